"""Where data loaders come from: a data module, the module itself, or the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from oomprobe.errors import InvalidArgumentError
from oomprobe.integrations.lightning.loaders import flat

TRAIN, EVAL = "train_dataloader", "val_dataloader"
DATA_LOADERS = {TRAIN: "train_dataloaders", EVAL: "val_dataloaders"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the loaders of one kind come from.

    Attributes:
        give: Makes them, while a Trainer is attached.
        holder: Whose method that is; None: they were handed in.
    """

    give: Callable[[], Any]
    holder: Any = None


def data_of(pl: Any, datamodule: Any, train: Any, validation: Any) -> tuple[Any, dict[str, Any]]:
    """The data module or None, and the loaders that were handed in, whichever of the two comes first, as in ``Trainer.fit``.

    Raises:
        InvalidArgumentError: one is neither.
    """
    if datamodule is None and isinstance(train, pl.LightningDataModule):
        datamodule, train = train, None
    elif train is None and _are_loaders(datamodule):
        datamodule, train = None, datamodule
    if datamodule is not None and not isinstance(datamodule, pl.LightningDataModule):
        raise InvalidArgumentError(
            f"datamodule must be a LightningDataModule of {pl.__name__}, as the Trainer is, not {_said(datamodule)}. Loaders "
            "are passed as train_dataloaders=..., val_dataloaders=..."
        )
    handed_in = {TRAIN: train, EVAL: validation}
    for name, loaders in handed_in.items():
        for one in flat(loaders) if loaders is not None else ():
            _check_loader(DATA_LOADERS[name], one)
    return datamodule, handed_in


def _are_loaders(value: Any) -> bool:
    found = flat(value)
    return bool(found) and all(isinstance(one, DataLoader) for one in found)


def _check_loader(argument: str, loader: Any) -> None:
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise InvalidArgumentError(
            f"{argument} has a data set ({type(loader).__name__}), not a loader: pass DataLoader(data_set, batch_size=...)"
        )
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not iterable or isinstance(loader, str | bytes | type):
        raise InvalidArgumentError(
            f"{argument} must be a DataLoader, or lists or dicts of some, and there is {_said(loader)} in it"
        )


def _said(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}: make an instance, {value.__name__}(...)"
    simple = isinstance(value, str | int | float | bool)
    return repr(value) if simple else f"of type {type(value).__name__}"


def sources_of(pl: Any, trainer: Any, own: Any, datamodule: Any, handed_in: dict[str, Any]) -> dict[str, Source]:
    """Those of training, and those of validation where there is any.

    Raises:
        InvalidArgumentError: there are none to train with, or too many.
    """
    given = [argument for name, argument in DATA_LOADERS.items() if handed_in[name] is not None]
    if datamodule is not None and given:
        raise InvalidArgumentError(f"pass either datamodule or {given[0]}: Trainer.fit takes no more than one of them")
    found = {name: _source(pl, name, own, datamodule, handed_in[name]) for name in DATA_LOADERS}
    train, validation = found[TRAIN], found[EVAL]
    if train is None:
        raise InvalidArgumentError(
            f"there is no training data: neither {type(own).__name__} nor a data module has train_dataloader(). Pass "
            "datamodule=..., or train_dataloaders=..., as you would to trainer.fit"
        )
    validates = trainer.limit_val_batches != 0 and _overrides(own, "validation_step", pl.LightningModule)
    return {TRAIN: train, EVAL: validation} if validation is not None and validates else {TRAIN: train}


def _source(pl: Any, name: str, own: Any, datamodule: Any, handed_in: Any) -> Source | None:
    if handed_in is not None:
        return Source(give=lambda: handed_in)
    for holder, base in ((datamodule, pl.LightningDataModule), (own, pl.LightningModule)):
        if holder is not None and _overrides(holder, name, base):
            return Source(give=getattr(holder, name), holder=holder)
    return None


def _overrides(holder: Any, name: str, base: type) -> bool:
    return name in vars(holder) or getattr(type(holder), name, None) is not getattr(base, name)
