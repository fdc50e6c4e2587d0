"""Where a Lightning module and its data module keep the batch size."""

from __future__ import annotations

from collections.abc import Iterator
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
    """

    def __init__(self, name: str, module: Any, datamodule: Any) -> None:
        self.name = name
        self._owners = [owner for owner in (module, datamodule) if owner is not None]
        self._places = [place for owner in self._owners for place in _places(owner, name)]

    @property
    def exists(self) -> bool:
        return bool(self._places)

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

    def names_of(self, size: int | None) -> list[str]:
        """Other attributes with that value, one of which may be what the user meant."""
        found: dict[str, None] = {}
        for owner in self._owners:
            for name, value in (*vars(owner).items(), *_hparams(owner).items()):
                if type(value) is int and value == size and not str(name).startswith("_"):
                    found[str(name)] = None
        return list(found)


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
