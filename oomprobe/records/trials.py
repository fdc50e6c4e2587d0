"""The records of a probe, and the contract between a session and its runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

from oomprobe.records.breakdown import Breakdown
from oomprobe.records.kinds import Bytes, Plain, Samples
from oomprobe.records.notes import Note


class Verdict(StrEnum):
    """How a trial ended; its text in JSON is the value.

    Attributes:
        FITS: The size ran.
        OOM: The memory of the device ran out, or that under the cap.
        HOST_OOM: Host memory ran out.
        SIZE_LIMIT: A kernel refuses sizes this large, whatever the memory.
        POISONED: A sticky error: the process can no longer use the device.
        CRASHED: The process of the trial died.
        TIMED_OUT: A time limit passed.
        BUG: Any other error.

    Examples:
        >>> Verdict("out of memory") is Verdict.OOM
        True
    """

    FITS = "fits"
    OOM = "out of memory"
    HOST_OOM = "out of host memory"
    SIZE_LIMIT = "size limit"
    POISONED = "poisoned"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    BUG = "bug"


LOST = frozenset(
    {Verdict.POISONED, Verdict.CRASHED}
)  # the process died or can give no further verdict
NO_VERDICT = LOST | {Verdict.TIMED_OUT}  # the trial says nothing about the size


class Phase(StrEnum):
    """Why a size was tried. The look counts as growing; plans, mixed values and the breakdown count as confirming.

    Attributes:
        GROW: To double until memory runs out.
        BISECT: To narrow the gap under the cap.
        RECHECK: To run the smallest failing size once more.
        CONFIRM: To run the answer for many calls.

    Examples:
        >>> [phase.value for phase in Phase]
        ['grow', 'bisect', 'recheck', 'confirm']
    """

    GROW = "grow"
    BISECT = "bisect"
    RECHECK = "recheck"
    CONFIRM = "confirm"


SECOND_OPINIONS = (Phase.RECHECK, Phase.CONFIRM)
ALL_ROWS = -1  # stands for the rows of a table that take turns in one trial


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrial:
    """What one of several ranks said about a trial.

    Attributes:
        rank: Its number, from 0.
        verdict: How the trial ended there; None if the rank waited for another and was ended.
        peak_allocated_bytes, peak_reserved_bytes, error: As in `Trial`.
        available_bytes: Memory available to the rank on its card; None if not measured yet.
        where: Where it failed, or where it waited.
    """

    rank: int
    verdict: Verdict | None
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    available_bytes: Bytes | None = None
    error: str | None = None
    where: str | None = None

    @property
    def reserved_of_available(self) -> tuple[int, int]:
        """Bytes that the peak reserved, and available ones; 0 where that is unknown."""
        return self.peak_reserved_bytes or 0, self.available_bytes or 0

    @property
    def left_bytes(self) -> int:
        """What the peak left of the available memory; 0 if that is unknown."""
        reserved_bytes, available_bytes = self.reserved_of_available
        return available_bytes - reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One batch size, tried.

    Attributes:
        batch_size: The size passed to the step.
        verdict: How it ended.
        phase: Why it was tried.
        steps: Completed calls of the step; of a command, optimizer steps that every rank has made.
        cap_bytes: Limit of the allocator; None if only the device's own limit applied, as while growing in a process
            that may die.
        peak_allocated_bytes: Most memory in live tensors during the trial; None if not measured.
        peak_reserved_bytes: Most memory held by the allocator during the trial; None if not measured.
        peak_upper_bytes: Upper end of a simulated peak, with the largest workspace that a convolution may want, as far as
            the cap allows; None on other devices.
        step_s: Median wall time of a call once every optimizer had stepped; None if no such call completed.
        samples_per_s: ``batch_size / step_s``.
        alloc_retries: Times the allocator had to free its cache to serve a request.
        pinned_bytes: Most pinned memory of the host during the trial, as torch rounds and keeps it,
            of all ranks together; None if not measured, as in a replay.
        host_bytes: The same with other tensors of 1 MiB or more that the trial made in host memory;
            only simulated cards know.
        leaked_bytes: Memory still in use after the trial and a full clean-up.
        step_leaked_bytes: Memory that each further step leaves in use, not counting uncollected garbage.
        error: Text of the failure; None if it passed.
        where: Where it failed, such as ``"backward, model.py:142"``.
        step_name: Which of several named steps failed, or had the highest peak; None for a single step.
        accumulation_steps: Micro-batches per optimizer step; 1 unless an accumulation plan was run.
        replayed: Whether what smaller trials asked of the allocator was replayed at this size, and the step did not run.
            Such trials guide the search; deciding trials run the step.
        ranks: What each rank said, if there were several. The trial's own peaks are then the highest of any rank, its times
            those of the slowest.
        limiting_rank: The rank that failed by itself; of several, and of passes, the one with the least memory left.
        settled_after: Calls after which the trial ended early, because everything that decides about memory had repeated: then
            identical further calls cannot fail. None if it made all its calls.

    Examples:
        >>> import oomprobe
        >>> def show(trial):
        ...     print(trial.batch_size, trial.passed, trial.verdict, f"{trial.peak_reserved_bytes:,} bytes")
        >>> checked = oomprobe.check_target("oomprobe.demo:wide_mlp", 64, device="sim:1GiB", progress=show)
        64 True fits ... bytes
    """

    batch_size: Samples
    verdict: Verdict
    phase: Phase
    steps: int = 0
    cap_bytes: Bytes | None = None
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    peak_upper_bytes: Bytes | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    alloc_retries: int = 0
    pinned_bytes: Bytes | None = None
    host_bytes: Bytes | None = None
    leaked_bytes: int = 0
    step_leaked_bytes: int = 0
    error: str | None = None
    where: str | None = None
    step_name: str | None = None
    accumulation_steps: Samples = 1
    replayed: bool = False
    ranks: tuple[RankTrial, ...] = ()
    limiting_rank: int | None = None
    settled_after: int | None = None

    @classmethod
    def of(cls, request: Request, verdict: Verdict, **measured: Any) -> Trial:
        """Return the trial of a request that ended like this; `measured` are its other fields."""
        asked = {
            "batch_size": request.batch_size,
            "phase": request.phase,
            "cap_bytes": request.cap_bytes,
        }
        return cls(
            **{
                **asked,
                "accumulation_steps": request.accumulation_steps,
                **measured,
                "verdict": verdict,
            }
        )

    @property
    def passed(self) -> bool:
        """Whether the size ran."""
        return self.verdict is Verdict.FITS

    @property
    def peaks(self) -> tuple[int, int]:
        """Peak allocated and peak reserved bytes; 0 where not measured."""
        return self.peak_allocated_bytes or 0, self.peak_reserved_bytes or 0


def last_of(trials: Sequence[Trial], batch_size: int, *, passed: bool = True) -> Trial:
    """Return the last trial of a size that passed, or failed, without gradient accumulation."""
    return [
        t
        for t in trials
        if (t.batch_size, t.passed, t.accumulation_steps) == (batch_size, passed, 1)
    ][-1]


# --- between a session and a runner ---

SIMULATED = "simulated"  # the device of a result's environment
# What a simulated card leaves out.
UNSIMULATED = (
    "workspaces of cuDNN, including its attention: only the card knows them (the upper end of the peak includes those of convolutions)",
    "kernels that CUDA loads later, other processes on the card, NCCL",
)
# And of a step that uses streams of its own:
SIDE_STREAMS = "when memory of side streams comes back: kernels ended at once, and backward ran on one stream, not on those of its forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Properties of a device, which may be in another process; named as in `Device`."""

    name: str
    torch_device: str
    total_bytes: int
    on_host: bool
    integrated: bool = False
    edge_bytes: int = 0
    counts_bytes: bool = False  # whether it counts the bytes that its allocator hands out
    is_simulated: bool = False  # whether it may repeat calls instead of running them
    not_covered: tuple[str, ...] = ()  # what a simulated card leaves out
    uuid: str = ""  # the same in every process; "" if unknown
    half: str = (
        "bf16"  # the 16-bit floats for which its attention kernels are fast: "bf16" or "fp16"
    )

    @property
    def emptying(self) -> str:
        """What to type to give its allocator's cache back."""
        kind = self.torch_device.split(":")[0]
        if self.is_simulated:  # a simulated card's tensors are in host memory
            kind = "cuda"
        return f"torch.{kind}.empty_cache()"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What a session knows about its runner before the first trial."""

    device: DeviceInfo
    step_names: tuple[str, ...]
    threads: int
    starts_anew: bool = (
        False  # whether each call starts the loop anew, so that many calls show no more than few
    )
    max_batch: int | None = None  # the largest size that there are data for; None: unknown
    replaceable: bool = False  # whether a process that dies or is poisoned can be replaced, and its trial tried again
    world_size: int = 1  # ranks that run each trial
    grows_capped: bool = False  # whether trials that grow have the cap of all others
    confirmations: int = 1  # how often an answer must pass, each time in fresh processes
    failure_cost_s: float = 0.0  # what a failure takes, if that is as much as many passes
    runs_plans: bool = (
        True  # whether it can run several micro-batches per optimizer step, and record a breakdown
    )
    alone: str = (
        "Run step_fn(model, {batch_size}) once by itself to see it"  # what to type to see a failure
    )
    not_covered: tuple[str, ...] | None = (
        None  # what trials leave out; None: what those of a step function do
    )
    environment: Mapping[str, Any] = field(
        default_factory=dict
    )  # what the answer holds for, if not this process's
    model: str | None = None  # its class
    explains: bool = False  # whether it can say why a trial runs out of memory
    records: bool = (
        False  # whether it can record what the calls of a trial ask of a card's allocator
    )
    builds: bool = False  # whether its processes build the model as training will, which leaves something in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a step, as a trial is asked to make it."""

    step: str  # its name
    batch_size: int
    row: int = 0  # of a table: which of the axis's values the step gets
    # What else the step gets, by name; "batch_size" in place of the call's own. Empty: what its row says.
    arguments: tuple[tuple[Any, ...], ...] = ()
    others: tuple[tuple[tuple[Any, ...], ...], ...] = ()  # on ranks from 1; none: the same on all
    accumulates: bool = (
        False  # whether gradients only accumulate, as in a micro-batch: no optimizer steps
    )
    is_extra: bool = False  # whether the trial has passed by then, so that a bug only ends it
    is_recorded: bool = False  # whether to record its allocations, for a breakdown

    def on_rank(self, rank: int) -> Call:
        """Return the call as this rank makes it."""
        arguments = (self.arguments, *self.others)[rank if self.others else 0]
        return replace(self, arguments=arguments, others=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """A trial learns how many calls a full step takes: it goes on until each step has made its full steps.

    Attributes:
        turns: The steps in turn.
        full_steps: That each makes in its turn.
        most_calls: To confirm: of each step, while there is time; 0: no more than it takes to learn.
        within_s: The time for such further calls.
    """

    turns: tuple[str, ...]
    full_steps: int
    most_calls: int = 0
    within_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """A trial goes on until its calls repeat.

    Attributes:
        period: Calls that must repeat together.
        most_calls: After which it ends in any case.
    """

    period: int
    most_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A trial to run: its calls, and under which conditions."""

    phase: Phase  # copied into the `Trial`
    calls: tuple[Call, ...]
    # How it goes on after its calls (`oomprobe.rules.program.further`), if it does.
    learns: Learning | None = None
    settles: Settling | None = None
    cap_bytes: int | None = None  # limit of the allocator; None: no limit
    looks: bool = False  # whether to find out how many calls a trial needs
    watches_inputs: bool = False  # whether to count what reaches the model
    fresh: bool = False  # whether nothing may have run before: in a new process, if there are any, and compiled anew
    as_built: bool = False  # whether the first trial of a process that `builds` keeps what building left in the cache
    # Whether it may not be replayed. A search sets it where it confirms; what is not asked by one runs.
    must_run: bool = True
    records: bool = False  # whether to record what each call asks of the allocator
    explains: bool = False  # whether to say why it runs out of memory
    deadline_s: float | None = (
        None  # on this machine's monotonic clock, at the time of the request; None: no limit
    )
    passed: tuple[int, ...] = ()  # the sizes that have passed
    learned: Mapping[str, Sequence[int]] = field(
        default_factory=dict
    )  # `Outcome.learned` of earlier trials

    @property
    def batch_size(self) -> int:
        """The size that is tried: the largest of any call."""
        return max(call.batch_size for call in self.calls)

    @property
    def row(self) -> int:
        """The row of a table that all calls have; `ALL_ROWS` if they differ."""
        rows = {call.row for call in self.calls}
        return rows.pop() if len(rows) == 1 else ALL_ROWS

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        runs = [
            len([*calls])
            for accumulates, calls in groupby(self.calls, attrgetter("accumulates"))
            if accumulates
        ]
        return max(runs, default=1)

    @property
    def confirms(self) -> bool:
        """Whether the answer rests on this trial."""
        return self.phase is Phase.CONFIRM

    @property
    def watches_growth(self) -> bool:
        """Whether to measure what each call leaves in memory."""
        return self.looks or self.fresh

    @property
    def smaller_passed(self) -> bool:
        """Whether a smaller size has passed: evidence for an ambiguous error text."""
        return any(size < self.batch_size for size in self.passed)

    @property
    def largest_passed(self) -> int | None:
        """The largest size that has passed; None if none has."""
        return max(self.passed, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A sample of the device's memory between trials."""

    available_bytes: int  # available to this process
    outside_bytes: int | None  # in use, but not by this process's allocator; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """What one call of a trial showed; how it is used stands in `oomprobe.rules.look`."""

    step: str  # its name
    served_bytes: int = 0  # that the allocator handed out; 0 if unknown
    blocks: int = 0  # that it handed out; 0 if unknown
    live_bytes: int = 0  # in live tensors afterwards; 0 if not watched
    peak_bytes: int = 0  # the highest allocation since the trial began; 0 if not watched
    # What reached the model; 0 if not watched.
    examples: int = 0  # the first dimension of the first tensor of each of its calls, added up
    values: int = 0  # the numbers in all tensors
    seconds: float | None = None  # None: a simulated device has repeated it
    # Where the call completed a full step, in which every optimizer of the step has stepped: how many calls that took, up to the last
    # optimizer; 0 if the step has none. None: it completed none.
    stepped: int | None = None
    mark: int | None = (
        None  # for what it did on the device and left there; None if that cannot be seen
    )
    counts: bool = False  # whether what the user's code holds has changed since the last call; False if not watched
    counted: int | None = (
        None  # the same as at the last check if nothing has changed that the user's code counts with; None: not checked
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished trial, what each of its calls showed, and what was measured around it."""

    trial: Trial
    records: tuple[CallRecord, ...] = ()  # of several ranks, what all of them showed together
    starts_alike: bool = True  # whether every trial starts at the same call
    ended_early: str | None = None  # the bug of an extra call that ended the trial
    measured: Measured | None = None
    outside_before_bytes: int | None = None  # `Measured.outside_bytes` before the trial
    outside_after_bytes: int | None = None
    refusal: str | None = None  # why the probe must stop, such as a large leak
    holders: tuple[
        str, ...
    ] = ()  # where memory grows from call to call, what the user's code held at the end
    gradients_hold_graphs: bool = (
        False  # where it grows: whether gradients are sums that keep the graph of each call
    )
    is_spent: bool = False  # whether its process must end: the step has replaced parameters of which there is no copy
    contradicts_replay: bool = False  # whether it proves earlier predicted trials wrong
    # Why trials cannot be predicted from those that ran; "" if they can, or it is not known yet.
    unpredicted: str = ""
    in_steps_s: float = 0.0  # time inside the step
    notes: tuple[
        Note, ...
    ] = ()  # what a reader of the result should know; the same note may come again
    # For each step the places of the optimizers that step, among those that building made; negative for all others.
    learned: Mapping[str, Sequence[int]] = field(default_factory=dict)
    breakdown: Breakdown | None = None
    # If the request records: `oomprobe.tape.record.TapedTrial`, or that as plain data, by rank; None
    # of a rank that was ended.
    taped: tuple[Any, ...] = ()
    unrecorded: str = ""  # why there is none
    why: Mapping[str, Plain] = field(
        default_factory=dict
    )  # it ran out of memory, if asked: an `oomprobe.results.why.Explanation` as plain data
    recomputed: float = (
        0.0  # share of the forward's module calls that backward made again, for a saving
    )
    typed: Mapping[str, str] = field(default_factory=dict)  # what to type for each saving
    blocks: int = 0  # that the model repeats, where a saving acts on them


class Runner(Protocol):
    """Runs trials for a session.

    In this process (`oomprobe.runners.local`), in processes that may die or on several ranks (`oomprobe.runners.workers`), or as runs of a
    command (`oomprobe.runners.command`).

    A runner promises this:

    - `run` starts cold and makes the calls of the request under its cap (a command makes as many, under a cap of its runner), then those
      that `rules.program.further` adds. It returns an `Outcome` however the trial ended: out of memory, a death, a time limit. It
      keeps no exception, frame or tensor of the trial, and the memory is back at its baseline unless its process has ended.
    - The `Trial` has the request's batch size, phase and cap, and its verdict is never BUG: `run` raises StepFailedError for a bug of the
      step, unless an extra call had it, and UnreliableError if the size was not really run. Any other exception ends the probe.
    - A second try is the session's business. `run` repeats a trial only for a reason other than its size:
        - what earlier trials left makes the step fail: trained weights, or a counter put back beside an iterator that has moved on;
        - a rank's data ended before those of the others;
        - a command found its port taken.
    - If the runner is `replaceable`, the next `run` replaces a process that died or was poisoned, and unless it `grows_capped`,
      trials that grow have no cap.
    - `Outcome.measured` is sampled after the first pass, when the step has loaded its kernels, and on host memory after each
      trial. `outside_before_bytes` and `outside_after_bytes` are sampled around each trial, where known.
    - The request carries what one process must know from another: which optimizers step (`Request.learned`). `must_run`
      concerns only runners that replay.
    """

    @property
    def facts(self) -> RunnerInfo:
        """What the session needs to know before the first trial."""
        ...

    def measure(self) -> Measured:
        """Sample the memory now."""
        ...

    def run(self, request: Request) -> Outcome:
        """Run one trial."""
        ...
