"""The bytes of a storage as they were: in this process, or on a shelf beside it."""

from __future__ import annotations

from typing import Protocol

import torch

from oomprobe.state.shelf import Shelf


class KeptBytes(Protocol):
    """What was kept of a storage."""

    def __len__(self) -> int: ...
    def same_as(self, data: torch.Tensor) -> bool:
        """Whether a tensor of bytes, on any device, has these."""

    def write_to(self, data: torch.Tensor) -> None:
        """Write them into a tensor of as many bytes, on any device."""

    def whole(self) -> torch.Tensor:
        """A tensor of them in host memory, to be read only."""


class InProcess:
    """Bytes in this process."""

    def __init__(self, data: torch.Tensor) -> None:
        self._kept = data.to("cpu", copy=True)

    def __len__(self) -> int:
        return self._kept.numel()

    def same_as(self, data: torch.Tensor) -> bool:
        return torch.equal(data.cpu(), self._kept)

    def write_to(self, data: torch.Tensor) -> None:
        data.copy_(self._kept)

    def whole(self) -> torch.Tensor:
        return self._kept


def keep_bytes(data: torch.Tensor, shelf: Shelf | None) -> KeptBytes:
    """Keep a tensor of bytes: on the shelf, where there is one and they are in host memory."""
    if shelf is None or data.device.type != "cpu" or not data.numel():
        return InProcess(data)
    try:
        return shelf.put(data)
    except (OSError, RuntimeError):  # a limit on the size of files, no memory for it, or not such bytes
        return InProcess(data)
