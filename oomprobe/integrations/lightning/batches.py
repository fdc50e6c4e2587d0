"""What a trial's loaders are made of: batches of one size, and the proof that they have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from oomprobe.errors import NotRunError
from oomprobe.integrations.worst_case import Order


class Repeated:
    """Batches of the largest examples, as indices."""

    def __init__(self, order: Order, size: int, times: int) -> None:
        self._order, self._size, self._times = order, size, times

    def __len__(self) -> int:
        return self._times

    def __iter__(self) -> Iterator[list[int]]:
        return (self._order.batch(self._size, number) for number in range(self._times))


class Endless(IterableDataset[Any]):
    """A stream that begins again when it ends, so that batches are full however few examples there are."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        empty = False
        while not empty:
            empty = True
            for example in self._dataset:
                empty = False
                yield example


class Counted:
    """A collate function that is handed as many examples as it should be, or says so."""

    def __init__(self, collate: Callable[[Any], Any], size: int) -> None:
        self._collate, self._size = collate, size

    def __call__(self, examples: Any) -> Any:
        if len(examples) != self._size:
            raise NotRunError(
                f"a batch of {self._size} was asked for, and {len(examples)} examples came: the stream cannot be read "
                "again, or ends"
            )
        return self._collate(examples)


class Checked:
    """Batches that are made elsewhere: that their tensors have the size is all that can be told of them."""

    def __init__(self, loader: Any, size: int) -> None:
        self._loader, self._size = loader, size

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._check(batch)
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def _check(self, batch: Any) -> None:
        parts = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        sizes = {len(part) for part in parts if isinstance(part, torch.Tensor) and part.dim()}
        if self._size not in sizes:
            seen = f"tensors whose first dimension is {sorted(sizes)}" if sizes else f"a {type(batch).__name__}"
            raise NotRunError(
                f"a batch of {self._size} was asked for, and the {type(self._loader).__name__} gave {seen}: does it read "
                f"the batch size when it is made? If its data ends before, pass a smaller max_batch"
            )
