"""A result as a report: the verdict, and what it rests on."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from oomprobe.ground.units import format_bytes, format_seconds
from oomprobe.ground.words import WIDTH, clean, clip, count, rate
from oomprobe.records.plan import PlanEntry
from oomprobe.records.result import ProbeResult
from oomprobe.records.trials import RankTrial, Verdict
from oomprobe.report.blocks import NOTES, Block, Facts, Report
from oomprobe.report.breakdown import breakdown_blocks
from oomprobe.report.plot import bracket_figure, result_figure
from oomprobe.report.trials import trials_block

WARNING = (
    "WARNING: memory outside this process's allocator changed while probing. Another process, or a library in this one, "
    "allocated or freed memory, so the number holds for that moment only. Probe again on an idle device."
)
TIMING_NOISE = 0.05  # smallest spread assumed between the rates of repeated trials
ALIKE = 0.01  # ranks count as alike if the shares of their memory that they reserve differ by no more than this
SPILL_FACTOR = 2.0  # a size that is slower than a smaller one by more than this may be spilling memory to the host
_LIMITS = {
    "memory": "memory",
    "host_memory": "host memory",
    "max_batch": "max_batch, not memory: nothing larger was tried",
    "step": "the step, not memory: it splits large batches itself",
    "size_limit": "a size limit that is not memory, such as 32-bit indexing",
}
_UNTOLD = (Verdict.CRASHED, Verdict.TIMED_OUT)  # they say nothing about the size


def result_report(result: ProbeResult, *, verbose: bool = False) -> Report:
    """Make the report of a result."""
    told = facts(result, verbose=verbose)
    sentences = " ".join((*(sentence for label in told.values() for sentence in label), *result.notes))
    mentioned = {int(size) for size in re.findall(r"(?:batch|between|and|,) (\d+)", sentences)}
    return Report(
        verdict=verdict_line(result),
        warning=WARNING if result.contaminated else "",
        blocks=[
            trials_block(result.trials, result.batch_size, mentioned=None if verbose else mentioned),
            Block("", told),
            *([] if result.breakdown is None else breakdown_blocks(result.breakdown)),
            Block(NOTES, result.notes),
            not_covered(result, verbose=verbose),
        ],
        pictures={
            "peak memory and throughput against batch size": partial(result_figure, result),
            "each trial in order, closing in on the answer": partial(bracket_figure, result),
        },
        appendix=appendix(result),
    )


def appendix(result: ProbeResult) -> list[Block]:
    """Return what the page adds: where and when the probe ran, and its options."""
    parts = {"environment": result.environment, "options": result.options}
    return [
        Block(title, {name: [_value(value)] for name, value in part.items() if value not in (None, {}, "")})
        for title, part in parts.items()
        if part
    ]


def verdict_line(result: ProbeResult) -> str:
    """Return the answer in one line."""
    if "command" in result.environment and not result.budget_bytes:
        return f"verdict: batch {result.batch_size} ran; no process reported its memory"
    per_rank = " per rank" if _counts_per_rank(result) else ""
    return within(result, f"verdict: batch {result.batch_size}{per_rank} fits")


def within(result: ProbeResult, what: str) -> str:
    """Return a line that says in which memory something fits."""
    fraction = result.options.get("memory_fraction") or result.budget_bytes / max(1, result.available_bytes)
    share = f"{100 * fraction:.3g} % of {format_bytes(result.available_bytes)} on "
    line = f"{what} in {format_bytes(result.budget_bytes)} ({share}"
    return f"{line}{clip(clean(result.device), max(8, WIDTH - 1 - len(line)))})"


def _counts_per_rank(result: ProbeResult) -> bool:
    """Return whether sizes are those of each rank; only a command's own author knows what its sizes count."""
    return result.world_size > 1 and "command" not in result.environment


def not_covered(result: ProbeResult, *, verbose: bool) -> Block:
    """List what the trials did not cover, or in one sentence, without the details after a bracket, colon or comma."""
    if verbose or not result.not_covered:
        return Block("not covered by the trials:", result.not_covered)
    short = [re.split(r" \(|: |, ", item, maxsplit=1)[0] for item in result.not_covered]
    return Block("", f"not covered: {'; '.join(short)}")


def facts(result: ProbeResult, *, verbose: bool) -> Facts:
    """Return the sentences of the report under each label."""
    command, program = result.environment.get("command"), result.environment.get("program")
    told = {
        "command": [command, *([f"the steps of {program} were counted"] if program else [])] if command else [],
        "checked" if _is_check(result) else "limited by": [_limit(result)],
        "ranks": _ranks(result, verbose=verbose),
        "holds for": [_holds_for(result)],
        "throughput": _throughput(result),
        "linear fit": _linear_fit(result, verbose=verbose),
        "estimates": _estimates(result) if verbose else [],
        "plan": _plan(result),
        "state": [_state(result)],
        "time": [_time(result)],
    }
    return {label: sentences for label, sentences in told.items() if sentences}


def _value(value: Any) -> str:
    return ", ".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, Mapping) else str(value)


def _limit(result: ProbeResult) -> str:
    if _is_check(result):
        step = "" if result.limiting_step is None else f"; step {result.limiting_step!r} takes the most memory"
        return f"batch {result.batch_size} was asked for, and ran{step}; no other size was tried"
    step = "" if result.limiting_step is None else f", in step {result.limiting_step!r}"
    limit, size = _LIMITS.get(result.limited_by, result.limited_by), result.batch_size
    tried = [t for t in result.trials if t.accumulation_steps == 1 and t.verdict not in _UNTOLD]
    calls = 0 if result.confirmation is None else result.confirmation.steps
    kind = "optimizer step" if "command" in result.environment else "call"
    ran = f"{limit}{step}; batch {size} ran" + (f" for {count(calls, kind, kind + 's')}" if calls else "")
    failed = min((t for t in tried if not t.passed and t.batch_size > size), key=lambda t: t.batch_size, default=None)
    if failed is None:
        return ran
    ran += f"; batch {failed.batch_size} failed{' a replay' if failed.replayed else ''}"
    cap_bytes, largest = failed.cap_bytes or math.inf, result.limit_batch_size
    larger = [t for t in tried if t.passed and t.batch_size == largest and (t.cap_bytes or math.inf) > cap_bytes]
    if largest < failed.batch_size or not larger:
        return ran
    passed = "passed a replay" if all(t.replayed for t in larger) else "ran"
    larger_failed = result.first_failing_batch_size or 0
    passed += f" and {larger_failed} failed" if larger_failed > largest else ""
    return f"{ran} under the budget ({format_bytes(failed.cap_bytes or 0)}); without it, batch {largest} {passed}"


def _ranks(result: ProbeResult, *, verbose: bool) -> list[str]:
    """Say how much memory each rank took at the answer, and which one limits."""
    told = () if result.confirmation is None else result.confirmation.ranks
    if len(told) < 2:
        return []
    limits = next((one for one in told if one.rank == result.limiting_rank), told[0])
    others = [one for one in told if one is not limits]
    each = [f"rank {one.rank}: {_of_available(one)}" for one in told]
    if max(map(_shares, told)) - min(map(_shares, told)) <= ALIKE:
        first = f"{len(told)} ranks, all alike: {_of_available(limits)}"
    else:
        peaks = sorted(one.peak_reserved_bytes or 0 for one in others)
        rest = " to ".join(dict.fromkeys(map(format_bytes, (peaks[0], peaks[-1]))))
        who = "the others reserve" if len(others) > 1 else "the other reserves"
        first = f"rank {limits.rank} of {len(told)} limits: {_of_available(limits)}; {who} {rest}"
    return [first, *(each if verbose and len(set(map(_of_available, told))) > 1 else [])]


def _of_available(rank: RankTrial) -> str:
    available_bytes = rank.available_bytes or 0
    return f"{format_bytes(rank.peak_reserved_bytes or 0)} reserved of {format_bytes(available_bytes)} available"


def _shares(rank: RankTrial) -> float:
    return (rank.peak_reserved_bytes or 0) / max(1, rank.available_bytes or 0)


def _is_check(result: ProbeResult) -> bool:
    """Return whether only one size was checked; a search would begin by growing."""
    return {t.batch_size for t in result.trials} == {result.batch_size} and not any(
        t.phase in ("grow", "bisect") for t in result.trials
    )


def _holds_for(result: ProbeResult) -> str:
    environment = result.environment
    here = (
        "" if environment.get("isolated") or result.world_size > 1 else ", and this one in its state before the probe"
    )
    after = f" after {environment['after']}" if "after" in environment else ""
    ranks = f"{result.world_size} fresh processes{after}, one for each rank"
    fresh = ranks if result.world_size > 1 else f"a fresh process{after}"
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "cuda", "hip") if environment.get(name))
    settings = [f"{name}={value}" for name, value in environment.get("allocator_settings", {}).items()]
    return "; ".join(part for part in (f"{fresh}{here}", versions, *settings) if part)


def _throughput(result: ProbeResult) -> list[str]:
    """State the rate, and compare it with the smaller sizes by the spread of repeated trials."""
    rates: dict[int, list[float]] = defaultdict(list)
    for trial in result.trials:
        if trial.passed and trial.accumulation_steps == 1 and trial.samples_per_s:
            rates[trial.batch_size].append(trial.samples_per_s)
    if result.batch_size not in rates:
        return []
    answer = rates[result.batch_size][-1]  # its confirmation, with the most steps
    alone = f"{rate(answer)} samples/s{' per rank' if _counts_per_rank(result) else ''}"
    smaller = {size: repeated[-1] for size, repeated in rates.items() if size < result.batch_size}
    if not smaller:
        return [alone]
    noise = max(TIMING_NOISE, *(1 - min(repeated) / max(repeated) for repeated in rates.values()))
    by_noise = f"the timing noise of {100 * noise:.0f} %"
    fastest = max(smaller, key=lambda size: smaller[size])
    if smaller[fastest] * (1 - noise) > answer:
        spilling = ". Memory may be spilling to the host" if smaller[fastest] > SPILL_FACTOR * answer else ""
        faster = f"batch {fastest} is faster, {rate(smaller[fastest])} samples/s, by more than {by_noise}"
        return [f"{alone}; {faster}{spilling}"]
    as_fast = min((size for size, speed in smaller.items() if speed >= (1 - noise) * answer), default=None)
    if as_fast is None:
        return [f"{alone}; every smaller size that ran is slower by more than {by_noise}"]
    return [f"{alone}; batch {as_fast} is as fast, within {by_noise}"]


def _linear_fit(result: ProbeResult, *, verbose: bool) -> list[str]:
    fit = result.fit
    if fit is None:
        return ["none: fewer than three sizes ran"]
    if fit.predicted_max_batch is None:
        prediction = "no prediction: the line does not rise"
    else:
        predicted = fit.predicted_max_batch - fit.predicted_max_batch % result.options.get("multiple_of", 1)
        prediction = f"{predicted}, not used: {_judge(result, predicted)}"
    off = "more than 1000 %" if fit.max_relative_error > 10 else f"up to {100 * fit.max_relative_error:.1f} %"
    coefficients = f"{format_bytes(fit.fixed_bytes)} fixed + {format_bytes(fit.bytes_per_sample)} per sample"
    return [f"{prediction}; the fit is off by {off}", *([f"{coefficients}, r2 {fit.r_squared:.4f}"] if verbose else [])]


def _judge(result: ProbeResult, predicted: int) -> str:
    """Compare a prediction with the trials; without a failure it is not too high, because max_batch may end a search."""
    if predicted <= result.batch_size:
        return "the same as the answer" if predicted == result.batch_size else "too low"
    passed = {t.batch_size: t.passed for t in result.trials}  # the last trial of each size counts
    failed = [size for size, ran in passed.items() if result.batch_size < size <= predicted and not ran]
    return f"too high, batch {min(failed)} failed" if failed else "above the answer, where nothing failed"


def _estimates(result: ProbeResult) -> list[str]:
    lines = [f"{name}: {'none' if size is None else f'{size:.0f}'}" for name, size in result.estimates.items()]
    return [f"never used; {result.batch_size} was measured:", *lines] if lines else []


def _plan(result: ProbeResult) -> list[str]:
    """List the splits of the global batch, if one was requested."""
    wanted, world_size = result.options.get("global_batch"), result.options.get("world_size") or result.world_size
    ranks = "" if world_size == 1 else f" x {world_size} ranks"
    if not wanted:
        return []
    entries = map(_entry, result.plan(wanted, world_size))
    return [f"global batch {wanted} = micro-batch x accumulation steps{ranks}", *entries]


def _entry(entry: PlanEntry) -> str:
    ranks = "" if entry.world_size == 1 else f" x {entry.world_size}"
    product = f"{entry.global_batch} = {entry.micro_batch} x {entry.accumulation_steps}{ranks}"
    ran = "ran, also with accumulation" if entry.ran_accumulated else "ran" if entry.ran else "not run"
    return f"{product}, {'exact' if entry.exact else 'near'}; micro-batch {entry.micro_batch}: {ran}"


def _state(result: ProbeResult) -> str:
    if result.environment.get("isolated"):
        return "trials ran in separate processes: nothing in this process was changed"
    if result.state_verified:
        return "restored and compared bit for bit: identical"
    if any(note.startswith("not restored: ") for note in result.notes):
        return "restored and compared bit for bit, except what the notes name as not restored"
    return "not compared bit for bit: this result makes no claim about it"


def _time(result: ProbeResult) -> str:
    total = f"{format_seconds(result.elapsed_s)} for {count(len(result.trials), 'trial', 'trials')}"
    if not result.elapsed_s > 0:
        return total
    share = result.in_steps_s / result.elapsed_s
    if "command" in result.environment:
        each = format_seconds(result.elapsed_s / max(1, len(result.trials)))
        return f"{total}, {each} each; {100 * (1 - share):.0f} % of it to start and end the command"
    return f"{total}, {100 * share:.0f} % of it inside the step"
