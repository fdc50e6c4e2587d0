"""What the processes of a crew said about a trial, as one outcome: who is believed. Pure.

A rank that ran out of memory is believed whatever the others say; then one that died; then the bug of the rank that failed
first. What the others say after that is noise: their collectives break because of it, or have run by luck.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import chain
from typing import Any, TypeVar

from oomprobe.errors import UnreliableError
from oomprobe.ground.units import format_seconds, known
from oomprobe.records.notes import Notes
from oomprobe.records.trials import LOST, Measured, Outcome, RankTrial, Request, Trial, Verdict
from oomprobe.rules.look import merged
from oomprobe.runners.workers.exit_status import ExitStatus, classify_exit
from oomprobe.runners.workers.messages import Failed, Lost, Message, Ready

Answer = Message | ExitStatus
BUILT_LATE = (
    "rank {passed} had built the target, but {seconds} later it was not built on {which}: {places}"
)
OUT_OF_STEP = (
    "{which} more than {seconds} after {passed} had finished batch {size}: {places}. Do all ranks make the same collectives, and the same "
    "number of them, in each step?"
)
UNKNOWN_PLACE = "an unknown place"
# Why a process was ended, as part of a sentence.
TIMED_OUT, WAITED, LATE, STUCK = "timed out", "waited for another rank", "was late", "stuck"


Kind = TypeVar("Kind", Ready, Failed, Outcome, Measured, ExitStatus)


def of_kind(kind: type[Kind], answers: Mapping[int, Answer]) -> dict[int, Kind]:
    """Return the answers of this kind, in the order of the ranks."""
    return {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, kind)}


def has_failed(answer: Answer) -> bool:
    """Return whether this answer already decides the trial: the process did not pass, or not with all its calls."""
    if isinstance(answer, Outcome):
        return not answer.trial.passed or answer.ended_early is not None
    return isinstance(answer, ExitStatus | Failed | Lost)


class Cause(IntEnum):
    """Why a rank failed; the lowest cause is believed."""

    LIMIT = 0  # the size itself
    DEATH = 1
    BUG = 2
    TIMEOUT = 3


_CAUSES = {
    Verdict.OOM: Cause.LIMIT,
    Verdict.HOST_OOM: Cause.LIMIT,
    Verdict.SIZE_LIMIT: Cause.LIMIT,
    Verdict.TIMED_OUT: Cause.TIMEOUT,
    **dict.fromkeys(LOST, Cause.DEATH),
}
_CAUSES_OF_END = {None: Cause.DEATH, TIMED_OUT: Cause.TIMEOUT}  # by `ExitStatus.why`


def _cause_of_failure(answer: Answer) -> Cause | None:
    """Return why the rank failed; None if it passed, or was ended only because another one had failed."""
    if isinstance(answer, Outcome):
        return _CAUSES.get(answer.trial.verdict)
    if isinstance(answer, ExitStatus):
        return _CAUSES_OF_END.get(answer.why)
    causes: dict[type, Cause] = {Lost: Cause.DEATH, Failed: Cause.BUG}
    return causes.get(type(answer))


def culprit(answers: Mapping[int, Answer], available_bytes: Mapping[int, int]) -> int | None:
    """Return the rank whose failure is believed; None if there is none. `answers` are in the order in which they came."""
    failed = of_kind(Failed, answers).values()
    bugs = [re.sub(r"\d+", "", answer.text) for answer in failed]  # numbers may be of the rank
    if len(bugs) == len(answers) and len(set(bugs)) == 1:
        return min(answers)  # they all have the same bug
    failing: dict[Cause, list[int]] = defaultdict(list)
    for rank, answer in answers.items():
        cause = _cause_of_failure(answer)
        if cause is not None:
            failing[cause].append(rank)
    if not failing:
        return None
    cause, outcomes = min(failing), of_kind(Outcome, answers)
    if cause is not Cause.LIMIT:
        return failing[cause][0]

    def left_bytes(rank: int) -> int:
        _, peak_bytes = outcomes[rank].trial.peaks
        return available_bytes.get(rank, 0) - peak_bytes

    return min(failing[cause], key=left_bytes)


def measured_of(every: Sequence[Measured | None]) -> Measured | None:
    """Return the sample of a crew: the least that is available, the most that is outside. None if a rank has none."""
    samples = known(every)
    if len(samples) < len(every):
        return None
    return Measured(
        available_bytes=min(sample.available_bytes for sample in samples),
        outside_bytes=_most(sample.outside_bytes for sample in samples),
    )


Number = TypeVar("Number", int, float)


def _most(values: Iterable[Number | None]) -> Number | None:
    return max(known(values), default=None)


def sum_of_known(values: Sequence[Number | None]) -> Number | None:
    """Return the sum of the values that are known; None if none is."""
    of_ranks = known(values)
    return sum(of_ranks[1:], of_ranks[0]) if of_ranks else None


def _first(texts: Iterable[str | None]) -> str | None:
    return next(iter(known(texts)), None)


# How each field follows from what it is on every rank; all other fields are those of the limiting rank.
_OUTCOME_OF_ALL: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "records": lambda records: tuple(merged(records)),
    "starts_alike": all,
    "ended_early": _first,
    "measured": measured_of,
    "outside_before_bytes": _most,
    "outside_after_bytes": _most,
    "refusal": _first,
    "is_spent": any,
    "in_steps_s": max,
    "taped": lambda taped: tuple(chain.from_iterable(taped)),
    "unrecorded": max,  # of the texts, "" is the least
    "notes": lambda notes: tuple(Notes(chain.from_iterable(notes))),  # each once
}
_TRIAL_OF_ALL: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "peak_allocated_bytes": _most,
    "peak_reserved_bytes": _most,
    "step_s": _most,  # training waits for the slowest rank
    "alloc_retries": max,
    "pinned_bytes": sum_of_known,  # they share the host
    "host_bytes": sum_of_known,
    "leaked_bytes": max,
    "step_leaked_bytes": max,
}


def _of_all(
    rules: Mapping[str, Callable[[Sequence[Any]], Any]], ranks: Sequence[object]
) -> dict[str, Any]:
    return {name: rule([getattr(rank, name) for rank in ranks]) for name, rule in rules.items()}


def passed_outcome(outcomes: Mapping[int, Outcome], available_bytes: Mapping[int, int]) -> Outcome:
    """Return the outcome of a trial that every process has passed."""
    if len(outcomes) == 1:
        return outcomes[0]
    every = [outcomes[rank] for rank in sorted(outcomes)]
    trials = [outcome.trial for outcome in every]
    ranks = tuple(
        _of_trial(rank, outcomes[rank].trial, available_bytes.get(rank))
        for rank in sorted(outcomes)
    )
    limiting_rank = min(ranks, key=lambda rank: rank.left_bytes).rank
    limiting = outcomes[limiting_rank]
    trial = replace(
        limiting.trial, ranks=ranks, limiting_rank=limiting_rank, **_of_all(_TRIAL_OF_ALL, trials)
    )
    if trial.samples_per_s is not None and trial.step_s:
        trial = replace(trial, samples_per_s=trial.batch_size / trial.step_s)
    return replace(limiting, trial=trial, **_of_all(_OUTCOME_OF_ALL, every))


def failed_outcome(
    request: Request,
    answers: Mapping[int, Answer],
    believed: int,
    available_bytes: Mapping[int, int],
    ready: Sequence[Ready],
) -> Outcome:
    """Return the outcome of a trial that failed on the rank that is believed, other than by a bug.

    `ready` is what the processes said when they were ready, by rank.
    """
    answer = answers[believed]
    ranks = tuple(
        _of_answer(request, rank, answers[rank], available_bytes.get(rank), ready[rank])
        for rank in sorted(answers)
    )
    rank = ranks[believed]
    if isinstance(answer, Outcome):
        outcome = replace(answer, refusal=None)  # a leak ends with its process
    else:
        verdict = rank.verdict or Verdict.CRASHED
        outcome = Outcome(trial=Trial.of(request, verdict, error=rank.error, where=rank.where))
    if len(answers) == 1:
        return outcome
    error = f"on rank {believed} of {len(answers)}: {rank.error}"
    limiting_rank = None
    timed_out = [late for late in ranks if late.verdict is Verdict.TIMED_OUT]
    if not timed_out:
        limiting_rank = believed
    elif rank.verdict is Verdict.TIMED_OUT:
        error = "; ".join(
            f"rank {late.rank} at {late.where or UNKNOWN_PLACE}" for late in timed_out
        )
    trial = replace(outcome.trial, error=error, ranks=ranks, limiting_rank=limiting_rank)
    tapes = {rank: one.taped for rank, one in answers.items() if isinstance(one, Outcome)}
    taped = tuple(next(iter(tapes.get(rank, ())), None) for rank in sorted(answers))
    return replace(outcome, trial=trial, measured=None, learned={}, taped=taped)


def _of_trial(rank: int, trial: Trial, available_bytes: int | None) -> RankTrial:
    return RankTrial(
        rank=rank,
        verdict=trial.verdict,
        peak_allocated_bytes=trial.peak_allocated_bytes,
        peak_reserved_bytes=trial.peak_reserved_bytes,
        available_bytes=available_bytes,
        error=trial.error,
        where=trial.where,
    )


def _of_answer(
    request: Request, rank: int, answer: Answer, available_bytes: int | None, ready: Ready
) -> RankTrial:
    if isinstance(answer, Outcome):
        return _of_trial(rank, answer.trial, available_bytes)
    verdicts = {Lost: Verdict.POISONED, Failed: Verdict.BUG}
    verdict, error, where = verdicts.get(type(answer)), how_it_ended(answer), None
    if isinstance(answer, ExitStatus):
        where = answer.where()
        if answer.why not in (WAITED, LATE):
            verdict = classify_exit(
                answer,
                smaller_passed=request.smaller_passed,
                on_host=ready.facts.device.on_host,
                used_bytes=answer.peak_resident_bytes - ready.resident_bytes,
                cap_bytes=request.cap_bytes or ready.available_bytes,
            )
    return RankTrial(
        rank=rank, verdict=verdict, available_bytes=available_bytes, error=error, where=where
    )


def how_it_ended(answer: Answer) -> str:
    """Say how a process ended, or failed, that gave no outcome."""
    if isinstance(answer, Failed | Lost):
        return answer.text
    if not isinstance(answer, ExitStatus):
        return ""
    if answer.why in (WAITED, LATE):
        return f"it {answer.why}, and was ended"
    return answer.text()


def first_to_end(request: Request, answers: Mapping[int, Answer], waited_s: float) -> Outcome:
    """Return the outcome of the rank that ended first, such as with its data, while others went on and waited for it.

    Raise UnreliableError if none did: then the ranks do not do the same.
    """
    passed = of_kind(Outcome, answers)
    early = [outcome for outcome in passed.values() if outcome.ended_early is not None]
    if early:
        return min(early, key=lambda outcome: len(outcome.records))
    late, others = f"{_late_ranks(answers)} were", "the others"
    if len(answers) - len(passed) == 1:
        late = f"{_late_ranks(answers)} was"
    if len(passed) == 1:
        others = f"rank {next(iter(passed))}"
    raise UnreliableError(
        OUT_OF_STEP.format(
            which=f"{late} still in the step",
            seconds=format_seconds(waited_s),
            passed=others,
            size=request.batch_size,
            places=places_of(answers),
        )
    )


def built_late(answers: Mapping[int, Answer], waited_s: float) -> UnreliableError:
    """Return the error for ranks that had not built the target this long after the first."""
    seconds, which = format_seconds(waited_s), _late_ranks(answers)
    passed, places = next(iter(answers)), places_of(answers)
    return UnreliableError(
        BUILT_LATE.format(passed=passed, seconds=seconds, which=which, places=places)
    )


def _late_ranks(answers: Mapping[int, Answer]) -> str:
    late = of_kind(ExitStatus, answers)
    if len(late) == 1:
        return f"rank {next(iter(late))}"
    return f"ranks {', '.join(map(str, late))}"


def places_of(answers: Mapping[int, Answer]) -> str:
    """Say at which lines of the user's the ranks were that had to be ended."""
    return "; ".join(
        f"rank {rank} at {status.where() or UNKNOWN_PLACE}"
        for rank, status in of_kind(ExitStatus, answers).items()
    )
