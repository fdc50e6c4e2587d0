"""What the processes of a command report of themselves, and what follows from all of them together. Pure, but for `read`.

`site/sitecustomize.py` writes the reports. A process that has not imported torch writes none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from oomprobe.records.plain import from_plain
from oomprobe.records.trials import RankTrial, Verdict
from oomprobe.verdicts import Link

TOLERANCE = 1e-6  # of a fraction, which torch keeps as a float


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
    # Bytes and blocks asked of the allocator, in all, by the end of each of the first steps.
    asked: tuple[tuple[int, int], ...]
    fraction: float | None  # of the total that the allocator may reserve; None: unknown
    outside_bytes: int | None  # the most that was in use but not reserved by this process; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
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
    raised_ooms: int  # those that reached the program; torch handles others itself, of cuDNN and Inductor
    where: str | None  # the user's line that ran out of memory, or whose exception ended the process
    errors: tuple[Link, ...]  # the exception that ended the process, and its causes
    devices: tuple[Memory, ...]  # on which it has reserved memory

    @property
    def name(self) -> str:
        """The process as a reader knows it."""
        return f"process {self.pid} on {self.host}" if self.rank is None else f"rank {self.rank}"


def read(folder: Path) -> list[Report]:
    """Return the reports in a folder, in the order in which they were written."""
    reports = [from_plain(Report, json.loads(path.read_bytes())) for path in folder.glob("*.json")]
    return sorted(reports, key=lambda report: report.at_s)


def training(reports: Iterable[Report]) -> list[Report]:
    """Return the reports of processes whose optimizers have stepped."""
    return [report for report in reports if report.steps]


def world_size(reports: Iterable[Report]) -> int:
    """Return how many ranks the command has; 1 if no process knows."""
    return max((report.world_size or 1 for report in reports), default=1)


def least_steps(reports: Iterable[Report]) -> int:
    """Return how many steps every rank has made; 0 while one has not stepped."""
    ranks = training(reports)
    return min(report.steps for report in ranks) if len(ranks) >= max(1, world_size(ranks)) else 0


def all_report(reports: Sequence[Report]) -> bool:
    """Return whether every process that holds memory of a device reports, as far as can be known.

    There must be as many as there are ranks. A process beside them that does not report (python -I, a container) cannot be
    told from none, but is rare: what makes one process silent makes all of a command silent.
    """
    return sum(bool(report.devices or report.steps) for report in reports) >= world_size(reports)


Card = Sequence[tuple[Report, Memory]]  # all processes that have reserved memory of one device


def cards(reports: Iterable[Report]) -> list[Card]:
    """Return the devices that the command uses; ranks that see one device each all call it 0.

    A process that ended before another one began on its device, such as a check before training, is left out.
    """
    found: dict[tuple[str, str], list[tuple[Report, Memory]]] = defaultdict(list)
    for report in reports:
        for memory in report.devices:
            found[report.host, memory.uuid].append((report, memory))
    return [[one for one in card if not _was_earlier(one[0], card)] for card in found.values()]


def _was_earlier(report: Report, card: Card) -> bool:
    return report.why == "exit" and any(other.begun_s > report.at_s for other, _ in card)


def outside_bytes(card: Card) -> int | None:
    """Return the memory of a device that is in use but not reserved by the command's allocators; None if unknown."""
    reserved_bytes = sum(memory.reserved_bytes for _, memory in card)
    known = [
        memory.outside_bytes - (reserved_bytes - memory.reserved_bytes)
        for _, memory in card
        if memory.outside_bytes is not None
    ]
    return max(known, default=None)


def most_outside_bytes(found: Iterable[Card]) -> int | None:
    """Return the largest `outside_bytes` of any device; None if all are unknown."""
    return max((bytes_ for card in found if (bytes_ := outside_bytes(card)) is not None), default=None)


def available_bytes(card: Card) -> int:
    """Return the memory of a device that the command's allocators may reserve."""
    return card[0][1].total_bytes - (outside_bytes(card) or 0)


def of_ranks(found: Iterable[Card], *, passed: bool) -> tuple[RankTrial, ...]:
    """Return a record for each rank that uses these devices, if there are several; in a failed run, only failures have a verdict."""
    ranks = []
    for card in found:
        for report, memory in card:
            if report.rank is not None:
                is_oom, is_bug = report.raised_ooms or report.why == "oom", report.errors
                failed = Verdict.OOM if is_oom else Verdict.BUG if is_bug else None
                ranks.append(
                    RankTrial(
                        rank=report.rank,
                        verdict=Verdict.FITS if passed else failed,
                        peak_allocated_bytes=memory.peak_allocated_bytes,
                        peak_reserved_bytes=memory.peak_reserved_bytes,
                        available_bytes=available_bytes(card),
                        where=report.where,
                    )
                )
    return tuple(sorted(ranks, key=lambda one: one.rank)) if len(ranks) > 1 else ()


def limiting_rank(ranks: Sequence[RankTrial]) -> int | None:
    """Return the rank that ran out of memory, or of several and of passes, the one with the least memory left."""
    which = [one for one in ranks if one.verdict is Verdict.OOM] or [
        one for one in ranks if one.verdict is Verdict.FITS
    ]
    return min(which, key=lambda one: one.left_bytes).rank if which else None


Asked = dict[str, list[tuple[int, int]]]


def asked_by_step(reports: Iterable[Report]) -> Asked:
    """Return the bytes and blocks that each of the first steps asked of the allocators, by process and device."""
    found = {}
    for report in training(reports):
        for memory in report.devices:
            steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(memory.asked)]
            if any(bytes_ for bytes_, _ in steps):  # cudaMallocAsync does not count them
                found[f"{report.rank} {memory.uuid}"] = steps
    return found


def are_the_same(one: Asked, other: Asked) -> bool:
    """Return whether the same processes asked for the same in the steps that both have made."""
    if not one or one.keys() != other.keys():
        return False
    return all(mine == theirs for name in one for mine, theirs in zip(one[name], other[name], strict=False))


def uncapped(reports: Iterable[Report], fractions: Mapping[str, float]) -> str | None:
    """Say which process was not held to its fraction, so that a pass does not prove the margin; None if all were."""
    found = cards(reports)
    if not found:
        return (
            "no process of the command reported its GPU's memory. It may use no GPU or no torch; run Python with -I, -E or -S, or "
            "with an emptied environment (sudo, env -i, a container, srun --export=NONE); or run on other machines, which do "
            "not share this one's folder for temporary files (set TMPDIR to a folder that all see)"
        )
    for card in found:
        if len(card) > 1:
            names = " and ".join(report.name for report, _ in card)
            return f"{names} hold memory of one GPU, {card[0][1].name}, and a cap for each would not be one for both"
        report, memory = card[0]
        wanted = fractions.get(memory.uuid, fractions[""])
        if memory.fraction is None:
            return f"{report.name} did not report the cap of its allocator"
        if memory.fraction > wanted + TOLERANCE:
            return (
                f"{report.name} set its allocator's cap to {memory.fraction:.3g} of the GPU itself "
                "(set_per_process_memory_fraction)"
            )
        if memory.peak_reserved_bytes > (wanted + TOLERANCE) * memory.total_bytes:
            return f"{report.name} reserved more than its cap before its first step ended, as older torch lets it"
    return None
