"""`find_max_batch` and `check`: grow, bisect under the cap, recheck, confirm, and give everything back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from oomprobe import search, summary
from oomprobe.devices import Device, Simulated, choose_device
from oomprobe.errors import DeviceLostError, InvalidArgumentError, OomProbeError, UnreliableError, add_note
from oomprobe.interrupts import Interrupts
from oomprobe.options import Options, StepFn, check_model, check_size, named_steps, refuse_ranks
from oomprobe.progress import reporter
from oomprobe.questions import confirm_only, run_plan
from oomprobe.rehearsal import ContradictedError
from oomprobe.report import trials_table
from oomprobe.result import ProbeResult, Trial
from oomprobe.scope import scope
from oomprobe.state import Keeper, preserved, resident_tensors, state_tensors
from oomprobe.trial import Trials
from oomprobe.watch import OptimizerWatch, outside_modes
from oomprobe.workbench import Workbench

LBFGS = (
    "LBFGS stops early on a simulated card, where the loss does not change: its history (history_size pairs as large as the "
    "parameters) is not in the peak"
)
Progress = str | Callable[[Trial], object]


def find_max_batch(
    model: torch.nn.Module,
    step_fn: StepFn | Mapping[str, StepFn],
    *,
    device: str | torch.device | Device | None = None,
    memory_fraction: float = 0.9,
    min_batch: int = 1,
    max_batch: int | None = None,
    multiple_of: int = 1,
    steps: int = 2,
    confirm_steps: int = 5,
    preserve: Iterable[Any] = (),
    global_batch: int | None = None,
    resolution: float = 0.0,
    time_limit_s: float | None = None,
    trial_time_limit_s: float | None = None,
    journal: object = None,
    progress: Progress = "auto",
) -> ProbeResult:
    """Find the largest batch size that truly fits, by running it.

    The batch doubles until the device runs out of memory; then the allocator is held to `memory_fraction` of what
    was available, and the size is bisected, run once more where it failed, and confirmed. The model, and everything
    else the step changes, comes back as it was.

    Args:
        model: The model to train, where it is trained.
        step_fn: ``step_fn(model, batch_size)`` runs one full optimisation step: make a batch, forward, backward,
            optimizer step. Or several by name, ``{"train": f, "eval": g}``: each trial runs them all.
        device: None: where the parameters are. Or "cuda", "cuda:1", "xpu", "mps", "cpu", "cpu:4GiB" (of address
            space beyond the warm process), "sim:24GiB" or "sim:H100-80GB" (a card that need not be there; the model
            stays in host memory), a torch.device, or a `Device`.
        memory_fraction: Share of the memory available to this process that the answer may use, in (0, 1].
        min_batch: Smallest size to try, at least 1.
        max_batch: Largest size to try; None: until the memory ends.
        multiple_of: Every size tried is a multiple of this.
        steps: Full steps a trial runs after every optimizer has stepped once; a simulated device runs no fewer than
            `confirm_steps`, since repeating costs it nothing.
        confirm_steps: Full steps the answer runs before it is returned.
        preserve: Further objects with ``state_dict()`` and ``load_state_dict()`` to give back as they were. Those
            that the step closes over, names or is bound to are found without it.
        global_batch: Plan gradient accumulation for this many samples, and run the planned micro-batch with it.
        resolution: Stop bisecting when the bracket is within this fraction of the size, in [0, 1); 0: exact.
        time_limit_s: Seconds for the whole probe; None: no limit. A step that hangs inside one call of C code is
            not interrupted.
        trial_time_limit_s: Seconds for one trial; None: no limit.
        journal: Not in this version yet.
        progress: "auto" (a live line on a terminal, otherwise a line for each trial, on stderr), "plain", "off", or
            a function that is called with each `Trial`.

    Returns:
        The answer and everything it rests on.

    Raises:
        InvalidArgumentError: an argument is wrong; nothing was run.
        NoDeviceError: the device is not here.
        NothingFitsError: not even the smallest size fits.
        StepFailedError: the step has a bug; an instance of the class of the step's own exception, and chained from it.
        DeviceLostError: a sticky error ended what this process can say.
        TimeLimitError: the time passed with nothing confirmed.
        UnreliableError: the step did no work, memory did not come back, or the state could not be restored.

    Example:
        >>> model = torch.nn.Linear(256, 256)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(model, batch_size):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(batch_size, 256)).square().mean().backward()
        ...     optimizer.step()
        >>> result = find_max_batch(model, step, device="cpu:1GiB", max_batch=64, progress="off")
        >>> result.batch_size, result.limited_by, result.state_verified
        (64, 'max_batch', True)
    """
    options = Options(
        memory_fraction=memory_fraction,
        min_batch=min_batch,
        max_batch=max_batch,
        multiple_of=multiple_of,
        steps=steps,
        confirm_steps=confirm_steps,
        global_batch=global_batch,
        resolution=resolution,
        time_limit_s=time_limit_s,
        trial_time_limit_s=trial_time_limit_s,
    )
    _refuse_journal(journal)
    with _workbench(model, step_fn, device, preserve, options, progress) as bench:
        bench.warm(options.sizes.first)
        found = _find(bench, options)
        if found.batch_size is None:
            raise summary.nothing_fits(bench)
        run_plan(bench, found.batch_size)
    return summary.result(bench, found)


def _find(bench: Workbench, options: Options) -> search.Found:
    find = partial(search.find, bench.ask, options.sizes, capped=options.memory_fraction < 1, enough=bench.enough)
    try:
        return find()
    except ContradictedError:
        bench.stop_rehearsing()
        return find()


def check(
    model: torch.nn.Module,
    step_fn: StepFn | Mapping[str, StepFn],
    batch_size: int,
    *,
    device: str | torch.device | Device | None = None,
    memory_fraction: float = 0.9,
    min_batch: int | None = None,
    confirm_steps: int = 5,
    preserve: Iterable[Any] = (),
    time_limit_s: float | None = None,
    progress: Progress = "auto",
) -> ProbeResult:
    """Answer whether one size will survive, in one confirmed trial under the cap.

    Args:
        model: As for `find_max_batch`.
        step_fn: As for `find_max_batch`.
        batch_size: The size in your config, at least 1.
        device: As for `find_max_batch`.
        memory_fraction: As for `find_max_batch`.
        min_batch: Size of the step that warms a host process; None: 2, or `batch_size` if that is smaller.
        confirm_steps: Full steps to run after every optimizer has stepped once.
        preserve: As for `find_max_batch`.
        time_limit_s: As for `find_max_batch`.
        progress: As for `find_max_batch`.

    Returns:
        A result whose `batch_size` is the one asked for.

    Raises:
        NothingFitsError: it does not fit.
        OomProbeError: as for `find_max_batch`.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> step = lambda model, batch_size: model(torch.randn(batch_size, 8)).sum().backward()
        >>> check(model, step, 32, device="cpu:1GiB", progress="off").batch_size
        32
    """
    check_size("batch_size", batch_size)
    warm_size = min(2, batch_size) if min_batch is None else min_batch
    options = Options(
        memory_fraction=memory_fraction,
        min_batch=batch_size,
        max_batch=batch_size,
        confirm_steps=confirm_steps,
        time_limit_s=time_limit_s,
    )
    with _workbench(model, step_fn, device, preserve, options, progress) as bench:
        bench.warm(warm_size)
        found = confirm_only(bench, batch_size)
        if found.batch_size is None:
            raise summary.nothing_fits(bench)
    return summary.result(bench, found)


@scope
def _workbench(
    model: torch.nn.Module,
    step_fn: StepFn | Mapping[str, StepFn],
    device: object,
    preserve: Iterable[Any],
    options: Options,
    progress: Progress,
) -> Iterator[Workbench]:
    """Everything a probe needs while it runs; on every way out the state is put back and compared."""
    check_model(model)
    preserve = preserved(preserve)
    steps = named_steps(step_fn)
    refuse_ranks()
    chosen = choose_device(device, model)
    status = reporter(progress)
    benches: list[Workbench] = []  # the one, once it is there
    with _told_of_trials(benches), Interrupts() as interrupts:
        keeper = Keeper(model, steps.values(), preserve, chosen.torch_device.type)
        place = chosen.place if isinstance(chosen, Simulated) else _there_already
        place(resident_tensors([model, *steps.values(), *preserve]))

        def meet(optimizer: torch.optim.Optimizer) -> None:
            with outside_modes():
                keeper.add(optimizer)
                place(state_tensors(optimizer))
            if isinstance(chosen, Simulated) and isinstance(optimizer, torch.optim.LBFGS):
                trials.notes[LBFGS] = None

        with OptimizerWatch(meet) as watch:
            trials = Trials(
                chosen,
                model,
                steps,
                optimizers=lambda: keeper.optimizers,
                restore_modes=keeper.restore_modes,
                watch=watch,
                interrupts=interrupts,
            )
            bench = Workbench(chosen, trials, keeper, options, status)
            benches.append(bench)
            bench.notes |= dict.fromkeys(_slips(device, chosen))
            lost = False
            try:
                with _told_as_lost(bench):
                    yield bench
            except DeviceLostError as error:
                lost, error.snapshot = not chosen.on_host, keeper.host_copy()
                raise
            finally:
                status.close()
                bench.notes |= dict.fromkeys(keeper.notes)
                keeper.put_back(device_lost=lost)
                bench.state_verified = not lost and _verified(keeper, bench)


def _there_already(tensors: Iterable[torch.Tensor]) -> None:
    """On a real device the model, and what belongs to it, is where it is."""


@scope
def _told_of_trials(benches: list[Workbench]) -> Iterator[None]:
    """Around everything: what came while nothing could be interrupted is delivered at the very end."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as interruption:
        trials = [trial for bench in benches for trial in bench.trials]
        add_note(interruption, "oomprobe was interrupted; the trials so far:\n" + trials_table(trials))
        raise


@scope
def _told_as_lost(bench: Workbench) -> Iterator[None]:
    """A sticky error may show itself outside a step, while memory is measured or given back."""
    try:
        yield
    except OomProbeError:
        raise
    except Exception as error:
        if bench.device.healthy():
            raise
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


def _slips(device: object, chosen: Device) -> list[str]:
    if device is None and chosen.on_host and torch.accelerator.is_available():
        return [
            "THE MODEL IS ON THE CPU and an accelerator is here: this number is about host memory. "
            "Call model.to('cuda') before probing"
        ]
    return []


def _refuse_journal(journal: object) -> None:
    if journal is not None:
        raise InvalidArgumentError("journal is not in this version yet: leave it out")
