"""Context managers written as generators, which leave the exceptions that pass through them alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import wraps
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Scope(Generic[T]):
    """What a function decorated with `scope` returns: enters and leaves like `contextlib.contextmanager`."""

    def __init__(self, body: Generator[T, None, None]) -> None:
        self._body = body

    def __enter__(self) -> T:
        return next(self._body)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> bool | None:
        if error is None:
            next(self._body, None)
            return False
        try:
            self._body.throw(error)
        except StopIteration:  # the body handled it, and has ended
            return True
        except BaseException as raised:
            # A generator turns a StopIteration that leaves it into a RuntimeError (PEP 479).
            converted = isinstance(error, StopIteration) and raised.__cause__ is error
            if raised is not error and not converted:
                raise
            # Without the frames added here, which hold the error that would hold them. Not an assignment: that can be
            # refused, and a class may have a with_traceback of its own.
            BaseException.with_traceback(error, frames)
            return False
        raise RuntimeError("a scope yields once")


def scope(function: Callable[P, Iterator[T]]) -> Callable[P, Scope[T]]:
    """Make a context manager of a generator function, for blocks in which a user's code runs.

    `contextlib.contextmanager` assigns ``__traceback__`` to each exception that passes. A class may refuse that, such
    as a frozen dataclass, and its exception would arrive as a ``FrozenInstanceError``.

    Example:
        >>> @scope
        ... def told(name):
        ...     print("in", name)
        ...     yield
        ...     print("out")
        >>> with told("here"):
        ...     print("inside")
        in here
        inside
        out
    """

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> Scope[T]:
        body = function(*args, **kwargs)
        assert isinstance(body, Generator)
        return Scope(body)

    return make
