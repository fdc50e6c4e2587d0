"""The result of a finished probe, with its notes, or the error that nothing fits."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from oomprobe.errors import NothingFitsError
from oomprobe.ground.allocator_settings import allocator_settings, to_expand
from oomprobe.ground.torch_versions import untested_note
from oomprobe.ground.units import format_bytes
from oomprobe.ground.version import __version__
from oomprobe.ground.words import count, shortened
from oomprobe.probing.session import Session
from oomprobe.records.epoch import SAMPLES, TOKENS, UNLIMITED
from oomprobe.records.fit import estimates, fit_line
from oomprobe.records.notes import Note, NoteKind, remark, warning
from oomprobe.records.trials import SIMULATED, Phase, Trial, Verdict, last_of
from oomprobe.results.result import ProbeResult
from oomprobe.rules.diagnosis import is_pressed
from oomprobe.rules.search import Found

PRESSED = (
    "marginal: batch {size} ran with {retries} in {calls}. Each empties the allocator's cache, which is slow; lower "
    "memory_fraction{setting}, or see what takes less (--savings all, of a target)"
)
GAPS_SHARE = 1.1  # of what tensors take: where more is reserved, the rest is worth a word
GAPS = (
    "fragmentation: batch {size} reserved {reserved} for {allocated} of tensors{before}, so {gaps} were in gaps between them. "
    "{setting} may take that back: try it"
)
CROWDED = "{taken} of the device were in use outside this process's allocator{which}: the answer is for what that leaves"
GREW_OUTSIDE = (
    "memory outside this process's allocator grew by {grown} while probing (loaded kernels, library handles, other processes): the "
    "cap does not count it, and it eats into the margin"
)
LEFT_BEHIND = (
    "leak: {left} was not freed after batch {size}, even by garbage collection; something keeps tensors of earlier steps, which makes "
    "the answer smaller"
)
KEPT = "leak: each step at batch {size} keeps {kept}, so the free memory lasts for about {steps} steps; {cause}"
NOT_RESTORED = "state that stays changed (positions of iterators and data loaders, attributes of library objects)"
OTHER_RANKS = "other ranks: DDP buckets, NCCL buffers, sharding"
OTHER_MACHINES = "ranks on other machines: NCCL takes memory for each connection, and FSDP shards over more ranks"
LONGEST = "longest sequence or largest sample, unless the step makes such batches"
LAST_BATCH = (
    "smaller last batch of an epoch, which splits cached blocks: drop_last=True leaves it out"
)
NOT_COVERED = (
    LONGEST,
    LAST_BATCH,
    OTHER_RANKS,
    "data loader workers and their host memory",
)
NO_EVALUATION = "evaluation between epochs (pass {'train': step_fn, 'eval': eval_fn} to include it)"
COMPILING = "compiling took about {seconds:.0f} s, for {sizes}: the time that first calls took beyond later ones"
UNPREDICTED = "not predicted: {why}. So each of the {trials} trials ran, which took {seconds:.0f} s"
LITTLE_DATA = "the data set limits the batch size: it has {count} {unit}"
FRAGMENTS = (
    "where shapes vary, fragmentation uses the margin up: set {setting} before the probe and the training, and let an epoch show "
    "which size trains (epoch=oomprobe.Epoch(...), --epoch: docs/epoch.md)"
)
SEEN = "the answer ran for {calls}; rarer events were not measured"
SETTLED = "repeats: within {calls} memory and the values that the step keeps came back to where they were, so identical further calls cannot fail"
# Words in a step's name.
CROWDED_BYTES = 2 * 2**30  # more than a process takes for its context, libraries and kernels
EVALUATING = {"eval", "evaluate", "evaluation", "val", "valid", "validate", "validation", "test"}
LATE = {
    "saving a checkpoint": {"save"},
    "the last evaluation": EVALUATING,
    "resuming from a checkpoint": {"resume"},
}
NO_LATE = "{what}, which come late: docs/recipes.md runs each as a named step at the answer"
# For all other verdicts, "memory". A sticky error that recurs at one size limits the size, but is not shown to be memory.
_LIMITED_BY = {
    Verdict.SIZE_LIMIT: "size_limit",
    Verdict.POISONED: "size_limit",
    Verdict.HOST_OOM: "host_memory",
}


def result_of(session: Session, largest: Found, target: str | None = None) -> ProbeResult:
    """Make the result from the trials of a session; `target` is what was probed, if it has a name."""
    assert largest.batch_size is not None
    ran = any(t.passed and t.batch_size == largest.batch_size for t in session.trials)
    answer = limiting = last_of(session.trials, largest.batch_size, passed=ran)
    deciding = None
    if largest.deciding is not None:
        deciding = limiting = last_of(session.trials, largest.deciding, passed=False)
    limit, budget_bytes = largest.limit or largest.batch_size, session.budget.total_bytes
    points = [
        (t.batch_size, t.peak_allocated_bytes)
        for t in _of_the_step(session)
        if t.passed and t.peak_allocated_bytes is not None
    ]
    fit = fit_line(points, budget_bytes)
    return ProbeResult(
        batch_size=largest.batch_size,
        unit=TOKENS if session.axis.counts_tokens else SAMPLES,
        limit_batch_size=limit,
        first_failing_batch_size=_first_failing(session, largest, limit),
        limited_by=_limited_by(session, largest.batch_size, deciding),
        limiting_step=limiting.step_name,
        trials=tuple(session.trials),
        fit=fit,
        device=session.device.name,
        budget_bytes=budget_bytes,
        available_bytes=session.budget.available_bytes,
        not_covered=tuple(_not_covered(session)),
        contaminated=session.neighbours.contaminated,
        state_verified=session.state_verified,
        environment={"target": target, **_environment(session)},
        estimates={} if fit is None else estimates(points, budget_bytes=budget_bytes),
        options=asdict(session.options),
        elapsed_s=session.clock.elapsed_s,
        in_steps_s=session.in_steps_s,
        breakdown=session.breakdown,
        epoch=session.epoch,
        explanation=session.why,
        world_size=session.runner.facts.world_size,
        limiting_rank=limiting.limiting_rank,
    )._with_notes(_notes(session, largest, answer))


def _of_the_step(session: Session) -> list[Trial]:
    """Return the trials whose calls are alike, not micro-batches of a plan, nor those of an epoch."""
    alike = [trial for trial in session.trials if trial not in session.stretches]
    return [trial for trial in alike if trial.accumulation_steps == 1]


def _lowered_from(session: Session) -> int:
    """Return the size that the epoch has lowered; 0 if it has not."""
    return 0 if session.epoch is None else session.epoch.lowered_from


def _limited_by(session: Session, answer: int, deciding: Trial | None) -> str:
    if deciding is not None:
        return _LIMITED_BY.get(deciding.verdict, "memory")
    if _lowered_from(session):
        return "memory"
    if session.splits:
        return "step"
    if session.has_time_to_grow:
        return "max_batch"
    if answer == session.options.sizes.last:
        return "max_batch"
    return "time_limit"


def nothing_fits(session: Session) -> NothingFitsError:
    """Return the error for a probe in which not even the smallest size ran."""
    options, facts = session.options, session.runner.facts
    *_, last = (trial for trial in session.trials if not trial.passed)
    memory, which = "with all available memory", ", the smallest allowed,"
    step = where = others = ""
    advice = ["a smaller model or sample"]
    if facts.runs_plans:
        advice.append("what takes less memory: --savings all (find_savings) runs each such saving")
    if options.min_batch == options.max_batch:
        which = ""
        advice.insert(0, "a smaller batch size")
    elif options.min_batch > 1:
        advice.append(f"min_batch below {options.min_batch}")
    cap_bytes = last.cap_bytes or 0
    # A trial that grows may have more than the margin leaves.
    most_bytes = math.inf if facts.grows_capped else session.budget.total_bytes
    if options.memory_fraction < 1 and 0 < cap_bytes <= most_bytes:
        budget = format_bytes(cap_bytes)
        memory = f"within a budget of {budget} (memory_fraction={options.memory_fraction})"
        advice.append("a larger memory_fraction")
    if last.step_name:
        step = f", in step {last.step_name!r}"
    if last.where:
        where = f" ({last.where})"
    neighbours = session.neighbours.names()
    if neighbours:
        others = f"Other processes are on the device: {neighbours}.\n"
    return NothingFitsError(
        f"batch {last.batch_size}{which} does not fit on {session.device.name} {memory}{step}: {last.verdict}{where}\n"
        f"  {shortened(last.error)}\n{others}Try {'; or '.join(advice)}."
    )


def _environment(session: Session) -> dict[str, Any]:
    environment: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "oomprobe": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "model": session.runner.facts.model,
        "device": _device(session),
        "device_name": session.device.name,
        "device_total_bytes": session.device.total_bytes,
        "threads": session.runner.facts.threads,
        "isolated": session.runner.facts.replaceable,
        "world_size": session.runner.facts.world_size,
        "allocator_settings": allocator_settings(),
    }
    if session.as_built.needs_emptying:
        environment["after"] = session.device.emptying
    return {**environment, **session.runner.facts.environment}


def _device(session: Session) -> str:
    if session.device.is_simulated:
        return SIMULATED
    return str(session.runner.facts.environment.get("device", session.device.torch_device))


def _first_failing(session: Session, largest: Found, limit: int) -> int | None:
    """Return the smallest size above the limit that failed; smaller sizes may have failed too, for example by fragmentation."""
    if largest.first_failing is None or largest.first_failing > limit:
        return largest.first_failing
    failed = {
        t.batch_size
        for t in _of_the_step(session)
        if t.phase is Phase.GROW and t.batch_size > limit and not t.passed
    }
    return min(failed.difference(largest.transient), default=None)


def _notes(session: Session, largest: Found, answer: Trial) -> Iterator[Note]:
    """Yield what the trials noted, and what is to be said of them together."""
    yield from session.notes
    yield from _of_torch(session)
    yield from session.neighbours.notes
    kind = "optimizer step" if "command" in session.runner.facts.environment else "call"
    if session.program.confirmed:
        text, calls = SETTLED, count(session.program.confirmed, kind, f"{kind}s")
        if answer.settled_after is None:
            text = SEEN
        if len(session.runner.facts.step_names) > 1:
            calls += " of each step"
        yield remark(text.format(calls=calls))
    yield from _of_compiling(session)
    yield from _of_data(session, largest)
    for size in largest.transient:
        yield remark(
            f"transient failure: batch {size} failed once and passed when tried again", size
        )
    if largest.unconfirmed:
        sizes = ", ".join(map(str, largest.unconfirmed))
        yield remark(f"passed a trial but failed confirmation: batch {sizes}", *largest.unconfirmed)
    if _device(session) == SIMULATED:
        yield _simulation_note(session, answer)
        if session.outcome is not None and session.outcome.unpredicted:
            trials, seconds = len(session.trials), session.in_steps_s
            why = session.outcome.unpredicted
            yield remark(UNPREDICTED.format(why=why, trials=trials, seconds=seconds))
    yield from _leaks(session, answer)
    if is_pressed(answer):
        retries = count(answer.alloc_retries, "allocator retry", "allocator retries")
        calls = count(answer.steps, kind, f"{kind}s")
        setting = to_expand(allocator_settings(), torch.__version__)
        if setting:
            setting = f", or set {setting}"
        text = PRESSED.format(size=answer.batch_size, retries=retries, calls=calls, setting=setting)
        yield warning(text, answer.batch_size)
    yield from _gaps(session, largest, answer)
    yield from _outside(session)
    alone = _lowered_from(session) or answer.batch_size
    if largest.deciding is not None and largest.deciding - alone > session.options.multiple_of:
        sizes_between = alone, largest.deciding
        yield remark(
            "not exact: sizes between {} and {} were not tried".format(*sizes_between),
            *sizes_between,
        )


def _of_compiling(session: Session) -> Iterator[Note]:
    """Yield a note on what compiling took, if the step is compiled."""
    if any(note.kind is NoteKind.COMPILES for note in session.notes):
        compiled_s = [calls.starting_s for calls in session.calls.values() if calls.starting_s]
        sizes = count(len(compiled_s), "size", "sizes")
        yield remark(COMPILING.format(sizes=sizes, seconds=sum(compiled_s)))


def _gaps(session: Session, largest: Found, answer: Trial) -> Iterator[Note]:
    """Yield a note if memory between tensors decided: at the answer, or at the failure above it."""
    setting = _to_set(session)
    if largest.deciding is None or not setting or session.device.on_host:
        return
    deciding = last_of(session.trials, largest.deciding, passed=False)
    for trial, before in ((answer, ""), (deciding, " before it failed")):
        allocated, reserved = trial.peak_allocated_bytes, trial.peak_reserved_bytes
        if allocated and reserved and reserved > GAPS_SHARE * allocated:
            sizes = {
                "allocated": format_bytes(allocated),
                "reserved": format_bytes(reserved),
                "gaps": format_bytes(reserved - allocated),
            }
            yield remark(
                GAPS.format(size=trial.batch_size, before=before, setting=setting, **sizes),
                trial.batch_size,
            )
            return


def _of_data(session: Session, largest: Found) -> Iterator[Note]:
    """Yield notes if the data set limits the size, and if shapes vary: then the margin pays for fragmentation."""
    most = min(session.axis.most, session.runner.facts.max_batch or UNLIMITED)
    is_bound = largest.deciding is None and not _lowered_from(session)
    if most == session.options.max_batch and is_bound:
        unit = TOKENS if session.axis.counts_tokens else "examples"
        yield remark(LITTLE_DATA.format(count=most, unit=unit))
    setting = _to_set(session)
    if session.program.has_varied and setting and session.epoch is None:
        yield remark(FRAGMENTS.format(setting=setting))


def _to_set(session: Session) -> str:
    """Return the setting against fragmentation; nothing for a command, which may set it itself."""
    if "command" in session.runner.facts.environment:
        return ""
    return to_expand(allocator_settings(), torch.__version__)


def _of_torch(session: Session) -> Iterator[Note]:
    """Yield a note if the version of torch is not one that oomprobe is tested with."""
    if "torch" in session.runner.facts.environment:  # a command's own, which its runner has noted
        return
    untested = untested_note()
    if untested is not None:
        yield remark(untested)


def _outside(session: Session) -> Iterator[Note]:
    """Yield notes about memory that is in use outside this process's allocator."""
    samples_bytes = session.neighbours.held_bytes
    if not samples_bytes:
        return
    first_bytes, grown_bytes = samples_bytes[0], samples_bytes[-1] - samples_bytes[0]
    if first_bytes > CROWDED_BYTES and not session.device.on_host:
        which = session.neighbours.names_in_brackets()
        yield remark(CROWDED.format(taken=format_bytes(first_bytes), which=which))
    if grown_bytes > 0:
        yield remark(GREW_OUTSIDE.format(grown=format_bytes(grown_bytes)))


def _leaks(session: Session, answer: Trial) -> Iterator[Note]:
    """Yield a note for each of the two kinds of leaks: what a trial leaves behind, and what each step keeps."""
    leaking = [t for t in session.trials if t.leaked_bytes and not t.step_leaked_bytes]
    if leaking:
        worst = max(leaking, key=lambda t: t.leaked_bytes)
        text = LEFT_BEHIND.format(left=format_bytes(worst.leaked_bytes), size=worst.batch_size)
        yield warning(text, worst.batch_size)
    kept_bytes, free_bytes = session.leak_of_step(answer.batch_size) if answer.passed else (0, 0)
    if kept_bytes:
        cause = f"something keeps tensors of each step{session.held_by_step}"
        if session.gradients_hold_graphs:
            cause = "the gradients hold the graph of every step (backward(create_graph=True))"
        kept, steps = format_bytes(kept_bytes), free_bytes // kept_bytes
        yield warning(
            KEPT.format(size=answer.batch_size, kept=kept, steps=steps, cause=cause),
            answer.batch_size,
        )


def _simulation_note(session: Session, answer: Trial) -> Note:
    text = "simulated: no kernel ran, and tensors had no values"
    (_, peak_bytes), upper_bytes = answer.peaks, answer.peak_upper_bytes or 0
    if upper_bytes <= peak_bytes:
        return remark(text)
    text += (
        f". At batch {answer.batch_size} the allocator reserves {format_bytes(peak_bytes)}, or up to "
        f"{format_bytes(upper_bytes)} if convolutions take the largest workspaces they may want"
    )
    budget_bytes = session.budget.total_bytes
    if upper_bytes < budget_bytes:
        return remark(text, answer.batch_size)
    roomy = [
        t.batch_size
        for t in session.trials
        if t.passed and (t.peak_upper_bytes or 0) < budget_bytes
    ]
    slower, sizes = "at every size", [answer.batch_size]
    if roomy:
        slower = f"above batch {max(roomy)}"
        sizes.append(max(roomy))
    text += f". Where one does not fit, torch takes another plan of cuDNN's, so this batch runs, but convolutions may be slower {slower}"
    return remark(text, *sizes)


def _not_covered(session: Session) -> list[str]:
    facts = session.runner.facts
    if facts.not_covered is not None:
        return list(facts.not_covered)
    not_covered = [*session.device.not_covered]
    words_in_names = set(re.findall(r"[^\W\d_]+", " ".join(facts.step_names).lower()))
    if words_in_names.isdisjoint(EVALUATING):
        not_covered.append(NO_EVALUATION)
    late = [what for what, words in LATE.items() if words_in_names.isdisjoint(words)]
    if late:
        not_covered.append(NO_LATE.format(what=", ".join(late)))
    has_largest = any(note.kind is NoteKind.LARGEST_EXAMPLES for note in session.notes)
    for item in NOT_COVERED:
        if item == LONGEST and has_largest:
            continue
        if item == OTHER_RANKS and facts.world_size > 1:  # the ranks of this machine were there
            item = OTHER_MACHINES
        not_covered.append(item)
    if not facts.replaceable:
        not_covered.append(NOT_RESTORED)
    return not_covered
