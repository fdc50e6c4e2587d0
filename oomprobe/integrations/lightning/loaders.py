"""The user's data loaders: where they come from, and each at another batch size, the largest examples first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from oomprobe.errors import InvalidArgumentError, NotRunError
from oomprobe.integrations.worst_case import Order

TRAIN, EVAL = "train_dataloader", "val_dataloader"
DATA_LOADERS = {TRAIN: "train_dataloaders", EVAL: "val_dataloaders"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the loaders of one kind come from."""

    give: Callable[[], Any]  # makes them, while a Trainer is attached
    holder: Any = None  # whose method that is; None: they were handed in


def sources_of(
    pl: Any, trainer: Any, own: Any, datamodule: Any, train: Any, validation: Any
) -> tuple[Any, dict[str, Source]]:
    """The data module or None, and the sources for training, and for validation where there is any.

    Whichever of data module and loaders comes first is taken, as in ``Trainer.fit``.

    Raises:
        InvalidArgumentError: there are none to train with, too many, or what is none.
    """
    if datamodule is None and isinstance(train, pl.LightningDataModule):
        datamodule, train = train, None
    elif train is None and (found := flat(datamodule)) and all(isinstance(one, DataLoader) for one in found):
        datamodule, train = None, datamodule
    if datamodule is not None and not isinstance(datamodule, pl.LightningDataModule):
        raise InvalidArgumentError(
            f"datamodule must be a LightningDataModule of {pl.__name__}, as the Trainer is, not {datamodule!r:.60}. Loaders "
            "are passed as train_dataloaders=..., val_dataloaders=..."
        )
    handed_in = {name: loaders for name, loaders in ((TRAIN, train), (EVAL, validation)) if loaders is not None}
    for name, loaders in handed_in.items():
        for one in flat(loaders):
            if not hasattr(one, "__iter__") or isinstance(one, str):
                raise InvalidArgumentError(
                    f"{DATA_LOADERS[name]} must be a DataLoader, or lists or dicts of some, and there is {one!r:.60} in it: "
                    "pass DataLoader(data_set, batch_size=...)"
                )
        if datamodule is not None:
            raise InvalidArgumentError(
                f"pass either datamodule or {DATA_LOADERS[name]}: Trainer.fit takes no more than one of them"
            )
    sources = {}
    for name in DATA_LOADERS:
        holders = ((datamodule, pl.LightningDataModule), (own, pl.LightningModule))
        holder = next((one for one, base in holders if one is not None and _overrides(one, name, base)), None)
        if name in handed_in:
            sources[name] = Source(give=partial(handed_in.get, name))
        elif holder is not None:
            sources[name] = Source(give=getattr(holder, name), holder=holder)
    if TRAIN not in sources:
        raise InvalidArgumentError(
            f"there is no training data: neither {type(own).__name__} nor a data module has train_dataloader(). Pass "
            "datamodule=..., or train_dataloaders=..., as you would to trainer.fit"
        )
    if trainer.limit_val_batches == 0 or not _overrides(own, "validation_step", pl.LightningModule):
        sources.pop(EVAL, None)
    return datamodule, sources


def _overrides(holder: Any, name: str, base: type) -> bool:
    return name in vars(holder) or getattr(type(holder), name, None) is not getattr(base, name)


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
            return (list if isinstance(part, list) else tuple)(map(walk, part))
        if hasattr(part, "iterables") and hasattr(part, "flattened"):  # Lightning's CombinedLoader
            return type(part)(walk(part.iterables), part._mode)  # how it combines has no public name
        return function(next(numbers), part)

    return walk(loaders)


def flat(loaders: Any) -> list[Any]:
    """The loaders of a collection, in the order of `each`."""
    found: list[Any] = []
    each(lambda _, loader: found.append(loader), loaders)
    return found


def kind_of(loader: Any) -> Kind:
    """A subclass with an iterator of its own makes its batches itself, and is left to do so."""
    # _get_iterator is what DataLoader.__iter__ calls; it has no public name, and subclasses override either.
    iterates = ("__iter__", "_get_iterator")
    if not isinstance(loader, DataLoader) or any(
        getattr(type(loader), name) is not getattr(DataLoader, name) for name in iterates
    ):
        return Kind.OPAQUE
    if loader.batch_sampler is None:
        return Kind.OPAQUE  # automatic batching is off: the data set, or the sampler, makes batches
    return Kind.STREAM if isinstance(loader.dataset, IterableDataset) else Kind.EXAMPLES


def size_of(loader: Any) -> int | None:
    """The batch size a loader was made with; None where it does not say."""
    for place in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(place, "batch_size", None)
        if isinstance(size, int):
            return size
    return len(next(iter(loader.batch_sampler), ())) if kind_of(loader) is Kind.EXAMPLES else None


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
    """Refuse a loader that was handed in and cannot be made again at another size."""
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
    """What the loaders of one loop are to give."""

    size: int  # examples in a batch of a loader that follows the batch size
    least: int  # batches that a loop needs before the loader ends
    orders: Mapping[int, Order]  # of the examples, by the place of the loader
    most: int | None = None  # examples of a batch that are really made; None: all
    handed_in: bool = False  # whether the loaders cannot be asked for another size, and so are made again
    own_sizes: set[int] = field(default_factory=set)  # filled with the sizes of loaders that keep their own
    followed: bool = False  # set once a loader was of the size asked for

    def of(self, place: int, loader: Any) -> Any:
        """The loader to hand to Lightning for this one.

        It has no workers: starting them for each trial takes longer than the trial, and their memory is not the step's.
        """
        kind, own = kind_of(loader), size_of(loader)
        size = self.size if self.handed_in or own is None else own
        if size == self.size:
            self.followed = True
        else:
            self.own_sizes.add(size)
        size = min(size, self.most or size)
        if kind is Kind.OPAQUE:
            return Checked(loader, size)
        if kind is Kind.STREAM:
            how: dict[str, Any] = {"dataset": Endless(loader.dataset), "batch_size": size}
        else:
            order, there = self.orders[place], length_of(loader) or 0
            if there != len(order.indices):
                raise NotRunError(
                    f"the data set had {len(order.indices)} examples when the probe began and has {there} now: make it "
                    "once, in setup(), or probe with a data set that stays as it is"
                )
            size = min(size, there)
            # As many batches as training has: schedulers and loops ask.
            batches = [order.batch(size, number) for number in range(max(self.least, -(-there // size)))]
            how = {"dataset": loader.dataset, "batch_sampler": batches}
        return DataLoader(collate_fn=_counted(loader.collate_fn, size), pin_memory=loader.pin_memory, **how)


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


def _counted(collate: Callable[[Any], Any], size: int) -> Callable[[Any], Any]:
    """A collate function that is handed as many examples as it should be, or says so."""

    def counted(examples: Any) -> Any:
        if len(examples) != size:
            raise NotRunError(
                f"a batch of {size} was asked for, and {len(examples)} examples came: the stream cannot be read again, or "
                "ends"
            )
        return collate(examples)

    return counted


class Checked:
    """Batches that are made elsewhere: that their tensors have the size is all that can be told of them."""

    def __init__(self, loader: Any, size: int) -> None:
        self._loader, self._size = loader, size

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            parts = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
            sizes = {len(part) for part in parts if isinstance(part, torch.Tensor) and part.dim()}
            if self._size not in sizes:
                seen = f"tensors whose first dimension is {sorted(sizes)}" if sizes else f"a {type(batch).__name__}"
                raise NotRunError(
                    f"a batch of {self._size} was asked for, and the {type(self._loader).__name__} gave {seen}: does it "
                    "read the batch size when it is made? If its data ends before, pass a smaller max_batch"
                )
            yield batch
