"""What the trials say about the step: that it ignores its batch size, splits it, varies, leaks, or presses the allocator.

Pure: everything is read from the trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oomprobe.ground.units import format_bytes
from oomprobe.ground.words import count
from oomprobe.records.trials import NO_VERDICT, DeviceInfo, Phase, Trial, Verdict
from oomprobe.rules import look
from oomprobe.rules.look import Records, differ

# A step that uses its batch size raises its peak, or the bytes it allocates, within this many doublings; devices that do
# not count allocated bytes get more. Allocators round up small requests, and the host's resident memory is noisy.
DOUBLINGS, UNCOUNTED_DOUBLINGS, HOST_NOISE_BYTES = 10, 24, 16 * 2**20
ENDLESS_BATCH = 2**40  # no memory holds this batch: a step that still passes ignores batch_size
# Over this many doublings a step that splits its batch itself multiplies its allocations at each, and its peak stays the
# same. An ordinary step allocates as many blocks for any batch (27 and 27, where such a step allocated 55, 191, 735, 2911).
SPLITTING_DOUBLINGS, SPLITTING_FACTOR = 3, 1.6
# Refuse the answer if a leak in each step would use up the free memory in fewer steps than this. The second number is for
# the user's own process, where other things may have grown.
STEPS_TO_LAST, STEPS_TO_LAST_HERE = 1000, 100

FLAT = (
    "batch {size} needs no more memory than batch {smaller}, so memory does not limit the batch "
    "size: the step ignores batch_size, does not run the model on this device, or runs out of "
    "data{examples}. If it runs out of data, pass as max_batch how many examples there are; if it "
    "pads small batches, search from the size it pads to (min_batch)"
)
AT_BOTH = " (the model got {examples} examples each time)"
ENDED = (
    "the model got {examples} examples where {size} were asked for, though a smaller size got as "
    "many as were asked for: the data end there, or the step drops some. Pass "
    "max_batch={examples} if there are no more, or probe with more data"
)
UNCOMPARED = "batch {size}, which was to show that the step uses its batch size, did not run: {why}"
SPLITS = (
    "memory does not limit this step: from batch {smaller} to {size} its peak stays the same while the number of its allocations "
    "grows with the batch, so it splits the batch itself. Larger batches run, in more time; to try them, pass max_batch"
)
LEAKS = (
    "each step at batch {size} keeps {kept}, even after collecting garbage, so training would use up the {free} left free "
    "after about {steps} more. {cause}"
)
UNKNOWN_CAUSE = (
    "Something keeps tensors of each step: a list of losses that still have their graph (append loss.item()), a cache keyed by "
    "shape, or a buffer that takes longer than that to fill; if it is a buffer, run the step until it is full, then probe"
)
GRADIENTS_HOLD_GRAPHS = (
    "The gradients hold the graph of every step: backward(create_graph=True) makes a reference cycle of each parameter and its "
    "gradient, as torch warns. Set the gradients to None in each step (optimizer.zero_grad()), or take them with "
    "torch.autograd.grad"
)

SLOW_START_CALLS, FAR = 10, 16  # see `growth`


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What the calls of a trial took; 0 if unknown."""

    each_served_bytes: tuple[int, ...] = ()  # by each call after the first full step
    examples: int = 0  # that reached the model in a call, at most
    values: int = 0
    served_bytes: int  # after the first full step
    blocks: int
    starting_s: float  # by the first call beyond a later one
    call_s: float  # by a later one

    @classmethod
    def of(cls, records: Records) -> Calls:
        """Add up those of all steps."""
        later = look.later_calls(records)
        served_bytes = tuple(record.served_bytes for record in later)
        call_s, starting_s = look.step_s(records[1:]), 0.0
        if call_s:
            starting_s = max(0.0, (records[0].seconds or 0.0) - call_s)
        return cls(
            served_bytes=sum(served_bytes),
            blocks=sum(record.blocks for record in later),
            starting_s=starting_s,
            call_s=call_s or 0.0,
            each_served_bytes=served_bytes,
            examples=look.largest(records, "examples"),
            values=look.largest(records, "values"),
        )


def growth(trial: Trial, taken: Mapping[int, Calls], total_bytes: int, slow_start_s: float) -> int:
    """Return the factor by which to grow: 4 where each size takes long to start, as one that is compiled, and memory is far away.

    Otherwise 2: above a sixteenth of the memory, a failure of a size four times as large would cost more than the step between.
    """
    calls = taken.get(trial.batch_size)
    if calls is None or trial.peak_reserved_bytes is None:
        return 2
    starts_slowly = calls.starting_s > max(slow_start_s, SLOW_START_CALLS * calls.call_s)
    is_far = FAR * trial.peak_reserved_bytes < total_bytes
    return 4 if starts_slowly and is_far else 2


def same_memory_smaller(
    trials: Sequence[Trial], allocated: Mapping[int, Calls], *, on_host: bool
) -> Trial | None:
    """Return a much smaller trial that took as much memory as the last one that grew; None if there is none."""
    grown = _grown(trials)
    now = grown[-1]
    served_bytes = {size: of_size.served_bytes for size, of_size in allocated.items()}
    is_counted = now.replayed or served_bytes.get(now.batch_size)
    doublings = DOUBLINGS if is_counted else UNCOUNTED_DOUBLINGS
    if now.batch_size >= ENDLESS_BATCH:
        return grown[0]
    smaller = [*filter(lambda trial: trial.batch_size << doublings <= now.batch_size, grown)]
    if not smaller:
        return None
    then = smaller[-1]
    same_peak = now.peaks[0] <= then.peaks[0] + HOST_NOISE_BYTES * on_host
    same_requests = served_bytes.get(now.batch_size) == served_bytes.get(then.batch_size)
    if same_peak and (same_requests or now.replayed):
        return then
    return None


def ask_for_the_same(
    now: Trial, then: Trial, taken: Mapping[int, Calls], device: DeviceInfo
) -> bool:
    """Return whether the calls of two sizes are known to have asked for the same memory.

    Blocks of an allocator are rounded, so small sizes may differ only in what the model got.
    """
    calls, calls_then = taken[now.batch_size], taken[then.batch_size]
    both = min(len(calls.each_served_bytes), len(calls_then.each_served_bytes))  # made these calls
    same_requests = calls.each_served_bytes[:both] == calls_then.each_served_bytes[:both]
    same_peak = abs(now.peaks[0] - then.peaks[0]) <= HOST_NOISE_BYTES * device.on_host
    is_known = device.counts_bytes or calls.values + sum(calls.each_served_bytes) > 0
    return is_known and calls.values == calls_then.values and same_requests and same_peak


def data_ended(examples: Mapping[int, int], size: int) -> bool:
    """Return whether the model got fewer examples than `size`, and as many as a smaller size."""
    got = examples.get(size, 0)
    return any(1 < asked == smaller < got < size for asked, smaller in examples.items())


def _grown(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.phase is Phase.GROW and trial.passed]


def splits_from(trials: Sequence[Trial], allocated: Mapping[int, Calls]) -> Trial | None:
    """Return the trial from which on doublings multiplied the step's allocations and did not raise its peak; or None."""
    grown = _grown(trials)[-1 - SPLITTING_DOUBLINGS :]
    if len(grown) <= SPLITTING_DOUBLINGS or any(trial.replayed for trial in grown):
        return None
    first, last = grown[0], grown[-1]
    blocks = [allocated[trial.batch_size].blocks for trial in grown]
    multiplies = all(0 < SPLITTING_FACTOR * fewer <= more for fewer, more in pairwise(blocks))
    same_peak = not differ(first.peaks[0], last.peaks[0])
    return first if multiplies and same_peak else None


def how_different(before: Trial, after: Trial) -> str | None:
    """Say how two trials of the same calls under the same cap differ; None if they do not."""
    if before.verdict is not after.verdict:
        return f"{before.verdict}, then {after.verdict}"
    peak_before, peak_after = before.peaks[0], after.peaks[0]
    if after.passed and differ(peak_before, peak_after):
        return f"peaks of {format_bytes(peak_before)} and {format_bytes(peak_after)}"
    return None


def known_so_far(trials: Sequence[Trial]) -> str:
    """Return the beginning of a sentence: the smallest size that failed, and the largest below it that ran; or ""."""
    last: dict[int, Trial] = {}  # of each size, which counts
    for trial in trials:
        if trial.verdict not in NO_VERDICT and trial.accumulation_steps == 1 and not trial.replayed:
            last[trial.batch_size] = trial
    ran = failed = 0
    for size in sorted(last):
        if not last[size].passed:
            failed = size
            break
        ran = size
    parts = []
    if ran:
        steps = last[ran].steps
        length = f" for {count(steps, 'step', 'steps')}" if steps else ""
        parts.append(f"batch {ran} ran{length}")
    if failed:
        parts.append(f"batch {failed} failed")
    return f"after {' and '.join(parts)}, " if parts else ""


def step_leak_bytes(last: Trial, looked: Trial | None) -> int:
    """Return the bytes that each step of the answer leaves in use; 0 if a longer look saw that level off."""
    if looked is None or not looked.passed or looked.steps <= last.steps:
        return last.step_leaked_bytes
    return last.step_leaked_bytes if looked.step_leaked_bytes else 0


def is_pressed(trial: Trial) -> bool:
    """Return whether the allocator emptied its cache on half of the calls or more; each time takes a synchronisation."""
    return 2 * trial.alloc_retries >= trial.steps > 0


def is_size_limit(trials: Sequence[Trial], trial: Trial) -> bool:
    """Return whether this size is a limit of its own: a smaller one passed, and two processes had a sticky error here."""
    poisoned = smaller_passed = 0
    for earlier in trials:
        if earlier.verdict is Verdict.POISONED and earlier.batch_size == trial.batch_size:
            poisoned += 1
        elif earlier.passed and earlier.batch_size < trial.batch_size:
            smaller_passed += 1
    return poisoned > 1 and smaller_passed > 0


def line_through(trials: Sequence[Trial], trial: Trial, wanted_bytes: int) -> int | None:
    """Return the size whose peak would be `wanted_bytes`, on the line through the smallest size that passed and a trial; or None."""
    smallest = min((ran for ran in trials if ran.passed), key=lambda ran: ran.batch_size)
    size, peak_bytes = smallest.batch_size, smallest.peaks[0]
    rise_bytes = trial.peaks[0] - peak_bytes
    if rise_bytes <= 0 or trial.batch_size <= size:
        return None
    return size + max(0, (wanted_bytes - peak_bytes) * (trial.batch_size - size) // rise_bytes)
