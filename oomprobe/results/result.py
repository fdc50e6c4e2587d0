"""The result of a probe: the answer and its evidence as data, and what is said about them."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_bytes, format_seconds
from oomprobe.ground.words import clean, clip, count
from oomprobe.records.breakdown import Breakdown
from oomprobe.records.epoch import SAMPLES, EpochRecord
from oomprobe.records.fit import LinearFit
from oomprobe.records.kinds import Bytes, Plain, Samples
from oomprobe.records.notes import Note, NoteKind
from oomprobe.records.plain import from_plain, reading, require_at_most
from oomprobe.records.plan import PlanEntry, plan
from oomprobe.records.trials import SIMULATED, Phase, Trial, Verdict
from oomprobe.results import facts
from oomprobe.results.base import Reported
from oomprobe.results.blocks import NOTES, VERDICT_WIDTH, Block, Fact, Facts, Report
from oomprobe.results.plot import bracket_figure, epoch_figure, memory_figure, timeline_figure
from oomprobe.results.trials import trials_block
from oomprobe.results.why import Explanation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
MOST_TRIALS = 10_000  # of a file
BATCH = "{batch}"  # stands for the size in a command
# Of a trial, for a summary.
MEASURED = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "step_s", "samples_per_s"),
    *("pinned_bytes", "host_bytes"),
)
Flat = dict[str, int | float | str | bool | None]  # what trackers of experiments take
WARNING = (
    "WARNING: memory outside this process's allocator changed while probing. Another process, or a library in this one, "
    "allocated or freed memory, so the number holds for that moment only. Probe again on an idle device."
)
NO_EPOCH = (
    "batch {size} was tried with its largest batch only, as no epoch could be replayed: {reason}"
)
_LIMITS = {
    "memory": "memory",
    "host_memory": "host memory",
    "max_batch": "max_batch, not memory: nothing larger was tried",
    "step": "the step, not memory: it splits large batches itself",
    "size_limit": "a size limit that is not memory, such as 32-bit indexing",
    "time_limit": "the time limit, not memory: nothing larger was tried (allow more with time_limit_s)",
}
_SAYS_NOTHING = (Verdict.CRASHED, Verdict.TIMED_OUT)  # of the size


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProbeResult(Reported):
    """The answer and all the evidence for it.

    Attributes:
        batch_size: The answer: it ran, at exactly this size, with the allocator capped at `budget_bytes`.
        unit: What batch sizes count: "samples", or "tokens" (`find_max_tokens`).
        limit_batch_size: Largest size that ran, or passed a replay, at all.
        first_failing_batch_size: Smallest size that failed without the margin, if only in a replay; or None.
        limited_by: ``"memory"``, ``"host_memory"``, ``"max_batch"``, ``"size_limit"``, ``"time_limit"`` or ``"step"``: the step
            splits its batch itself, so memory limits no size.
        limiting_step: Name of the step that limits, when several were given.
        trials: Every trial, in the order they ran.
        fit: The straight line through (batch size, peak), a diagnostic; None with fewer than three points.
        device: Name of the device.
        budget_bytes: Cap on the allocator for the answer: `memory_fraction` of `available_bytes`.
        available_bytes: Memory available to this process.
        notes: What a careful reader should know about this number.
        note_kinds: Of the notes that say that the answer may not hold, what they mean.
        noted_sizes: The batch sizes that notes are about.
        not_covered: What could need memory in training but was not part of the trials.
        written: What an adapter set in its framework's own arguments: micro-batch x accumulation steps.
        contaminated: Whether other processes may have changed the answer.
        state_verified: Whether the restored state was compared bit for bit and equal.
        environment: Versions and settings the number is valid for, and the date and the target of the probe.
        estimates: What rules of thumb would have answered, by name. Never used.
        options: The options of the call.
        elapsed_s: Wall time of the probe.
        in_steps_s: Part of `elapsed_s` spent inside the step.
        breakdown: What held the memory at the answer; None if not requested.
        epoch: How many orders of an epoch train at the answer; None if no epoch was given.
        explanation: Why the next size ran out of memory; see `why`.
        world_size: Ranks that ran each trial. All batch sizes are per rank.
        limiting_rank: The rank that limits, if there are several: which failed at the next size, or had the least memory left.
        schema_version: Version of the JSON form.

    Examples:
        >>> import oomprobe, tempfile
        >>> target = "oomprobe.demo:wide_mlp"
        >>> result = oomprobe.probe_target(target, device="sim:1GiB", multiple_of=64, progress="off")
        >>> result.batch_size, result.limited_by, result.confirmation.steps, result.was_replayed
        (832, 'memory', 50, False)
        >>> [(entry.micro_batch, entry.accumulation_steps) for entry in result.plan(1024) if entry.exact]
        [(512, 2)]
        >>> ProbeResult.from_dict(json.loads(result.to_json())) == ProbeResult.from_dict(result.to_dict())
        True
        >>> result.summary()["options/memory_fraction"], result.trains
        (0.9, True)
        >>> result.pinned_bytes, result.host_bytes == 0
        (0, ...)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result.to_html(f"{folder}/probe.html")
        ...     figure = result.plot()
        >>> result.report(verbose=True).verdict
        'batch 832 fits in ...'
    """

    batch_size: Samples
    unit: str = SAMPLES
    limit_batch_size: Samples
    first_failing_batch_size: Samples | None
    limited_by: str
    limiting_step: str | None = None
    trials: tuple[Trial, ...]
    fit: LinearFit | None = None
    device: str
    budget_bytes: Bytes
    available_bytes: Bytes
    notes: tuple[str, ...] = ()
    note_kinds: Mapping[str, NoteKind] = field(default_factory=dict)
    noted_sizes: tuple[int, ...] = ()
    not_covered: tuple[str, ...] = ()
    written: str = ""
    contaminated: bool = False
    state_verified: bool = False
    environment: Mapping[str, Plain] = field(default_factory=dict)
    estimates: Mapping[str, float | None] = field(default_factory=dict)
    options: Mapping[str, Plain] = field(default_factory=dict)
    elapsed_s: float = 0.0
    in_steps_s: float = 0.0
    breakdown: Breakdown | None = None
    epoch: EpochRecord | None = None
    explanation: Explanation | None = None
    world_size: Samples = 1
    limiting_rank: int | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def confirmation(self) -> Trial | None:
        """The last trial of the answer, which confirmed it; None if `trials` has none."""
        for trial in reversed(self.trials):
            if (
                trial.passed
                and trial.batch_size == self.batch_size
                and trial.accumulation_steps == 1
            ):
                return trial
        return None

    @property
    def was_replayed(self) -> bool:
        """Whether the answer was not run: in a table of simulated cards, what the step allocated on one is replayed on others."""
        return self.confirmation is not None and self.confirmation.replayed

    @property
    def trains(self) -> bool:
        """Whether no order of the epoch runs out of memory, if one was given."""
        return self.epoch is None or self.epoch.deaths == 0

    def why(self) -> Explanation | None:
        """Return why the smallest size that failed under the budget ran out of memory.

        After the answer, that size runs once more and is recorded. The budget counts as the memory
        that there is.

        Returns:
            What `oomprobe.explain` says of such a recording; None where no size ran out of memory,
            or none was recorded: on host memory, on several ranks, of a command, of a size that did
            not run, and while you record torch's memory history yourself.

        Examples:
            >>> import oomprobe
            >>> options = {"device": "sim:1GiB", "multiple_of": 64, "progress": "off"}
            >>> result = oomprobe.probe_target("oomprobe.demo:wide_mlp", **options)
            >>> found = result.why()
            >>> found.source, found.cause, found.available_bytes == result.budget_bytes
            ('batch 896', 'live', True)
        """
        return self.explanation

    @property
    def pinned_bytes(self) -> int | None:
        """Pinned host memory that the answer took, as torch rounds and keeps it; None: unknown."""
        return None if self.confirmation is None else self.confirmation.pinned_bytes

    @property
    def host_bytes(self) -> int | None:
        """The same with other tensors that it made in host memory, which only simulated cards know."""
        return None if self.confirmation is None else self.confirmation.host_bytes

    def plan(self, global_batch: int, world_size: int | None = None) -> tuple[PlanEntry, ...]:
        """Return ways to reach a global batch with gradient accumulation, best first.

        Args:
            global_batch: Samples per optimizer step over all ranks, at least 1.
            world_size: Ranks that share the global batch, at least 1; None: as many as ran the trials.

        Returns:
            Entries whose ``ran`` says whether this probe ran that micro-batch and it passed.

        Raises:
            InvalidArgumentError: a size is not a positive integer, or sizes count tokens.
        """
        if self.unit != SAMPLES:
            raise InvalidArgumentError(
                f"batch_size counts {self.unit} here, which no plan divides into micro-batches"
            )
        if world_size is None:
            world_size = self.world_size
        largest = self.batch_size
        accumulated = [trial for trial in self.trials if trial.accumulation_steps > 1]
        if not all(trial.passed for trial in accumulated):
            # Trust only sizes that passed with accumulation.
            largest = max((trial.batch_size for trial in accumulated if trial.passed), default=1)
        ran = set()
        for trial in self.trials:
            if trial.passed and not trial.replayed:
                ran.add((trial.batch_size, trial.accumulation_steps))
        return plan(
            global_batch,
            world_size=world_size,
            max_micro_batch=largest,
            min_micro_batch=self.options.get("min_batch", 1),
            multiple_of=self.options.get("multiple_of", 1),
            ran=ran,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types; `from_dict` reads them back."""
        return json.loads(json.dumps(asdict(self), default=str))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProbeResult:
        """Return the result that `to_dict` wrote.

        Raises:
            InvalidArgumentError: the data has another schema version, or is not a result.
        """
        with reading("result", data, SCHEMA_VERSION):
            return read_at(data)

    def summary(self) -> Flat:
        """Return the result as one flat mapping for a tracker of experiments.

        It has the fields that are numbers or texts, all notes as one text, what was measured at the answer, and the environment and
        the options, as ``"environment/torch"`` and ``"options/memory_fraction"``.
        """
        plain = self.to_dict()
        plain["notes"] = "\n".join(self.notes)
        for name in MEASURED:
            plain[name] = getattr(self.confirmation, name, None)
        for part in ("environment", "options"):
            for name, value in plain[part].items():
                plain[f"{part}/{name}"] = value
        return {
            name: value
            for name, value in plain.items()
            if isinstance(value, int | float | str | None)
        }

    def _noted(self) -> list[Note]:
        """Return the notes, each with what it means for the answer."""
        return [
            Note(text=text, kind=self.note_kinds.get(text, NoteKind.REMARK)) for text in self.notes
        ]

    def _with_notes(self, before: Iterable[Note] = (), after: Iterable[Note] = ()) -> ProbeResult:
        """Return this result with further notes, before and after its own."""
        notes = [*before, *self._noted(), *after]
        return replace(
            self,
            notes=tuple(note.text for note in notes),
            note_kinds={note.text: note.kind for note in notes if note.warns},
            noted_sizes=tuple(
                dict.fromkeys(chain(self.noted_sizes, *(note.sizes for note in notes)))
            ),
        )

    def report(self, *, verbose: bool = False, all_trials: bool = False) -> Report:
        """Return the report; a verbose one has all trials, the fit, the estimates and `why`."""
        sentences = facts_of(self, verbose=verbose)
        mentioned = None
        if not verbose and not all_trials:
            mentioned = _mentioned(sentences) | {*self.noted_sizes}
        pictures: dict[str, Callable[[], Figure]] = {}
        if self.epoch is not None and self.epoch.reserved:
            pictures["reserved memory over the calls of each order"] = partial(
                epoch_figure, self.epoch, self.budget_bytes
            )
        pictures["peak memory and throughput against batch size"] = partial(
            memory_figure,
            self.trials,
            self.batch_size,
            self.fit,
            self.budget_bytes,
            self.available_bytes,
        )
        pictures["each trial in order, closing in on the answer"] = partial(
            bracket_figure, self.trials, self.batch_size
        )
        blocks = [
            trials_block(self.trials, self.batch_size, mentioned=mentioned),
            Block("", sentences),
        ]
        if self.breakdown is not None:
            blocks += facts.breakdown_blocks(self.breakdown)
            if self.breakdown.timeline is not None:
                pictures["memory over a step, by kind"] = partial(
                    timeline_figure, self.breakdown.timeline, self.breakdown.peak_reserved_bytes
                )
        blocks += [Block(NOTES, self.notes), not_covered_block(self)]
        parts = {}
        if self.explanation is not None and (verbose or all_trials):
            parts[f"why memory ran out: {self.explanation.source}"] = self.explanation.report()
        return Report(
            subject=subject(self),
            verdict=_verdict_of_result(self),
            warning=WARNING if self.contaminated else "",
            to_paste=_to_paste(self),
            blocks=blocks,
            parts=parts,
            pictures=pictures,
            appendix=appendix(self),
        )


# --- read from a file ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadOptions:
    """The options that a report computes with."""

    memory_fraction: float | None = None
    min_batch: Samples = 1
    multiple_of: Samples = 1
    global_batch: Samples | None = None
    world_size: Samples = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadEnvironment:
    """What a report takes apart of the environment."""

    command: str | None = None
    program: str | None = None
    allocator_settings: Mapping[str, Plain] = field(default_factory=dict)


def read_at(data: Any, place: str = "") -> ProbeResult:
    """Return the result that `to_dict` wrote, from its place in a file.

    Raises:
        InvalidArgumentError: it is no result.
    """
    result = from_plain(ProbeResult, data, place)
    require_at_most(MOST_TRIALS, result.trials, f"{place}.trials")
    from_plain(_ReadOptions, result.options, f"{place}.options")
    from_plain(_ReadEnvironment, result.environment, f"{place}.environment")
    return result


# --- the report ---


def subject(result: ProbeResult) -> str:
    """Return the command that was probed, or the class of the model."""
    return clean(str(result.environment.get("command", result.environment.get("model", ""))))


def _verdict_of_result(result: ProbeResult) -> str:
    if _is_of_command(result) and not result.budget_bytes:
        return f"batch {result.batch_size} ran; no process reported its memory"
    if result.epoch is not None and result.epoch.reason:
        return NO_EPOCH.format(size=result.batch_size, reason=result.epoch.reason)
    if _counts_per_rank(result):
        return within(result, f"batch {result.batch_size} per rank fits")
    if result.epoch is not None and any(result.epoch.ends):
        orders = f"{result.epoch.deaths} of {len(result.epoch.ends)} orders"
        return within(result, f"batch {result.batch_size} runs out of memory in {orders}")
    written = ""
    if result.written:
        written = f", written: {result.written} (your global batch),"
    counted = "" if result.unit == SAMPLES else f" {result.unit}"
    return within(result, f"batch {result.batch_size}{counted} fits{written}")


def within(result: ProbeResult, what: str) -> str:
    """Return a verdict that says in which memory something fits."""
    fraction = result.options.get("memory_fraction") or result.budget_bytes / max(
        1, result.available_bytes
    )
    share = f"{100 * fraction:.3g} % of {format_bytes(result.available_bytes)} on "
    verdict = f"{what} in {format_bytes(result.budget_bytes)} ({share}"
    return f"{verdict}{clip(clean(result.device), max(8, VERDICT_WIDTH - 1 - len(verdict)))})"


def _to_paste(result: ProbeResult) -> list[str]:
    """Return what trains with the answer: the allocator's settings, and the command or the numbers."""
    lines = []
    for name, value in result.environment.get("allocator_settings", {}).items():
        lines.append(f"export {name}={shlex.quote(str(value))}")
    if _is_of_command(result):
        command, size = str(result.environment["command"]), str(result.batch_size)
        lines.append(command.replace(f"'{BATCH}'", size).replace(BATCH, size))
    else:
        lines.append(f"batch_size = {result.batch_size}")
    return lines


def _is_of_command(result: ProbeResult) -> bool:
    return "command" in result.environment


def _counts_per_rank(result: ProbeResult) -> bool:
    """Return whether sizes are those of each rank; only a command's own author knows what its sizes count."""
    return result.world_size > 1 and not _is_of_command(result)


def not_covered_block(result: ProbeResult) -> Block:
    """List what the trials did not cover."""
    return Block("not covered by the trials:", result.not_covered)


def appendix(result: ProbeResult) -> list[Block]:
    """Return what the page adds: where and when the probe ran, and its options."""
    blocks = []
    for title, part in (("environment", result.environment), ("options", result.options)):
        given = {}
        for name, value in part.items():
            if isinstance(value, Mapping):
                value = ", ".join(f"{key}={item}" for key, item in value.items())
            if value not in (None, ""):
                given[name] = [Fact(str(value))]
        if part:
            blocks.append(Block(title, given))
    return blocks


def _mentioned(sentences: Facts) -> set[int]:
    """Return the batch sizes that facts are about."""
    sizes = set[int]()
    for facts_of_label in sentences.values():
        for fact in facts_of_label:
            sizes.update(fact.sizes)
    return sizes


def facts_of(result: ProbeResult, *, verbose: bool) -> Facts:
    """Return the sentences of the report under each label."""
    sentences = {"command": _command(result)}
    sentences["checked"] = _checked_size(result)
    if not sentences["checked"]:
        sentences["limited by"] = [_limit(result)]
    sentences["epoch"] = facts.epoch(result.epoch)
    if result.confirmation is not None:
        sentences["ranks"] = facts.ranks(
            result.confirmation.ranks, result.limiting_rank, verbose=verbose
        )
    if result.explanation is not None:
        sentences["why"] = [Fact(result.explanation.in_short())]
    if result.pinned_bytes or result.host_bytes:
        sentences["host memory"] = [facts.host_memory(result.pinned_bytes, result.host_bytes)]
    sentences["holds for"] = [_holds_for(result)]
    sentences["throughput"] = facts.throughput(
        result.trials, result.batch_size, per_rank=_counts_per_rank(result)
    )
    multiple_of = result.options.get("multiple_of", 1)
    sentences["linear fit"] = facts.linear_fit(
        result.fit, result.trials, result.batch_size, multiple_of=multiple_of, verbose=verbose
    )
    if verbose:
        sentences["estimates"] = _estimates(result)
    global_batch = result.options.get("global_batch")
    if global_batch and result.unit == SAMPLES:
        world_size = result.options.get("world_size", result.world_size)
        sentences["plan"] = facts.plan(
            global_batch, world_size, result.plan(global_batch, world_size)
        )
    sentences["state"] = [_state(result)]
    sentences["time"] = [_time(result)]
    return {label: some for label, some in sentences.items() if some}


def _command(result: ProbeResult) -> list[Fact]:
    if not result.environment.get("command"):
        return []
    lines = [Fact(result.environment["command"])]
    if program := result.environment.get("program"):
        lines.append(Fact(f"the steps of {program} were counted"))
    return lines


def _checked_size(result: ProbeResult) -> list[Fact]:
    """Say that one size was checked, beside half of it; a search would grow to it."""
    size, half = result.batch_size, result.batch_size // 2
    sizes = {trial.batch_size for trial in result.trials}
    phases = {trial.phase for trial in result.trials if trial.batch_size == size}
    if not sizes <= {size, half} or phases - {Phase.RECHECK} != {Phase.CONFIRM}:
        return []
    ran = "ran" if result.confirmation is not None else "did not run"
    sentence = f"batch {size} was asked for, and {ran}"
    if result.limiting_step is not None:
        sentence += f"; step {result.limiting_step!r} takes the most memory"
    if half in sizes:
        return [Fact(f"{sentence}; batch {half} ran too, to compare", (size, half))]
    return [Fact(f"{sentence}; no other size was tried", (size,))]


def _limit(result: ProbeResult) -> Fact:
    """Say what limits the answer, how long it ran, and which sizes above it failed or ran."""
    size = result.batch_size
    sentence = _LIMITS.get(result.limited_by, result.limited_by)
    if result.limiting_step is not None:
        sentence += f", in step {result.limiting_step!r}"
    sentence += f"; batch {size} ran"
    if result.confirmation is not None and result.confirmation.steps:
        kind = "optimizer step" if _is_of_command(result) else "call"
        sentence += f" for {count(result.confirmation.steps, kind, f'{kind}s')}"
    larger = [trial for trial in _telling(result) if trial.batch_size > size]
    failed = min(
        (trial for trial in larger if not trial.passed),
        key=lambda trial: (trial.batch_size, trial.replayed),
        default=None,
    )
    if failed is None:
        return Fact(sentence, (size,))
    sentence += f"; batch {failed.batch_size} failed"
    if failed.replayed:
        sentence += " a replay"
    uncapped = _without_the_cap(result, failed)
    if uncapped is None:
        return Fact(sentence, (size, failed.batch_size))
    budget = format_bytes(failed.cap_bytes or 0)
    return Fact(
        f"{sentence} under the budget ({budget}); without it, {uncapped.text}",
        (size, failed.batch_size, *uncapped.sizes),
    )


def _telling(result: ProbeResult) -> Iterator[Trial]:
    """Yield the trials that say whether their size fits."""
    for trial in result.trials:
        if trial.accumulation_steps == 1 and trial.verdict not in _SAYS_NOTHING:
            yield trial


def _without_the_cap(result: ProbeResult, failed: Trial) -> Fact | None:
    """Say how the largest size that ran did so although a smaller one failed; None if it has no larger cap, or is smaller."""
    largest, cap_bytes = result.limit_batch_size, failed.cap_bytes or math.inf
    ran = []
    for trial in _telling(result):
        if (
            trial.passed
            and trial.batch_size == largest
            and (trial.cap_bytes or math.inf) > cap_bytes
        ):
            ran.append(trial)
    if largest < failed.batch_size or not ran:
        return None
    how = "passed a replay" if all(trial.replayed for trial in ran) else "ran"
    next_size = result.first_failing_batch_size
    if next_size is None or next_size <= largest:
        return Fact(f"batch {largest} {how}", (largest,))
    return Fact(f"batch {largest} {how} and {next_size} failed", (largest, next_size))


def _holds_for(result: ProbeResult) -> Fact:
    """Say in which processes, versions and settings the answer holds."""
    environment = result.environment
    is_of_ranks = result.world_size > 1
    where = f"{result.world_size} fresh processes" if is_of_ranks else "a fresh process"
    if "command" in environment and environment.get("device") == SIMULATED:
        where += " on a simulated card"
    if "after" in environment:
        where += f" after {environment['after']}"
    if is_of_ranks:
        where += ", one for each rank"
    elif not environment.get("isolated"):
        where += ", and this one in its state before the probe"
    parts = [where]
    versions = [
        f"{name} {environment[name]}" for name in ("torch", "cuda", "hip") if environment.get(name)
    ]
    if versions:
        parts.append(", ".join(versions))
    for name, value in environment.get("allocator_settings", {}).items():
        parts.append(f"{name}={value}")
    return Fact("; ".join(parts))


def _estimates(result: ProbeResult) -> list[Fact]:
    if not result.estimates:
        return []
    lines = [Fact(f"never used; {result.batch_size} was measured:")]
    for name, size in result.estimates.items():
        estimate = "none" if size is None else f"{size:.0f}"
        lines.append(Fact(f"{name}: {estimate}"))
    return lines


def _state(result: ProbeResult) -> Fact:
    if result.environment.get("isolated"):
        return Fact("trials ran in separate processes: nothing in this process was changed")
    if result.state_verified:
        return Fact("restored and compared bit for bit: identical")
    if NoteKind.NOT_RESTORED in result.note_kinds.values():
        return Fact("restored and compared bit for bit, except what the notes name as not restored")
    return Fact("not compared bit for bit: this result makes no claim about it")


def _time(result: ProbeResult) -> Fact:
    replayed = sum(trial.replayed for trial in result.trials)
    ran = len(result.trials) - replayed
    total = f"{format_seconds(result.elapsed_s)} for {count(ran, 'trial', 'trials')}"
    if replayed:
        total += f" and {count(replayed, 'replay', 'replays')}"
    if not min(result.elapsed_s, result.in_steps_s) > 0:  # no step was timed
        return Fact(total)
    share = result.in_steps_s / result.elapsed_s
    if _is_of_command(result):
        each = format_seconds(result.elapsed_s / max(1, ran))
        return Fact(
            f"{total}, {each} each; {100 * (1 - share):.0f} % of it to start and end the command"
        )
    return Fact(f"{total}, {100 * share:.0f} % of it inside the step")
