"""The ways to open a session: for a live model or a target; in this process, in forked children, or in workers."""

from __future__ import annotations

import gc
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from oomprobe.devices import (
    Device,
    choose_device,
    device_error,
    extras_of,
    is_host,
    names_simulated,
    opened_if_simulated,
    replays,
)
from oomprobe.errors import (
    DeviceLostError,
    InvalidArgumentError,
    NoDeviceError,
    OomProbeError,
    UnreliableError,
    check_size,
    target_failed,
)
from oomprobe.ground.units import format_bytes, format_seconds
from oomprobe.ground.words import count
from oomprobe.probing.session import Session
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.options import Options, Step, StepFn, check_model, check_process_group, named_steps
from oomprobe.records.trials import Trial
from oomprobe.report.progress import Progress, reporter
from oomprobe.report.trials import trials_table
from oomprobe.runners.hooks import OptimizerWatch, outside_modes, preload_dynamo
from oomprobe.runners.local import LocalRunner
from oomprobe.runners.signals import Clock, Interrupts
from oomprobe.runners.targets import build, name_of
from oomprobe.runners.workers.system import MARK
from oomprobe.state import Snapshot, Tracker, preserved, state_tensors

if TYPE_CHECKING:
    from oomprobe.runners.workers.runner import Source  # imports on Linux only, like the host device

ON_THE_CPU = (
    "THE MODEL IS ON THE CPU, but an accelerator is available: this number is about host memory. Call model.to('cuda') "
    "before probing"
)
ON_HOST_MEMORY = (
    ", which is slow: the model is on the CPU. Build it on the GPU, or simulate one with --device sim:24GiB (in Python "
    'device="sim:24GiB")'
)
NO_BREAKDOWN = (
    "breakdown records the allocations of a step in its own process, which a command does not allow: write a target, "
    "and probe that"
)
IN_A_RANK = (
    "this process is rank {rank} of {ranks}, and a probe starts ranks of its own: call it in one process, before torchrun or "
    "accelerate launch, with nproc_per_node={local} (oomprobe run path/to/train.py:build --nproc-per-node {local})"
)
SEVERAL_MACHINES = (
    "oomprobe runs the ranks of one machine: probe on one of them (in a Slurm job: srun -N1 -n1 --gpus-per-node=8 oomprobe run ... "
    "--nproc-per-node 8). DDP needs the same memory per rank on every machine, and FSDP over more ranks needs less, so that answer "
    "is safe, less what NCCL takes between machines"
)
NO_RANKS_THERE = (
    "device={device!r} cannot be given for several ranks, which have a card each: leave it out, or state a kind or a budget for "
    "each, such as 'cuda', 'cuda:8GiB' or 'sim:24GiB'. CUDA_VISIBLE_DEVICES chooses the cards"
)
_KINDS = re.compile(r"(cuda|xpu)(:[\d.]+ ?[A-Za-z]+)?")
BUILDING = "; building {ranks} ranks took {seconds}, and a search usually builds 7 or 8 groups"
NOT_RESTORED = "not restored: {names}"
CACHED_BYTES = 16 * 2**20  # more than libraries leave
CACHED = (
    "{cached} were reserved and free when the probe began, and trials start without them: in another process, call {emptying} after "
    "building, before training. In this one, the probe has done so"
)


def open_model(
    model: torch.nn.Module,
    step_fn: StepFn | Step | Mapping[str, StepFn | Step],
    device: str | torch.device | Device | None,
    preserve: Iterable[Any],
    options: Options,
    progress: Progress,
    axis: Axis = NO_AXIS,
) -> AbstractContextManager[Session]:
    """Open a session for a live model: trials on host memory run in forked children, all others in this process."""
    check_model(model)
    objects, steps = preserved(preserve), named_steps(step_fn, axis)
    check_process_group(extras_of(device).world_size, has_stepped=False)
    chosen = choose_device(device, model)
    if is_host(chosen):
        return _forked(model, steps, objects, chosen, options, progress, axis, was_chosen=device is not None)
    return _here(model, steps, objects, chosen, options, progress, axis)


def open_target(
    target: str | Callable[[], Any],
    isolate: bool,
    device: Any,
    preserve: Any,
    options: Options,
    progress: Progress,
    nproc_per_node: int | str | None = None,
    axis: Axis = NO_AXIS,
) -> AbstractContextManager[Session]:
    """Open a session for a target: in child processes, on several ranks, or in this process."""
    name = name_of(target)
    if nproc_per_node is not None and names_simulated(device):
        return _on_simulated_ranks(name, nproc_per_node, device, preserve, options, progress, axis)
    if nproc_per_node is not None:
        _refuse_isolation(preserve)
        ranks = _ranks(nproc_per_node, device, isolate=isolate)
        return _on_ranks(name, ranks, device, options, progress, axis)
    device = opened_if_simulated(device)
    if isolate and not replays(device):
        _refuse_isolation(preserve)
        _refuse_in_a_rank()
        return _isolated(name, device, options, progress, axis)
    model, step_fn = _built(name, device)
    return open_model(model, step_fn, device, preserve, options, progress, axis)


def _built(target: str, device: Any) -> tuple[torch.nn.Module, StepFn]:
    try:
        return build(target, device)
    except (OomProbeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise target_failed(error, target) from error


@contextmanager
def _on_simulated_ranks(
    target: str,
    nproc_per_node: int | str,
    device: str,
    preserve: Any,
    options: Options,
    progress: Progress,
    axis: Axis,
) -> Iterator[Session]:
    """Open a session for the first of several ranks on a simulated card, which runs in this process."""
    from oomprobe.runners.workers.group import variables

    _refuse_in_a_rank()
    check_size("nproc_per_node", nproc_per_node)  # refuses "gpu": a simulated machine has no number of cards
    ranks = int(nproc_per_node)
    card = opened_if_simulated(device, ranks)
    with card.first_rank(variables(0, ranks, port=0)):
        model, step_fn = _built(target, card)
        with open_model(model, step_fn, card, preserve, options, progress, axis) as session:
            yield session


def _refuse_isolation(preserve: Any) -> None:
    if MARK in os.environ:  # set in workers
        raise InvalidArgumentError(
            "a target's file calls probe_target while it is imported, so each process that builds the target would start "
            'another probe: put the call under if __name__ == "__main__":'
        )
    if sys.platform != "linux":
        raise InvalidArgumentError(
            f"trials can be isolated on Linux only, and this is {sys.platform}: pass isolate=False (--in-process) to run "
            "them in this process"
        )
    if preserve is not None and preserve != () and preserve != []:
        raise InvalidArgumentError(
            "preserve takes live objects of this process, but isolated trials run in other processes: leave it out, or pass "
            "isolate=False"
        )


def _refuse_in_a_rank() -> None:
    """Raise InvalidArgumentError in a rank of torchrun or srun: each of them would start a probe of its own."""
    variables = os.environ
    ranks, local = variables.get("WORLD_SIZE", "1"), variables.get("LOCAL_WORLD_SIZE", "")
    if "RANK" in variables and ranks not in ("", "1"):
        machines = local and local != ranks
        raise InvalidArgumentError(
            IN_A_RANK.format(rank=variables["RANK"], ranks=ranks, local=local or ranks)
            + (f". {SEVERAL_MACHINES}" if machines else "")
        )


def _ranks(nproc_per_node: int | str, device: Any, *, isolate: bool) -> int:
    """Return the number of ranks, after checking that each has an accelerator; this process does not open them."""
    _refuse_in_a_rank()
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        tasks = os.environ["SLURM_STEP_NUM_TASKS"]
        raise InvalidArgumentError(f"this is one of {tasks} tasks that srun has started. {SEVERAL_MACHINES}")
    if not isolate:
        raise InvalidArgumentError("ranks are processes of their own: leave out isolate=False (--in-process)")
    if device is not None and (not isinstance(device, str) or not _KINDS.fullmatch(device)):
        raise InvalidArgumentError(NO_RANKS_THERE.format(device=device))
    kind = torch.accelerator.current_accelerator()  # that torch was built for, present or not
    cards = 0 if kind is None or kind.type == "mps" else int(torch.get_device_module(kind).device_count())
    if nproc_per_node != "gpu":
        check_size("nproc_per_node", nproc_per_node)
    ranks = cards if nproc_per_node == "gpu" else int(nproc_per_node)
    if ranks > cards or not cards:
        raise NoDeviceError(
            f"{count(ranks or 1, 'rank needs', 'ranks need')} an accelerator each, and this machine shows "
            f"{count(cards, 'accelerator', 'accelerators')} that can be used so (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): lower --nproc-per-node, or simulate a rank of DDP, "
            "--device sim:24GiB"
        )
    return ranks


# --- in other processes ---


@contextmanager
def _isolated(target: str, device: Any, options: Options, progress: Progress, axis: Axis) -> Iterator[Session]:
    """Open a session whose trials run in workers; none of its processes is left afterwards."""
    from oomprobe.runners.workers.runner import workers

    with _processes(
        workers(target, device, options, axis), options, progress, "" if device else ON_HOST_MEMORY
    ) as session:
        session.state_verified = True  # the caller's process has no state that a trial could change
        yield session


@contextmanager
def _on_ranks(
    target: str, ranks: int, device: Any, options: Options, progress: Progress, axis: Axis
) -> Iterator[Session]:
    """Open a session whose trials run on several ranks of this machine; none of their processes is left afterwards."""
    from oomprobe.runners.workers.ranks import RanksRunner
    from oomprobe.runners.workers.runner import task_of

    task = {**task_of(target, device, options, axis), "ranks": ranks}
    with _running(lambda clock, interrupts: RanksRunner(ranks, task, clock, interrupts), options, progress) as session:
        session.state_verified = True  # the caller's process has no state that a trial could change
        yield session


@contextmanager
def _forked(
    model: torch.nn.Module,
    steps: Mapping[str, Step],
    preserve: list[Any],
    device: Device,
    options: Options,
    progress: Progress,
    axis: Axis,
    *,
    was_chosen: bool,
) -> Iterator[Session]:
    """Open a session on host memory: each trial runs in a child forked from this process, which holds the model.

    A child changes only its own copy of the state, except for tensors in shared memory, which are restored at the end.
    """
    from oomprobe.runners.workers.runner import forks

    tracker = Tracker(model, [step.run for step in steps.values()], preserve, device)
    source = forks(model, steps, tracker, device, axis)
    resident = tracker.resident_tensors()
    shared = [(tensor, tensor.detach().clone()) for tensor in resident if tensor.is_shared()]  # type: ignore[no-untyped-call]
    try:
        with garbage_frozen(), _processes(source, options, progress, "" if was_chosen else ON_HOST_MEMORY) as session:
            if not was_chosen and torch.accelerator.is_available():
                session.notes[ON_THE_CPU] = None
            yield session
    finally:
        for tensor, before in shared:
            tensor.detach().copy_(before)
    session.state_verified = True


def _processes(source: Source, options: Options, progress: Progress, hint: str) -> AbstractContextManager[Session]:
    from oomprobe.runners.workers.runner import ProcessRunner

    return _running(lambda clock, interrupts: ProcessRunner(source, clock, interrupts), options, progress, hint)


@contextmanager
def _running(
    runner_of: Callable[[Clock, Interrupts], Any], options: Options, progress: Progress, hint: str = ""
) -> Iterator[Session]:
    """Open a session whose runner starts processes when it is entered, and ends them on exit."""
    status = reporter(progress)
    recorded: list[Trial] = []
    with trials_attached(recorded), Interrupts() as interrupts:
        clock = Clock(options)
        try:
            with runner_of(clock, interrupts) as runner:
                facts = runner.facts
                if facts.world_size > 1:
                    hint = BUILDING.format(seconds=format_seconds(clock.elapsed_s), ranks=facts.world_size)
                status.opened(facts.device.name + hint * (facts.device.on_host or facts.world_size > 1), options)
                yield Session(runner, options, status, clock, recorded)
        finally:
            status.close()


@contextmanager
def open_command(
    command: Sequence[str], passes_after_s: float | None, options: Options, progress: Progress
) -> Iterator[Session]:
    """Open a session whose trials are runs of a command; no process of it is left afterwards."""
    if sys.platform != "linux":
        raise InvalidArgumentError(f"a command can be probed on Linux only, and this is {sys.platform}")
    from oomprobe.runners.command.runner import CommandRunner, checked

    words, status = checked(command), reporter(progress)
    if options.breakdown:
        raise InvalidArgumentError(NO_BREAKDOWN)
    recorded: list[Trial] = []
    with trials_attached(recorded), Interrupts() as interrupts:
        clock = Clock(options)
        try:
            status.opened(shlex.join(words), options)
            session = Session(
                CommandRunner(words, options, interrupts, passes_after_s, clock.patience),
                options,
                status,
                clock,
                recorded,
            )
            session.state_verified = True  # the caller's process has no state that a trial could change
            yield session
        finally:
            status.close()


# --- in this process ---


@contextmanager
def _here(
    model: torch.nn.Module,
    steps: Mapping[str, Step],
    preserve: list[Any],
    device: Device,
    options: Options,
    progress: Progress,
    axis: Axis,
) -> Iterator[Session]:
    """Open a session whose trials run in this process. On every way out the state is restored and compared."""
    functions = [step.run for step in steps.values()]
    status, card, cached_bytes = reporter(progress), extras_of(device).replay, extras_of(device).cached_bytes()
    recorded: list[Trial] = []
    preload_dynamo()
    with trials_attached(recorded), Interrupts() as interrupts, garbage_frozen():
        snapshot = Snapshot(model, functions, preserve, device.torch_device.type, device)
        card.place(snapshot.tracker.resident_tensors())

        def keep_new_optimizer(optimizer: torch.optim.Optimizer) -> None:
            # An optimizer that the step creates and drops within one call needs no copy.
            if not any(step.has_made is not None and step.has_made(optimizer) for step in steps.values()):
                with interrupts.held_back(), outside_modes():
                    snapshot.add(optimizer)
                    card.place(state_tensors(optimizer))

        with OptimizerWatch(keep_new_optimizer, model) as watch:
            clock = Clock(options)
            runner = LocalRunner(
                device,
                model,
                steps,
                snapshot.tracker,
                watch,
                interrupts,
                snapshot=snapshot,
                axis=axis,
                patience=clock.patience,
            )
            session = Session(runner, options, status, clock, recorded)
            if cached_bytes > CACHED_BYTES:
                cached, emptying = format_bytes(cached_bytes), session.device.emptying
                session.notes[CACHED.format(cached=cached, emptying=emptying)] = None
            status.opened(device.name, options)
            with _state_restored(session, snapshot, device):
                try:
                    yield session
                except Exception as error:  # of the device, while memory was measured or released
                    if told := device_error(device, error):
                        raise told from error
                    raise
                finally:
                    status.close()
                    runner.compiled.drop()  # training compiles as if there had been no probe
                    session.notes |= dict.fromkeys(snapshot.notes)


FROZEN_BY_PYTHON = 1000  # at most: collecting garbage in 3.12 freezes immortal objects, 375 at the start


@contextmanager
def garbage_frozen() -> Iterator[None]:
    """Freeze existing objects so that garbage collection scans only new ones: 0.01 ms, not 98, with frameworks imported.

    Forked children inherit this and copy fewer pages. Freeze nothing if the caller has frozen objects, because unfreezing
    would unfreeze theirs too.
    """
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _state_restored(session: Session, snapshot: Snapshot, device: Device) -> Iterator[None]:
    """Restore and compare the state on every way out, and release the memory that the probe reserved."""
    try:
        try:
            yield
        except DeviceLostError:
            raise
        except BaseException:
            _restore(session, snapshot, device)
            raise
        _restore(session, snapshot, device)
    except DeviceLostError as error:
        error.snapshot = snapshot.host_copy()
        snapshot.restore(device_lost=True)
        raise


def _restore(session: Session, snapshot: Snapshot, device: Device) -> None:
    try:
        snapshot.restore()
        differences = snapshot.differences()
        if differences:
            raise UnreliableError(
                f"not everything came back as it was before the probe: {', '.join(differences[:5])}. Do not train with "
                "this model: load it again. The step may be changing it from another thread"
            )
        if changes := snapshot.tracker.changes():
            session.notes[NOT_RESTORED.format(names=", ".join(changes))] = None
        session.state_verified = not changes
        gc.collect()
        device.release()
    except Exception as error:
        told = device_error(device, error)
        if isinstance(told, DeviceLostError):
            raise told from error
        raise


@contextmanager
def trials_attached(trials: list[Trial]) -> Iterator[None]:
    """Attach the trials so far to whatever error ends the probe, also a Ctrl-C or exit.

    Must be outermost: `Interrupts` raises deferred signals when it closes.
    """
    try:
        yield
    except OomProbeError as error:
        error.trials = tuple(trials)
        raise
    except (KeyboardInterrupt, SystemExit) as interruption:
        interruption.add_note("oomprobe was interrupted; the trials so far:\n" + trials_table(trials))
        raise
