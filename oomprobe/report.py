"""The report an engineer reads in a job log: plain ASCII, at most 100 columns, returned and never printed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from oomprobe.units import byte_unit, format_bytes, format_seconds

if TYPE_CHECKING:
    from oomprobe.plan import PlanEntry
    from oomprobe.result import ProbeResult, Trial

WIDTH = 100  # columns: what job logs and code review show without wrapping
FAST_ENOUGH = 0.95  # under this share of the answer's speed, a smaller batch is a loss nobody would take
_LABEL = 14  # columns of the label before a fact
_STEP_NAME = "step name"
_LIMITS = {
    "memory": "the memory of the device",
    "host_memory": "the memory of the host",
    "max_batch": "the max_batch of the call, not memory: nothing larger was tried",
    "size_limit": "a size limit that is not memory, such as 32-bit indexing",
}


def text(result: ProbeResult) -> str:
    """Render a result as plain text.

    Args:
        result: What a probe returned, or `ProbeResult.from_dict` read.

    Returns:
        Lines of ASCII; the last one, and only that, is the verdict: ``verdict: batch 96 fits in ...``.
    """
    blocks = (
        _heading(result),
        [trials_table(result.trials)],
        _facts(result),
        _bullets("notes:", result.notes),
        _bullets("not covered by the trials:", result.not_covered),
        [*_warning(result), _verdict(result)],
    )
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def trials_table(trials: Iterable[Trial]) -> str:
    """Render trials as a table, with what there is to say about one on the line under it.

    Args:
        trials: Any number, also none: errors and an interrupted probe show what had been run until then.

    Returns:
        The table without a final newline. Columns that no trial measured are left out.
    """
    rows = tuple(trials)
    if not rows:
        return "no trial was run"
    unit, factor = byte_unit(max(_sizes(rows), default=0))
    columns = {head: [cell(t) for t in rows] for head, cell in _columns(factor).items()}
    columns = {head: cells for head, cells in columns.items() if any(cell is not None for cell in cells)}
    widths = _widths(columns)
    title = f"trials (memory in {unit}; '-': not measured, or no cap; an error that repeats is shown once)"
    lines = [title, _row({head: head for head in columns}, widths)]
    shown = ""
    for index, trial in enumerate(rows):
        lines.append(_row({head: cells[index] or "-" for head, cells in columns.items()}, widths))
        failure = _failure(trial)
        lines += _under(widths["batch"] + 4, _remarks(trial) + [failure] * (failure != shown))
        shown = failure or shown
    return "\n".join(lines)


def trial_line(trial: Trial) -> str:
    """Render one trial as one line, for a log that is read while the probe runs."""
    peaks = [b for b in (trial.peak_allocated_bytes, trial.peak_reserved_bytes) if b is not None]
    parts = (
        f"batch {trial.batch_size}",
        trial.verdict.value,
        trial.phase.value,
        None if trial.step_name is None else _clean(trial.step_name),
        f"peak {format_bytes(max(peaks))}" if peaks else None,
        None if trial.cap_bytes is None else f"cap {format_bytes(trial.cap_bytes)}",
        None if trial.samples_per_s is None else f"{_rate(trial.samples_per_s)} samples/s",
        *_remarks(trial),
        _failure(trial),
    )
    return _clip("  ".join(part for part in parts if part), WIDTH)


# The table


def _columns(factor: int) -> dict[str, Callable[[Trial], str | None]]:
    def memory(size_bytes: int | None) -> str | None:
        return None if size_bytes is None else f"{size_bytes / factor:.{2 if factor > 1 else 0}f}"

    return {
        "batch": lambda t: str(t.batch_size),
        "phase": lambda t: t.phase.value,
        "verdict": lambda t: t.verdict.value,
        "steps": lambda t: str(t.steps),
        "allocated": lambda t: memory(t.peak_allocated_bytes),
        "reserved": lambda t: memory(t.peak_reserved_bytes),
        "cap": lambda t: memory(t.cap_bytes),
        "time/step": lambda t: None if t.step_s is None else format_seconds(t.step_s),
        "samples/s": lambda t: None if t.samples_per_s is None else _rate(t.samples_per_s),
        _STEP_NAME: lambda t: None if t.step_name is None else _clean(t.step_name),
    }


def _widths(columns: dict[str, list[str | None]]) -> dict[str, int]:
    """Widths that fit in a line: the names of the steps, which are the user's, give way."""
    widths = {head: max(len(head), *(len(cell or "-") for cell in cells)) for head, cells in columns.items()}
    if _STEP_NAME in widths:
        others = sum(2 + width for head, width in widths.items() if head != _STEP_NAME)
        widths[_STEP_NAME] = max(len(_STEP_NAME), min(widths[_STEP_NAME], WIDTH - 2 - others))
    return widths


def _row(cells: dict[str, str], widths: dict[str, int]) -> str:
    words = ("phase", "verdict", _STEP_NAME)
    aligned = (
        f"{_clip(cell, widths[head]):{'<' if head in words else '>'}{widths[head]}}" for head, cell in cells.items()
    )
    return ("  " + "  ".join(aligned)).rstrip()


def _sizes(trials: Iterable[Trial]) -> list[int]:
    sizes = ((t.peak_allocated_bytes, t.peak_reserved_bytes, t.cap_bytes) for t in trials)
    return [size for of_trial in sizes for size in of_trial if size is not None]


def _under(indent: int, remarks: list[str]) -> list[str]:
    line = "; ".join(remark for remark in remarks if remark)
    return [_clip(f"{' ' * indent}^ {line}", WIDTH)] if line else []


def _remarks(trial: Trial) -> list[str]:
    remarks = (
        (trial.leaked_bytes, f"LEAKED {format_bytes(trial.leaked_bytes)}"),
        (trial.accumulation_steps > 1, f"{trial.accumulation_steps} accumulation steps"),
        (trial.alloc_retries, _count(trial.alloc_retries, "allocator retry", "allocator retries")),
    )
    return [remark for worth_saying, remark in remarks if worth_saying]


def _failure(trial: Trial) -> str:
    """Where and why: two sentences of torch's text say what was asked for, the others are advice."""
    first_line = (trial.error or "").strip().partition("\n")[0]
    sentences = ". ".join(first_line.split(". ")[:2])
    return ": ".join(part for part in (_clean(trial.where or ""), _clean(sentences)) if part)


# The facts


def _facts(result: ProbeResult) -> list[str]:
    facts = {
        "limit": _limit(result),
        "throughput": _throughput(result),
        "fit": _fit(result),
        "estimates": _estimates(result),
        "plan": _plan(result),
        "state": [_state(result)],
        "time": [_time(result)],
    }
    rest = " " * _LABEL
    lines = []
    for label, sentences in facts.items():
        firsts = [f"  {label}".ljust(_LABEL), *[rest] * len(sentences)]
        for first, sentence in zip(firsts, sentences, strict=False):
            lines += _wrap(sentence, first=first, rest=rest + "  ")
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
        f"batch {result.limit_batch_size} is the largest that ran, {failed} failed with all the memory",
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
        if t.passed and t.accumulation_steps == 1 and t.samples_per_s and math.isfinite(t.samples_per_s)
    }
    answer = speeds.get(result.batch_size)
    if answer is None:
        return []
    smaller = {size: speed for size, speed in speeds.items() if size < result.batch_size}
    close = min((size for size, speed in smaller.items() if speed >= FAST_ENOUGH * answer), default=None)
    if close is None:
        alone = f"{_rate(answer)} samples/s at batch {result.batch_size}"
        within = f"no smaller size that ran comes within {100 * (1 - FAST_ENOUGH):.0f} % of it"
        return [f"{alone}; {within}" if smaller else alone]
    # Rounded up, and never "within 0 %": what is written must hold.
    behind = max(1, math.ceil(round(100 * (1 - smaller[close] / answer), 6)))
    against = f"({_rate(smaller[close])} against {_rate(answer)} samples/s)"
    return [f"batch {close} is already within {behind} % of the throughput of {result.batch_size} {against}"]


def _fit(result: ProbeResult) -> list[str]:
    fit = result.fit
    if fit is None:
        return ["none: a line through fewer than three sizes says nothing"]
    line = f"{format_bytes(fit.fixed_bytes)} fixed + {format_bytes(fit.bytes_per_sample)} per sample"
    quality = f"{line}, r2 {fit.r_squared:.4f}, off by at most {100 * fit.max_relative_error:.1f} %"
    if fit.predicted_max_batch is None:
        return [quality, "the line does not rise and would have answered nothing (not used)"]
    predicted = fit.predicted_max_batch - fit.predicted_max_batch % _multiple_of(result)
    return [quality, f"the line would have answered {predicted} (not used): {_judgement(result, predicted)}"]


def _judgement(result: ProbeResult, predicted: int) -> str:
    """Call a prediction too high only where a failure shows it: max_batch, say, leaves sizes untried."""
    larger = {t.batch_size for t in result.trials if result.batch_size < t.batch_size <= predicted}
    failed = [size for size in larger if not _witness(result, size).passed]
    if predicted == result.batch_size:
        return "the same as the answer"
    if predicted < result.batch_size:
        return f"too low, {_tried(result, predicted)}"
    if not failed:
        return f"higher than the answer, {_tried(result, predicted)}"
    smaller = "" if predicted in failed else f", batch {min(failed)} failed"
    return f"too high, {_tried(result, predicted)}{smaller}"


def _tried(result: ProbeResult, size: int) -> str:
    if all(t.batch_size != size for t in result.trials):
        return "not run"
    trial = _witness(result, size)
    held = "under the budget" if _is_held(trial, result) else "with all the memory"
    return f"{'ran' if trial.passed else 'failed'} {held}"


def _witness(result: ProbeResult, size: int) -> Trial:
    """The last trial of a size, of those under the budget if any was: the line is asked about that."""
    trials = [t for t in result.trials if t.batch_size == size]
    return ([t for t in trials if _is_held(t, result)] or trials)[-1]


def _is_held(trial: Trial, result: ProbeResult) -> bool:
    return trial.cap_bytes is not None and trial.cap_bytes <= result.budget_bytes


def _estimates(result: ProbeResult) -> list[str]:
    if not result.estimates:
        return []
    numbers = {n: f"{v:.6g}" for n, v in result.estimates.items() if isinstance(v, int | float)}
    return [", ".join(f"{name}: {numbers.get(name, '-')}" for name in result.estimates) + " (never used)"]


def _plan(result: ProbeResult) -> list[str]:
    wanted, world_size = result.options.get("global_batch"), result.options.get("world_size") or 1
    target = wanted or 1 << (4 * max(1, result.batch_size) - 1).bit_length()
    try:
        entries = result.plan(target, world_size)
    except (
        ArithmeticError,
        TypeError,
        ValueError,
    ) as error:  # the options of a file edited by hand must not hide its trials
        return [f"none: {error}"]
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
    if result.state_verified:
        return "restored and compared bit for bit: identical"
    return "not compared bit for bit: this result makes no claim about it"


def _time(result: ProbeResult) -> str:
    total = f"{format_seconds(result.elapsed_s)} for {_count(len(result.trials), 'trial', 'trials')}"
    if not result.elapsed_s > 0:
        return total
    return f"{total}, {100 * result.in_steps_s / result.elapsed_s:.0f} % of it inside the step"


# The end


def _warning(result: ProbeResult) -> list[str]:
    if not result.contaminated:
        return []
    return _wrap(
        "WARNING: memory outside this process's allocator moved while probing. Another process, or a library "
        "of this one, took or gave back memory: the number holds for that moment only. "
        "Probe again on an idle device.",
        first="!! ",
        rest="!! ",
    )


def _verdict(result: ProbeResult) -> str:
    share = f"{100 * _fraction(result):.3g} % of {format_bytes(result.available_bytes)} on "
    line = f"verdict: batch {result.batch_size} fits in {format_bytes(result.budget_bytes)} ({share}"
    return f"{line}{_clip(_clean(result.device), max(8, WIDTH - 1 - len(line)))})"


def _heading(result: ProbeResult) -> list[str]:
    device = f"oomprobe: {_clean(result.device)}"
    memory = (
        f"available {format_bytes(result.available_bytes)}, memory_fraction {_fraction(result):.4g}, "
        f"budget {format_bytes(result.budget_bytes)}"
    )
    one_line = f"{device}, {memory}"
    return [one_line] if len(one_line) <= WIDTH else [_clip(device, WIDTH), *_wrap(memory, first="  ")]


def _fraction(result: ProbeResult) -> float:
    given = result.options.get("memory_fraction")
    if isinstance(given, int | float):
        return float(given)
    return result.budget_bytes / result.available_bytes if result.available_bytes else 0.0


def _multiple_of(result: ProbeResult) -> int:
    given = result.options.get("multiple_of")
    return given if isinstance(given, int) and given > 0 else 1


# Words


def _bullets(heading: str, items: Iterable[str]) -> list[str]:
    lines = [line for item in items for line in _wrap(item, first="  - ", rest="    ")]
    return [heading, *lines] if lines else []


def _wrap(sentence: str, *, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(_clean(sentence), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _clip(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(0, width - 3)].rstrip() + "..."


def _clean(foreign: str) -> str:
    """One line of printable ASCII: the user's texts may hold line ends, escape codes or any alphabet."""
    line = " ".join(foreign.split())
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode("ascii") for c in line)


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.0f}" if 100 <= samples_per_s < 1e9 else f"{samples_per_s:.3g}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
