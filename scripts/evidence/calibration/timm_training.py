"""timm's training benchmark on an RTX 3090: the largest batch size that ran, and the next one, which failed.

Source: huggingface/pytorch-image-models, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv (Apache-2.0), kept in
tests/data. Recipe: torch 1.12, CUDA 11.3, channels first, fp16 autocast around loss and backward, no scaler, SGD with
Nesterov momentum as a loop over parameters, cross-entropy, cudnn.benchmark, sizes from 512 down. Attention is not fused, as
in timm then, and autocast left nearest-neighbour upsampling in 16 bits until torch 2.4 (pytorch/pytorch#121072): with 32
bits, hrnet_w30 and hrnet_w44 are refused at the size that ran.
"""

from unittest.mock import patch

import torch

from calibration import timm_loop

FILE = "timm_rtx3090_train_amp_nchw.json"
START = 512
CAPACITY_MIB = 22_000  # chosen on rows of this file
ABOUT = {
    "source": "huggingface/pytorch-image-models, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv",
    "card": "RTX-3090",
    "torch": "1.12",
    "how": "benchmark.py, training, fp16 autocast: a size that ran, and the next larger one, which failed",
}


def compare(count=None, capacity_mib=CAPACITY_MIB):
    """Yield a bracket for each of `count` evenly spaced rows; None: all."""
    torch.backends.cudnn.benchmark = True
    for row in timm_loop.rows(FILE, count):
        from timm.layers import set_fused_attn

        set_fused_attn(False)
        with patch.object(torch.nn.Upsample, "forward", upsample):
            bracket = timm_loop.bracket(
                row, timm_loop.card_of(ABOUT["card"], capacity_mib), START, begin
            )
        yield bracket


def upsample(module, images):
    """Upsample as autocast did before torch 2.4: in the dtype of the images."""
    with torch.autocast("cuda", enabled=False):
        return torch.nn.functional.interpolate(
            images, module.size, module.scale_factor, module.mode, module.align_corners
        )


def begin(model, size, image_size):
    """Return what the benchmark repeats; the images are made in its first call."""
    model.train()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=False
    )
    images = []

    def step():
        if not images:
            images.append(torch.randn(size, 3, image_size, image_size, device="cuda"))
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            output = model(images[0])
            target = torch.empty(size, dtype=torch.long, device="cuda").random_(output.shape[1])
            torch.nn.functional.cross_entropy(output, target).backward()
        optimizer.step()

    return step
