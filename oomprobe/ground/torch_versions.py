"""What torch's versions, from 2.6, do differently with a GPU's memory; a simulated card does what the torch beside it does.

Seen on the allocators of torch 2.6 to 2.15 (tests/bed, tests/cuda/test_simulated.py). Free blocks of one size:
pull requests 178362, 183489 and 183591 of pytorch/pytorch; workspaces of 2.15: pull request 194311.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Any, NamedTuple

import torch

LT_BYTES = 2**20  # cuBLASLt's own workspace
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
OLDEST, NEWEST_TESTED = (2, 6), (2, 15)
UNTESTED = (
    "torch {version} is newer than {newest}, the newest that this oomprobe was tested with: what a probe measures does not "
    "depend on it, but what a simulated card allocates may"
)


def untested_note() -> str | None:
    """Return a note if the torch beside this process is newer than those tested."""
    if VERSION <= NEWEST_TESTED:
        return None
    return UNTESTED.format(version=torch.__version__, newest=".".join(map(str, NEWEST_TESTED)))


# --- workspaces of cuBLAS and cuBLASLt ---


class LtWorkspace(StrEnum):
    """What cuBLASLt, which multiplies matrices and adds a bias, uses as its workspace."""

    EACH_CALL = "each call"  # its own, taken for each call and given back
    KEPT = "kept"  # its own, kept by each thread
    SHARED = "shared"  # that of cuBLAS


class Workspaces(NamedTuple):
    """How torch provides workspaces."""

    kept: bool  # that of cuBLAS is kept by each thread; otherwise it is taken for each call and given back
    lt: LtWorkspace


def workspaces() -> Workspaces:
    """Return how this torch provides workspaces."""
    if VERSION >= (2, 15) and os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") != "1":
        return Workspaces(kept=False, lt=LtWorkspace.EACH_CALL)
    if VERSION >= (2, 12):
        return Workspaces(kept=True, lt=LtWorkspace.SHARED)
    if VERSION >= (2, 9):
        return Workspaces(kept=True, lt=LtWorkspace.KEPT)
    return Workspaces(kept=True, lt=LtWorkspace.EACH_CALL)


# From which kernels for attention take bfloat16. Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
FLASH_CAPABILITY = (8, 0)


def half_of(capability: tuple[int, int]) -> str:
    """Return the 16-bit floats for which a card's attention kernels save memory."""
    return "bf16" if capability >= FLASH_CAPABILITY else "fp16"


def has_large_workspace(capability: tuple[int, int]) -> bool:
    """Return whether cuBLAS's workspace takes 32 MiB on a card of this compute capability."""
    if VERSION < (2, 12):
        return capability[0] == 9
    if VERSION < (2, 14) and capability[0] == 11:
        return False
    return capability >= (9, 0)


def uses_lt(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: Any) -> bool:
    """Return whether ``addmm`` calls cuBLASLt; its arguments are fakes.

    Source: aten/src/ATen/native/cuda/Blas.cpp, as seen on 2.6 to 2.15.
    """
    rows, inner, columns = left.shape[0], left.shape[1], right.shape[1]
    is_real = bias.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    if not is_real or not bias.is_contiguous():
        return False
    if beta != 1 or 1 in (inner, columns):
        return False
    if bias.shape == (columns,):
        return rows > 1 or VERSION != (2, 10)
    if bias.shape == (rows, columns) and bias.element_size() == 2 and VERSION >= (2, 15):
        return True
    if bias.shape != (1, columns):
        return False
    return VERSION >= (2, 11) or (VERSION == (2, 10) and rows > 1)


COUNTS_PINNED_CACHE = VERSION >= (2, 10)  # in torch.cuda.host_memory_stats()


# --- autograd and kernels ---


class GradientUses(NamedTuple):
    """How often a gradient is referred to in Python and in C++, and its storage, as `card_mode` sees it."""

    references: int
    uses: int
    storage_uses: int


EFFICIENT_ATTENTION_KEEPS_SEEDS = VERSION >= (
    2,
    14,
)  # on the card, if it drops nothing; 2.13 was not seen
GROUP_NORM_KEEPS_FORMAT = VERSION >= (2, 14)  # channels last; 2.13 was not seen
INFERENCE_KEEPS_CASTS = VERSION < (
    2,
    11,
)  # whether autocast keeps weights that it has cast in inference mode
HELD_BY_ENGINE = (
    GradientUses(5, 4, 2) if VERSION >= (2, 10) else GradientUses(4, 4, 1)
)  # and by nothing else


def prefers_cudnn_attention(capability: tuple[int, int]) -> bool:
    """Return whether cuDNN's attention comes before flash attention. Source: sdp_utils.cpp (check_prefer_cudnn_attention)."""
    return VERSION >= (2, 10) and capability in ((9, 0), (10, 0))


def flash_backward_width(width: int) -> int:
    """Return the width to which flash attention's backward pass pads the gradient of a query of that width."""
    widest, step = (
        (192, 256) if VERSION < (2, 11) else (128, 64)
    )  # to steps of 32 up to the first, then of the second
    if width <= widest or VERSION < (2, 7):
        step = 32
    return -(-width // step) * step
