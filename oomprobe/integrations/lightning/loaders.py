"""The user's data loaders at another batch size, the largest examples first, and proof that batches have that size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from oomprobe.errors import InvalidArgumentError, NotRunError
from oomprobe.integrations.lightning.batches import Checked, Counted, Endless, Repeated
from oomprobe.integrations.worst_case import Order


class Kind(StrEnum):
    """What can be done with a loader."""

    EXAMPLES = "examples"  # a data set with indices: any batch of it can be made
    STREAM = "stream"  # an IterableDataset: it is read as it comes
    OPAQUE = "opaque"  # batches that are made elsewhere


def each(function: Callable[[int, Any], Any], loaders: Any) -> Any:
    """The same collection, with a function applied to the number and the loader of each place.

    Example:
        >>> each(lambda place, loader: (place, loader), {"a": "x", "b": ["y"]})
        {'a': (0, 'x'), 'b': [(1, 'y')]}
    """
    numbers = iter(range(2**31))

    def walk(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: walk(value) for key, value in part.items()}
        if isinstance(part, list | tuple):
            return type(part)(map(walk, part)) if type(part) in (list, tuple) else tuple(map(walk, part))
        if hasattr(part, "iterables") and hasattr(part, "flattened"):  # Lightning's CombinedLoader
            # How it combines has no public name.
            return type(part)(walk(part.iterables), part._mode)
        return function(next(numbers), part)

    return walk(loaders)


def flat(loaders: Any) -> list[Any]:
    """The loaders of a collection, in the order of `each`."""
    found: list[Any] = []
    each(lambda _, loader: found.append(loader), loaders)
    return found


def kind_of(loader: Any) -> Kind:
    """A subclass with an iterator of its own makes its batches itself, and is left to do so."""
    if not isinstance(loader, DataLoader) or _iterates_itself(type(loader)):
        return Kind.OPAQUE
    if loader.batch_sampler is None:
        return Kind.OPAQUE  # automatic batching is off: the data set, or the sampler, makes batches
    return Kind.STREAM if isinstance(loader.dataset, IterableDataset) else Kind.EXAMPLES


def _iterates_itself(kind: type) -> bool:
    # The second is what DataLoader.__iter__ calls; it has no public name, and subclasses override either.
    return any(getattr(kind, name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))


def size_of(loader: Any) -> int | None:
    """The batch size a loader was made with; None where it does not say."""
    for place in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(place, "batch_size", None)
        if isinstance(size, int):
            return size
    if kind_of(loader) is Kind.EXAMPLES:
        return len(next(iter(loader.batch_sampler), ()))
    return None


def indices_of(loader: Any) -> Sequence[int]:
    """The examples that training draws from: all, or those that a sampler of a subset names."""
    chosen = getattr(loader.sampler, "indices", None)
    return range(len(loader.dataset)) if chosen is None else [int(index) for index in chosen]


def length_of(loader: Any) -> int | None:
    """How many examples there are; None where nobody knows."""
    if kind_of(loader) is Kind.EXAMPLES:
        return len(indices_of(loader))
    try:
        return len(loader.dataset)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def refuse_fixed(loader: Any) -> None:
    """Refuse a loader that was handed in and cannot be made again at another size.

    Raises:
        InvalidArgumentError: it makes its batches itself, or has a batch sampler of the user's own.
    """
    if kind_of(loader) is Kind.OPAQUE:
        what = f"a {type(loader).__name__} that makes its batches itself"
    elif type(loader.batch_sampler) is not BatchSampler:
        what = f"a DataLoader with a batch sampler of its own ({type(loader.batch_sampler).__name__})"
    else:
        return
    raise InvalidArgumentError(
        f"train_dataloaders has {what}, which cannot be made again with another batch size. Pass a LightningDataModule "
        "whose train_dataloader() reads self.batch_size instead, so that it can be asked for each size"
    )


@dataclass(slots=True, kw_only=True)
class Batches:
    """What the loaders of one loop are to give.

    Attributes:
        size: Examples in a batch of a loader that follows the batch size.
        least: Batches that a loop needs before the loader ends.
        orders: Of the examples, by the place of the loader.
        most: Examples of a batch that are really made; None: all.
        handed_in: Whether the loaders cannot be asked for another size, and so are made again.
        own_sizes: Filled with the sizes of loaders that keep their own.
        followed: Set once a loader was of the size asked for.
    """

    size: int
    least: int
    orders: Mapping[int, Order]
    most: int | None = None
    handed_in: bool = False
    own_sizes: set[int] = field(default_factory=set)
    followed: bool = False

    def of(self, place: int, loader: Any) -> Any:
        """The loader to hand to Lightning for this one."""
        kind, own = kind_of(loader), size_of(loader)
        size = self.size if self.handed_in or own is None else own
        if size == self.size:
            self.followed = True
        else:
            self.own_sizes.add(size)
        size = min(size, self.most or size)
        if kind is Kind.EXAMPLES:
            return self._examples(loader, self._order(place, loader), size)
        if kind is Kind.STREAM:
            return _quiet_loader(loader, Endless(loader.dataset), size, batch_size=size)
        return Checked(loader, size)

    def _order(self, place: int, loader: Any) -> Order:
        order, there = self.orders[place], length_of(loader)
        if there != len(order.indices):
            raise NotRunError(
                f"the data set had {len(order.indices)} examples when the probe began and has {there} now: make it once, in "
                "setup(), or probe with a data set that stays as it is"
            )
        return order

    def _examples(self, loader: Any, order: Order, size: int) -> Any:
        """The largest examples there are, again and again, in as many batches as training has."""
        there = len(order.indices)
        size = min(size, there)
        batches = Repeated(order, size, max(self.least, -(-there // size)))
        return _quiet_loader(loader, loader.dataset, size, batch_sampler=batches)


def _quiet_loader(loader: Any, dataset: Any, size: int, **how: Any) -> Any:
    """Without workers: starting them for each trial takes longer than the trial, and their memory is not the step's.

    A child that is forked under a budget of host memory would not keep to it, either.
    """
    collate = Counted(loader.collate_fn, size)
    return DataLoader(dataset, collate_fn=collate, pin_memory=loader.pin_memory, **how)
