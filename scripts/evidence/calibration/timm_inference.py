"""timm's inference benchmark on cards of today: the largest batch size that ran, and the next one, which failed.

Source: huggingface/pytorch-image-models, results/benchmark-infer-amp-nchw-pt291-*.csv (Apache-2.0), kept in tests/data.
Recipe: torch 2.9.1, channels first, eval, inference mode, fp16 autocast, cudnn.benchmark, fused attention.

Assumed, because the source does not say it:

- Norms of layers and groups stay in 16 bits (``--fast-norm``). efficientnet_b3_gn ran 768 images of 320 pixels on 24 GB;
  with norms in 32 bits these activations alone take 42 GB.
- `KERNELS_MIB` are taken by cuDNN's kernels and a desktop. This was chosen on every second row of the RTX 4090, from the
  first; the other rows, and those of other cards, are the evidence.
"""

import torch

from calibration import timm_loop
from oomprobe.simulation.catalogue import find_card

FILES = {  # with the size from which the loop descends
    "RTX-4090": ("timm_rtx4090_infer_amp_nchw.json", 1024),
    "RTX-5090": ("timm_rtx5090_infer_amp_nchw.json", 1024),
    "RTX-PRO-6000-96GB": ("timm_pro6000_infer_amp_nchw.json", 2048),
}
KERNELS_MIB = 327
ABOUT = {
    "source": "huggingface/pytorch-image-models, results/benchmark-infer-amp-nchw-pt291-*.csv",
    "card": "RTX-4090",
    "torch": "2.9.1",
    "how": "benchmark.py, inference, fp16 autocast: a size that ran, and the next larger one, which failed",
}


def compare(count=None):
    """Yield a bracket for each row that is evidence, of `count` evenly spaced ones; None: all."""
    torch.backends.cudnn.benchmark = True
    for name, (file, start) in FILES.items():
        capacity_mib = find_card(name).available_bytes // timm_loop.MIB - KERNELS_MIB
        evidence = {"first": 1, "step": 2} if name == ABOUT["card"] else {}
        for row in timm_loop.rows(file, count, **evidence):
            from timm.layers import set_fast_norm

            set_fast_norm()
            yield timm_loop.bracket(row, timm_loop.card_of(name, capacity_mib), start, begin)


def begin(model, size, image_size):
    """Return what the benchmark repeats; the images are made in its first call."""
    model.eval()
    images = []

    def step():
        with torch.no_grad():  # then, autocast kept the weights that it had cast in inference mode too (torch_versions)
            if not images:
                images.append(torch.randn(size, 3, image_size, image_size, device="cuda"))
            with torch.autocast("cuda"):
                model(images[0])

    return step
