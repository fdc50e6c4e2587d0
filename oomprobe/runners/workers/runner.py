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
from typing import Any, TypeGuard

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
from oomprobe.records.trials import (
    Call,
    Measured,
    Outcome,
    Request,
    RunnerInfo,
    Verdict,
)
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
    UNKNOWN_PLACE,
    Answer,
    built_late,
    culprit,
    failed_outcome,
    first_to_end,
    has_failed,
    how_it_ended,
    measured_of,
    of_kind,
    passed_outcome,
    places_of,
)
from oomprobe.runners.workers.template import Template
from oomprobe.state import Tracker
from oomprobe.tape.record import TapedTrial

ANSWERING_S = (
    30.0  # beyond a trial's limit and `Patience.ending_s`: for a worker to end its child and answer
)
MISSING_BYTES = (
    64 * 2**20
)  # of the memory of a crew that was ended: the next one waits while more has not come back
BUILDS = 4  # attempts to build a target, if memory of the crew before was not free yet
CONFIRMATIONS = 2  # of ranks, each in a crew of its own: under NCCL, DDP may hold one set of gradients more, by chance
ALONE = (
    "Run one step at batch size {{batch_size}} under torchrun --nproc-per-node {ranks} to see it"
)
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
    template: Template | None = None  # that forks the workers
    task: Task | None = (
        None  # what workers build; None: children are forked from this process, which holds the model
    )

    @property
    def ranks(self) -> int | None:
        """Size of the process group that each crew is; None: a crew is one process."""
        if self.task is None:
            return None
        return self.task.ranks

    @property
    def tasks(self) -> Mapping[int, Message]:
        """The first message to each process, by rank."""
        if self.task is None:
            return {}
        return dict.fromkeys(range(self.ranks or 1), self.task)

    def wait(self, until_s: float) -> None:
        """Wait until the processes can be started, but no longer than until a time on the monotonic clock."""
        if self.template is not None:
            self.template.wait(until_s)

    @property
    def is_instant(self) -> bool:
        """Whether starting them takes no time."""
        return self.template is not None and not self.template.refusal

    def end(self) -> None:
        """End what starts them."""
        if self.template is not None:
            self.template.end()


def forks(
    model: torch.nn.Module,
    steps: Mapping[str, Step],
    tracker: Tracker,
    device: Device,
    axis: Axis,
    patience: Patience,
) -> Source:
    """Return a source of children forked from this process; each runs one trial on host memory."""
    children = multiprocessing.active_children()
    if children:
        raise errors.InvalidArgumentError(
            LIVE_CHILDREN.format(names=", ".join(child.name for child in children))
        )
    preload_dynamo()

    def answer(wire: Connection) -> None:
        serve(wire, lambda: (local_runner(model, steps, tracker, device, axis=axis), device))

    return Source(start=lambda: Crew.forked(answer, patience))


def workers(
    target: str,
    device: Any,
    options: Options,
    axis: Axis,
    patience: Patience,
    ranks: int | None = None,
) -> Source:
    """Return a source of workers that build a target, one or a rank each."""
    task = Task(
        target=target,
        device=_pickled(
            device,
            f"the {type(device).__name__} given as device",
            "name it by a string such as 'cuda:1'",
        ),
        axis=_pickled(
            axis, f"a value of {axis.name}", "let its name stand for it, and the step look it up"
        ),
        options=options,
        ranks=ranks,
    )
    template = Template.of(target) if ranks is None else None
    if template is None:
        return Source(start=lambda: Crew.spawned(ranks, patience), task=task)
    return Source(
        start=lambda: Crew({0: template.process(patience)}, patience=patience),
        template=template,
        task=task,
    )


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
        self._ranks = source.ranks or 1
        self._crew: Crew | None = None
        self._spare: Crew | None = None  # started, but with no task yet
        self._ready: list[Ready] = []  # by the current crew, or the last one
        self._outside_bytes: list[int] = []  # when the first crew was ready, by rank
        self._building_s = 0.0
        self._available_bytes: dict[int, int] = {}
        self._learned: dict[int, Mapping[str, Sequence[int]]] = {}  # which optimizers step, by rank
        self._small: Request | None = None  # the first that several ranks have passed
        # Of the memory after the first pass of a crew, until it was told.
        self._sample: Measured | None = None

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
        # Unlike this process, they can be replaced.
        facts = replace(self._ready[0].facts, replaceable=True)
        if self._source.template is not None:
            return replace(
                facts, environment={**facts.environment, "workers": self._source.template.how}
            )
        if self._source.ranks is None:
            return facts
        devices = [of_rank.facts.device for of_rank in self._ready]
        smallest = min(devices, key=lambda device: device.total_bytes)
        counts = Counter(device.name for device in devices)
        names = ", ".join(f"{number} x {name}" for name, number in counts.items())
        return replace(
            facts,
            device=replace(smallest, name=names),
            world_size=len(devices),
            confirmations=CONFIRMATIONS,
            failure_cost_s=self._building_s,
            alone=ALONE.format(ranks=len(devices)),
        )

    # --- the crews ---

    def _begin(self) -> dict[int, Answer]:
        """Make a crew ready if there is none; return what a later one answered that died instead, otherwise nothing.

        Raise the error of one that failed, and of a first one that died.
        """
        if self._crew is not None:
            return {}
        is_first = not self._ready

        def has_memory(answers: Mapping[int, Answer]) -> bool:
            """Return whether that of the crew before was free."""
            names = [failed.name for failed in of_kind(Failed, answers).values()]
            return "OutOfMemoryError" not in names

        answers = until(
            has_memory,
            self._build,
            wait=tenacity.wait_exponential(multiplier=2),
            stop=tenacity.stop_after_attempt(1 if is_first else BUILDS),
        )
        ready = of_kind(Ready, answers)
        if len(ready) < self._ranks:
            self._end_crew()
            _refuse_crew(answers, self._source, self._clock, is_first=is_first)
            return answers
        self._ready = [*ready.values()]
        if is_first:
            check_cards([of_rank.facts.device for of_rank in self._ready])
            self._outside_bytes = _outside_bytes(self._ready)
        elif self._ranks > 1:
            self._await_memory()
        return {}

    def _build(self) -> dict[int, Answer]:
        """Let a crew build the target."""
        self._end_crew()
        patience = self._clock.patience
        with self._interrupts.delivered_until(None):
            self._source.wait(self._clock.end_s or time.monotonic() + patience.building_s)
        self._crew, self._spare = self._spare or self._source.start(), None
        return self._ask(
            self._source.tasks,
            self._clock.end_s,
            late_s=patience.building_s,
            stuck_s=patience.stuck_s,
        )

    def _await_memory(self) -> None:
        """Wait for the memory of the previous crew to come back; after `Patience.returning_s`, accept that others hold it."""
        outside = _outside_bytes(self._ready)

        def is_back(outside: Sequence[int]) -> bool:
            pairs = zip(outside, self._outside_bytes, strict=True)
            return all(now <= then + MISSING_BYTES for now, then in pairs)

        if not is_back(outside):
            outside = until(
                is_back,
                lambda: _outside_bytes([*self._measured().values()]),
                wait=tenacity.wait_exponential(multiplier=0.25, max=4),
                stop=tenacity.stop_after_delay(self._clock.patience.returning_s),
            )
        self._outside_bytes = [*map(max, zip(outside, self._outside_bytes, strict=True))]

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
        longest_idle_s = None
        if self._source.task is None:
            longest_idle_s = stuck_s  # only a fork waits for threads of its parent
        try:
            with self._interrupts.delivered_until(None):
                answers = self._crew.ask(
                    messages, deadline_s, late_s=late_s, stuck_s=longest_idle_s, further=further
                )
        except BaseException:
            self.end()
            raise
        if len(self._crew.processes) < self._ranks:
            self._end_crew()
        for answer in answers.values():
            if _was_ended(answer, STUCK):
                raise errors.UnreliableError(HANGS.format(where=answer.where() or UNKNOWN_PLACE))
        return answers

    def end(self) -> None:
        """End all processes."""
        self._end_crew()
        self._crew, self._spare = self._spare, None
        self._end_crew()
        self._source.end()

    def _end_crew(self) -> None:
        last, self._crew = self._crew, None
        if last is not None:
            last.end()

    def _start_spare(self) -> None:
        """Start the next crew, unless host memory is too scarce for what this one took to build."""
        if self._spare is not None or self._source.is_instant:
            return
        taken_bytes, free_bytes = (
            sum(of_rank.resident_bytes for of_rank in self._ready),
            linux.free_bytes(),
        )
        if free_bytes is None or free_bytes > taken_bytes:
            self._spare = self._source.start()

    @property
    def _has_children(self) -> bool:
        """Whether each trial has a process of its own, forked here or by a worker."""
        return self._source.task is None or self._ready[0].trials_in_children

    # --- the Runner protocol ---

    def run(self, request: Request) -> Outcome:
        """Run one trial; a `fresh` one in a crew that has run nothing else."""
        if request.fresh and self._has_run:
            self._end_crew()
        outcome = self._try(request)
        tapes = tuple(plain and TapedTrial.read(plain) for plain in outcome.taped)
        outcome = replace(outcome, taped=tapes)
        if self._source.task is None:
            self._end_crew()
            return replace(outcome, measured=self.measure())
        if (
            outcome.trial.passed
        ):  # a crew may have passed others before it, of which the session knows nothing
            outcome, self._sample = replace(outcome, measured=self._sample), None
        return outcome

    def _try(self, request: Request) -> Outcome:
        """Run one trial, in a new crew if there is none; its time limit starts now, after the target was built.

        What looks like a bug in a crew that has run other trials may come from what these have left there: trained weights, or
        a counter that was put back beside an iterator that was not. A new crew then decides.
        """
        died = self._begin()
        if not died:
            self._warm_up(request)
            died = self._begin()
        if died:
            return self._failed(request, died, culprit(died, {}) or 0)
        has_run = self._has_run
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
        outcomes = of_kind(Outcome, answers)
        if len(outcomes) == self._ranks:
            return self._passed(request, outcomes)
        self._end_crew()
        early = first_to_end(request, answers, self._clock.patience.late_s)
        outcome = self._try(made_as_long(request, len(early.records)))
        return replace(outcome, ended_early=early.ended_early)

    @property
    def _has_run(self) -> bool:
        """Whether processes of the crew have run a trial themselves, and may keep what it left there."""
        if self._crew is None or self._has_children:
            return False
        return self._crew.has_run

    def _answers(self, request: Request) -> dict[int, Answer]:
        assert self._crew is not None
        self._crew.has_run = True
        request = replace(request, deadline_s=self._clock.deadline_s())
        messages = {}
        for rank in range(self._ranks):
            messages[rank] = replace(
                request,
                calls=tuple(call.on_rank(rank) for call in request.calls),
                learned=self._learned.get(rank, request.learned),
            )
        deadline_s, patience = request.deadline_s, self._clock.patience
        if deadline_s is not None and self._ready[0].trials_in_children:
            deadline_s += patience.ending_s + ANSWERING_S
        goes_on = partial(_further, request)
        return self._ask(
            messages, deadline_s, late_s=None, stuck_s=patience.stuck_in_step_s, further=goes_on
        )

    def _warm_up(self, request: Request) -> None:
        """Run a small size that has passed in a new crew of ranks before this trial, so that those that decide all begin alike.

        After its first step, once in the life of a process, DDP rebuilds its buckets, and NCCL may still hold the old ones during
        the second. If only the first trial of each crew met that, verdicts would depend on their order. The trials that confirm do
        meet it, as training does.
        """
        if self._small is None or self._has_run or request.fresh:
            return
        answers = self._answers(self._small)
        if any(map(has_failed, answers.values())):
            self._end_crew()

    def _passed(self, request: Request, outcomes: Mapping[int, Outcome]) -> Outcome:
        outcome = passed_outcome(outcomes, self._available_bytes)
        self._sample = outcome.measured or self._sample
        if self._has_children:
            return outcome
        is_spent = outcome.is_spent
        if self._ranks > 1:
            is_spent |= outcome.trial.leaked_bytes > 0
            self._small = self._small or request
            for rank, of_rank in outcomes.items():
                self._learned[rank] = of_rank.learned or self._learned.get(rank, {})
                if of_rank.measured is not None:
                    self._available_bytes[rank] = of_rank.measured.available_bytes
        if is_spent:
            self._end_crew()
        self._start_spare()
        return outcome

    def _failed(self, request: Request, answers: Mapping[int, Answer], rank: int) -> Outcome:
        outcome = failed_outcome(request, answers, rank, self._available_bytes, self._ready)
        trial = outcome.trial
        if self._ranks > 1 or outcome.is_spent:
            self._end_crew()
        elif not self._has_children:
            # At the driver's edge a failed mapping may have broken torch's allocator, which a health check may miss.
            at_the_edge = request.cap_bytes is None
            if at_the_edge or trial.leaked_bytes or trial.verdict is Verdict.POISONED:
                self._end_crew()
        return outcome

    def measure(self) -> Measured:
        """Sample the memory now: of several ranks, the least that one has available."""
        available_bytes = self._ready[0].available_bytes
        if available_bytes is not None:
            return Measured(available_bytes=available_bytes, outside_bytes=None)
        samples = self._measured()
        self._available_bytes = {rank: sample.available_bytes for rank, sample in samples.items()}
        measured = measured_of([*samples.values()])
        assert measured is not None
        return measured

    def _measured(self) -> dict[int, Measured]:
        for _ in range(2):
            answers = self._begin()
            if not answers:
                answers = self._ask(
                    dict.fromkeys(range(self._ranks), Measure()),
                    self._clock.end_s,
                    late_s=None,
                    stuck_s=0.0,
                )
            samples = of_kind(Measured, answers)
            if len(samples) == self._ranks:
                return samples
            self._end_crew()
            if any(_was_ended(answer, TIMED_OUT) for answer in answers.values()):
                raise self._clock.time_is_up("while the memory was measured")
        rank = culprit(answers, {}) or 0
        crews = "processes"
        if self._ranks > 1:
            crews = f"groups of {self._ranks} ranks"
        how, device = how_it_ended(answers[rank]), self.facts.device.name
        raise errors.UnreliableError(NOT_MEASURED.format(crews=crews, device=device, how=how))


def _refuse_crew(
    answers: Mapping[int, Answer], source: Source, clock: Clock, *, is_first: bool
) -> None:
    """Raise the error of a crew that did not get ready, unless a later one died: that may not happen again."""
    rank, ranks = culprit(answers, {}), source.ranks or 1
    if rank is None:
        raise built_late(answers, clock.patience.building_s)
    answer = answers[rank]
    if isinstance(answer, Failed):
        raise_failure(_of_rank(answer, rank, ranks), 0)
    if not is_first or not isinstance(answer, ExitStatus):
        return
    if answer.why is not None:
        places = ""
        if ranks > 1:
            places = f" ({places_of(answers)})"
        raise clock.time_is_up(f"while the target was built{places}")
    if source.task is None:
        raise errors.StepFailedError(
            f"a child forked from this process died before its trial: {answer.text()}"
        )
    who, under = "the process", ""
    if ranks > 1:
        who, under = f"rank {rank} of {ranks}", f" under torchrun --nproc-per-node {ranks}"
    how, target = answer.text(), source.task.target
    raise errors.StepFailedError(DIED_BUILDING.format(who=who, target=target, how=how, under=under))


def _of_rank(failed: Failed, rank: int, ranks: int) -> Failed:
    """Add the rank to the failure that it reported, if there are several."""
    if ranks == 1:
        return failed
    where = f"on rank {rank} of {ranks}"
    if failed.building is not None:
        failed = replace(failed, building=f"{failed.building} {where}")
    if failed.kind == "InvalidArgumentError":  # which all ranks would raise
        return failed
    return replace(failed, text=f"{where}: {failed.text}")


def _further(request: Request, ranks: Sequence[Records]) -> Sequence[Call]:
    """Return the calls with which a trial goes on, from what every rank has shown."""
    return further(request, merged(ranks), time.monotonic())


def _outside_bytes(samples: Sequence[Ready | Measured]) -> list[int]:
    return [sample.outside_bytes or 0 for sample in samples]


def _was_ended(answer: Answer, why: str) -> TypeGuard[ExitStatus]:
    return isinstance(answer, ExitStatus) and answer.why == why
