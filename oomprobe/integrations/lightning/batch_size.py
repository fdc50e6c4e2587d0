"""Where a Lightning module and its data module keep the batch size."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Number
from types import NoneType
from typing import Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.scope import scope


class BatchSize:
    """The attribute, in every place where Lightning's own finder would look for it and set it.

    Those are the module, its hyperparameters, the data module and its hyperparameters.

    Args:
        name: Of the attribute.
        module: A ``LightningModule``.
        datamodule: A ``LightningDataModule``, or None.

    Raises:
        InvalidArgumentError: that is no name.
    """

    def __init__(self, name: str, module: Any, datamodule: Any) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise InvalidArgumentError(
                f"batch_size_name must be the name of an attribute, such as 'batch_size', not {name!r}"
            )
        self.name = name
        self._owners = [owner for owner in (module, datamodule) if owner is not None]
        self._places = [place for owner in self._owners for place in _places(owner, name)]

    def check(self) -> None:
        """Refuse a name that nothing has, or something that is no number.

        Raises:
            InvalidArgumentError: so it is.
        """
        for value in self.values:
            if isinstance(value, bool) or not isinstance(value, Number | str | NoneType):
                raise InvalidArgumentError(
                    f"batch_size_name={self.name!r} names something of type {type(value).__name__}, not a batch size"
                    + _or_these(self.names_of())
                )
        if self._places:
            return
        said = " nor ".join(type(owner).__name__ for owner in self._owners)
        raise InvalidArgumentError(
            f"neither {said} nor {'its' if len(self._owners) == 1 else 'their'} hyperparameters have {self.name!r}, so there "
            f"is nothing to set to another batch size. Write self.{self.name} = 1 in __init__ and DataLoader(..., "
            f"batch_size=self.{self.name}) in train_dataloader(), or pass batch_size_name=, the name of the "
            "attribute that it reads" + _or_these(self.names_of())
        )

    @property
    def values(self) -> list[Any]:
        """One for each place."""
        return [_read(place, self.name) for place in self._places]

    def write(self, size: int) -> None:
        """Set it everywhere.

        Raises:
            InvalidArgumentError: a place does not take it, such as a property without a setter.
        """
        for place in self._places:
            _write(place, self.name, size)

    @scope
    def at(self, size: int) -> Iterator[None]:
        """Set it, and put back what was there, whatever happens."""
        before = self.values
        try:
            self.write(size)
            yield
        finally:
            for place, value in zip(self._places, before, strict=True):
                if _read(place, self.name) is not value:
                    _write(place, self.name, value)

    def names_of(self, *sizes: int | None) -> list[str]:
        """Other attributes with that value, or any whole number, one of which may be what the user meant."""
        found: dict[str, None] = {}
        for owner in self._owners:
            for name, value in (*vars(owner).items(), *_hparams(owner).items()):
                if type(value) is int and (not sizes or value in sizes) and not str(name).startswith("_"):
                    found[str(name)] = None
        return list(found)


def _or_these(names: list[str]) -> str:
    return f". Of whole numbers there are {', '.join(map(repr, sorted(names)))}" if names else ""


def _hparams(owner: Any) -> dict[str, Any]:
    hparams = getattr(owner, "hparams", {})
    return dict(hparams) if isinstance(hparams, dict) else dict(vars(hparams))


def _places(owner: Any, name: str) -> Iterator[Any]:
    if hasattr(owner, name):
        yield owner
    if name in _hparams(owner):
        yield owner.hparams


def _read(place: Any, name: str) -> Any:
    return place[name] if isinstance(place, dict) else getattr(place, name)


def _write(place: Any, name: str, value: Any) -> None:
    if isinstance(place, dict):
        place[name] = value
        return
    try:
        setattr(place, name, value)
    except AttributeError as error:
        raise InvalidArgumentError(
            f"{name} of {type(place).__name__} cannot be set ({error}), so neither this nor Lightning's own finder can "
            f"use it: make it a plain attribute, self.{name} = ..."
        ) from error
