"""Keep a step's variables from one call to the next, as the loop does that the step stands for.

A function's variables die when it returns. Those of a loop's body live on until the next iteration
binds them again, so two batches may be alive at once. Here the next call of a step begins with the
variables that the last one left: from there on, Python itself drops each where a loop drops it.

Nothing watches the call meanwhile. A trace function that stays would keep the arguments of every
function alive that the step calls.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

from oomprobe.records.options import Step

RETURNED = "what it returned"
UNSEEN = (
    "the variables of a loop live on until the next iteration binds them again. Those of this step "
    "could not be kept like that, because compiled code ran in its place: compile the model instead"
)
Begin = Callable[
    [FrameType], Mapping[str, object]
]  # returns the variables that a frame begins with


class LoopVariables:
    """What the loop that a step stands for keeps between two iterations: variables and the result.

    Attributes:
        returned: What the last call returned.
        unseen: Why the variables cannot be kept; "" if they can.
    """

    def __init__(self, step: Step) -> None:
        self._code = _code_of(step.function) if step.is_loop else None
        self._names = () if self._code is None else _variables_of(self._code)
        self._frame: FrameType | None = None  # of the call that runs
        self._kept: Mapping[str, object] = {}
        self.returned: object = None
        self.unseen = ""

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Let the step that is called inside begin with the variables that its last call left."""
        if self._code is None or not self._names or self.unseen:
            yield
            return
        try:
            with _watching(self._code, self._begin):
                yield
            if self._frame is None:
                self.unseen = UNSEEN
            else:
                left = self._frame.f_locals
                self._kept = {name: left[name] for name in self._names if name in left}
        finally:
            self._frame = None

    def _begin(self, frame: FrameType) -> Mapping[str, object]:
        if self._frame is not None:  # the step calls itself
            return {}
        self._frame = frame
        kept, self._kept = self._kept, {}
        return kept

    def names(self) -> list[str]:
        """Return the names of what is kept."""
        return [*self._kept, RETURNED]

    def drop(self, name: str) -> None:
        """Let go of one of them."""
        self._kept = {other: value for other, value in self._kept.items() if other != name}
        if name == RETURNED:
            self.returned = None


def _code_of(function: object) -> CodeType | None:
    """Return the code of the function that decorators lead to; None if it is not Python's."""
    while not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        if hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif inspect.isfunction(type(function).__call__):
            function = type(function).__call__
        else:
            return None
    return function.__code__


def _variables_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of a function's variables, without its parameters."""
    parameters = inspect.getargs(code)
    given = {*parameters.args, parameters.varargs, parameters.varkw}
    return tuple(name for name in (*code.co_varnames, *code.co_cellvars) if name not in given)


@contextmanager
def _monitoring(code: CodeType, begin: Begin) -> Iterator[None]:
    monitoring = sys.monitoring  # type: ignore[attr-defined]
    started = monitoring.events.PY_START
    tool = next(number for number in (4, 3) if monitoring.get_tool(number) is None)

    def start(code: CodeType, offset: int) -> None:
        frame = sys._getframe(1)
        variables = frame.f_locals
        variables.update(begin(frame))
        if sys.version_info < (3, 13):  # there it is a copy
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
            variables.clear()

    monitoring.use_tool_id(tool, "oomprobe")
    monitoring.register_callback(tool, started, start)
    monitoring.set_local_events(tool, code, started)
    try:
        yield
    finally:
        monitoring.set_local_events(tool, code, 0)
        monitoring.register_callback(tool, started, None)
        monitoring.free_tool_id(tool)


@contextmanager
def _tracing(code: CodeType, begin: Begin) -> Iterator[None]:
    """Watch by a trace function, which takes itself away at the first frame of the code.

    Under a debugger that frame begins with nothing, and what the last call left lives until this
    one has returned: a debugger keeps the variables of every frame itself.
    """
    debugger, unbound = sys.gettrace(), list[Mapping[str, object]]()

    def trace(frame: FrameType, event: Any, argument: object) -> Any:
        if frame.f_code is not code:
            return None
        sys.settrace(debugger)
        if debugger is not None:
            unbound.append(begin(frame))
            return debugger(frame, event, argument)
        variables = frame.f_locals  # Python writes these to the frame when this function returns,
        variables.update(begin(frame))
        emptier: Any = _Emptier(variables)  # and then replaces this by what it returns.
        frame.f_trace = emptier
        return lambda *event: None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(debugger)


class _Emptier:
    """Empties a frame's dictionary, which would keep alive what the frame began with."""

    def __init__(self, variables: dict[str, object]) -> None:
        self._variables = variables

    def __del__(self) -> None:
        self._variables.clear()


# Calls `begin` with each frame of the code that starts inside, which begins with what that returns.
_watching = _monitoring if sys.version_info >= (3, 12) else _tracing
