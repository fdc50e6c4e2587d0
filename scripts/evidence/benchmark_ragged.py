"""Train 5,000 steps of ragged batches at answers for three margins, on torch's CUDA allocator (the bed).

    .venv-cuda/bin/python scripts/evidence/benchmark_ragged.py

Two models: a GPT whose lengths are uniform from 16 to 128, and an MLP over 8 to 512 tokens, log-normal, so that the longest are rare.
Each answer is found twice: by a step whose batches are all of the longest length, and by one that draws lengths as training does. Then
two fresh processes with the whole card train, from other seeds. A line gives the answer, and the steps at which these ran out of memory.
"""

import random
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bed import forked  # noqa: E402
from zoo import gpt, training_step  # noqa: E402

import oomprobe  # noqa: E402

STEPS, SEEDS, LONGEST, WIDTH = 5000, (11, 12), 512, 64
SETTINGS = {"default": {}, "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}


def uniform(seed):
    """Return a GPT and its step, of random lengths; of the longest without a seed."""
    torch.manual_seed(seed or 0)
    return gpt(shortest=None if seed is None else 16)


def skewed(seed):
    """Return an MLP and its step, of random lengths; of the longest without a seed."""
    lengths = random.Random(seed)
    widths = [WIDTH, 512, 512, WIDTH]
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
    model = nn.Sequential(*layers[:-1]).cuda()

    def draw(batch_size):
        length = (
            LONGEST if seed is None else min(LONGEST, max(8, int(lengths.lognormvariate(4, 0.8))))
        )
        return torch.randn(batch_size, length, WIDTH, device="cuda")

    return model, training_step(torch.optim.AdamW(model.parameters()), draw)


def answer(build, seed, fraction):
    """Return the answer of a probe."""
    return oomprobe.find_max_batch(
        *build(seed), memory_fraction=fraction, progress="off"
    ).batch_size


def trained(build, seed, batch_size):
    """Return the step at which training runs out of memory, or None."""
    model, step = build(seed)
    for number in range(STEPS):
        try:
            step(model, batch_size)
        except torch.OutOfMemoryError:
            return number
    return None


def main():
    """Print a line for each answer."""
    for build in (uniform, skewed):
        for probed in (None, 0):
            for memory in ("1GiB", "4GiB"):
                for name, settings in SETTINGS.items():
                    for fraction in (0.9, 0.95, 1.0):
                        bed = {"memory": memory, "limit_s": 1200, **settings}
                        size = forked(answer, build, probed, fraction, **bed)
                        died = [forked(trained, build, seed, size, **bed) for seed in SEEDS]
                        lengths = "longest" if probed is None else "random"
                        print(
                            build.__name__, lengths, memory, name, fraction, size, died, flush=True
                        )


if __name__ == "__main__":
    main()
