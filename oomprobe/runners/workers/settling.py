"""What the processes of a crew said about a trial, as one outcome: who is believed. Pure.

A rank that ran out of memory is believed whatever the others say; then one that died; then the bug of the rank that failed
first. What the others say after that is noise: their collectives break because of it, or have run by luck.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from oomprobe.errors import UnreliableError
from oomprobe.ground.units import format_seconds
from oomprobe.records.trials import LOST, Calls, Measured, Outcome, RankTrial, Request, Trial, Verdict
from oomprobe.runners.workers.exit_status import ExitStatus, classify_exit
from oomprobe.runners.workers.messages import Failed, Lost, Message, Ready

Answer = Message | ExitStatus
BUILT_LATE = "rank {passed} had built the target, but {seconds} later it was not built on {which}: {places}"
OUT_OF_STEP = (
    "{which} more than {seconds} after {passed} had finished batch {size}: {places}. Do all ranks make the same collectives, and the same "
    "number of them, in each step?"
)
# Why a process was ended, as part of a sentence.
TIMED_OUT, WAITED, LATE, STUCK = "timed out", "waited for another rank", "was late", "stuck"


def has_failed(answer: Answer) -> bool:
    """Return whether this answer already decides the trial: the process did not pass, or not with all its calls."""
    if isinstance(answer, Outcome):
        return not answer.trial.passed or answer.calls.ended_early is not None
    return isinstance(answer, ExitStatus | Failed | Lost)


def culprit(answers: Mapping[int, Answer], available_bytes: Mapping[int, int]) -> int | None:
    """Return the rank whose failure is believed; None if there is none. `answers` are in the order in which they came."""
    kinds: tuple[Callable[[Answer], bool], ...] = (_is_limit, _is_death, _is_bug, _is_timeout)
    if all(map(_is_bug, answers.values())) and len(set(map(_words, answers.values()))) == 1:
        return min(answers)  # they all have the same bug
    for is_of_kind in kinds:
        if found := [rank for rank, answer in answers.items() if is_of_kind(answer)]:
            return min(found, key=lambda rank: _left_bytes(answers[rank], available_bytes.get(rank, 0)))
    return None


def _is_limit(answer: Answer) -> bool:
    return isinstance(answer, Outcome) and answer.trial.verdict in (Verdict.OOM, Verdict.HOST_OOM, Verdict.SIZE_LIMIT)


def _is_death(answer: Answer) -> bool:
    if isinstance(answer, Outcome):
        return answer.trial.verdict in LOST
    return isinstance(answer, Lost) or (isinstance(answer, ExitStatus) and answer.why is None)


def _is_bug(answer: Answer) -> bool:
    return isinstance(answer, Failed)


def _words(answer: Answer) -> str:
    """Return the text of a bug without its numbers, such as that of the rank."""
    return re.sub(r"\d+", "", answer.text) if isinstance(answer, Failed) else ""


def _is_timeout(answer: Answer) -> bool:
    if isinstance(answer, Outcome):
        return answer.trial.verdict is Verdict.TIMED_OUT
    return isinstance(answer, ExitStatus) and answer.why == TIMED_OUT


def _left_bytes(answer: Answer, available_bytes: int) -> int:
    """Return what a rank that ran out of memory had left; 0 for all others, of which the first counts."""
    if not isinstance(answer, Outcome) or not _is_limit(answer):
        return 0
    return available_bytes - (answer.trial.peak_reserved_bytes or 0)


def passed_outcome(outcomes: Mapping[int, Outcome], available_bytes: Mapping[int, int]) -> Outcome:
    """Return the outcome of a trial that every process has passed."""
    if len(outcomes) == 1:
        return outcomes[0]
    ranks = tuple(_of_trial(rank, one.trial, available_bytes.get(rank)) for rank, one in sorted(outcomes.items()))
    limiting = min(ranks, key=lambda one: one.left_bytes).rank
    every = [outcomes[rank] for rank in sorted(outcomes)]
    trials, calls = [one.trial for one in every], [one.calls for one in every]
    step_s = _most([trial.step_s for trial in trials])
    trial = replace(
        outcomes[limiting].trial,
        peak_allocated_bytes=_most([trial.peak_allocated_bytes for trial in trials]),
        peak_reserved_bytes=_most([trial.peak_reserved_bytes for trial in trials]),
        step_s=step_s,
        samples_per_s=trials[0].batch_size / step_s if step_s and trials[0].samples_per_s else None,
        alloc_retries=max(trial.alloc_retries for trial in trials),
        leaked_bytes=max(trial.leaked_bytes for trial in trials),
        step_leaked_bytes=max(trial.step_leaked_bytes for trial in trials),
        ranks=ranks,
        limiting_rank=limiting,
    )
    return replace(
        outcomes[limiting],
        trial=trial,
        calls=_of_all_calls(calls),
        measured=measured_of([one.measured for one in every]),
        outside_before_bytes=_most([one.outside_before_bytes for one in every]),
        outside_after_bytes=_most([one.outside_after_bytes for one in every]),
        refusal=next((one.refusal for one in every if one.refusal), None),
        is_spent=any(one.is_spent for one in every),
        in_steps_s=max(one.in_steps_s for one in every),
        notes=tuple(dict.fromkeys(note for one in every for note in one.notes)),
    )


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
        _of_answer(request, rank, answers[rank], available_bytes.get(rank), ready[rank]) for rank in sorted(answers)
    )
    rank = ranks[believed]
    if isinstance(answer, Outcome):
        outcome = replace(answer, refusal=None)  # a leak ends with its process
    else:
        verdict = rank.verdict or Verdict.CRASHED
        outcome = Outcome(trial=Trial.of(request, verdict, error=rank.error, where=rank.where))
    if len(answers) == 1:
        return outcome
    timed_out = [one for one in ranks if one.verdict is Verdict.TIMED_OUT]
    if rank.verdict is Verdict.TIMED_OUT:
        error = "; ".join(f"rank {one.rank} at {one.where or 'an unknown place'}" for one in timed_out)
    else:
        error = f"on rank {believed} of {len(answers)}: {rank.error}"
    trial = replace(outcome.trial, error=error, ranks=ranks, limiting_rank=None if timed_out else believed)
    return replace(outcome, trial=trial, measured=None, learned={})


def measured_of(every: Sequence[Measured | None]) -> Measured | None:
    """Return the sample of a crew: the least that is available, the most that is outside. None if a rank has none."""
    samples = [one for one in every if one is not None]
    if len(samples) < len(every):
        return None
    return Measured(
        available_bytes=min(one.available_bytes for one in samples),
        outside_bytes=_most([one.outside_bytes for one in samples]),
    )


def _of_all_calls(calls: list[Calls]) -> Calls:
    return Calls(
        made=min(one.made for one in calls),
        first=max(one.first for one in calls),
        needed=max(one.needed for one in calls),
        call_s=_most([one.call_s for one in calls]),
        served_bytes=max(one.served_bytes for one in calls),
        allocations=max(one.allocations for one in calls),
        varying=any(one.varying for one in calls),
        period=math.lcm(*(one.period for one in calls)),
        counts=any(one.counts for one in calls),
        ended_early=next((one.ended_early for one in calls if one.ended_early), None),
    )


Number = TypeVar("Number", int, float)


def _most(values: Sequence[Number | None]) -> Number | None:
    return max((value for value in values if value is not None), default=None)


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


def _of_answer(request: Request, rank: int, answer: Answer, available_bytes: int | None, ready: Ready) -> RankTrial:
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
    return RankTrial(rank=rank, verdict=verdict, available_bytes=available_bytes, error=error, where=where)


def how_it_ended(answer: Answer) -> str:
    """Say how a process ended, or failed, that gave no outcome."""
    if isinstance(answer, ExitStatus):
        return f"it {answer.why}, and was ended" if answer.why in (WAITED, LATE) else answer.text()
    return answer.text if isinstance(answer, Failed | Lost) else ""


def first_to_end(request: Request, answers: Mapping[int, Answer], waited_s: float) -> Outcome:
    """Return the outcome of the rank that ended first, such as with its data, while others went on and waited for it.

    Raise UnreliableError if none did: then the ranks do not do the same.
    """
    passed = {rank: one for rank, one in answers.items() if isinstance(one, Outcome)}
    if early := [one for one in passed.values() if one.calls.ended_early]:
        return min(early, key=lambda one: one.calls.made)
    raise UnreliableError(
        OUT_OF_STEP.format(
            which=f"{_late_ranks(answers)} {'was' if len(answers) - len(passed) == 1 else 'were'} still in the step",
            seconds=format_seconds(waited_s),
            passed="the others" if len(passed) > 1 else f"rank {next(iter(passed))}",
            size=request.batch_size,
            places=places_of(answers),
        )
    )


def built_late(answers: Mapping[int, Answer], waited_s: float) -> UnreliableError:
    """Return the error for ranks that had not built the target this long after the first."""
    seconds, which = format_seconds(waited_s), _late_ranks(answers)
    passed, places = next(iter(answers)), places_of(answers)
    return UnreliableError(BUILT_LATE.format(passed=passed, seconds=seconds, which=which, places=places))


def _late(answers: Mapping[int, Answer]) -> dict[int, ExitStatus]:
    return {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, ExitStatus)}


def _late_ranks(answers: Mapping[int, Answer]) -> str:
    late = _late(answers)
    return f"rank {next(iter(late))}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"


def places_of(answers: Mapping[int, Answer]) -> str:
    """Say at which lines of the user's the ranks were that had to be ended."""
    return "; ".join(
        f"rank {rank} at {status.where() or 'an unknown place'}" for rank, status in _late(answers).items()
    )
