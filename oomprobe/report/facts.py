"""The facts between the table and the notes, each a label with its sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from oomprobe.report.fitted import fitted
from oomprobe.report.words import count, rate, wrap
from oomprobe.units import format_seconds

if TYPE_CHECKING:
    from oomprobe.report.plan import PlanEntry
    from oomprobe.result import ProbeResult

FAST_ENOUGH = 0.95  # under this share of the answer's speed, a smaller batch is a loss nobody would take
_LABEL = 14  # columns of the label before a fact
_LIMITS = {
    "memory": "the memory of the device",
    "host_memory": "the memory of the host",
    "max_batch": "the max_batch of the call, not memory: nothing larger was tried",
    "size_limit": "a size limit that is not memory, such as 32-bit indexing",
}


def facts(result: ProbeResult) -> list[str]:
    """Every fact that there is something to say about."""
    sentences_of = {
        "limit": _limit(result),
        "throughput": _throughput(result),
        "fit": fitted(result),
        "estimates": _estimates(result),
        "plan": _plan(result),
        "state": [_state(result)],
        "time": [_time(result)],
    }
    rest = " " * _LABEL
    lines = []
    for label, sentences in sentences_of.items():
        firsts = [f"  {label}".ljust(_LABEL), *[rest] * len(sentences)]
        for first, sentence in zip(firsts, sentences, strict=False):
            lines += wrap(sentence, first=first, rest=rest + "  ")
    return lines


def _limit(result: ProbeResult) -> list[str]:
    if _is_check(result):
        step = "" if result.limiting_step is None else f"; step {result.limiting_step!r} takes the most memory"
        return [
            f"batch {result.batch_size} was asked for, and ran{step}",
            "no other size was tried: larger ones may fit too (find_max_batch looks for them)",
        ]
    failing = result.first_failing_batch_size
    failed = "no size" if failing is None else f"batch {failing}"
    step = "" if result.limiting_step is None else f", in step {result.limiting_step!r}"
    return [
        f"batch {result.limit_batch_size} is the largest that ran, {failed} failed without the margin",
        f"limited by {_LIMITS.get(result.limited_by, result.limited_by)}{step}",
    ]


def _is_check(result: ProbeResult) -> bool:
    """Whether one size was checked, without a search, which would begin by growing."""
    return {t.batch_size for t in result.trials} == {result.batch_size} and not any(
        t.phase in ("grow", "bisect") for t in result.trials
    )


def _throughput(result: ProbeResult) -> list[str]:
    # Of several trials of a size the last counts: the answer's is its confirmation, with the most steps.
    speeds = {
        t.batch_size: t.samples_per_s
        for t in result.trials
        if t.passed and t.accumulation_steps == 1 and t.samples_per_s
    }
    answer = speeds.get(result.batch_size)
    if answer is None:
        return []
    smaller = {size: speed for size, speed in speeds.items() if size < result.batch_size}
    close = min((size for size, speed in smaller.items() if speed >= FAST_ENOUGH * answer), default=None)
    if close is None:
        alone = f"{rate(answer)} samples/s at batch {result.batch_size}"
        within = f"no smaller size that ran comes within {100 * (1 - FAST_ENOUGH):.0f} % of it"
        return [f"{alone}; {within}" if smaller else alone]
    against = f"({rate(smaller[close])} against {rate(answer)} samples/s)"
    if smaller[close] > 1.01 * answer:
        return [f"batch {close} is faster than {result.batch_size} {against}"]
    # Rounded up, and never "within 0 %": what is written must hold.
    behind = max(1, math.ceil(round(100 * (1 - smaller[close] / answer), 6)))
    return [f"batch {close} is already within {behind} % of the throughput of {result.batch_size} {against}"]


def _estimates(result: ProbeResult) -> list[str]:
    if not result.estimates:
        return []
    told = [f"what straight lines would have answered, never used; {result.batch_size} was measured:"]
    for name, size in result.estimates.items():
        if isinstance(size, int | float):
            told.append(f"{name}: {size:.6g} ({size / result.batch_size:.3g} times the answer)")
        else:
            told.append(f"{name}: -")
    return told


def _plan(result: ProbeResult) -> list[str]:
    wanted, world_size = result.options.get("global_batch"), result.options.get("world_size") or 1
    target = wanted or 1 << (4 * max(1, result.batch_size) - 1).bit_length()
    entries = result.plan(target, world_size)
    ranks = "" if world_size == 1 else f" x {world_size} ranks"
    example = "" if wanted else "for example "
    title = f"{example}global batch {target} = micro-batch x accumulation steps{ranks}"
    return [title, *map(_entry, entries if wanted else entries[:2])]


def _entry(entry: PlanEntry) -> str:
    ranks = "" if entry.world_size == 1 else f" x {entry.world_size}"
    product = f"{entry.global_batch} = {entry.micro_batch} x {entry.accumulation_steps}{ranks}"
    ran = "ran, also with accumulation" if entry.ran_accumulated else "ran" if entry.ran else "not run"
    return f"{product}, {'exact' if entry.exact else 'near'}; micro-batch {entry.micro_batch}: {ran}"


def _state(result: ProbeResult) -> str:
    if result.environment.get("isolated"):
        return "trials ran in processes of their own: nothing here was touched"
    if result.state_verified:
        return "restored and compared bit for bit: identical"
    return "not compared bit for bit: this result makes no claim about it"


def _time(result: ProbeResult) -> str:
    total = f"{format_seconds(result.elapsed_s)} for {count(len(result.trials), 'trial', 'trials')}"
    if not result.elapsed_s > 0:
        return total
    return f"{total}, {100 * result.in_steps_s / result.elapsed_s:.0f} % of it inside the step"
