"""Run each trial on several ranks of this machine, which must all say that the size fits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, NoReturn

import tenacity

from oomprobe import errors
from oomprobe.ground import linux
from oomprobe.ground.units import format_seconds
from oomprobe.ground.waiting import until
from oomprobe.ground.words import count
from oomprobe.records.plain import from_plain
from oomprobe.records.trials import Measured, Outcome, Request, RunnerInfo
from oomprobe.runners.ranks_here import check_cards
from oomprobe.runners.signals import Clock, Interrupts
from oomprobe.runners.workers.agreement import (
    Answer,
    culprit,
    failed_outcome,
    has_failed,
    measured_of,
    passed_outcome,
)
from oomprobe.runners.workers.exit_status import ExitStatus
from oomprobe.runners.workers.group import Group
from oomprobe.runners.workers.messages import Hello, Message, raise_failure

# The other ranks have `Patience.late_s` to end a trial that one has passed, or this many times as long as that one took.
LATE_FACTOR = 10.0
MISSING_BYTES = 64 * 2**20  # of the memory of a group that was ended: the next one waits while more has not come back
BUILDS = 4  # attempts to build a group, if memory of the one before was not free yet
CONFIRMATIONS = 2  # each in a group of its own: under NCCL, DDP may hold one set of gradients more, by chance
ALONE = "Run one step at batch size {{batch_size}} under torchrun --nproc-per-node {ranks} to see it"
OUT_OF_STEP = (
    "{which} more than {seconds} after {passed} had finished batch {size}: {places}. Do all ranks make the same collectives, and the same "
    "number of them, in each step?"
)
BUILD_LATE = "rank {passed} had built the target, but {seconds} later it was not built on {which}: {places}"


class RanksRunner:
    """Runs trials on all ranks of a group; see `oomprobe.records.trials.Runner`. As a context manager it ends them on exit.

    A group lives while every rank passes. Any other end of a trial ends all its processes, because ranks that wait in a
    collective cannot be told anything. The next group is started early, so that its imports cost no time.
    """

    def __init__(self, ranks: int, task: Message, clock: Clock, interrupts: Interrupts) -> None:
        self._ranks, self._task, self._clock, self._interrupts = ranks, task, clock, interrupts
        self._group: Group | None = None
        self._spare: Group | None = None  # started, but with no task yet
        self._hellos: list[Hello] = []  # of the first group, by rank
        self._available_bytes: dict[int, int] = {}
        self._learned: dict[int, Mapping[str, Sequence[int]]] = {}  # which optimizers step, by rank
        self._building_s = 0.0
        self._small: Request | None = None  # the first that has passed
        self._sample: Measured | None = None  # of the memory after the first pass of a group, until it was told

    def __enter__(self) -> RanksRunner:
        """Start the first group and take over what it reports of the devices and the steps."""
        started_s = time.monotonic()
        try:
            self._ready()
        except BaseException:
            self.end()
            raise
        self._building_s = time.monotonic() - started_s
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @cached_property
    def facts(self) -> RunnerInfo:
        """What the ranks of the first group have reported; the device with the least memory stands for all."""
        every = [hello.facts.device for hello in self._hellos]
        smallest = min(every, key=lambda device: device.total_bytes)
        names = Counter(device.name for device in every)
        return replace(
            self._hellos[0].facts,
            device=replace(smallest, name=", ".join(f"{number} x {name}" for name, number in names.items())),
            replaceable=True,
            world_size=self._ranks,
            confirmations=CONFIRMATIONS,
            failure_cost_s=self._building_s,
            alone=ALONE.format(ranks=self._ranks),
        )

    # --- the groups ---

    def _ready(self) -> Group:
        """Return the group; if there is none, take the spare one or a new one, and wait until every rank has built the target."""
        if self._group is not None:
            return self._group
        answers = until(
            # Memory of the group before may not be free yet.
            lambda answers: not self._hellos or not _is_out_of_memory(answers),
            self._built,
            wait=tenacity.wait_exponential(multiplier=2),
            stop=tenacity.stop_after_attempt(BUILDS),
        )
        hellos = _hellos(answers)
        if len(hellos) < self._ranks:
            self._refuse(answers)
        if not self._hellos:
            check_cards([hello.facts.device for hello in hellos])
            self._hellos = hellos
        else:
            self._await_memory(hellos)
        return self._current

    @property
    def _current(self) -> Group:
        assert self._group is not None
        return self._group

    def _built(self) -> dict[int, Answer]:
        """Let a group build the target; it stays if every rank has done so."""
        self._group, self._spare = self._spare or self._new_group(), None
        answers = self._ask(dict.fromkeys(range(self._ranks), self._task), self._clock.end_s, building=True)
        if len(_hellos(answers)) < self._ranks:
            self._end_group()
        return answers

    def _refuse(self, answers: Mapping[int, Answer]) -> NoReturn:
        """Raise the error for a group that did not build the target."""
        rank = culprit(answers, {})
        if rank is None:
            places, passed = _places(answers), next(iter(answers))
            seconds, which = format_seconds(self._clock.patience.building_s), _ranks_of(answers)
            raise errors.UnreliableError(BUILD_LATE.format(passed=passed, seconds=seconds, which=which, places=places))
        answer = answers[rank]
        if isinstance(answer, ExitStatus) and answer.why is not None:
            raise self._clock.time_is_up(f"while the target was built ({_places(answers)})")
        if isinstance(answer, ExitStatus):
            raise errors.StepFailedError(
                f"rank {rank} of {self._ranks}, which was to build and run the target {self._task['target']}, died: "
                f"{answer.text()}\nNothing was probed. {ALONE.format(ranks=self._ranks).format(batch_size=1)}"
            )
        raise_failure(self._of_rank(rank, answer["failed"]), 0)

    def _await_memory(self, hellos: Sequence[Hello]) -> None:
        """Wait for the memory of the previous group to come back; after `Patience.returning_s`, accept that others hold it."""
        before = [hello.outside_bytes or 0 for hello in self._hellos]

        def is_back(outside: Sequence[int]) -> bool:
            return all(now <= then + MISSING_BYTES for now, then in zip(outside, before, strict=True))

        outside = [hello.outside_bytes or 0 for hello in hellos]
        if not is_back(outside):
            outside = until(
                is_back,
                lambda: [one.outside_bytes or 0 for one in self._measured().values()],
                wait=tenacity.wait_exponential(multiplier=0.25, max=4),
                stop=tenacity.stop_after_delay(self._clock.patience.returning_s),
            )
        self._hellos = [
            replace(hello, outside_bytes=max(now, hello.outside_bytes or 0))
            for hello, now in zip(self._hellos, outside, strict=True)
        ]

    def _ask(
        self, messages: Mapping[int, Message], deadline_s: float | None, *, building: bool = False
    ) -> dict[int, Answer]:
        patience = self._clock.patience
        try:
            with self._interrupts.delivered_until(None):
                return self._current.ask(
                    messages,
                    deadline_s,
                    lambda took_s: patience.building_s if building else max(patience.late_s, LATE_FACTOR * took_s),
                )
        except BaseException:
            self.end()
            raise

    def _new_group(self) -> Group:
        return Group(self._ranks, self._clock.patience)

    def end(self) -> None:
        """End all processes."""
        self._end_group()
        self._group, self._spare = self._spare, None
        self._end_group()

    def _end_group(self) -> None:
        last, self._group = self._group, None
        if last is not None:
            last.end()

    def _start_spare(self) -> None:
        """Start the next group, unless host memory is too scarce for what this one took to build."""
        taken_bytes, free_bytes = sum(hello.resident_bytes for hello in self._hellos), linux.free_bytes()
        if self._spare is None and (free_bytes is None or free_bytes > taken_bytes):
            self._spare = self._new_group()

    # --- the Runner protocol ---

    def run(self, request: Request) -> Outcome:
        """Run one trial; a `fresh` one in a group that has run nothing else."""
        outcome = self._run(request)
        if outcome.trial.passed:  # a group may have passed others before it, of which the session knows nothing
            outcome, self._sample = replace(outcome, measured=self._sample), None
        return outcome

    def _run(self, request: Request) -> Outcome:
        if self._group is not None and self._group.has_run and request.fresh:
            self._end_group()
        return self._try(request)

    def _try(self, request: Request) -> Outcome:
        """Run one trial, in a new group if there is none; its time limit starts now, after the target was built.

        What looks like a bug in a group that has run other trials may come from what these have left there: trained weights, or
        a counter that was put back beside an iterator that was not. A new group then decides.
        """
        group = self._ready()
        if not group.has_run and not request.fresh:
            self._warm_up()
            group = self._ready()
        is_first, group.has_run = not group.has_run, True
        answers = self._answers(request)
        rank = culprit(answers, self._available_bytes)
        passed = {number: answer for number, answer in answers.items() if isinstance(answer, dict)}
        if rank is None and len(passed) == self._ranks:
            self._small = self._small or request
            return self._passed(passed)
        self._end_group()
        if rank is None:
            early = self._early(request, answers, passed)
            outcome = self._try(replace(request, calls=early["made"]))
            return replace(outcome, calls=replace(outcome.calls, ended_early=early["ended_early"]))
        answer = answers[rank]
        if isinstance(answer, ExitStatus) or "failed" not in answer:
            return failed_outcome(request, answers, rank, self._available_bytes)
        if not is_first:
            return self._try(replace(request, fresh=True))
        return raise_failure(self._of_rank(rank, answer["failed"]), request.batch_size)

    def _answers(self, request: Request) -> dict[int, Answer]:
        request = replace(request, deadline_s=self._clock.deadline_s())
        messages = {
            rank: {"do": "run", "request": asdict(replace(request, learned=self._learned.get(rank, {})))}
            for rank in range(self._ranks)
        }
        return self._ask(messages, request.deadline_s)

    def _warm_up(self) -> None:
        """Run a small size that has passed in a new group, so that the trials that decide all begin alike.

        After its first step, once in the life of a process, DDP rebuilds its buckets, and NCCL may still hold the old ones during
        the second. If only the first trial of each group met that, verdicts would depend on their order. The trials that confirm do
        meet it, as training does.
        """
        if self._small is not None:
            answers = self._answers(self._small)
            if any(map(has_failed, answers.values())):
                self._end_group()
            else:
                self._current.has_run = True

    def _passed(self, answers: Mapping[int, Message]) -> Outcome:
        for rank, answer in answers.items():
            outcome = answer["outcome"]
            self._learned[rank] = outcome["learned"] or self._learned.get(rank, {})
            if outcome["measured"] is not None:
                self._available_bytes[rank] = outcome["measured"]["available_bytes"]
        outcome = passed_outcome(answers, self._available_bytes)
        self._sample = outcome.measured or self._sample
        if outcome.trial.leaked_bytes or any(answer["outcome"]["is_spent"] for answer in answers.values()):
            self._end_group()
        self._start_spare()
        return outcome

    def _early(self, request: Request, answers: Mapping[int, Answer], passed: Mapping[int, Message]) -> dict[str, Any]:
        """Return the calls of the rank that ended first, such as with its data, while others went on and waited for it.

        Raise UnreliableError if none did: then the ranks do not do the same.
        """
        calls: list[dict[str, Any]] = [answer["outcome"]["calls"] for answer in passed.values()]
        if early := [one for one in calls if one["ended_early"]]:
            return min(early, key=lambda one: int(one["made"]))
        raise errors.UnreliableError(
            OUT_OF_STEP.format(
                which=f"{_ranks_of(answers)} {'was' if len(answers) - len(passed) == 1 else 'were'} still in the step",
                seconds=format_seconds(self._clock.patience.late_s),
                passed="the others" if len(passed) > 1 else f"rank {next(iter(passed))}",
                size=request.batch_size,
                places=_places(answers),
            )
        )

    def measure(self) -> Measured:
        """Sample the memory now: the least that a rank has available."""
        samples = self._measured()
        self._available_bytes = {rank: one.available_bytes for rank, one in samples.items()}
        measured = measured_of([*samples.values()])
        assert measured is not None
        return measured

    def _measured(self) -> dict[int, Measured]:
        for _ in range(2):
            self._ready()
            answers = self._ask({rank: {"do": "measure"} for rank in range(self._ranks)}, self._clock.end_s)
            told = {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, dict)}
            samples = {
                rank: from_plain(Measured, answer["measured"]) for rank, answer in told.items() if "measured" in answer
            }
            if len(samples) == self._ranks:
                return samples
            self._end_group()
        raise errors.UnreliableError(
            f"two groups of {count(self._ranks, 'rank', 'ranks')} failed while they measured the memory of {self.facts.device.name}, "
            "between trials, so there is no answer. The step is not the cause: probe again, or check the driver and the system's log"
        )

    def _of_rank(self, rank: int, failed: dict[str, Any]) -> dict[str, Any]:
        """Add the rank to the failure that it reported."""
        where = f"on rank {rank} of {self._ranks}"
        building = failed["building"] and f"{failed['building']} {where}"
        text = failed["text"] if failed["kind"] == "InvalidArgumentError" else f"{where}: {failed['text']}"
        return {**failed, "text": text, "building": building}


def _hellos(answers: Mapping[int, Answer]) -> list[Hello]:
    """Return what the ranks that have built the target told, in their order."""
    told = [answer for _, answer in sorted(answers.items()) if isinstance(answer, dict) and "hello" in answer]
    return [from_plain(Hello, answer["hello"]) for answer in told]


def _is_out_of_memory(answers: Mapping[int, Answer]) -> bool:
    return any(
        isinstance(answer, dict) and "failed" in answer and answer["failed"]["cause"]["name"] == "OutOfMemoryError"
        for answer in answers.values()
    )


def _late(answers: Mapping[int, Answer]) -> dict[int, ExitStatus]:
    return {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, ExitStatus)}


def _ranks_of(answers: Mapping[int, Answer]) -> str:
    late = _late(answers)
    return f"rank {next(iter(late))}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"


def _places(answers: Mapping[int, Answer]) -> str:
    return "; ".join(
        f"rank {rank} at {status.where() or 'an unknown place'}" for rank, status in _late(answers).items()
    )
