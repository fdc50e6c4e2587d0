"""Building a model for a card that is not there: real tensors, with real initial values, that are said to be on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

from oomprobe.simulation.allocator import AllocatorOutOfMemory
from oomprobe.simulation.fakes import CARD, HOST, STATED_HOST, place_of
from oomprobe.simulation.identity import Identity
from oomprobe.simulation.session import patches
from oomprobe.simulation.world import World


@contextmanager
def building(world: World) -> Iterator[None]:
    """Run code that makes a model and moves it to ``"cuda"``; the tensors stay real, in host memory."""
    with ExitStack() as stack:
        for owner, name, value in patches(world):
            stack.enter_context(patch.object(owner, name, value))
        mode = _Building(world)
        stack.enter_context(patch.object(torch, "load", mode.loader(torch.load)))
        stack.enter_context(mode)
        yield


class _Building(Identity):
    """Initialisation needs values, so nothing is faked: what is moved to the card is noted to be there."""

    def loader(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.load``, into host memory; what was to go to the card is noted to be there."""

        def loaded(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
            result = load(f, map_location="cpu", **kwargs)
            if isinstance(map_location, str | int | torch.device) and place_of(map_location) == CARD:
                tree_map_only(torch.Tensor, self._put, result)
            return result

        return loaded

    def _has_values(self, tensor: torch.Tensor) -> bool:
        return True

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any], place: torch.device) -> Any:
        made = func(*args, **{**kwargs, "device": HOST})
        if place == CARD and isinstance(made, torch.Tensor):
            self._put(made)
        return made

    def _moved(
        self, tensor: torch.Tensor, place: torch.device | None, dtype: torch.dtype | None = None, *, copy: bool = False,
        memory_format: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        on_card = self._world.is_on_card(tensor)
        leaves = on_card and place == STATED_HOST
        moved = tensor.to(tensor.dtype if dtype is None else dtype, copy=copy or leaves, memory_format=memory_format)
        if place == CARD or (on_card and not leaves):
            self._put(moved)
        return moved

    def _put(self, tensor: torch.Tensor) -> None:
        with suppress(AllocatorOutOfMemory):  # said, with all that is too much, when the probe begins
            self._world.settle(tensor)
