"""`find_max_batch`, `check` and `probe_target`: options in, result out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from oomprobe.devices import Device, choose_device, is_host, replay_of, simulated_or
from oomprobe.errors import InvalidArgumentError, OomProbeError, check_size, target_failed
from oomprobe.isolation.system import MARK
from oomprobe.options import Options, Step, StepFn, check_model, named_steps, refuse_ranks
from oomprobe.report.progress import Progress
from oomprobe.report.summary import nothing_fits, result_of
from oomprobe.result import ProbeResult
from oomprobe.search import Found
from oomprobe.session import Session, open_here
from oomprobe.state import preserved
from oomprobe.targets import build, name_of


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
    breakdown: bool = False,
    progress: Progress = "auto",
) -> ProbeResult:
    """Find the largest batch size that truly fits, by running it.

    The batch size doubles until a step runs out of memory. The allocator is then capped at `memory_fraction` of the
    available memory, and bisection finds the largest size that passes. The deciding failure is retried once, and the
    answer is confirmed with more steps. The model, and everything else the step changes, comes back as it was.

    Args:
        model: The model, already on its device.
        step_fn: ``step_fn(model, batch_size)`` runs one full optimisation step: make a batch, forward, backward,
            optimizer step. Or several by name, ``{"train": f, "eval": g}``: each trial runs them all.
        device: None: where the parameters are. Or "cuda", "cuda:1", "xpu", "mps", "cpu", "cpu:4GiB" (of address
            space on top of what this process already uses), "sim:24GiB" or "sim:H100-80GB" (a simulated card: needs no
            GPU, and the model stays in host memory), a torch.device, or a `Device`.
        memory_fraction: Share of the memory available to this process that the answer may use, in (0, 1].
        min_batch: Smallest size to try, at least 1.
        max_batch: Largest size to try; None: until the memory ends.
        multiple_of: Every size tried is a multiple of this.
        steps: Full steps per trial, after a first one that creates optimizer state. Simulated devices run at least
            `confirm_steps`, because repeats are free there.
        confirm_steps: Full steps the answer runs before it is returned; up to 50 where steps allocate different amounts.
        preserve: More objects with ``state_dict()`` and ``load_state_dict()`` to restore. Objects that the step closes
            over, refers to by global name, or is a method of are found automatically.
        global_batch: Plan gradient accumulation for this many samples, and run the planned micro-batch with it.
        resolution: Stop bisecting when the bracket is within this fraction of the size, in [0, 1); 0: exact.
        time_limit_s: Seconds for the whole probe; None: no limit. A step that hangs inside one call of C code is
            not interrupted.
        trial_time_limit_s: Seconds for one trial; None: no limit.
        breakdown: Run one more step at the answer, to tell what held the memory (`ProbeResult.breakdown`).
        progress: "auto" (a live line on a terminal, otherwise a line before and after each trial, on stderr), "plain", "off", or
            a function that is called with each `Trial`.

    Returns:
        The answer and everything it rests on.

    Raises:
        InvalidArgumentError: an argument is wrong; nothing was run.
        NoDeviceError: the device is not here.
        NothingFitsError: not even the smallest size fits.
        StepFailedError: the step has a bug; raised from its own exception.
        DeviceLostError: a sticky CUDA error; this process can no longer use the device.
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
        breakdown=breakdown,
    )
    with _open(model, step_fn, device, preserve, options, progress) as session:
        found = _settled(session, session.find())
    return result_of(session, found)


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
    breakdown: bool = False,
    progress: Progress = "auto",
) -> ProbeResult:
    """Check that one size fits, in one confirmed trial under the cap.

    Args:
        model: As for `find_max_batch`.
        step_fn: As for `find_max_batch`.
        batch_size: The size in your config, at least 1.
        device: As for `find_max_batch`.
        memory_fraction: As for `find_max_batch`.
        confirm_steps: Full steps to run after every optimizer has stepped once.
        preserve: As for `find_max_batch`.
        time_limit_s: As for `find_max_batch`.
        breakdown: As for `find_max_batch`.
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
    options = _options_of_one(batch_size, memory_fraction, confirm_steps, time_limit_s, breakdown)
    with _open(model, step_fn, device, preserve, options, progress) as session:
        found = _settled(session, session.confirm_only(batch_size))
    return result_of(session, found)


def probe_target(
    target: str | Callable[[], Any],
    *,
    isolate: bool = True,
    device: Any = None,
    preserve: Any = (),
    progress: Progress = "auto",
    **options: Any,
) -> ProbeResult:
    """Probe what a target builds.

    A target can be built anew, so its trials run in child processes that may die: of a sticky CUDA error, of the system's
    OOM killer, of a library that leaves the process. On host memory each trial is a process of its own, forked from one
    that has built the target; on an accelerator a child goes from trial to trial for as long as it is healthy, and this
    process opens no CUDA context. A simulated card takes no memory, and is probed in this process.

    Args:
        target: ``module:function`` or ``path/to/file.py:function``, or such a function itself; it takes no arguments and
            returns ``(model, step_fn)``.
        isolate: Run trials in child processes (Linux only); False: build the target here, and run them here.
        device: As for `find_max_batch`. A `Device` of your own has to be one that can be pickled.
        preserve: As for `find_max_batch`, and only without isolation: children have nothing to give back.
        progress: As for `find_max_batch`.
        **options: As for `find_max_batch`.

    Returns:
        The result.

    Raises:
        InvalidArgumentError: the target cannot be found, or imported in another process, or does not return a model and
            a step; or trials cannot be isolated here.
        StepFailedError: a bug in the step or in the target; or its process died twice at one size, and not for want of
            memory.
        OomProbeError: whatever else `find_max_batch` raises.

    Example:
        >>> probe_target("oomprobe.demo:small_gpt", device="sim:16GiB", resolution=0.5, progress="off").limited_by
        'memory'
    """
    with _open_target(target, isolate, device, preserve, Options(**options), progress) as session:
        found = _settled(session, session.find())
    return result_of(session, found)


def check_target(
    target: str | Callable[[], Any],
    batch_size: int,
    *,
    isolate: bool = True,
    device: Any = None,
    memory_fraction: float = 0.9,
    confirm_steps: int = 5,
    time_limit_s: float | None = None,
    breakdown: bool = False,
    progress: Progress = "auto",
) -> ProbeResult:
    """Check that one size of what a target builds fits; arguments and errors are those of `probe_target` and `check`."""
    options = _options_of_one(batch_size, memory_fraction, confirm_steps, time_limit_s, breakdown)
    with _open_target(target, isolate, device, (), options, progress) as session:
        found = _settled(session, session.confirm_only(batch_size))
    return result_of(session, found)


def _options_of_one(
    batch_size: int, memory_fraction: float, confirm_steps: int, time_limit_s: float | None, breakdown: bool
) -> Options:
    """The options of a check: one size may be tried."""
    check_size("batch_size", batch_size)
    return Options(
        memory_fraction=memory_fraction,
        min_batch=batch_size,
        max_batch=batch_size,
        confirm_steps=confirm_steps,
        time_limit_s=time_limit_s,
        breakdown=breakdown,
    )


def _settled(session: Session, found: Found) -> Found:
    """Raise if nothing fits or if each step leaks; otherwise run the accumulation plan and the breakdown."""
    if found.batch_size is None:
        raise nothing_fits(session)
    session.refuse_leaking(found.batch_size)
    session.run_plan(found.batch_size)
    session.break_down(found.batch_size)
    return found


def _open(
    model: torch.nn.Module,
    step_fn: StepFn | Step | Mapping[str, StepFn | Step],
    device: str | torch.device | Device | None,
    preserve: Iterable[Any],
    options: Options,
    progress: Progress,
) -> AbstractContextManager[Session]:
    """Open a session for a model that is here: each trial on host memory is a child, all others run in this process."""
    check_model(model)
    objects, steps = preserved(preserve), named_steps(step_fn)
    refuse_ranks()
    chosen = choose_device(device, model)
    if not is_host(chosen):
        return open_here(model, steps, objects, chosen, options, progress)
    from oomprobe.isolation.sessions import open_forked  # Linux only, as the device is

    return open_forked(model, steps, objects, chosen, options, progress, was_chosen=device is not None)


def _open_target(
    target: str | Callable[[], Any],
    isolate: bool,
    device: Any,
    preserve: Any,
    options: Options,
    progress: Progress,
) -> AbstractContextManager[Session]:
    """Open a session for what a target builds, in processes of its own or here."""
    name, device = name_of(target), simulated_or(device)
    if isolate and replay_of(device) is None:
        _refuse_isolation(preserve)
        from oomprobe.isolation.sessions import open_isolated

        return open_isolated(name, device, options, progress)
    try:
        model, step_fn = build(name, device)
    except (OomProbeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise target_failed(error, name) from error
    return _open(model, step_fn, device, preserve, options, progress)


def _refuse_isolation(preserve: Any) -> None:
    if MARK in os.environ:  # in a worker
        raise InvalidArgumentError(
            "a target's file calls probe_target while it is imported, and each process that builds the target would start "
            'another probe: put the call under if __name__ == "__main__":'
        )
    if sys.platform != "linux":
        raise InvalidArgumentError(
            f"trials can be isolated on Linux only, and this is {sys.platform}: pass isolate=False (--in-process) to run "
            "them in this process"
        )
    if preserve is not None and preserve != () and preserve != []:
        raise InvalidArgumentError(
            "preserve names live objects, and isolated trials run in other processes, where there is nothing to give back: "
            "leave it out, or pass isolate=False"
        )
