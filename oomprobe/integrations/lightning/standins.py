"""What a module finds in a trial where training has the user's loggers and callbacks: the same to look at, without effect."""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from oomprobe.scope import scope

_CONTAINERS = (list, dict, set, deque)  # which a module may fill in place


class Silent:
    """Takes whatever is done with it and gives itself; as a path, a folder that ends with the probe.

    Example:
        >>> experiment = Silent("/tmp/x")
        >>> experiment.config["lr"] = 0.1
        >>> experiment.add_image("a", None).anything is experiment, Path(experiment.dir)
        (True, PosixPath('/tmp/x'))
    """

    def __init__(self, folder: str) -> None:
        vars(self)["_folder"] = folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks objects whether they have
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self

    def __getitem__(self, key: object) -> Any:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __fspath__(self) -> str:
        return str(vars(self)["_folder"])

    __str__ = __fspath__


class SilentLogger(Silent):
    """A logger for whoever asks for its class or its folders, that logs nothing.

    Args:
        folder: Takes the place of its ``save_dir``; there is one for this logger in it.
        logger: The user's; it is not asked anything, for some start a run when they are.
    """

    group_separator, version = "/", 0

    def __init__(self, folder: str, logger: Any) -> None:
        name = vars(logger).get("_name")
        own = Path(folder) / (name if isinstance(name, str) and name else "oomprobe")
        log_dir = own / f"version_{self.version}"
        log_dir.mkdir(parents=True, exist_ok=True)
        told = {"name": own.name, "save_dir": folder, "root_dir": str(own), "log_dir": str(log_dir)}
        vars(self).update(told, _folder=str(log_dir), _kind=type(logger))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return vars(self)["_kind"]


class StandIns:
    """For the loggers and callbacks of a Trainer, and for what else the user has put on it.

    Args:
        pl: The package.
        trainer: The user's.
        folder: For what a module writes beside its logs and checkpoints.
    """

    def __init__(self, pl: Any, trainer: Any, folder: str) -> None:
        self._pl, self._folder = pl, folder
        self.kinds: set[type] = set()  # of the callbacks that it stands for
        # Out of the sight of what keeps the state of all that a step reaches: trials have no part in it.
        self._trainer = weakref.ref(trainer)
        self.loggers = [SilentLogger(folder, one) for one in trainer.loggers]
        self.modules = [
            part
            for holder in (trainer, *trainer.callbacks)
            for part in vars(holder).values()
            if isinstance(part, torch.nn.Module)
        ]

    def give(self, trainer: Any, callbacks: list[Any]) -> None:
        """Give the Trainer of a trial what the user's has, beside callbacks of the trial's own."""
        users: Any = self._trainer()
        trainer.callbacks = [*self.callbacks(users.callbacks), *callbacks]
        trainer.save_checkpoint = _nothing
        for name in vars(users).keys() - vars(trainer).keys():
            if not name.startswith("_"):
                setattr(trainer, name, getattr(users, name))

    def callbacks(self, callbacks: Any) -> list[Any]:
        """Each as it is now, in an object of its own whose hooks do nothing."""
        found = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
        self.kinds.update(map(type, found))
        return [self._callback(one) for one in found]

    def _callback(self, callback: Any) -> Any:
        try:
            standin = object.__new__(type(callback))
        except TypeError:  # a class that is built in, too
            return self._pl.Callback()
        for name, value in vars(callback).items():
            vars(standin)[name] = copy.copy(value) if type(value) in _CONTAINERS else value
        vars(standin).update(dict.fromkeys(_hooks(self._pl), _nothing))
        # A ModelCheckpoint finds its own when it is set up; what lies in that of an OnExceptionCheckpoint is resumed from.
        if "dirpath" in vars(standin):
            vars(standin)["dirpath"] = self._folder
        return standin


def lacking(error: AttributeError, trainer: Any) -> str | None:
    """What to say of an attribute that the Trainer of a trial, or a callback of it, lacks; None: another object does."""
    used = error.obj
    if used is trainer:
        what = f"self.trainer.{error.name}, which the Trainer of a trial does not have: it is made by the probe, as a Trainer"
    elif any(used is one for one in trainer.callbacks):
        what = f"{error.name!r} of the callback {type(used).__name__}, which trials do not call, so that it has not made it"
    else:
        return None
    return (
        f"training uses {what}. Let the module make it (in __init__ or setup()), or probe a step of your own: "
        "oomprobe.find_max_batch(module, step_fn)"
    )


def _hooks(pl: Any) -> list[str]:
    return [name for name in vars(pl.Callback) if name in ("setup", "teardown") or name.startswith("on_")]


def _nothing(*args: object, **kwargs: object) -> None:
    return None


@scope
def stand_ins(pl: Any, trainer: Any) -> Iterator[StandIns]:
    """For the Trainer of the user, until the probe has ended; the files they made go with them."""
    with tempfile.TemporaryDirectory(prefix="oomprobe-", ignore_cleanup_errors=True) as folder:
        yield StandIns(pl, trainer, folder)
