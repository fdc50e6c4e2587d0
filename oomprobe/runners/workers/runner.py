"""Run trials in processes that may die: workers that build the target, one or a rank each, or children forked from this process."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from typing import Any

import tenacity
import torch

from oomprobe import errors
from oomprobe.devices import Device
from oomprobe.ground import linux
from oomprobe.ground.waiting import until
from oomprobe.records.axis import Axis
from oomprobe.records.notes import remark
from oomprobe.records.options import Options, Step
from oomprobe.records.patience import Clock, Patience
from oomprobe.records.trials import Call, Measured, Outcome, Request, RunnerInfo, Verdict
from oomprobe.rules.look import Records, merged
from oomprobe.rules.program import further, made_as_long
from oomprobe.runners.hooks import preload_dynamo
from oomprobe.runners.ranks_here import check_cards
from oomprobe.runners.signals import Interrupts
from oomprobe.runners.workers.crew import Crew, FurtherOfRanks, no_further
from oomprobe.runners.workers.exit_status import ExitStatus
from oomprobe.runners.workers.messages import Failed, Measure, Message, Ready, Task, raise_failure
from oomprobe.runners.workers.serve import local_runner, serve
from oomprobe.runners.workers.settling import (
    STUCK,
    TIMED_OUT,
    Answer,
    built_late,
    culprit,
    failed_outcome,
    first_to_end,
    has_failed,
    how_it_ended,
    measured_of,
    passed_outcome,
    places_of,
)
from oomprobe.state import Tracker

ANSWERING_S = 30.0  # beyond a trial's limit and `Patience.ending_s`: for a worker to end its child and answer
MISSING_BYTES = 64 * 2**20  # of the memory of a crew that was ended: the next one waits while more has not come back
BUILDS = 4  # attempts to build a target, if memory of the crew before was not free yet
CONFIRMATIONS = 2  # of ranks, each in a crew of its own: under NCCL, DDP may hold one set of gradients more, by chance
ALONE = "Run one step at batch size {{batch_size}} under torchrun --nproc-per-node {ranks} to see it"
HANGS = (
    "a child forked for a trial hangs at {where}: it waits for a thread or a lock of the process that holds the model. Call "
    "torch.set_num_threads(1) before the first operation in that process, and start other threads in the step. If a script "
    "has already computed something, probe in fresh processes: oomprobe run path/to/train.py:build"
)
LIVE_CHILDREN = (
    "host memory is probed in children forked from the process that holds the model, but that process has live child "
    "processes ({names}), such as data loader workers: a forked step would read batches meant for its parent. End them "
    "(del the loader's iterator), start them in the step, or, from a script, probe in fresh processes: "
    "oomprobe run path/to/train.py:build"
)
DIED_BUILDING = (
    "{who} died while it imported and built the target {target}: {how}\nNothing was probed. To see the error without oomprobe, import "
    "the file and call the function{under}"
)
BUG_ONCE = "batch {size} failed with {error} in a process that had run other trials, and ran in a new one: the step does not begin anew in each trial"
NOT_MEASURED = (
    "two {crews} failed while they measured the memory of {device}, between trials, so there is no answer: {how}\nThe step is not the "
    "cause: probe again, or check the driver and the system's log"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How to start the processes that run trials."""

    start: Callable[[], Crew]
    task: Task | None = None  # what workers build; None: children are forked from this process, which holds the model


def forks(
    model: torch.nn.Module, steps: Mapping[str, Step], tracker: Tracker, device: Device, axis: Axis, patience: Patience
) -> Source:
    """Return a source of children forked from this process; each runs one trial on host memory."""
    if living := multiprocessing.active_children():
        raise errors.InvalidArgumentError(LIVE_CHILDREN.format(names=", ".join(one.name for one in living)))
    preload_dynamo()

    def answer(wire: Connection) -> None:
        serve(wire, lambda: (local_runner(model, steps, tracker, device, axis=axis), device))

    return Source(start=lambda: Crew.forked(answer, patience))


def workers(
    target: str, device: Any, options: Options, axis: Axis, patience: Patience, ranks: int | None = None
) -> Source:
    """Return a source of workers that build a target, one or a rank each."""
    told = f"the {type(device).__name__} given as device", "name it by a string such as 'cuda:1'"
    task = Task(
        target=target,
        device=_pickled(device, *told),
        axis=_pickled(axis, f"a value of {axis.name}", "let its name stand for it, and the step look it up"),
        options=options,
        ranks=ranks,
    )
    return Source(start=lambda: Crew.spawned(ranks, patience), task=task)


def _pickled(value: object, what: str, instead: str) -> str:
    try:
        return pickle.dumps(value).hex()
    except Exception as error:
        raise errors.InvalidArgumentError(
            f"{what} cannot be sent to the processes that run trials ({error}): {instead}, or pass isolate=False"
        ) from None


class WorkersRunner:
    """Runs each trial in a crew of processes; see `oomprobe.records.trials.Runner`. As a context manager it ends them on exit.

    One process goes on after most failures; several ranks never do, because those that wait in a collective cannot be told
    anything. The next crew is started early, so that its imports cost no time.
    """

    def __init__(self, source: Source, clock: Clock, interrupts: Interrupts) -> None:
        self._source, self._clock, self._interrupts = source, clock, interrupts
        self._ranks = (source.task and source.task.ranks) or 1
        self._crew: Crew | None = None
        self._spare: Crew | None = None  # started, but with no task yet
        self._ready: list[Ready] = []  # by the current crew, or the last one
        self._outside_bytes: list[int] = []  # when the first crew was ready, by rank
        self._building_s = 0.0
        self._available_bytes: dict[int, int] = {}
        self._learned: dict[int, Mapping[str, Sequence[int]]] = {}  # which optimizers step, by rank
        self._small: Request | None = None  # the first that several ranks have passed
        self._sample: Measured | None = None  # of the memory after the first pass of a crew, until it was told

    def __enter__(self) -> WorkersRunner:
        """Start the first crew and take over what it reports of the device and the steps."""
        began_s = self._clock.elapsed_s
        try:
            self._begin()
        except BaseException:
            self.end()
            raise
        self._building_s = self._clock.elapsed_s - began_s
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @cached_property
    def facts(self) -> RunnerInfo:
        """What the first crew has reported; of several ranks, the device with the least memory stands for all."""
        facts = replace(self._ready[0].facts, replaceable=True)  # unlike this process, they can be replaced
        if self._source.task is None or self._source.task.ranks is None:
            return facts
        every = [of_rank.facts.device for of_rank in self._ready]
        names = Counter(device.name for device in every)
        smallest = min(every, key=lambda device: device.total_bytes)
        return replace(
            facts,
            device=replace(smallest, name=", ".join(f"{number} x {name}" for name, number in names.items())),
            world_size=self._ranks,
            confirmations=CONFIRMATIONS,
            failure_cost_s=self._building_s,
            alone=ALONE.format(ranks=self._ranks),
        )

    # --- the crews ---

    def _begin(self) -> dict[int, Answer]:
        """Make a crew ready if there is none; return what a later one answered that died instead, otherwise nothing.

        Raise the error of one that failed, and of a first one that died.
        """
        if self._crew is not None:
            return {}
        is_first = not self._ready
        answers = until(
            lambda answers: not _is_out_of_memory(answers),  # the memory of the crew before may not be free yet
            self._build,
            wait=tenacity.wait_exponential(multiplier=2),
            stop=tenacity.stop_after_attempt(1 if is_first else BUILDS),
        )
        ready = [answer for _, answer in sorted(answers.items()) if isinstance(answer, Ready)]
        if len(ready) < self._ranks:
            self._end_crew()
            self._refuse(answers, is_first=is_first)
            return answers
        self._ready = ready
        if is_first:
            check_cards([of_rank.facts.device for of_rank in ready])
            self._outside_bytes = [of_rank.outside_bytes or 0 for of_rank in ready]
        elif self._ranks > 1:
            self._await_memory()
        return {}

    def _build(self) -> dict[int, Answer]:
        """Let a crew build the target."""
        self._end_crew()
        self._crew, self._spare = self._spare or self._source.start(), None
        patience, task = self._clock.patience, self._source.task
        messages = {} if task is None else dict.fromkeys(range(self._ranks), task)
        return self._ask(messages, self._clock.end_s, late_s=patience.building_s, stuck_s=patience.stuck_s)

    def _refuse(self, answers: Mapping[int, Answer], *, is_first: bool) -> None:
        """Raise the error of a crew that did not get ready, unless a later one died: that may not happen again."""
        rank = culprit(answers, {})
        if rank is None:
            raise built_late(answers, self._clock.patience.building_s)
        answer = answers[rank]
        if isinstance(answer, Failed):
            raise_failure(_of_rank(answer, rank, self._ranks), 0)
        if not is_first or not isinstance(answer, ExitStatus):
            return
        if answer.why is not None:
            places = f" ({places_of(answers)})" if self._ranks > 1 else ""
            raise self._clock.time_is_up(f"while the target was built{places}")
        if self._source.task is None:
            raise errors.StepFailedError(f"a child forked from this process died before its trial: {answer.text()}")
        raise _died_building(answer, self._source.task.target, rank, self._ranks)

    def _await_memory(self) -> None:
        """Wait for the memory of the previous crew to come back; after `Patience.returning_s`, accept that others hold it."""
        outside = [of_rank.outside_bytes or 0 for of_rank in self._ready]

        def is_back(outside: Sequence[int]) -> bool:
            pairs = zip(outside, self._outside_bytes, strict=True)
            return all(now <= then + MISSING_BYTES for now, then in pairs)

        if not is_back(outside):
            outside = until(
                is_back,
                lambda: [sample.outside_bytes or 0 for sample in self._measured().values()],
                wait=tenacity.wait_exponential(multiplier=0.25, max=4),
                stop=tenacity.stop_after_delay(self._clock.patience.returning_s),
            )
        self._outside_bytes = [max(pair) for pair in zip(outside, self._outside_bytes, strict=True)]

    def _ask(
        self,
        messages: Mapping[int, Message],
        deadline_s: float | None,
        *,
        late_s: float | None,
        stuck_s: float,
        further: FurtherOfRanks = no_further,
    ) -> dict[int, Answer]:
        """Send messages to the crew, if there are any, and return its answers; end it unless all its processes live."""
        assert self._crew is not None
        try:
            with self._interrupts.delivered_until(None):
                stuck = stuck_s if self._source.task is None else None  # only a fork waits for threads of its parent
                answers = self._crew.ask(messages, deadline_s, late_s=late_s, stuck_s=stuck, further=further)
        except BaseException:
            self.end()
            raise
        if len(self._crew.processes) < self._ranks:
            self._end_crew()
        for answer in answers.values():
            if isinstance(answer, ExitStatus) and answer.why == STUCK:
                raise errors.UnreliableError(HANGS.format(where=answer.where() or "an unknown place"))
        return answers

    def end(self) -> None:
        """End all processes."""
        self._end_crew()
        self._crew, self._spare = self._spare, None
        self._end_crew()

    def _end_crew(self) -> None:
        last, self._crew = self._crew, None
        if last is not None:
            last.end()

    def _start_spare(self) -> None:
        """Start the next crew, unless host memory is too scarce for what this one took to build."""
        taken_bytes, free_bytes = sum(of_rank.resident_bytes for of_rank in self._ready), linux.free_bytes()
        if self._spare is None and (free_bytes is None or free_bytes > taken_bytes):
            self._spare = self._source.start()

    @property
    def _has_children(self) -> bool:
        """Whether each trial has a process of its own, forked here or by a worker."""
        return self._source.task is None or self._ready[0].trials_in_children

    # --- the Runner protocol ---

    def run(self, request: Request) -> Outcome:
        """Run one trial; a `fresh` one in a crew that has run nothing else."""
        if self._crew is not None and self._crew.has_run and request.fresh and not self._has_children:
            self._end_crew()
        outcome = self._try(request)
        if self._source.task is None:
            self._end_crew()
            return replace(outcome, measured=self.measure())
        if outcome.trial.passed:  # a crew may have passed others before it, of which the session knows nothing
            outcome, self._sample = replace(outcome, measured=self._sample), None
        return outcome

    def _try(self, request: Request) -> Outcome:
        """Run one trial, in a new crew if there is none; its time limit starts now, after the target was built.

        What looks like a bug in a crew that has run other trials may come from what these have left there: trained weights, or
        a counter that was put back beside an iterator that was not. A new crew then decides.
        """
        died = self._begin()
        is_new = not self._has_run
        if not died and is_new and self._ranks > 1 and not request.fresh:
            self._warm_up()
            died = self._begin()
        if died:
            return self._failed(request, died, culprit(died, {}) or 0)
        has_run = self._has_run and not self._has_children
        answers = self._answers(request)
        rank = culprit(answers, self._available_bytes)
        if rank is None:
            return self._passed_or_late(request, answers)
        answer = answers[rank]
        if not isinstance(answer, Failed):
            return self._failed(request, answers, rank)
        if self._ranks > 1 or has_run or self._source.task is None:
            self._end_crew()
        if not has_run:
            raise_failure(_of_rank(answer, rank, self._ranks), request.batch_size)
        outcome = self._try(replace(request, fresh=True))
        if not outcome.trial.passed:
            return outcome
        text = BUG_ONCE.format(size=request.batch_size, error=answer.cause_text)
        return replace(outcome, notes=(*outcome.notes, remark(text, request.batch_size)))

    def _passed_or_late(self, request: Request, answers: Mapping[int, Answer]) -> Outcome:
        """Return the outcome of a trial that every rank has passed, or of as many calls as the rank made whose data ended first."""
        outcomes = {rank: answer for rank, answer in answers.items() if isinstance(answer, Outcome)}
        if len(outcomes) == self._ranks:
            return self._passed(request, outcomes)
        self._end_crew()
        early = first_to_end(request, answers, self._clock.patience.late_s)
        outcome = self._try(made_as_long(request, len(early.records)))
        return replace(outcome, ended_early=early.ended_early)

    @property
    def _has_run(self) -> bool:
        return self._crew is not None and self._crew.has_run

    def _answers(self, request: Request) -> dict[int, Answer]:
        assert self._crew is not None
        self._crew.has_run = True
        request = replace(request, deadline_s=self._clock.deadline_s())
        learned = {rank: self._learned.get(rank, request.learned) for rank in range(self._ranks)}
        messages = {rank: replace(request, learned=one) for rank, one in learned.items()}
        deadline_s, patience = request.deadline_s, self._clock.patience
        if deadline_s is not None and self._ready[0].trials_in_children:
            deadline_s += patience.ending_s + ANSWERING_S
        goes_on = partial(_further, request)
        return self._ask(messages, deadline_s, late_s=None, stuck_s=patience.stuck_in_step_s, further=goes_on)

    def _warm_up(self) -> None:
        """Run a small size that has passed in a new crew of ranks, so that the trials that decide all begin alike.

        After its first step, once in the life of a process, DDP rebuilds its buckets, and NCCL may still hold the old ones during
        the second. If only the first trial of each crew met that, verdicts would depend on their order. The trials that confirm do
        meet it, as training does.
        """
        if self._small is not None and any(map(has_failed, self._answers(self._small).values())):
            self._end_crew()

    def _passed(self, request: Request, outcomes: Mapping[int, Outcome]) -> Outcome:
        outcome = passed_outcome(outcomes, self._available_bytes)
        self._sample = outcome.measured or self._sample
        if self._has_children:
            return outcome
        if self._ranks > 1:
            self._small = self._small or request
            for rank, one in outcomes.items():
                self._learned[rank] = one.learned or self._learned.get(rank, {})
                if one.measured is not None:
                    self._available_bytes[rank] = one.measured.available_bytes
        if outcome.is_spent or (self._ranks > 1 and outcome.trial.leaked_bytes):
            self._end_crew()
        self._start_spare()
        return outcome

    def _failed(self, request: Request, answers: Mapping[int, Answer], rank: int) -> Outcome:
        outcome = failed_outcome(request, answers, rank, self._available_bytes, self._ready)
        trial = outcome.trial
        # At the driver's edge a failed mapping may have broken torch's allocator, which a health check may miss.
        is_suspect = request.cap_bytes is None or trial.leaked_bytes or trial.verdict is Verdict.POISONED
        if self._ranks > 1 or outcome.is_spent or (is_suspect and not self._has_children):
            self._end_crew()
        return outcome

    def measure(self) -> Measured:
        """Sample the memory now: of several ranks, the least that one has available."""
        if (available_bytes := self._ready[0].available_bytes) is not None:
            return Measured(available_bytes=available_bytes, outside_bytes=None)
        samples = self._measured()
        self._available_bytes = {rank: one.available_bytes for rank, one in samples.items()}
        measured = measured_of([*samples.values()])
        assert measured is not None
        return measured

    def _measured(self) -> dict[int, Measured]:
        for _ in range(2):
            answers = self._begin() or self._ask(
                dict.fromkeys(range(self._ranks), Measure()), self._clock.end_s, late_s=None, stuck_s=0.0
            )
            samples = {rank: one for rank, one in sorted(answers.items()) if isinstance(one, Measured)}
            if len(samples) == self._ranks:
                return samples
            self._end_crew()
            if any(isinstance(one, ExitStatus) and one.why == TIMED_OUT for one in answers.values()):
                raise self._clock.time_is_up("while the memory was measured")
        rank = culprit(answers, {}) or 0
        device, crews = self.facts.device.name, "processes" if self._ranks == 1 else f"groups of {self._ranks} ranks"
        raise errors.UnreliableError(NOT_MEASURED.format(crews=crews, device=device, how=how_it_ended(answers[rank])))


def _of_rank(failed: Failed, rank: int, ranks: int) -> Failed:
    """Add the rank to the failure that it reported, if there are several."""
    if ranks == 1:
        return failed
    where = f"on rank {rank} of {ranks}"
    building = failed.building and f"{failed.building} {where}"
    text = failed.text if failed.kind == "InvalidArgumentError" else f"{where}: {failed.text}"
    return replace(failed, text=text, building=building)


def _died_building(status: ExitStatus, target: str, rank: int, ranks: int) -> errors.StepFailedError:
    """Return the error for a process that died while it built the target."""
    who, under = "the process", ""
    if ranks > 1:
        who, under = f"rank {rank} of {ranks}", f" under torchrun --nproc-per-node {ranks}"
    return errors.StepFailedError(DIED_BUILDING.format(who=who, target=target, how=status.text(), under=under))


def _further(request: Request, ranks: Sequence[Records]) -> Sequence[Call]:
    """Return the calls with which a trial goes on, from what every rank has shown."""
    return further(request, merged(ranks), time.monotonic())


def _is_out_of_memory(answers: Mapping[int, Answer]) -> bool:
    return any(isinstance(answer, Failed) and answer.name == "OutOfMemoryError" for answer in answers.values())
