"""Building a model for a simulated card: real tensors in host memory that report to be on the card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

from oomprobe.simulation.allocator import AllocatorOutOfMemory
from oomprobe.simulation.fakes import CARD, EXPLICIT_HOST, HOST, requested_device
from oomprobe.simulation.identity import Identity
from oomprobe.simulation.session import patches
from oomprobe.simulation.world import World


@contextmanager
def building(world: World) -> Iterator[None]:
    """Run code that builds a model and moves it to ``"cuda"``; its tensors stay real, in host memory."""
    with ExitStack() as stack:
        for owner, name, value in patches(world):
            stack.enter_context(patch.object(owner, name, value))
        mode = _Building(world)
        stack.enter_context(patch.object(torch, "load", mode.wrap_load(torch.load)))
        stack.enter_context(mode)
        yield


class _Building(Identity):
    """Record tensors moved to the card without faking them: initialisation needs values."""

    def wrap_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Make ``torch.load`` load into host memory and record tensors mapped to the card."""

        def wrapped(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
            result = load(f, map_location="cpu", **kwargs)
            if isinstance(map_location, str | int | torch.device) and requested_device(map_location) == CARD:
                tree_map_only(torch.Tensor, self._put_on_card, result)
            return result

        return wrapped

    def _has_values(self, tensor: torch.Tensor) -> bool:
        return True

    def _create(self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
        created = func(*args, **{**kwargs, "device": HOST})
        if device == CARD and isinstance(created, torch.Tensor):
            self._put_on_card(created)
        return created

    def _move(
        self, tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None = None, *, copy: bool = False,
        memory_format: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        on_card = self._world.is_on_card(tensor)
        leaves_card = on_card and device == EXPLICIT_HOST
        moved = tensor.to(
            tensor.dtype if dtype is None else dtype, copy=copy or leaves_card, memory_format=memory_format
        )
        if device == CARD or (on_card and not leaves_card):
            self._put_on_card(moved)
        return moved

    def _put_on_card(self, tensor: torch.Tensor) -> None:
        with suppress(AllocatorOutOfMemory):  # reported with the total when the probe begins
            self._world.fakes.put_on_card(tensor)
