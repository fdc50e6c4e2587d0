"""What the processes of a command report of themselves, and what follows from all of them together. Pure, but for reading.

`site/sitecustomize.py` writes the reports. A process that has not imported torch writes none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from oomprobe.ground.units import known
from oomprobe.records.plain import from_plain
from oomprobe.records.trials import RankTrial, Verdict
from oomprobe.runners.workers.settling import sum_of_known
from oomprobe.tape.record import NotRecorded, TapedTrial
from oomprobe.verdicts import Link

TOLERANCE = 1e-6  # of a fraction, which torch keeps as a float
NO_RECORDING = (
    "the command recorded nothing: that takes torch 2.14 or later with its own allocator, "
    "optimizers that step, and one GPU for each process"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of one device, as one process sees it."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    reserved_bytes: int  # by this process's allocator, now
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    retries: int  # times that the allocator released its cache to serve a request
    requested: tuple[
        tuple[int, int], ...
    ]  # bytes and blocks, in all, by the end of each of the first steps
    fraction: float | None  # of the total that the allocator may reserve; None: unknown
    outside_bytes: (
        int | None
    )  # the most that was in use but not reserved by this process; None: unknown
    workspace_bytes: int = 0  # of a simulated card: the largest that a convolution may want


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """The last report of one process."""

    pid: int
    host: str
    rank: int | None
    world_size: int | None
    program: str  # the name of its file
    why: str  # it was written: "import" of torch, "step", "oom", "exit"
    begun_s: float  # times of day: when it imported torch, and when it wrote this
    at_s: float
    torch: str
    cuda: str | None
    steps: int  # of each optimizer, on average
    step_s: tuple[float, ...]  # times of day of the first optimizer step and the last
    ooms: int  # out-of-memory errors of the allocator
    raised_ooms: (
        int  # which reached the program; torch handles others itself, of cuDNN and Inductor
    )
    where: (
        str | None
    )  # the user's line that ran out of memory, or whose exception ended the process
    errors: tuple[Link, ...]  # the exception that ended the process, and its causes
    devices: tuple[Memory, ...]  # on which it has reserved memory
    pinned_bytes: int | None = None  # most pinned memory of the host; None: unknown
    # On a simulated card:
    host_bytes: int | None = None  # that and other memory of the host
    notes: tuple[str, ...] = ()  # what was assumed
    not_covered: tuple[str, ...] = ()  # what was left out
    not_compared: str = ""  # what nobody has compared with torch's allocator
    refusal: str = ""  # why the program, or a part of it, cannot be simulated
    read_at: str = ""  # the line that read last what has no value

    @property
    def name(self) -> str:
        """The process as a reader knows it."""
        return f"process {self.pid} on {self.host}" if self.rank is None else f"rank {self.rank}"

    @property
    def failure(self) -> Verdict | None:
        """What it has met, though its program may have caught that; None if nothing."""
        if self.raised_ooms or self.why == "oom":
            return Verdict.OOM
        return Verdict.BUG if self.errors else None


@dataclass(frozen=True, slots=True)
class UsedCard:
    """A device, with all processes of the command that have reserved memory there."""

    users: Sequence[tuple[ProcessReport, Memory]]

    @property
    def memory(self) -> Memory:
        """The memory as the first process sees it."""
        return self.users[0][1]

    @property
    def outside_bytes(self) -> int | None:
        """Memory in use but not reserved by the command's allocators; None if unknown."""
        reserved_bytes = sum(memory.reserved_bytes for _, memory in self.users)
        outside = []
        for _, memory in self.users:
            if memory.outside_bytes is not None:  # it counts what the other processes have reserved
                outside.append(memory.outside_bytes + memory.reserved_bytes - reserved_bytes)
        return max(outside, default=None)

    @property
    def available_bytes(self) -> int:
        """Memory that the command's allocators may reserve."""
        return self.memory.total_bytes - (self.outside_bytes or 0)

    @property
    def peak_reserved_bytes(self) -> int:
        """The sum of the peaks of all processes."""
        return sum(memory.peak_reserved_bytes for _, memory in self.users)

    @property
    def workspaces_bytes(self) -> int:
        """The sum of the workspaces that convolutions of all processes may want."""
        return sum(memory.workspace_bytes for _, memory in self.users)


# Bytes and blocks that each of the first steps requested from the allocators, by process and device.
Requested = Mapping[str, Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class RunReports:
    """What all processes of a command have reported so far, in the order in which they wrote it."""

    reports: Sequence[ProcessReport] = ()

    @classmethod
    def read(cls, folder: Path) -> RunReports:
        """Read the reports in a folder."""
        reports = [
            from_plain(ProcessReport, json.loads(path.read_bytes()))
            for path in folder.glob("*.json")
        ]
        return cls(sorted(reports, key=lambda report: report.at_s))

    @property
    def training(self) -> list[ProcessReport]:
        """The reports of processes whose optimizers have stepped."""
        return [report for report in self.reports if report.steps]

    @property
    def world_size(self) -> int:
        """How many ranks the command has; 1 if no process knows."""
        return max((report.world_size or 1 for report in self.reports), default=1)

    @property
    def steps(self) -> int:
        """The fewest steps of a process that trains; 0 if none does."""
        return min((report.steps for report in self.training), default=0)

    @property
    def step_s(self) -> float | None:
        """Seconds for each step of the slowest process; None if none has made two."""
        slowest_s = 0.0
        for report in self.training:
            if report.steps > 1:
                took_s = report.step_s[-1] - report.step_s[0]
                slowest_s = max(slowest_s, took_s / (report.steps - 1))
        return slowest_s or None

    @property
    def steps_of_all(self) -> int:
        """The fewest steps of any rank; 0 while one that the others know of has not stepped."""
        return self.steps if len(self.training) >= RunReports(self.training).world_size else 0

    @property
    def missing_ranks(self) -> int:
        """How many ranks have never reported, by what the training ones know."""
        known = {report.rank for report in self.reports if report.rank is not None}
        return RunReports(self.training).world_size - len(known)

    @property
    def all_report(self) -> bool:
        """Whether every process that holds memory of a device reports, as far as can be known.

        There must be as many as there are ranks. A process beside them that does not report (python -I, a container) cannot be
        told from none, but is rare: what makes one process silent makes all of a command silent.
        """
        return (
            sum(bool(report.devices or report.steps) for report in self.reports) >= self.world_size
        )

    @property
    def refusal(self) -> str:
        """Why the command cannot be simulated; "" if nothing was refused."""
        return next((report.refusal for report in self.reports if report.refusal), "")

    @property
    def read_at(self) -> str:
        """The line that read an unknown value before a process failed; "" if none did."""
        return next((report.read_at for report in self.reports if report.errors), "")

    @property
    def caught_oom(self) -> bool:
        """Whether an out-of-memory error has reached a program."""
        return any(report.raised_ooms for report in self.reports)

    @property
    def out_of_memory(self) -> ProcessReport | None:
        """The first report of a process that has run out of memory."""
        for report in self.reports:
            if report.failure is Verdict.OOM:
                return report
        return None

    @property
    def is_pressed(self) -> bool:
        """Whether an allocator had to release its cache, or has refused something."""
        return any(
            report.ooms or memory.retries for report in self.reports for memory in report.devices
        )

    @property
    def may_recover(self) -> bool:
        """Whether no error has reached a program."""
        return not any(report.raised_ooms or report.errors for report in self.reports)

    @property
    def goes_on(self) -> bool:
        """Whether a program has stepped since an out-of-memory error reached it."""
        return any(report.raised_ooms and report.why == "step" for report in self.reports)

    @property
    def is_in_trouble(self) -> bool:
        """Whether a process with memory on a device has failed, or has run out of memory and not stepped since."""
        return any(report.failure and report.devices for report in self.reports)

    @property
    def cards(self) -> list[UsedCard]:
        """The devices that the command uses; ranks that see one device each all call it 0.

        A process that ended before another one began on its device, such as a check before training, is left out.
        """
        devices: dict[tuple[str, str], list[tuple[ProcessReport, Memory]]] = defaultdict(list)
        for report in self.reports:
            for memory in report.devices:
                devices[report.host, memory.uuid].append((report, memory))
        cards = []
        for users in devices.values():
            begun_s = max(report.begun_s for report, _ in users)
            cards.append(
                UsedCard(
                    [user for user in users if user[0].why != "exit" or user[0].at_s >= begun_s]
                )
            )
        return cards

    @property
    def fullest_card(self) -> UsedCard:
        """The device of which the command has reserved the largest share; without users if it has reserved none."""
        return max(
            self.cards,
            key=lambda card: card.peak_reserved_bytes / max(1, card.available_bytes),
            default=UsedCard(()),
        )

    @property
    def outside_bytes(self) -> int | None:
        """The most memory of any device that is in use but not reserved by the command; None if unknown."""
        return max(known(card.outside_bytes for card in self.cards), default=None)

    @property
    def pinned_bytes(self) -> int | None:
        """What the processes that train have pinned of the host; None if unknown."""
        return sum_of_known([report.pinned_bytes for report in self.training])

    @property
    def host_bytes(self) -> int | None:
        """The same with other memory of the host, on a simulated card."""
        return sum_of_known([report.host_bytes for report in self.training])

    @property
    def requested(self) -> Requested:
        """What each of the first steps requested; without allocators that do not count it, such as cudaMallocAsync."""
        requested = {}
        for report in self.training:
            for memory in report.devices:
                steps = [
                    (after[0] - before[0], after[1] - before[1])
                    for before, after in pairwise(memory.requested)
                ]
                if any(nbytes for nbytes, _ in steps):
                    requested[f"{report.rank} {memory.uuid}"] = steps
        return requested

    def tapes(self, folder: Path) -> tuple[TapedTrial, ...]:
        """Read what the ranks have recorded there, in an order that is the same in each trial.

        Raises:
            NotRecorded: one of them could not record, or has not one GPU for itself.
        """
        cards = sorted(self.cards, key=lambda card: card.users[0][0].name)
        # One of a process that uses several GPUs stands here several times.
        paths = [
            folder / f"{user.host}-{user.pid}.tape" for card in cards for user, _ in card.users
        ]
        written = {*filter(Path.exists, paths)}
        if not 0 < len(written) == len(paths) == len(cards):
            raise NotRecorded(NO_RECORDING)
        return tuple(
            TapedTrial.of_history(
                json.loads(path.read_bytes()),
                most_bytes=card.available_bytes,
                total_bytes=card.memory.total_bytes,
            )
            for path, card in zip(paths, cards, strict=True)
        )

    def ranks(self, *, passed: bool) -> tuple[RankTrial, ...]:
        """Return a record for each rank with memory, if there are several; in a failed run, only failures have a verdict."""
        ranks = []
        for card in self.cards:
            for report, memory in card.users:
                if report.rank is not None:
                    trial = RankTrial(
                        rank=report.rank,
                        verdict=Verdict.FITS if passed else report.failure,
                        peak_allocated_bytes=memory.peak_allocated_bytes,
                        peak_reserved_bytes=memory.peak_reserved_bytes,
                        available_bytes=card.available_bytes,
                        where=report.where,
                    )
                    ranks.append(trial)
        if len(ranks) < 2:
            return ()
        return tuple(sorted(ranks, key=lambda trial: trial.rank))

    def uncapped(self, fractions: Mapping[str, float]) -> str | None:
        """Say which process was not held to its fraction, so that a pass does not prove the margin; None if all were."""
        cards = self.cards
        if not cards:
            return (
                "no process of the command reported its GPU's memory. It may use no GPU or no torch; run Python with -I, -E or "
                "-S, or with an emptied environment (sudo, env -i, a container, srun --export=NONE); or run on other machines, "
                "which do not share this one's folder for temporary files (set TMPDIR to a folder that all see)"
            )
        for card in cards:
            if len(card.users) > 1:
                names = " and ".join(report.name for report, _ in card.users)
                return f"{names} hold memory of one GPU, {card.memory.name}, and a cap for each would not be one for both"
            [(report, memory)] = card.users
            wanted = fraction_of(memory, fractions) + TOLERANCE
            if memory.fraction is None:
                return f"{report.name} did not report the cap of its allocator"
            if memory.fraction > wanted:
                return (
                    f"{report.name} set its allocator's cap to {memory.fraction:.3g} of the GPU itself "
                    "(set_per_process_memory_fraction)"
                )
            if memory.peak_reserved_bytes > wanted * memory.total_bytes:
                return f"{report.name} reserved more than its cap before its first step ended, as older torch lets it"
        return None


def fraction_of(memory: Memory, fractions: Mapping[str, float]) -> float:
    """Return the fraction for a device; "" stands for all that have none of their own."""
    return fractions.get(memory.uuid, fractions[""])


def limiting_rank(ranks: Sequence[RankTrial]) -> int | None:
    """Return the rank that ran out of memory, or of several and of passes, the one with the least memory left."""
    for verdict in (Verdict.OOM, Verdict.FITS):
        candidates = [trial for trial in ranks if trial.verdict is verdict]
        if candidates:
            return min(candidates, key=lambda trial: trial.left_bytes).rank
    return None


def are_the_same(requested: Requested, last: Requested) -> bool:
    """Return whether the same processes requested the same in the steps that both have made."""
    if not requested or requested.keys() != last.keys():
        return False
    return all(
        step == last_step
        for name, steps in requested.items()
        for step, last_step in zip(steps, last[name], strict=False)
    )
