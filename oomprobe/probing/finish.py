"""What follows the search: refuse an answer that leaks, run the plan, find what held the memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from oomprobe.errors import OomProbeError, StepFailedError, TimeLimitError, UnreliableError
from oomprobe.ground.units import format_bytes
from oomprobe.probing.epochs import find_epoch
from oomprobe.probing.session import Session
from oomprobe.probing.summary import nothing_fits
from oomprobe.records.notes import remark, warning
from oomprobe.records.options import MAX_CALLS
from oomprobe.records.plain import from_plain
from oomprobe.records.plan import plan
from oomprobe.records.trials import Phase, Request, Trial, Verdict, last_of
from oomprobe.results.why import Explanation
from oomprobe.rules import diagnosis
from oomprobe.rules.search import Found

# While the accumulation plan does not fit, its micro-batch shrinks. The gradient buffer that accumulation adds is small, so
# five times a tenth is more than enough.
PLAN_TRIALS, PLAN_SHRINK = 5, 0.9
NO_HISTORY = (
    "no breakdown: {device} does not record its allocations (torch's own CUDA allocator and simulated "
    "cards do: --device sim:24GiB), or you record torch's memory history, which it would end"
)
NO_SPLIT = "no split of global_batch={global_batch} into micro-batches of at most {size} ran: accumulate in the step function, and probe that"
NO_PLAN = (
    "the plan for global_batch was not run: the command itself decides how it accumulates gradients"
)


def finish(session: Session, largest: Found, broken_down_at: int | None = None) -> Found:
    """Raise if nothing fits or if each step leaks; otherwise find the size with which the epoch trains.

    Then run the accumulation plan, the breakdown of the answer or another size, and the failure
    that decided.
    """
    if largest.batch_size is None:
        raise nothing_fits(session)
    refuse_leaking(session, largest.batch_size)
    compare_sizes(session, largest.batch_size, is_limited=largest.deciding is not None)
    answer = find_epoch(session, largest.batch_size)
    largest = replace(largest, batch_size=answer)
    run_plan(session, answer)
    break_down(session, broken_down_at or answer)
    explain_failure(session, largest)
    return largest


def compare_sizes(session: Session, answer: int, *, is_limited: bool) -> None:
    """Raise if half of an answer asks for as much memory, or if its examples were not there.

    A larger size that failed has shown that the step uses its size; so has another row of a table.
    """
    now = last_of(session.trials, answer)
    is_shown = is_limited or now.replayed or session.follows
    half = None if is_shown else _run_half(session, now)
    if diagnosis.data_ended(session.examples, answer):
        text = diagnosis.ENDED.format(examples=session.examples[answer], size=answer)
        if not is_limited:
            raise UnreliableError(text)
        session.notes.add(warning(text, answer))
    if half is None:
        return
    if diagnosis.ask_for_the_same(now, half, session.calls, session.device):
        raise session.flat(now, half)


def _run_half(session: Session, now: Trial) -> Trial | None:
    """Run half of an answer whose memory is known; None if it does not run."""
    size = session.comparable.down(now.batch_size, 2)
    is_half = 2 * size <= now.batch_size  # nearer sizes may be rounded to the same
    if not (is_half and now.peak_allocated_bytes):
        return None
    request = session.requested(size, Phase.GROW, session.budget.search_cap())
    try:
        session.run(replace(request, must_run=True, watches_inputs=True))
    except (TimeLimitError, StepFailedError) as error:
        why = str(error).splitlines()[0]
        session.notes.add(remark(diagnosis.UNCOMPARED.format(size=size, why=why), size))
        return None
    half = session.trials.pop()
    phases = [trial.phase for trial in session.trials]
    session.trials.insert(phases.index(Phase.CONFIRM), half)  # the answer's own stays the last
    return half if half.passed else None


def run_plan(session: Session, batch_size: int) -> None:
    """Run the micro-batch planned for `global_batch` with gradient accumulation; shrink it while that fails."""
    if session.options.global_batch is None:
        return
    if not session.runner.facts.runs_plans:
        session.notes.add(remark(NO_PLAN))
        return
    largest = batch_size
    for _ in range(PLAN_TRIALS):
        entries = plan(
            session.options.global_batch,
            world_size=session.runner.facts.world_size,
            max_micro_batch=largest,
            min_micro_batch=session.options.min_batch,
            multiple_of=session.options.multiple_of,
        )
        entry = next(iter(entries), None)
        if entry is None:
            break
        size, steps = entry.micro_batch, min(entry.accumulation_steps, MAX_CALLS)
        if steps == 1 and size == batch_size:
            return
        try:
            trial = session.run(_planned(session, size, steps))
        except (TimeLimitError, StepFailedError) as error:
            reason = str(error).splitlines()[0]
            session.notes.add(
                remark(f"the plan for global_batch was not run to completion ({reason})")
            )
            return
        if trial.passed:
            return
        largest = int(PLAN_SHRINK * size)
    session.notes.add(
        remark(NO_SPLIT.format(global_batch=session.options.global_batch, size=batch_size))
    )


def _planned(session: Session, size: int, steps: int) -> Request:
    """Return the trial of a plan's entry: a whole optimizer step over its micro-batches."""
    cap_bytes = session.budget.search_cap()
    if steps == 1:
        return session.requested(size, Phase.CONFIRM, cap_bytes)
    request = session.program.accumulating(size, steps)
    return replace(request, cap_bytes=cap_bytes, fresh=True, as_built=session.as_built.is_due)


def break_down(session: Session, batch_size: int) -> None:
    """Run one more step at the answer, which is not recorded as a trial, to find what held the memory."""
    if not session.options.breakdown:
        return
    request = replace(session.program.recording(batch_size), cap_bytes=session.budget.search_cap())
    try:
        outcome = session.runner.run(session.with_evidence(request))
    except OomProbeError as error:  # the answer stands without it
        session.notes.add(remark(f"no breakdown: {str(error).splitlines()[0]}"))
        return
    session.take_over(outcome)
    session.breakdown = outcome.breakdown
    if not outcome.trial.passed:
        session.notes.add(
            remark(f"no breakdown: its extra step ended with {outcome.trial.verdict}")
        )
    elif session.breakdown is None:
        session.notes.add(remark(NO_HISTORY.format(device=session.device.name)))


def explain_failure(session: Session, largest: Found) -> None:
    """Find why the size that failed next ran out of memory; run it once more if no trial told.

    That is not recorded as a trial. Of an answer that was replayed, nothing has run.
    """
    if largest.deciding is None or not session.runner.facts.explains:
        return
    answer = last_of(session.trials, largest.batch_size or 0)
    failed = last_of(session.trials, largest.deciding, passed=False)
    if failed.verdict is not Verdict.OOM or answer.replayed:
        return
    why = session.explained.get(failed.batch_size, {})
    if not why:
        request = session.requested(failed.batch_size, failed.phase, failed.cap_bytes)
        request = replace(request, must_run=True, fresh=False, as_built=False, explains=True)
        with suppress(OomProbeError):  # the answer stands without it
            outcome = session.runner.run(session.with_evidence(request))
            session.in_steps_s += outcome.in_steps_s
            why = outcome.why
    if why:
        session.why = from_plain(Explanation, why)


def refuse_leaking(session: Session, answer: int) -> None:
    """Raise UnreliableError if each step leaks enough to exhaust the memory soon."""
    kept_bytes, free_bytes = session.leak_of_step(answer)
    least_steps = (
        diagnosis.STEPS_TO_LAST
        if session.runner.facts.replaceable
        else diagnosis.STEPS_TO_LAST_HERE
    )
    if kept_bytes and free_bytes // kept_bytes < least_steps:
        kept, free = format_bytes(kept_bytes), format_bytes(free_bytes)
        cause = diagnosis.UNKNOWN_CAUSE + session.held_by_step
        if session.gradients_hold_graphs:
            cause = diagnosis.GRADIENTS_HOLD_GRAPHS
        raise UnreliableError(
            diagnosis.LEAKS.format(
                size=answer, kept=kept, free=free, steps=free_bytes // kept_bytes, cause=cause
            )
        )
