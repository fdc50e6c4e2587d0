"""Where blocks were allocated, told by their recorded stacks: the line of the user's code, the kind, the module."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from oomprobe.records.kinds import Bytes
from oomprobe.tape.history import Live
from oomprobe.tape.snapshot import MOST_FRAMES, Frames

MOST_CHARACTERS = 400  # of a name, such as that of a template in C++
UNKNOWN = "without a recorded stack"
_OWN = f"{Path(__file__).parents[1]}{os.sep}"  # the folder of oomprobe's code
_DEMO = f"{_OWN}demo.py"  # stands for a user's file, because it contains steps
# Folders of libraries: site-packages and dist-packages, code that torch.compile made, Python's own on Linux and on Windows.
_LIBRARIES = re.compile(
    r"[/\\](?:\w{4}-packages|torch(?:inductor_.*)?|lib[/\\]python3.*|\w*ython[^\\]*\\[Ll]ib)[/\\]"
)
_BACKWARD = re.compile(r"autograd::generated::(\w+?)Backward\d*(?:_apply|::apply)")
_MODULE_CALL = "_wrapped_call_impl"  # of torch.nn.Module: what a caller calls
# The first whose pattern matches a frame, written as "name filename", says what a block is. Workspaces and communication are
# requested by kernels, an optimizer's state by its step, and a forward pass may be run again in backward.
_KINDS = {
    "workspaces of libraries": re.compile(r"Workspace|cudnn_\w*algo|_scratch", re.IGNORECASE),
    "communication": re.compile(r"^c10d::|torch[/\\]distributed[/\\](?!fsdp|algorithms)"),
    "optimizer": re.compile(
        r"torch[/\\]optim[/\\]|[/\\](?:bitsandbytes|apex|transformer_engine)[/\\]optim"
    ),
    "backward": re.compile(
        r"torch::autograd::(?:Engine|generated::\w+?Backward)|torch[/\\]autograd[/\\]"
    ),
    "parameters and buffers": re.compile(
        r"^(?:_apply|reset_parameters|__init__|to|cuda) .*torch[/\\]nn[/\\]modules", re.MULTILINE
    ),
    "forward": re.compile(r"^(?:_wrapped_call_impl|forward) ", re.MULTILINE),
}
_OUTSIDE = "outside of modules"


@dataclass(frozen=True, slots=True)
class Modules:
    """Calls of equal modules: the line that calls them, how many of them hold memory, and how much they hold together."""

    where: str
    count: int
    held_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """A function's name, the file it is in, and the line that runs."""

    name: str
    file: str
    line: str

    def is_python(self) -> bool:
        """Whether it is a function of Python that is not oomprobe's."""
        if self.file.startswith(_OWN):
            return self.file == _DEMO
        return self.file.endswith(".py") or self.file.startswith(("<", "/tmp/ipykernel_"))

    def is_users(self) -> bool:
        return self.is_python() and not is_of_library(self.file)


@functools.cache
def is_of_library(file: str) -> bool:
    """Return whether a file belongs to a library or to Python itself."""
    return file != _DEMO and _LIBRARIES.search(file) is not None


class Stacks:
    """Reads stacks, each of them once; `without` is the kind of blocks that have none.

    Examples:
        >>> frames = [{"name": "forward", "filename": "/me/model.py", "line": 7}, {"name": "main", "filename": "/me/train.py", "line": 3}]
        >>> Stacks([frames]).line_of(frames), Stacks([frames]).kind_of(frames)
        ('model.py:7 in forward', 'forward')
    """

    def __init__(self, stacks: Iterable[Frames], without: str = UNKNOWN) -> None:
        self._without = without
        self._read: dict[int, tuple[Frame, ...]] = {}
        self._kinds: dict[int, str] = {}
        for frames in stacks:
            self._of(frames)
        files = {
            frame.file for stack in self._read.values() for frame in filter(Frame.is_users, stack)
        }
        self._folder = os.path.commonpath(
            [os.path.dirname(file) for file in files if os.path.isabs(file)] or [""]
        )

    def _of(self, frames: Frames) -> tuple[Frame, ...]:
        if id(frames) not in self._read:
            dicts = (raw for raw in frames[:MOST_FRAMES] if isinstance(raw, dict))
            self._read[id(frames)] = tuple(map(_frame, dicts))
        return self._read[id(frames)]

    def line_of(self, frames: Frames) -> str:
        """Return the user's line that requested a block, of backward the operator, as the engine has no line of Python."""
        stack = self._of(frames)
        kind = self.kind_of(frames)
        if kind == "backward":
            operators = filter(None, (_BACKWARD.search(frame.name) for frame in stack))
            return next((f"backward of {operator[1]}" for operator in operators), kind)
        for is_chosen in (Frame.is_users, Frame.is_python):
            for frame in filter(is_chosen, stack):
                return self._written(frame)
        return kind

    def _written(self, frame: Frame) -> str:
        file = frame.file
        if len(self._folder) > 1 and file.startswith(self._folder):
            file = os.path.relpath(file, self._folder)
        return f"{file}:{frame.line} in {frame.name}"

    def kind_of(self, frames: Frames) -> str:
        """Return what a block was requested for."""
        if id(frames) not in self._kinds:
            stack = self._of(frames)
            self._kinds[id(frames)] = kind_of_stack(stack) if stack else self._without
        return self._kinds[id(frames)]

    def equal_modules(self, live: Iterable[Live]) -> tuple[Modules, ...]:
        """Return the calls of modules from one line that hold memory several times by the same stacks, most memory first."""
        sizes: dict[str, dict[tuple[Frame, ...], list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for block in live:
            stack = self._of(block.frames)
            where = ""  # the outermost forward that calls a module
            for callee, caller in pairwise(filter(Frame.is_python, stack)):
                if (callee.name, caller.name) == (_MODULE_CALL, "forward"):
                    where = self._written(caller)
            if where:
                sizes[where][stack].append(block.size)
        modules = []
        for where, by_stack in sizes.items():
            count = len(max(by_stack.values(), key=sum))
            if count > 1:
                modules.append(Modules(where, count, sum(map(sum, by_stack.values()))))
        return tuple(sorted(modules, key=lambda calls: -calls.held_bytes))


def kind_of_stack(stack: Iterable[Frame]) -> str:
    """Return what a block was requested for with a stack."""
    text = "\n".join(f"{frame.name} {frame.file}" for frame in stack)
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(text)), _OUTSIDE)


def total_by(name_of: Callable[[Frames], str], live: Iterable[Live]) -> Mapping[str, int]:
    """Return the bytes of blocks by a name of their stacks, largest first."""
    totals: Counter[str] = Counter()
    for block in live:
        totals[name_of(block.frames)] += block.size
    return dict(totals.most_common())


def _frame(raw: Any) -> Frame:
    texts = []
    for name in ("name", "filename", "line"):
        value = raw.get(name, "")
        texts.append(str(value)[:MOST_CHARACTERS] if isinstance(value, str | int) else "")
    return Frame(*texts)
