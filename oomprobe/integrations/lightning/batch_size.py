"""Where a Lightning module and its data module keep the batch size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Number
from types import NoneType
from typing import Any

from oomprobe.errors import InvalidArgumentError


class BatchSize:
    """The attribute, in every place where Lightning's own finder would look for it and set it.

    Those are the module, its hyperparameters, the data module and its hyperparameters.
    """

    def __init__(self, name: str, module: Any, datamodule: Any) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise InvalidArgumentError(
                f"batch_size_name must be the name of an attribute, such as 'batch_size', not {name!r}"
            )
        self.name = name
        self._owners = [owner for owner in (module, datamodule) if owner is not None]
        self._places = [owner for owner in self._owners if hasattr(owner, name)]
        self._places += [owner.hparams for owner in self._owners if name in getattr(owner, "hparams", ())]

    def check(self) -> None:
        """Refuse a name that nothing has, or something that is no number."""
        for value in self.values:
            if isinstance(value, bool) or not isinstance(value, Number | str | NoneType):
                raise InvalidArgumentError(
                    f"batch_size_name={self.name!r} names something of type {type(value).__name__}, not a batch size"
                )
        if not self._places:
            said = " nor ".join(type(owner).__name__ for owner in self._owners)
            raise InvalidArgumentError(
                f"neither {said} nor their hyperparameters have {self.name!r}, so there is nothing to set to another batch "
                f"size. Write self.{self.name} = 1 in __init__ and DataLoader(..., batch_size=self.{self.name}) in "
                "train_dataloader(), or pass batch_size_name=, the name of the attribute that it reads"
            )

    @property
    def values(self) -> list[Any]:
        """One for each place."""
        return [place[self.name] if isinstance(place, dict) else getattr(place, self.name) for place in self._places]

    def write(self, *sizes: Any) -> None:
        """Set it, to one size everywhere or to a size for each place."""
        for place, size in zip(self._places, sizes * (len(self._places) if len(sizes) == 1 else 1), strict=True):
            if isinstance(place, dict):
                place[self.name] = size
            else:
                setattr(place, self.name, size)

    @contextmanager
    def at(self, size: int) -> Iterator[None]:
        """Set it, and put back what was there, whatever happens."""
        before = self.values
        try:
            self.write(size)
            yield
        finally:
            if self.values != before:
                self.write(*before)
