"""The ways to open a session: for a live model or a target; in this process, in forked children, or in workers."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from oomprobe.devices import (
    Device,
    choose_device,
    device_error,
    is_host,
    may_have_gpu,
    opened_if_simulated,
)
from oomprobe.errors import (
    DeviceLostError,
    InvalidArgumentError,
    OomProbeError,
    UnreliableError,
    check_size,
    target_failed,
)
from oomprobe.ground.frames import hide_frames
from oomprobe.ground.processes import MARK
from oomprobe.ground.units import format_bytes, format_seconds
from oomprobe.probing.order import Order
from oomprobe.probing.session import Session
from oomprobe.records.notes import Note, NoteKind, remark
from oomprobe.records.options import (
    Step,
    StepFn,
    Steps,
    check_model,
    is_simulated,
    named_steps,
)
from oomprobe.records.patience import Clock
from oomprobe.records.trials import Runner, Trial
from oomprobe.results.log import warn
from oomprobe.results.progress import Reporter, reporter
from oomprobe.results.trials import trials_table
from oomprobe.runners.hooks import OptimizerWatch, outside_modes, preload_dynamo
from oomprobe.runners.local import Workload
from oomprobe.runners.predicting import open_local, open_predicting, predict_on_card
from oomprobe.runners.ranks_here import check_process_group, ranks_to_start, refuse_in_a_rank
from oomprobe.runners.signals import Interrupts
from oomprobe.runners.targets import build
from oomprobe.simulation.catalogue import card_of
from oomprobe.state import Snapshot, Tracker, preserved, state_tensors
from oomprobe.state.surroundings import garbage_frozen
from oomprobe.state.tracker import parameters_of

ON_HOST_MEMORY = (
    "no accelerator is here and no device was named, so host memory is probed, which is slow; such a probe ends after {seconds} unless "
    'time_limit_s is set. To probe a GPU that is not here, simulate one: device="sim:24GiB" (--device sim:24GiB)'
)
NO_GPU = (
    "no GPU is in sight on this machine, so the command may train on the CPU, for hours: add --device sim:RTX-4090 (in Python "
    'device="sim:RTX-4090") to run it on a simulated card. If it starts ranks on machines that have GPUs, all is well'
)
BUILDING = "; building {ranks} ranks took {seconds}, and a search usually builds 7 or 8 groups"
NOT_RESTORED = "not restored: {names}"
CACHED_BYTES = 16 * 2**20  # more than libraries leave
CACHED = (
    "{cached} were reserved and free when the probe began, and trials start without them: in another process, call {emptying} after "
    "building, before training. In this one, the probe has already done so"
)
OF_ANOTHER_MODEL = (
    "no optimizer within the step's reach holds a parameter of this model; {others} belong to "
    "another one. If you made the model anew, as in a notebook, make its optimizer anew too: the "
    "old one keeps the old model on the device and does not train this one"
)


def open_model(
    order: Order, model: torch.nn.Module, step_fn: Steps
) -> AbstractContextManager[Session]:
    """Open a session for a live model: trials on host memory run in forked children, all others in this process."""
    check_model(model)
    preserve, steps = preserved(order.preserve), named_steps(step_fn, order.axis)
    device = choose_device(order.device, model)
    check_process_group(device.world_size, has_stepped=False)
    if is_host(device):
        return _forked(order, model, steps, preserve, device)
    return _here(order, model, steps, preserve, device)


def open_target(
    order: Order, name: str, *, isolate: bool, nproc_per_node: int | str | None
) -> AbstractContextManager[Session]:
    """Open a session for a target by its name: in child processes, on several ranks, or in this process."""
    if nproc_per_node is not None and is_simulated(order.device):
        return _on_simulated_ranks(order, name, nproc_per_node)
    if nproc_per_node is not None:
        _refuse_isolation()
        return _isolated(order, name, ranks_to_start(nproc_per_node))
    order = replace(order, device=opened_if_simulated(order.device))
    if isolate and not is_simulated(order.device):
        _refuse_isolation()
        refuse_in_a_rank()
        return _isolated(order, name)
    return open_model(order, *_built(name, order.device))


def _built(target: str, device: Any) -> tuple[torch.nn.Module, StepFn]:
    try:
        return build(target, device)
    except (OomProbeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        hide_frames(error)
        raise target_failed(error, target) from error


@contextmanager
def _on_simulated_ranks(order: Order, target: str, nproc_per_node: int | str) -> Iterator[Session]:
    """Open a session for the first of several ranks on a simulated card, which runs in this process."""
    from oomprobe.runners.workers.crew import variables

    refuse_in_a_rank()
    check_size(
        "nproc_per_node", nproc_per_node
    )  # refuses "gpu": a simulated machine has no number of cards
    ranks = int(nproc_per_node)
    card = opened_if_simulated(order.device, ranks)
    with (
        card.first_rank(variables(0, ranks, port=0)),
        open_model(replace(order, device=card), *_built(target, card)) as session,
    ):
        yield session


def _refuse_isolation() -> None:
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


# --- the frame of every session ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """What every session has, however its trials run."""

    order: Order
    reporter: Reporter
    interrupts: Interrupts
    clock: Clock
    trials: list[Trial]

    def session(self, runner: Runner, title: str, *, state_verified: bool = True) -> Session:
        """Return the session; `state_verified` if trials cannot change the state of this process."""
        self.reporter.opened(title, self.order.options, runner.facts.device.is_simulated)
        session = Session(
            runner,
            self.order.options,
            self.reporter,
            self.clock,
            self.trials,
            axis=self.order.axis,
        )
        session.state_verified = state_verified
        if self.order.device is None and runner.facts.device.on_host:
            self._limit_unasked(session)
        return session

    def _limit_unasked(self, session: Session) -> None:
        """Warn at once that nobody asked for host memory, and let the probe end soon."""
        seconds = self.clock.patience.unasked_host_s
        self.clock.limit(seconds)
        text = ON_HOST_MEMORY.format(seconds=format_seconds(seconds))
        warn(text)
        session.notes.add(remark(text))


@contextmanager
def _framed(order: Order) -> Iterator[_Frame]:
    """Hold back signals, close the reporter, and attach the trials to whatever ends the probe: an error, Ctrl-C or an exit."""
    status, trials = reporter(order.progress), list[Trial]()
    try:
        with Interrupts() as interrupts, closing(status):
            clock = Clock(order.options, patience=order.patience)
            yield _Frame(
                order=order, reporter=status, interrupts=interrupts, clock=clock, trials=trials
            )
    except OomProbeError as error:
        error.trials = tuple(trials)
        raise
    except (
        KeyboardInterrupt,
        SystemExit,
    ) as interruption:  # some are raised only when `Interrupts` closes
        interruption.add_note(
            "oomprobe was interrupted; the trials so far:\n" + trials_table(trials)
        )
        raise


# --- in other processes: none is left afterwards ---


@contextmanager
def _isolated(order: Order, target: str, ranks: int | None = None) -> Iterator[Session]:
    """Open a session whose trials run in workers that build the target: one, or several ranks of this machine."""
    from oomprobe.runners.workers.runner import WorkersRunner, workers

    with _framed(order) as frame:
        source = workers(
            target, order.device, order.options, order.axis, frame.clock.patience, ranks
        )
        with WorkersRunner(source, frame.clock, frame.interrupts) as runner:
            title = runner.facts.device.name
            if ranks is not None and ranks > 1:
                title += BUILDING.format(seconds=format_seconds(frame.clock.elapsed_s), ranks=ranks)
            yield frame.session(predict_on_card(runner, order.axis), title)


@contextmanager
def _forked(
    order: Order,
    model: torch.nn.Module,
    steps: Mapping[str, Step],
    preserve: list[Any],
    device: Device,
) -> Iterator[Session]:
    """Open a session on host memory: each trial runs in a child forked from this process, which holds the model.

    A child changes only its own copy of the state, except for tensors in shared memory, which are restored at the end.
    """
    from oomprobe.runners.workers.runner import WorkersRunner, forks

    tracker = Tracker(model, [step.function for step in steps.values()], preserve, device)
    resident = tracker.resident_tensors()
    shared = [(tensor, tensor.detach().clone()) for tensor in resident if tensor.is_shared()]  # type: ignore[no-untyped-call]
    try:
        with garbage_frozen(), _framed(order) as frame:
            source = forks(model, steps, tracker, device, order.axis, frame.clock.patience)
            with WorkersRunner(source, frame.clock, frame.interrupts) as runner:
                yield frame.session(runner, runner.facts.device.name)
    finally:
        for tensor, before in shared:
            tensor.detach().copy_(before)


@contextmanager
def open_command(
    order: Order, command: Sequence[str], passes_after_s: float | None, *, keep_writes: bool
) -> Iterator[Session]:
    """Open a session whose trials are runs of a command."""
    if sys.platform != "linux":
        raise InvalidArgumentError(
            f"a command can be probed on Linux only, and this is {sys.platform}: let a function return the "
            "model and its step, and probe that, oomprobe run path/to/train.py:build"
        )
    from oomprobe.runners.command.runner import CommandRunner, checked

    words = checked(command)
    card = order.device
    if card is not None:
        card_of(card)  # raises
    with _framed(order) as frame:
        runner = CommandRunner(
            words,
            order.options,
            frame.interrupts,
            passes_after_s,
            frame.clock.patience,
            card,
            keep_writes,
        )
        session = frame.session(open_predicting(runner), shlex.join(words))
        if card is None and not may_have_gpu():
            warn(NO_GPU)
            session.notes.add(remark(NO_GPU))
        yield session


# --- in this process ---


def _on_another_model(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[Note]:
    """Yield a note if optimizers train another model alone; keep nothing that a step drops."""
    trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
    theirs = [*chain.from_iterable(map(parameters_of, optimizers))]
    if trained and theirs and trained.isdisjoint(map(id, theirs)):
        theirs += chain.from_iterable(map(state_tensors, optimizers))
        others = format_bytes(sum(map(attrgetter("nbytes"), theirs)))
        yield remark(OF_ANOTHER_MODEL.format(others=others))


@contextmanager
def _here(
    order: Order,
    model: torch.nn.Module,
    steps: Mapping[str, Step],
    preserve: list[Any],
    device: Device,
) -> Iterator[Session]:
    """Open a session whose trials run in this process. On every way out the state is restored and compared."""
    functions = [step.function for step in steps.values()]
    cached_bytes = device.cached_bytes()
    preload_dynamo()
    with _framed(order) as frame, garbage_frozen():
        snapshot = Snapshot(model, functions, preserve, device.torch_device.type, device)
        device.place(snapshot.tracker.resident_tensors())

        def keep_new_optimizer(optimizer: torch.optim.Optimizer) -> None:
            # An optimizer that the step creates and drops within one call needs no copy.
            for step in steps.values():
                if step.has_made is not None and step.has_made(optimizer):
                    return
            with frame.interrupts.held_back(), outside_modes():
                snapshot.add(optimizer)
                device.place(state_tensors(optimizer))

        with OptimizerWatch(keep_new_optimizer, model) as watch:
            work = Workload(
                device=device, model=model, steps=steps, tracker=snapshot.tracker, watch=watch, interrupts=frame.interrupts,
                snapshot=snapshot, axis=order.axis,
            )  # fmt: skip
            local, runner = open_local(work)
            predicting = predict_on_card(runner, order.axis)
            session = frame.session(predicting, device.name, state_verified=False)
            if cached_bytes > CACHED_BYTES:
                cached, emptying = format_bytes(cached_bytes), session.device.emptying
                session.notes.add(remark(CACHED.format(cached=cached, emptying=emptying)))
                session.as_built.needs_emptying = True
            session.notes.extend(_on_another_model(model, snapshot.tracker.optimizers))
            with _state_restored(session, snapshot, device):
                try:
                    yield session
                except Exception as error:  # of the device, while memory was measured or released
                    of_device = device_error(device, error)
                    if of_device is not None:
                        raise of_device from error
                    raise
                finally:
                    local.compiled.drop()  # training compiles as if there had been no probe
                    session.notes.extend(map(remark, snapshot.notes))


@contextmanager
def _state_restored(session: Session, snapshot: Snapshot, device: Device) -> Iterator[None]:
    """Restore and compare the state on every way out, and release the memory that the probe reserved."""
    try:
        yield
    except DeviceLostError:
        with suppress(UnreliableError):  # what was on the device is lost; all else comes back
            snapshot.restore()
        raise
    except BaseException:
        _restore(session, snapshot, device)
        raise
    _restore(session, snapshot, device)


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
            text = NOT_RESTORED.format(names=", ".join(changes))
            session.notes.add(Note(text=text, kind=NoteKind.NOT_RESTORED))
        session.state_verified = not changes
        torch.clear_autocast_cache()
        gc.collect()
        device.release()
    except Exception as error:
        of_device = device_error(device, error)
        if isinstance(of_device, DeviceLostError):
            raise of_device from error
        raise
