"""What the processes of a crew said about a trial, as one outcome: who is believed. Pure.

A rank that ran out of memory is believed whatever the others say; then one that died; then the bug of the rank that failed
first. What the others say after that is noise: their collectives break because of it, or have run by luck.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from oomprobe.errors import UnreliableError
from oomprobe.ground.units import format_seconds
from oomprobe.records.notes import Notes
from oomprobe.records.trials import LOST, Measured, Outcome, RankTrial, Request, Trial, Verdict
from oomprobe.rules.look import merged
from oomprobe.runners.workers.exit_status import ExitStatus, classify_exit
from oomprobe.runners.workers.messages import Failed, Lost, Message, Ready

Answer = Message | ExitStatus
BUILT_LATE = "rank {passed} had built the target, but {seconds} later it was not built on {which}: {places}"
OUT_OF_STEP = (
    "{which} more than {seconds} after {passed} had finished batch {size}: {places}. Do all ranks make the same collectives, and the same "
    "number of them, in each step?"
)
UNKNOWN_PLACE = "an unknown place"
LIMITS = {Verdict.OOM, Verdict.HOST_OOM, Verdict.SIZE_LIMIT}  # verdicts on the size itself
# Why a process was ended, as part of a sentence.
TIMED_OUT, WAITED, LATE, STUCK = "timed out", "waited for another rank", "was late", "stuck"


def has_failed(answer: Answer) -> bool:
    """Return whether this answer already decides the trial: the process did not pass, or not with all its calls."""
    if isinstance(answer, Outcome):
        return not answer.trial.passed or answer.ended_early is not None
    return isinstance(answer, ExitStatus | Failed | Lost)


def culprit(answers: Mapping[int, Answer], available_bytes: Mapping[int, int]) -> int | None:
    """Return the rank whose failure is believed; None if there is none. `answers` are in the order in which they came."""
    bugs = {_words(answer) for answer in answers.values() if isinstance(answer, Failed)}
    all_failed = all(isinstance(answer, Failed) for answer in answers.values())
    if all_failed and len(bugs) == 1:
        return min(answers)  # they all have the same bug
    kinds: tuple[Callable[[Answer], bool], ...] = (_is_limit, _is_death, _is_bug, _is_timeout)
    for is_of_kind in kinds:
        ranks = [rank for rank, answer in answers.items() if is_of_kind(answer)]
        if ranks:
            return min(ranks, key=lambda rank: _left_bytes(answers[rank], available_bytes.get(rank, 0)))
    return None


def _is_limit(answer: Answer) -> bool:
    return isinstance(answer, Outcome) and answer.trial.verdict in LIMITS


def _is_death(answer: Answer) -> bool:
    if isinstance(answer, Outcome):
        return answer.trial.verdict in LOST
    if isinstance(answer, ExitStatus):
        return answer.why is None
    return isinstance(answer, Lost)


def _is_bug(answer: Answer) -> bool:
    return isinstance(answer, Failed)


def _words(failed: Failed) -> str:
    """Return the text of a bug without its numbers, such as that of the rank."""
    return re.sub(r"\d+", "", failed.text)


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
    every = [outcomes[rank] for rank in sorted(outcomes)]
    ranks = tuple(_of_trial(rank, outcomes[rank].trial, available_bytes.get(rank)) for rank in sorted(outcomes))
    limiting = min(ranks, key=lambda rank: rank.left_bytes).rank
    return replace(
        outcomes[limiting],
        trial=_slowest_and_largest(outcomes[limiting].trial, [outcome.trial for outcome in every], ranks),
        records=tuple(merged([outcome.records for outcome in every])),
        starts_alike=all(outcome.starts_alike for outcome in every),
        counts=any(outcome.counts for outcome in every),
        ended_early=_first(outcome.ended_early for outcome in every),
        measured=measured_of([outcome.measured for outcome in every]),
        outside_before_bytes=_most(outcome.outside_before_bytes for outcome in every),
        outside_after_bytes=_most(outcome.outside_after_bytes for outcome in every),
        refusal=_first(outcome.refusal for outcome in every),
        is_spent=any(outcome.is_spent for outcome in every),
        in_steps_s=max(outcome.in_steps_s for outcome in every),
        notes=tuple(Notes(chain.from_iterable(outcome.notes for outcome in every))),
    )


def _slowest_and_largest(limiting: Trial, trials: Sequence[Trial], ranks: tuple[RankTrial, ...]) -> Trial:
    """Return the trial of the limiting rank, with the time of the slowest rank and the highest peaks of any."""
    step_s = _most(trial.step_s for trial in trials)
    is_timed = step_s is not None and trials[0].samples_per_s is not None
    return replace(
        limiting,
        peak_allocated_bytes=_most(trial.peak_allocated_bytes for trial in trials),
        peak_reserved_bytes=_most(trial.peak_reserved_bytes for trial in trials),
        step_s=step_s,
        samples_per_s=limiting.batch_size / step_s if is_timed and step_s else None,
        alloc_retries=max(trial.alloc_retries for trial in trials),
        leaked_bytes=max(trial.leaked_bytes for trial in trials),
        step_leaked_bytes=max(trial.step_leaked_bytes for trial in trials),
        ranks=ranks,
        limiting_rank=min(ranks, key=lambda rank: rank.left_bytes).rank,
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
    timed_out = [late for late in ranks if late.verdict is Verdict.TIMED_OUT]
    error = f"on rank {believed} of {len(answers)}: {rank.error}"
    if rank.verdict is Verdict.TIMED_OUT:
        error = "; ".join(f"rank {late.rank} at {late.where or UNKNOWN_PLACE}" for late in timed_out)
    trial = replace(outcome.trial, error=error, ranks=ranks, limiting_rank=None if timed_out else believed)
    return replace(outcome, trial=trial, measured=None, learned={})


def measured_of(every: Sequence[Measured | None]) -> Measured | None:
    """Return the sample of a crew: the least that is available, the most that is outside. None if a rank has none."""
    samples = [sample for sample in every if sample is not None]
    if len(samples) < len(every):
        return None
    return Measured(
        available_bytes=min(sample.available_bytes for sample in samples),
        outside_bytes=_most(sample.outside_bytes for sample in samples),
    )


Number = TypeVar("Number", int, float)


def _most(values: Iterable[Number | None]) -> Number | None:
    return max((value for value in values if value is not None), default=None)


def _first(texts: Iterable[str | None]) -> str | None:
    return next((text for text in texts if text is not None), None)


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
    passed = {rank: answer for rank, answer in answers.items() if isinstance(answer, Outcome)}
    early = [outcome for outcome in passed.values() if outcome.ended_early is not None]
    if early:
        return min(early, key=lambda outcome: len(outcome.records))
    is_one_late, has_one_passed = len(answers) - len(passed) == 1, len(passed) == 1
    were = "was" if is_one_late else "were"
    raise UnreliableError(
        OUT_OF_STEP.format(
            which=f"{_late_ranks(answers)} {were} still in the step",
            seconds=format_seconds(waited_s),
            passed=f"rank {next(iter(passed))}" if has_one_passed else "the others",
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
    if len(late) == 1:
        return f"rank {next(iter(late))}"
    return f"ranks {', '.join(map(str, late))}"


def places_of(answers: Mapping[int, Answer]) -> str:
    """Say at which lines of the user's the ranks were that had to be ended."""
    return "; ".join(f"rank {rank} at {status.where() or UNKNOWN_PLACE}" for rank, status in _late(answers).items())
