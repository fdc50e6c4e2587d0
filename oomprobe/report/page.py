"""The report an engineer reads in a job log: plain ASCII, at most 100 columns, returned and never printed."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from oomprobe.report.breakdown import breakdown_lines
from oomprobe.report.table import trials_table
from oomprobe.report.words import WIDTH, bullets, clean, clip, count, rate, wrap
from oomprobe.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from oomprobe.report.plan import PlanEntry
    from oomprobe.result import ProbeResult

SCATTER = 0.05  # of a rate: what repeated trials of a size differ by, unless those of this probe differed by more
SLOW_FACTOR = 2.0  # a sample that takes this much longer than at a smaller size hints at paging
_LABEL = 14  # columns of the label before a fact
_LIMITS = {
    "memory": "memory",
    "host_memory": "host memory",
    "max_batch": "max_batch, not memory: nothing larger was tried",
    "size_limit": "a size limit that is not memory, such as 32-bit indexing",
}


def text(result: ProbeResult, *, verbose: bool = False) -> str:
    """Render a result as lines of ASCII; the first one, and only that, is the verdict: ``verdict: batch 96 fits ...``.

    The verbose report has the coefficients of the fit, the estimates, the whole plan and all of each thing that no trial covered.
    """
    blocks = (
        [verdict_line(result), *warning_lines(result)],
        [trials_table(result.trials)],
        _fact_lines(result, verbose=verbose),
        [] if result.breakdown is None else breakdown_lines(result.breakdown),
        bullets("notes:", result.notes),
        bullets("not covered by the trials:", result.not_covered) if verbose else _not_covered(result.not_covered),
    )
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def brief(result: ProbeResult) -> str:
    """The verdict and the table alone."""
    return "\n".join([verdict_line(result), *warning_lines(result), trials_table(result.trials)]) + "\n"


def verdict_line(result: ProbeResult) -> str:
    """The answer, in one line of at most 100 columns."""
    fraction = result.options.get("memory_fraction") or result.budget_bytes / max(1, result.available_bytes)
    share = f"{100 * fraction:.3g} % of {format_bytes(result.available_bytes)} on "
    line = f"verdict: batch {result.batch_size} fits in {format_bytes(result.budget_bytes)} ({share}"
    return f"{line}{clip(clean(result.device), max(8, WIDTH - 1 - len(line)))})"


def warning_lines(result: ProbeResult) -> list[str]:
    """What makes the answer doubtful; none where nothing does."""
    if not result.contaminated:
        return []
    return wrap(
        "WARNING: memory outside this process's allocator moved while probing. Another process, or a library "
        "of this one, took or gave back memory: the number holds for that moment only. "
        "Probe again on an idle device.",
        first="!! ",
        rest="!! ",
    )


def _not_covered(items: tuple[str, ...]) -> list[str]:
    """One sentence: what stands before the details of each item."""
    heads = [re.split(r" \(|: |, ", item, maxsplit=1)[0] for item in items]
    return wrap(f"not covered: {'; '.join(heads)}", rest="  ") if heads else []


def facts(result: ProbeResult, *, verbose: bool) -> dict[str, list[str]]:
    """What there is to say: sentences by their label."""
    return {
        "checked" if _is_check(result) else "limited by": [_limit(result)],
        "holds for": [_holds_for(result)],
        "throughput": _throughput(result),
        "linear fit": _line(result, verbose=verbose),
        "estimates": _estimates(result) if verbose else [],
        "plan": _plan(result, verbose=verbose),
        "state": [_state(result)],
        "time": [_time(result)],
    }


def _fact_lines(result: ProbeResult, *, verbose: bool) -> list[str]:
    lines = []
    for label, sentences in facts(result, verbose=verbose).items():
        for number, sentence in enumerate(sentences):
            first = f"  {'' if number else label}".ljust(_LABEL)
            lines += wrap(sentence, first=first, rest=" " * (_LABEL + 2))
    return lines


def _limit(result: ProbeResult) -> str:
    if _is_check(result):
        step = "" if result.limiting_step is None else f"; step {result.limiting_step!r} takes the most memory"
        return f"batch {result.batch_size} was asked for, and ran{step}; no other size was tried"
    step = "" if result.limiting_step is None else f", in step {result.limiting_step!r}"
    failing = result.first_failing_batch_size
    failed = "" if failing is None else f", batch {failing} failed with all the memory"
    limit = _LIMITS.get(result.limited_by, result.limited_by)
    of_limit = [t for t in result.trials if t.batch_size == result.limit_batch_size and t.passed]
    passed = "passed a replay" if of_limit and all(t.replayed for t in of_limit) else "ran"
    return f"{limit}{step}; batch {result.limit_batch_size} is the largest that {passed}{failed}"


def _is_check(result: ProbeResult) -> bool:
    """Whether one size was checked, without a search, which would begin by growing."""
    return {t.batch_size for t in result.trials} == {result.batch_size} and not any(
        t.phase in ("grow", "bisect") for t in result.trials
    )


def _holds_for(result: ProbeResult) -> str:
    environment = result.environment
    here = "" if environment.get("isolated") else ", and this one as the probe found it"
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "cuda", "hip") if environment.get(name))
    settings = [f"{name}={value}" for name, value in environment.get("allocator_settings", {}).items()]
    return "; ".join(part for part in (f"a fresh process{here}", versions, *settings) if part)


def _throughput(result: ProbeResult) -> list[str]:
    """Compare rates only where they differ by more than repeated trials of one size do."""
    rates: dict[int, list[float]] = defaultdict(list)
    for trial in result.trials:
        if trial.passed and trial.accumulation_steps == 1 and trial.samples_per_s:
            rates[trial.batch_size].append(trial.samples_per_s)
    if result.batch_size not in rates:
        return []
    answer = rates[result.batch_size][-1]  # its confirmation, with the most steps
    alone = f"{rate(answer)} samples/s"
    smaller = {size: of_size[-1] for size, of_size in rates.items() if size < result.batch_size}
    if not smaller:
        return [alone]
    scatter = max(SCATTER, *(1 - min(of_size) / max(of_size) for of_size in rates.values()))
    within = f"{100 * scatter:.0f} %, the scatter of these times"
    fastest = max(smaller, key=lambda size: smaller[size])
    if smaller[fastest] * (1 - scatter) > answer:
        spilling = ". Memory may be spilling to the host" if smaller[fastest] > SLOW_FACTOR * answer else ""
        faster = f"batch {fastest} is faster, {rate(smaller[fastest])} samples/s, by more than {within}"
        return [f"{alone}; {faster}{spilling}"]
    close = min((size for size, speed in smaller.items() if speed >= (1 - scatter) * answer), default=None)
    named = "no smaller size that ran" if close is None else f"batch {close}"
    return [f"{alone}; {named} comes within {within}"]


def _line(result: ProbeResult, *, verbose: bool) -> list[str]:
    """The straight line, a diagnostic."""
    fit = result.fit
    if fit is None:
        return ["none: fewer than three sizes ran"]
    if fit.predicted_max_batch is None:
        said = "does not rise: no answer"
    else:
        predicted = fit.predicted_max_batch - fit.predicted_max_batch % result.options.get("multiple_of", 1)
        said = f"{predicted}, not used: {_judgement(result, predicted)}"
    off = "more than 1000 %" if fit.max_relative_error > 10 else f"up to {100 * fit.max_relative_error:.1f} %"
    coefficients = f"{format_bytes(fit.fixed_bytes)} fixed + {format_bytes(fit.bytes_per_sample)} per sample"
    return [f"{said}; the fit is off by {off}", *([f"{coefficients}, r2 {fit.r_squared:.4f}"] if verbose else [])]


def _judgement(result: ProbeResult, predicted: int) -> str:
    """Call a prediction too high only where a failure shows it: max_batch, say, leaves sizes untried."""
    if predicted <= result.batch_size:
        return "the same as the answer" if predicted == result.batch_size else "too low"
    passed = {t.batch_size: t.passed for t in result.trials}  # in the last trial of each size
    failed = [size for size, ran in passed.items() if result.batch_size < size <= predicted and not ran]
    return f"too high, batch {min(failed)} failed" if failed else "above the answer, where nothing failed"


def _estimates(result: ProbeResult) -> list[str]:
    told = [f"{name}: {'none' if size is None else f'{size:.0f}'}" for name, size in result.estimates.items()]
    return [f"never used; {result.batch_size} was measured:", *told] if told else []


def _plan(result: ProbeResult, *, verbose: bool) -> list[str]:
    """Splits of the global batch; where none was asked for, an example for those who want the details."""
    wanted, world_size = result.options.get("global_batch"), result.options.get("world_size") or 1
    ranks = "" if world_size == 1 else f" x {world_size} ranks"
    if wanted:
        title, entries = f"global batch {wanted}", result.plan(wanted, world_size)
    elif verbose:
        example = 1 << (4 * result.batch_size - 1).bit_length()
        title, entries = f"for example global batch {example}", result.plan(example, world_size)[:2]
    else:
        return []
    return [f"{title} = micro-batch x accumulation steps{ranks}", *map(_entry, entries)]


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
