"""A whole program on a simulated card: what `oomprobe run --device sim:... -- CMD` makes of each process of the command.

The module in front of the command's path (`runners/command/site`) calls `enter` as soon as the process has imported torch. The
process stays on the card to its end. Beyond what a step does, a program has host memory of its own, saves files, loads data in other
processes, starts threads, and joins a group of ranks.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import _worker_loop

from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.errors import SimulationError
from oomprobe.ground.frames import raised_at
from oomprobe.ground.replaced import Patch, replaced
from oomprobe.ground.torch_versions import OLDEST, VERSION
from oomprobe.simulation.card_mode import CardMode
from oomprobe.simulation.catalogue import card_of
from oomprobe.simulation.fakes import SEEN
from oomprobe.simulation.files import Files
from oomprobe.simulation.host import HostMemory
from oomprobe.simulation.memory import CardMemory
from oomprobe.simulation.patches import without_values
from oomprobe.simulation.ranks import groups_of_program, with_nccl
from oomprobe.simulation.unknown import needs_cuda, refuse_address, wants_data
from oomprobe.tape.calls import RecordedCall, write_calls

TOO_OLD = "the command's torch is {version}: a simulated card needs {oldest} or later"
EAGER = (
    "torch.compile was left out: compiled steps mostly take less memory, so a larger batch may fit"
)
NOT_TRACED = "torch.jit.trace and TensorBoard's add_graph ran the model and recorded nothing"
NEEDS_CUDA = "{where} needs CUDA itself ({error}), and a simulated card has none: leave that out, or probe on a real device"
# What launchers are called that start ranks as processes of their own.
_LAUNCHERS = {
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate-launch", "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli", "deepspeed", "deepspeed.launcher.launch", "deepspeed.launcher.runner", "ray", "colossalai",
}  # fmt: skip
MOST_CALLS = 12  # that do not repeat, before a program is taken not to


def enter(name: str, variables: dict[str, str]) -> Program | None:
    """Put this process on a simulated card.

    Return None if it hides all cards from itself, or is a launcher, which only learns how many
    cards there are.

    Args:
        name: Name of the card, ``"sim:..."``.
        variables: The process's environment.

    Raises:
        SimulationError: torch is too old.
        OomProbeError: there is no such card, or the allocator's settings are not simulated.
    """
    if VERSION < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SimulationError(TOO_OLD.format(version=torch.__version__, oldest=oldest))
    if hides_cards(variables):
        return None
    if _is_launcher(sys.orig_argv[1:]):
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 1
        return None
    program = Program(CardMemory(card_of(name), AllocatorSettings.from_environment()))
    if variables.get("LOCAL_RANK", "").isdigit():
        SEEN.claim(int(variables["LOCAL_RANK"]))
    program.enter()
    return program


def hides_cards(variables: Mapping[str, str]) -> bool:
    """Whether the program has hidden all cards from itself, and not the user before."""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    return visible in ("", "-1") and visible != variables.get("OOMPROBE_VISIBLE")


def _is_launcher(words: list[str]) -> bool:
    """Return whether the words after ``python`` start a launcher, or the server from which Python forks processes."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "-c":
            return "multiprocessing.forkserver" in following
        if word == "-m":
            return following in _LAUNCHERS
        if not word.startswith("-"):
            return os.path.basename(word) in _LAUNCHERS
    return False


class Program:
    """This process on a simulated card.

    Attributes:
        files: What it saves and loads.
        refusal: The first sentence with which something was refused, though the program may have caught it; "" if nothing was.
    """

    def __init__(self, memory: CardMemory) -> None:
        self._memory, self._mode = memory, CardMode(memory)
        self._mode.whole_program = self._mode.fakes.keeps_parameters = True
        self.files = Files(self._mode)
        self._patches = ExitStack()
        self.refusal = ""
        self._first_optimizer = 0  # its id
        self._calls: list[RecordedCall] | None = []
        # The id of its first model on the card, and where calls of it began.
        self._model, self._begun = 0, list[tuple[int, int]]()
        self._is_left = False

    def enter(self) -> None:
        """Enter the modes and patches, for good."""

        def has_joined(ranks: int) -> None:
            if ranks > 1:
                card, note = with_nccl(self._memory.card, ranks)
                self._memory.keep_back(card)
                self._mode.notes[note] = None

        def begins(module: torch.nn.Module, _: object) -> None:
            if not self._model and any(parameter.is_cuda for parameter in module.parameters()):
                self._model = id(module)
            if id(module) == self._model:
                self._begun.append(self._memory.tape.place)

        self._patches.enter_context(without_values(self._mode))
        groups = groups_of_program(self._mode.notes, has_joined, self._on_card)
        self._patches.enter_context(replaced([*self._of_program(), *self.files.patches(), *groups]))
        self._patches.callback(register_module_forward_pre_hook(begins).remove)
        os.register_at_fork(after_in_child=self.leave)

    def hooks(self) -> dict[str, Callable[[Any], None]]:
        """Return what is to be done once a module is imported, by its name."""
        return {
            "safetensors.torch": self.files.answer_safetensors,
            "torch.utils.tensorboard.writer": self._answer_writer,
            "tensorboardX.writer": self._answer_writer,
        }

    def _answer_writer(self, module: Any) -> None:
        def add_graph(_: Any, model: Any, input_to_model: Any = None, *__: Any, **___: Any) -> None:
            if input_to_model is not None:
                torch.jit.trace(model, input_to_model)  # type: ignore[no-untyped-call]

        module.SummaryWriter.add_graph = add_graph

    def leave(self) -> None:
        """Go back to the host, in a process that loads data."""
        if self._is_left:
            return
        self._is_left = True
        while torch._C._len_torch_function_stack():  # also those that the program has entered above
            torch._C._pop_torch_function_stack()
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        while torch._C._len_torch_dispatch_stack():
            torch._C._pop_torch_dispatch_stack(None)
        with suppress(RuntimeError):  # of modes that are gone
            self._patches.close()

    def stepped(self, optimizer: object, path: str) -> None:
        """End a call: what the program did since the last step of its first optimizer. Once calls repeat, write them to a file."""
        self._first_optimizer = self._first_optimizer or id(optimizer)
        if self._calls is not None and id(optimizer) != self._first_optimizer:
            return
        call = self._memory.finish_call()
        self._memory.tape.start()
        self._keep(call, path)

    def ended(self, path: str) -> None:
        """Write the calls of a program that made no steps: each begins as its model is called."""
        if not self._first_optimizer:
            for call in self._memory.finish_call().cut(self._begun[:MOST_CALLS]):
                self._keep(call, path)

    def _keep(self, call: RecordedCall, path: str) -> None:
        """Keep a call; once calls repeat, write them to a file."""
        if self._calls is None:  # they are written, or never repeat
            return
        self._calls.append(call)
        repeats = len(self._calls) > 1 and self._calls[-1].repeats(self._calls[-2])
        if repeats and not self._mode.counts_values:
            write_calls(self._calls, path)
        if repeats or len(self._calls) == MOST_CALLS:
            self._calls = None

    def ended_by(self, error: BaseException) -> None:
        """Take an error that ends the program for a refusal, if it is about what a simulated card lacks."""
        if not isinstance(error, RuntimeError | AssertionError | AttributeError):
            return
        with suppress(SimulationError):  # its sentence is kept
            if isinstance(error, RuntimeError) and wants_data(error):
                refuse_address(error)
            if needs_cuda(error):
                where = raised_at(error) or "the program"
                raise SimulationError(NEEDS_CUDA.format(where=where, error=error))

    @property
    def used(self) -> list[int]:
        """The index of the card, if this process has reserved memory there."""
        if self._is_left or not self._memory.peaks[1]:
            return []
        return [SEEN.device.index]

    @property
    def workspace_bytes(self) -> int:
        """The largest workspace that a convolution may want."""
        return self._memory.largest_workspace_bytes

    @property
    def host(self) -> HostMemory:
        """What it takes of the host."""
        return self._memory.host

    @property
    def read_at(self) -> str:
        """The line that read last what has no value."""
        return self._mode.facts.read_at

    @property
    def notes(self) -> list[str]:
        """Assumptions made so far."""
        return list(self._mode.notes)

    @property
    def not_covered(self) -> list[str]:
        """What was left out so far."""
        return list(self._mode.not_covered)

    @property
    def not_compared(self) -> str:
        """What operators take that nobody has compared with torch's."""
        return self._memory.uncompared.note(self._memory.peaks[0])

    def _on_card(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function create floating-point tensors on the card: in C++, it asks tensors there for a device that torch does not know."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._mode.host_is_card = True
            try:
                return function(*args, **kwargs)
            finally:
                self._mode.host_is_card = False

        return wrapped

    def _of_program(self) -> Iterator[Patch]:
        """Yield replacements for attributes, each with its owner and name."""
        run, compiler = BaseProcess.run, torch.compile
        refuse = SimulationError.__init__

        def __init__(error: SimulationError, *args: Any) -> None:
            refuse(error, *args)
            self.refusal = self.refusal or str(error)

        def run_process(process: Any) -> None:
            if process._target is _worker_loop:  # of a loader that does not fork
                self.leave()
            run(process)

        def compile_nothing(*args: Any, **kwargs: Any) -> Any:
            self._mode.notes[EAGER] = None
            return compiler(*args, **kwargs)

        def trace_nothing(func: Any = None, example_inputs: Any = None, *_: Any, **__: Any) -> Any:
            self._mode.notes[NOT_TRACED] = None
            func(*example_inputs if isinstance(example_inputs, list | tuple) else (example_inputs,))
            return func

        yield torch.cuda, "is_available", lambda: not hides_cards(os.environ)
        yield SimulationError, "__init__", __init__
        yield BaseProcess, "run", run_process
        yield torch, "compile", compile_nothing
        yield torch.jit, "trace", trace_nothing
        # Host memory does not count.
        yield DataLoader, "pin_memory", property(lambda _: False, lambda *_: None)
