"""From the trials of a finished probe to its result, or to the error that says why there is none."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

import oomprobe
from oomprobe.devices.leaks import leak_of_step
from oomprobe.errors import NothingFitsError
from oomprobe.report.fit import LinearFit, estimates, fit_line
from oomprobe.report.words import count, shortened
from oomprobe.result import Phase, ProbeResult, Trial
from oomprobe.search import Found
from oomprobe.units import format_bytes, format_seconds
from oomprobe.verdicts import Verdict

if TYPE_CHECKING:
    from oomprobe.session import Session

SLOW_FACTOR = 2.0  # a sample that takes this much longer than at a smaller size hints at paging or a slow fallback
MEASURED_STEP_S = 5e-3  # a faster step is timed too roughly to call another one slow
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

NOT_RESTORED = "state that is not restored: other Python attributes, generators of your own, positions of data loaders"
# A crash that repeats at one size is a limit of that size, but not shown to be memory.
_LIMITED_BY = {
    Verdict.SIZE_LIMIT: "size_limit",
    Verdict.POISONED: "size_limit",
    Verdict.HOST_OOM: "host_memory",
}


def result_of(session: Session, found: Found) -> ProbeResult:
    """Put together what was found."""
    assert found.batch_size is not None
    answer = _last(session.trials, found.batch_size, passed=True)
    deciding = None if found.deciding is None else _last(session.trials, found.deciding, passed=False)
    fit = _fit(session)
    return ProbeResult(
        batch_size=found.batch_size,
        limit_batch_size=found.limit or found.batch_size,
        first_failing_batch_size=_first_failing(session, found),
        limited_by="max_batch" if deciding is None else _LIMITED_BY.get(deciding.verdict, "memory"),
        limiting_step=(deciding or answer).step_name,
        trials=tuple(session.trials),
        fit=fit,
        device=session.device.name,
        budget_bytes=session.budget_bytes,
        available_bytes=session.available_bytes,
        notes=tuple(_notes(session, found, answer)),
        not_covered=tuple(_not_covered(session)),
        contaminated=session.neighbours.contaminated,
        state_verified=session.state_verified,
        environment=environment(session),
        estimates=_estimates(session),
        options=asdict(session.options),
        elapsed_s=session.clock.elapsed_s,
        in_steps_s=session.runner.in_steps_s,
        breakdown=session.breakdown,
    )


def nothing_fits(session: Session) -> NothingFitsError:
    """Say that not even the smallest size runs, and by how much."""
    last = next(trial for trial in reversed(session.trials) if not trial.passed)
    with_all = last.cap_bytes is None or session.options.memory_fraction == 1
    one_size = session.options.min_batch == session.options.max_batch
    cap = format_bytes(last.cap_bytes or 0)
    room = "with all the memory there is" if with_all else f"within a budget of {cap}"
    margin = "" if with_all else f" (memory_fraction={session.options.memory_fraction})"
    advice = [
        "a smaller model or sample, activation checkpointing or lower precision",
        *([] if one_size or session.options.min_batch == 1 else [f"min_batch below {session.options.min_batch}"]),
        *([] if with_all else ["a larger memory_fraction"]),
    ]
    what = " does not survive" if one_size else ", the smallest allowed, does not fit"
    return NothingFitsError(
        f"batch {last.batch_size}{what} on {session.device.name} {room}{margin}: "
        f"{last.verdict} {f'in the {last.where}' if last.where else ''}\n  {shortened(last.error)}\n{_held_by_others(session)}"
        f"Try {'; or '.join(advice)}.",
        trials=tuple(session.trials),
    )


def _held_by_others(session: Session) -> str:
    names = session.tenants()
    return f"Others are on the device: {names}.\n" if names else ""


def environment(session: Session) -> dict[str, Any]:
    """What the number holds for."""
    return {
        "oomprobe": oomprobe.__version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": session.device.torch_device,
        "device_name": session.device.name,
        "device_total_bytes": session.device.total_bytes,
        "threads": session.runner.threads,
        "isolated": session.runner.replaceable,
        "allocator_settings": {name: os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ},
    }


def _first_failing(session: Session, found: Found) -> int | None:
    """The upper end of the bracket: above the limit also where failures do not grow with the size."""
    limit = found.limit or found.batch_size or 0
    if found.first_failing is None or found.first_failing > limit:
        return found.first_failing
    grown = (t for t in session.trials if not t.passed and t.phase is Phase.GROW and t.accumulation_steps == 1)
    failed = {t.batch_size for t in grown}
    return min((size for size in failed - set(found.transient) if size > limit), default=None)


def _last(trials: Iterable[Trial], batch_size: int, *, passed: bool) -> Trial:
    return [t for t in trials if t.batch_size == batch_size and t.passed is passed and t.accumulation_steps == 1][-1]


def _fit(session: Session) -> LinearFit | None:
    return fit_line(_points(session), session.budget_bytes)


def _points(session: Session) -> list[tuple[int, int]]:
    return [
        (t.batch_size, t.peak_allocated_bytes)
        for t in session.trials
        if t.passed and t.peak_allocated_bytes is not None and t.accumulation_steps == 1
    ]


def _estimates(session: Session) -> dict[str, float | None]:
    return {} if _fit(session) is None else estimates(_points(session), budget_bytes=session.budget_bytes)


def _notes(session: Session, found: Found, answer: Trial) -> list[str]:
    return [
        *session.notes,
        *session.neighbours.notes,
        *(f"transient failure: batch {size} failed once and passed when tried again" for size in found.transient),
        *_unconfirmed(found),
        *(() if session.device.is_simulated else session.runner.device_notes),  # a simulated one says it below
        *_leaks(session.trials),
        *_growing(session, answer),
        *(_simulated(session, answer) if session.device.is_simulated else ()),
        *_pressure(session.trials, answer),
        *_slow(session.trials, answer),
        *_outside(session),
        *_stopped_early(session, found),
    ]


def _unconfirmed(found: Found) -> list[str]:
    if not found.unconfirmed:
        return []
    return [f"passed as a trial and failed in confirmation: batch {', '.join(map(str, found.unconfirmed))}"]


def _leaks(trials: Iterable[Trial]) -> list[str]:
    leaking = [
        t for t in trials if t.leaked_bytes and not t.step_leaked_bytes
    ]  # leaks of each step get a note of their own
    if not leaking:
        return []
    worst = max(leaking, key=lambda t: t.leaked_bytes)
    return [
        f"leak: {format_bytes(worst.leaked_bytes)} had not come back after batch {worst.batch_size}, even after collecting "
        "garbage; something keeps tensors of past steps, and the answer is smaller by as much"
    ]


def _growing(session: Session, answer: Trial) -> list[str]:
    leak = leak_of_step(
        session.trials, answer.batch_size, available_bytes=session.available_bytes, budget_bytes=session.budget_bytes
    )
    if leak is None:
        return []
    return [
        f"leak: each step at batch {answer.batch_size} keeps {format_bytes(leak.kept_bytes)}, and what is left free lasts "
        f"for about {leak.steps_to_last} of them; something keeps tensors of each step"
    ]


def _simulated(session: Session, answer: Trial) -> list[str]:
    peak, upper = answer.peak_reserved_bytes or 0, answer.peak_upper_bytes
    widened = (
        f". At batch {answer.batch_size} the allocator reserves {format_bytes(peak)}, and up to {format_bytes(upper)} with "
        "the largest workspace that a convolution would take if there is room"
        if upper is not None and upper > peak
        else ""
    )
    return [f"simulated: no kernel ran, and tensors had no values{widened}", *session.runner.device_notes]


def _pressure(trials: Iterable[Trial], answer: Trial) -> list[str]:
    """Name the size to take instead: where the cache is given back in each step, steps are slow, and chance decides."""
    if not answer.alloc_retries:
        return []
    within_bytes = answer.cap_bytes or 0
    at_ease = [
        t.batch_size
        for t in trials
        if t.passed and not t.alloc_retries and t.peak_reserved_bytes and t.peak_reserved_bytes <= within_bytes
    ]
    instead = f"; batch {max(at_ease)} ran without this" if at_ease else ""
    return [
        f"marginal: batch {answer.batch_size} fits only because the allocator gave its cache back "
        f"{count(answer.alloc_retries, 'time', 'times')}, which is slow and may fail within the same budget elsewhere{instead}"
    ]


def _slow(trials: Iterable[Trial], answer: Trial) -> list[str]:
    smaller = [t for t in trials if t.batch_size < answer.batch_size and t.accumulation_steps == 1]
    rated = [t for t in smaller if t.samples_per_s and t.step_s and t.step_s >= MEASURED_STEP_S]
    best = max(rated, key=lambda t: t.samples_per_s or 0.0, default=None)
    if best is None or not best.samples_per_s or not answer.samples_per_s:
        return []
    factor = best.samples_per_s / answer.samples_per_s
    if factor < SLOW_FACTOR:
        return []
    return [
        f"a sample takes {factor:.1f} times as long at batch {answer.batch_size} as at {best.batch_size} "
        f"({format_seconds(1 / answer.samples_per_s)} against {format_seconds(1 / best.samples_per_s)}): "
        "memory may be spilling to the host, or a slow kernel was chosen for want of workspace"
    ]


def _outside(session: Session) -> list[str]:
    held = session.neighbours.held_bytes
    if not held:
        return []
    grown = held[-1] - held[0]
    if not held[-1] and grown <= 0:
        return []
    text = f"{format_bytes(held[-1])} of the device is held outside this process's allocator"
    if grown <= 0:
        return [f"{text} (context, libraries, other processes); the cap does not count it"]
    return [
        f"{text}; {format_bytes(grown)} of it came while probing (kernels loaded, library handles, other processes) and "
        "eats into the margin"
    ]


def _stopped_early(session: Session, found: Found) -> list[str]:
    step = session.options.multiple_of
    if found.batch_size is None or found.deciding is None or found.deciding - found.batch_size <= step:
        return []
    return [f"not exact: sizes between {found.batch_size} and {found.deciding} were not tried"]


def _not_covered(session: Session) -> list[str]:
    words_in_names = set(re.findall(r"[^\W\d_]+", " ".join(session.runner.step_names).lower()))
    items = [
        (
            "longest sequence or largest sample, unless the step makes such batches",
            "long longest large largest max maximum",
        ),
        (
            "evaluation between epochs (pass {'train': step_fn, 'eval': eval_fn} to include it)",
            "eval evaluate evaluation val validate validation test",
        ),
        ("saving and resuming checkpoints", "checkpoint checkpoints save"),
        ("other ranks: DDP buckets, NCCL buffers, sharding", "ddp fsdp"),
        ("data loader workers and their host memory", ""),
    ]
    return [
        *session.device.not_covered,
        *(text for text, words in items if words_in_names.isdisjoint(words.split())),
        *([] if session.runner.replaceable else [NOT_RESTORED]),
    ]
