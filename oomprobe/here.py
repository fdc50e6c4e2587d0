"""A workbench in this process: everything a probe needs while it runs, and everything back when it has ended."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from oomprobe.clock import Clock
from oomprobe.devices import Device, Simulated, choose_device, raised_by
from oomprobe.devices.host import HostDevice
from oomprobe.errors import DeviceLostError, OomProbeError, UnreliableError, unmeasured
from oomprobe.interrupts import Interrupts
from oomprobe.local import LocalRunner
from oomprobe.options import Options, Step, StepFn, check_model, named_steps, refuse_ranks
from oomprobe.progress import Progress, reporter
from oomprobe.report import trials_table
from oomprobe.result import Trial
from oomprobe.state import Keeper, preserved, resident_tensors, state_tensors
from oomprobe.trial import Trials
from oomprobe.watch import OptimizerWatch, outside_modes
from oomprobe.work import load_counter
from oomprobe.workbench import Workbench

LBFGS = (
    "LBFGS stops early on a simulated card, where the loss does not change: its history (history_size pairs as large as the "
    "parameters) is not in the peak"
)


@contextmanager
def bench_here(
    model: torch.nn.Module,
    step_fn: StepFn | Step | Mapping[str, StepFn | Step],
    device: object,
    preserve: Iterable[Any],
    options: Options,
    progress: Progress,
) -> Iterator[Workbench]:
    """Everything a probe needs while it runs; on every way out the state is put back and compared."""
    check_model(model)
    preserve = preserved(preserve)
    steps = named_steps(step_fn)
    functions = [step.run for step in steps.values()]
    refuse_ranks()
    chosen = choose_device(device, model)
    if isinstance(chosen, HostDevice):
        from oomprobe.isolation.bench import forked_bench  # Linux only, as the device is

        with forked_bench(model, steps, preserve, chosen, options, progress, notes=_slips(device)) as bench:
            yield bench
        return
    status = reporter(progress)
    recorded: list[Trial] = []
    load_counter()
    with told_of_trials(recorded), Interrupts() as interrupts, garbage_frozen():
        keeper = Keeper(model, functions, preserve, chosen.torch_device.type)
        place = chosen.place if isinstance(chosen, Simulated) else _there_already
        place(resident_tensors([model, *functions, *preserve]))

        def meet(optimizer: torch.optim.Optimizer) -> None:
            if not any(_made_by(step, optimizer) for step in steps.values()):
                with interrupts.held_back(), outside_modes():
                    keeper.add(optimizer)
                    place(state_tensors(optimizer))
            if isinstance(optimizer, torch.optim.LBFGS) and isinstance(chosen, Simulated):
                trials.notes[LBFGS] = None

        with OptimizerWatch(meet, model) as watch:
            trials = Trials(
                chosen,
                model,
                steps,
                optimizers=lambda: keeper.optimizers,
                restore_modes=keeper.restore_modes,
                let_go=keeper.start_cold,
                watch=watch,
                interrupts=interrupts,
                after_call=keeper.release_dead,
            )
            clock = Clock(options)
            runner = LocalRunner(chosen, trials, keeper, clock, recorded, smallest=options.sizes.first)
            bench = Workbench(runner, options, status, clock, recorded)
            with given_back(bench, keeper, chosen), _told_as_lost(bench, chosen):
                try:
                    yield bench
                finally:
                    status.close()
                    trials.compiled.finish()
                    bench.notes |= dict.fromkeys((*keeper.notes, *trials.compiled.notes))


@contextmanager
def garbage_frozen() -> Iterator[None]:
    """Collect garbage, and from then on only what is made inside: 98 ms become 0.01 where frameworks are imported.

    Where the caller froze objects of its own, nothing is frozen: they could not be told from ours afterwards.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def given_back(bench: Workbench, keeper: Keeper, device: Device) -> Iterator[None]:
    """Restore and compare the state on every way out."""
    try:
        yield
    except DeviceLostError as error:
        error.snapshot = keeper.host_copy()
        keeper.put_back(device_lost=not device.on_host)
        raise
    except BaseException:
        _give_back(bench, keeper, device)
        raise
    _give_back(bench, keeper, device)


def _give_back(bench: Workbench, keeper: Keeper, device: Device) -> None:
    """Restore the state and compare it, and leave no memory of ours reserved.

    Raises:
        DeviceLostError: the device died before it had everything back.
        UnreliableError: something did not come back.
    """
    try:
        keeper.put_back()
        bench.state_verified = _verified(keeper, bench)
        gc.collect()
        device.release()
    except Exception as error:
        if device.healthy():
            raise
        lost = bench.device_lost(f"{type(error).__name__}: {error}")
        lost.snapshot = keeper.host_copy()
        keeper.put_back(device_lost=True)
        raise lost from error


def _there_already(tensors: Iterable[torch.Tensor]) -> None:
    """On a real device the model, and what belongs to it, is where it is."""


def _made_by(step: Step, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step knows that it made the optimizer and all its parameters in this call: they end with it.

    Then no copy is made of them in the midst of the call, which in host memory would count against the budget. Of other
    steps a copy is made, and let go of with what it is of.
    """
    return step.has_made is not None and step.has_made(optimizer)


@contextmanager
def told_of_trials(trials: list[Trial]) -> Iterator[None]:
    """Around everything: what came while nothing could be interrupted is delivered at the very end."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as interruption:
        interruption.add_note("oomprobe was interrupted; the trials so far:\n" + trials_table(trials))
        raise


@contextmanager
def _told_as_lost(bench: Workbench, device: Device) -> Iterator[None]:
    """A sticky error may show itself outside a step, while memory is measured or given back."""
    try:
        yield
    except OomProbeError:
        raise
    except Exception as error:
        if device.healthy() and not raised_by(device, error):
            raise
        if device.healthy():  # the step's own errors have another class by now
            raise unmeasured(device.name, error, trials=tuple(bench.trials)) from error
        raise bench.device_lost(f"{type(error).__name__}: {error}") from error


def _verified(keeper: Keeper, bench: Workbench) -> bool:
    differences = keeper.differences()
    if differences:
        raise UnreliableError(
            "not everything came back as it was before the probe: "
            + ", ".join(differences[:5])
            + ". Do not train with "
            "this model: load it again. The step may be changing it from another thread",
            trials=tuple(bench.trials),
        )
    return True


def _slips(device: object) -> list[str]:
    if device is None and torch.accelerator.is_available():
        return [
            "THE MODEL IS ON THE CPU and an accelerator is here: this number is about host memory. "
            "Call model.to('cuda') before probing"
        ]
    return []
