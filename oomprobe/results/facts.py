"""What was measured: sentences about ranks, rates, the straight line and the plan, and tables of where the memory went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from oomprobe.ground.units import format_bytes
from oomprobe.ground.words import rate
from oomprobe.records.breakdown import Breakdown, ModuleMemory
from oomprobe.records.epoch import EpochRecord
from oomprobe.records.fit import LinearFit
from oomprobe.records.plan import PlanEntry
from oomprobe.records.trials import RankTrial, Trial
from oomprobe.results.blocks import Block, Fact, Row, Table

TIMING_NOISE = 0.05  # smallest spread assumed between the rates of repeated trials
ALIKE = 0.01  # ranks count as alike if the shares of their memory that they reserve differ by no more than this
SPILL_FACTOR = 2.0  # a size that is slower than a smaller one by more than this may be spilling memory to the host
MOST_MODULES = 10
WHAT_FITS = (
    "what would take less: --savings all (find_savings) runs the step with each saving of memory"
)


def ranks(trials: Sequence[RankTrial], limiting_rank: int | None, *, verbose: bool) -> list[Fact]:
    """Say how much memory each rank took at the answer, and which one limits."""
    if len(trials) < 2:
        return []
    limiting = next((trial for trial in trials if trial.rank == limiting_rank), trials[0])
    others = [trial for trial in trials if trial is not limiting]
    taken = [trial.reserved_of_available for trial in trials]
    shares = [reserved / max(1, available) for reserved, available in taken]
    if max(shares) - min(shares) <= ALIKE:
        facts = [Fact(f"{len(trials)} ranks, all alike: {_of_available(limiting)}")]
    else:
        limit = f"rank {limiting.rank} of {len(trials)} limits: {_of_available(limiting)}"
        facts = [Fact(f"{limit}; {_reserve(others)}")]
    each = {trial.rank: _of_available(trial) for trial in trials}
    if verbose and len(set(each.values())) > 1:
        facts += [Fact(f"rank {rank}: {reserved}") for rank, reserved in each.items()]
    return facts


def _of_available(trial: RankTrial) -> str:
    reserved, available = map(format_bytes, trial.reserved_of_available)
    return f"{reserved} reserved of {available} available"


def _reserve(others: Sequence[RankTrial]) -> str:
    peaks = sorted(trial.reserved_of_available for trial in others)
    least, most = (format_bytes(reserved) for reserved, _ in (peaks[0], peaks[-1]))
    if len(others) == 1:
        return f"the other reserves {least}"
    if least == most:
        return f"the others reserve {least}"
    return f"the others reserve {least} to {most}"


def epoch(record: EpochRecord | None) -> list[Fact]:
    """Say how many orders of an epoch run out of memory, at the answer and at the size whose largest batch still runs."""
    if record is None or not record.ends:
        return []
    size, bound = record.batch_size, record.longest_only_batch_size
    text = _deaths(size, record.ends)
    if not any(record.ends):  # with a chance of 95 %, more orders that die would have shown one
        most = 1 - 0.05 ** (1 / len(record.ends))
        text += f", so at most {100 * most:.2g} % of all orders do (at 95 % confidence)"
    facts = [Fact(text, (size,))]
    if bound is not None and bound != size and record.longest_only_ends:
        text = f"{_deaths(bound, record.longest_only_ends)}: it is the largest that runs the largest batch alone"
        facts.append(Fact(text, (bound,)))
    for setting, deaths in record.settings.items():
        if deaths != record.deaths:
            text = f"with {setting}, {deaths} of {len(record.ends)} do at batch {size}"
            facts.append(Fact(text, (size,)))
    return facts


def _deaths(size: int, ends: Sequence[int | None]) -> str:
    """Say how many orders of a size die, and when."""
    died = sorted(end for end in ends if end)
    text = f"batch {size}: {len(died)} of {len(ends)} orders run out of memory"
    if not died:
        return text
    if len(died) == 1:
        return f"{text}, in call {died[0]}"
    return f"{text}, the first in call {died[0]}, half of them by call {died[(len(died) - 1) // 2]}, the last in {died[-1]}"


def host_memory(pinned_bytes: int | None, host_bytes: int | None) -> Fact:
    """Say what the answer took of the host beside the card."""
    pinned = f"{format_bytes(pinned_bytes or 0)} pinned, as torch rounds it"
    if host_bytes is None:
        return Fact(pinned)
    return Fact(f"{format_bytes(host_bytes)}, of it {pinned}")


def throughput(trials: Iterable[Trial], answer: int, *, per_rank: bool) -> list[Fact]:
    """State the rate of the answer, and compare it with the smaller sizes by the spread of repeated trials."""
    rates: dict[int, list[float]] = defaultdict(list)
    timed_once = set[int]()  # sizes, by a single call after the first
    for trial in trials:
        if trial.passed and trial.accumulation_steps == 1 and trial.samples_per_s:
            rates[trial.batch_size].append(trial.samples_per_s)
            timed_once.discard(trial.batch_size)
            if trial.steps <= 2:
                timed_once.add(trial.batch_size)
    if answer not in rates:
        return []
    speed = rates[answer][-1]  # its confirmation, with the most steps
    sentence = f"{rate(speed)} samples/s"
    if per_rank:
        sentence += " per rank"
    smaller = {size: repeated[-1] for size, repeated in rates.items() if size < answer}
    if not smaller:
        return [Fact(sentence)]
    noise = TIMING_NOISE
    for repeated in rates.values():
        noise = max(noise, 1 - min(repeated) / max(repeated))
    compared = _compared(smaller, speed, noise)
    by_one_call = ""
    if timed_once.intersection(compared.sizes):
        by_one_call = ", by one call"
    return [Fact(f"{sentence}; {compared.text}{by_one_call}", compared.sizes)]


def _compared(smaller: Mapping[int, float], speed: float, noise: float) -> Fact:
    """Compare the rates of smaller sizes with that of the answer."""
    by_noise = f"the timing noise of {100 * noise:.0f} %"
    fastest = max(smaller, key=smaller.__getitem__)
    if smaller[fastest] * (1 - noise) > speed:
        sentence = f"batch {fastest} is faster, {rate(smaller[fastest])} samples/s, by more than {by_noise}"
        if smaller[fastest] > SPILL_FACTOR * speed:
            sentence += ". Memory may be spilling to the host"
        return Fact(sentence, (fastest,))
    as_fast = [size for size in smaller if smaller[size] >= (1 - noise) * speed]
    if not as_fast:
        return Fact(f"every smaller size that ran is slower by more than {by_noise}")
    return Fact(f"batch {min(as_fast)} is as fast, within {by_noise}", (min(as_fast),))


def linear_fit(
    fit: LinearFit | None, trials: Iterable[Trial], answer: int, *, multiple_of: int, verbose: bool
) -> list[Fact]:
    """Say what the line would have answered, and how far the peaks are off it."""
    if fit is None:
        return [Fact("none: fewer than three sizes ran")]
    prediction = Fact("no prediction: the line does not rise")
    if fit.predicted_max_batch is not None:
        prediction = _judge_prediction(
            fit.predicted_max_batch - fit.predicted_max_batch % multiple_of, trials, answer
        )
    off = "more than 1000 %"
    if fit.max_relative_error <= 10:
        off = f"up to {100 * fit.max_relative_error:.1f} %"
    facts = [Fact(f"{prediction.text}; the fit is off by {off}", prediction.sizes)]
    if verbose:
        coefficients = f"{format_bytes(fit.fixed_bytes)} fixed + {format_bytes(fit.bytes_per_sample)} per sample"
        facts.append(Fact(f"{coefficients}, r2 {fit.r_squared:.4f}"))
    return facts


def _judge_prediction(predicted: int, trials: Iterable[Trial], answer: int) -> Fact:
    """Compare a prediction with the trials; without a failure it is not too high, because max_batch may end a search."""
    sentence = f"{predicted}, not used"
    if predicted == answer:
        return Fact(f"{sentence}: the same as the answer")
    if predicted < answer:
        return Fact(f"{sentence}: too low")
    failed = set[int]()
    for trial in trials:
        if not trial.passed:
            failed.add(trial.batch_size)
        else:  # the last trial of each size counts
            failed.discard(trial.batch_size)
    too_high = [size for size in failed if answer < size <= predicted]
    if not too_high:
        return Fact(f"{sentence}: above the answer, where nothing failed")
    return Fact(f"{sentence}: too high, batch {min(too_high)} failed", (min(too_high),))


def plan(global_batch: int, world_size: int, entries: Iterable[PlanEntry]) -> list[Fact]:
    """List the splits of a global batch."""
    of_ranks, by_ranks = "", ""
    if world_size > 1:
        of_ranks, by_ranks = f" x {world_size} ranks", f" x {world_size}"
    facts = [Fact(f"global batch {global_batch} = micro-batch x accumulation steps{of_ranks}")]
    for entry in entries:
        size = entry.micro_batch
        product = f"{entry.global_batch} = {size} x {entry.accumulation_steps}{by_ranks}"
        nearness = "exact" if entry.exact else "near"
        facts.append(
            Fact(f"{product}, {nearness}; micro-batch {size}: {_what_ran(entry)}", (size,))
        )
    return facts


def _what_ran(entry: PlanEntry) -> str:
    if entry.ran_accumulated:
        return "ran, also with accumulation"
    if entry.ran:
        return "ran"
    return "not run"


def breakdown_blocks(breakdown: Breakdown) -> list[Block]:
    """Return tables of size, share of the peak and name: of the parts, and of modules with 0.1 % or more."""
    peak_bytes = max(1, breakdown.peak_reserved_bytes)
    title = f"where the memory went: batch {breakdown.batch_size}"
    if breakdown.step_name is not None:
        title += f", step {breakdown.step_name!r}"
    parts = {kind: nbytes for kind, nbytes in breakdown.parts.items() if nbytes}
    parts["peak reserved"] = breakdown.peak_reserved_bytes
    blocks = [
        Block(f"{title}, at the peak in {breakdown.peak_in}", _table_of_shares(parts, peak_bytes))
    ]
    modules = {}
    for module in breakdown.modules[:MOST_MODULES]:
        if 1000 * module.activation_bytes >= peak_bytes:
            modules[_name_of(module)] = module.activation_bytes
    if modules:
        blocks.append(
            Block(
                "modules that hold the most activation memory:",
                _table_of_shares(modules, peak_bytes),
            )
        )
    return [*blocks, Block("", WHAT_FITS)]


def _table_of_shares(sizes: Mapping[str, int], peak_bytes: int) -> Table:
    rows = []
    for name, nbytes in sizes.items():
        rows.append(Row(cells=[format_bytes(nbytes), f"{100 * nbytes / peak_bytes:.1f} %", name]))
    return Table(rows=rows, texts={2})


def _name_of(module: ModuleMemory) -> str:
    if module.count > 1:
        return f"{module.name} ({module.count} x {module.kind})"
    if module.kind:
        return f"{module.name} ({module.kind})"
    return module.name
