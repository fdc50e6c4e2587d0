"""`find_max_batch` and `check`: grow, bisect under the cap, recheck, confirm, and give everything back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from oomprobe import search, summary
from oomprobe.devices import Device
from oomprobe.here import bench_here
from oomprobe.options import Options, Step, StepFn, check_size
from oomprobe.progress import Progress
from oomprobe.questions import confirm_only, run_plan
from oomprobe.rehearsal import ContradictedError
from oomprobe.result import ProbeResult
from oomprobe.workbench import Workbench


def find_max_batch(
    model: torch.nn.Module,
    step_fn: StepFn | Step | Mapping[str, StepFn | Step],
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
            space beyond what this process has), "sim:24GiB" or "sim:H100-80GB" (a card that need not be there; the model
            stays in host memory), a torch.device, or a `Device`.
        memory_fraction: Share of the memory available to this process that the answer may use, in (0, 1].
        min_batch: Smallest size to try, at least 1.
        max_batch: Largest size to try; None: until the memory ends.
        multiple_of: Every size tried is a multiple of this.
        steps: Full steps a trial runs after every optimizer has stepped once; a simulated device runs no fewer than
            `confirm_steps`, since repeating costs it nothing.
        confirm_steps: Full steps the answer runs before it is returned; up to 50 where steps allocate different amounts.
        preserve: Further objects with ``state_dict()`` and ``load_state_dict()`` to give back as they were. Those
            that the step closes over, names or is bound to are found without it.
        global_batch: Plan gradient accumulation for this many samples, and run the planned micro-batch with it.
        resolution: Stop bisecting when the bracket is within this fraction of the size, in [0, 1); 0: exact.
        time_limit_s: Seconds for the whole probe; None: no limit. A step that hangs inside one call of C code is
            not interrupted.
        trial_time_limit_s: Seconds for one trial; None: no limit.
        progress: "auto" (a live line on a terminal, otherwise a line before and after each trial, on stderr), "plain", "off", or
            a function that is called with each `Trial`.

    Returns:
        The answer and everything it rests on.

    Raises:
        InvalidArgumentError: an argument is wrong; nothing was run.
        NoDeviceError: the device is not here.
        NothingFitsError: not even the smallest size fits.
        StepFailedError: the step has a bug; raised from its own exception.
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
    with bench_here(model, step_fn, device, preserve, options, progress) as bench:
        found = search_on(bench)
    return summary.result(bench, found)


def search_on(bench: Workbench) -> search.Found:
    """Find the largest size that a workbench runs, and run the plan for the global batch.

    Raises:
        OomProbeError: as for `find_max_batch`.
    """
    found = _find(bench, bench.options)
    if found.batch_size is None:
        raise summary.nothing_fits(bench)
    bench.refuse_leaking(found.batch_size)
    run_plan(bench, found.batch_size)
    bench.count_anatomy()
    return found


def _find(bench: Workbench, options: Options) -> search.Found:
    find = partial(
        search.find,
        bench.ask,
        options.sizes,
        capped=options.memory_fraction < 1,
        enough=bench.enough,
    )
    try:
        return find()
    except ContradictedError:
        bench.stop_rehearsing()
        return find()


def check(
    model: torch.nn.Module,
    step_fn: StepFn | Step | Mapping[str, StepFn | Step],
    batch_size: int,
    *,
    device: str | torch.device | Device | None = None,
    memory_fraction: float = 0.9,
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
    options = options_of_one(batch_size, memory_fraction, confirm_steps, time_limit_s)
    with bench_here(model, step_fn, device, preserve, options, progress) as bench:
        found = check_on(bench)
    return summary.result(bench, found)


def options_of_one(batch_size: int, memory_fraction: float, confirm_steps: int, time_limit_s: float | None) -> Options:
    """The options of a check: one size may be tried."""
    check_size("batch_size", batch_size)
    return Options(
        memory_fraction=memory_fraction,
        min_batch=batch_size,
        max_batch=batch_size,
        confirm_steps=confirm_steps,
        time_limit_s=time_limit_s,
    )


def check_on(bench: Workbench) -> search.Found:
    """Confirm the one size of a workbench.

    Raises:
        OomProbeError: as for `check`.
    """
    found = confirm_only(bench, bench.options.min_batch)
    if found.batch_size is None:
        raise summary.nothing_fits(bench)
    bench.refuse_leaking(found.batch_size)
    return found
