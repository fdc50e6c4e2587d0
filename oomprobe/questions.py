"""What is asked of a workbench beside the search: does this one size survive, and does the plan?"""

from __future__ import annotations

from oomprobe.errors import StepFailedError, TimeLimitError
from oomprobe.options import MAX_CALLS
from oomprobe.plan import PlanEntry, plan
from oomprobe.result import Phase, Trial
from oomprobe.search import Found
from oomprobe.workbench import Workbench

PLAN_TRIALS = 5  # a gradient buffer beside the activations costs little; five times a tenth is far more
PLAN_SHRINK = 0.9


def confirm_only(bench: Workbench, size: int) -> Found:
    """Ask for one size under the cap, and again where that fails or the cap turns out too high.

    The available memory is sampled before the trial and, once its kernels are loaded, after it.
    """
    bench.measure_available(loaded=False)
    first_budget = bench.budget_bytes
    trial = _confirm(bench, size, Phase.CONFIRM)
    if trial.passed:
        bench.measure_available(loaded=True)
        peak = trial.peak_reserved_bytes
        if bench.budget_bytes < first_budget and (peak is None or peak > bench.budget_bytes):
            trial = _confirm(bench, size, Phase.RECHECK)
    else:
        trial = _confirm(bench, size, Phase.RECHECK)
    passed = trial.passed
    return Found(batch_size=size if passed else None, limit=size if passed else None)


def _confirm(bench: Workbench, size: int, phase: Phase) -> Trial:
    return bench.run(size, phase, steps=bench.options.confirm_steps, cap_bytes=bench.cap_bytes)


def run_plan(bench: Workbench, batch_size: int) -> None:
    """Run the micro-batch planned for `global_batch` with its accumulation; move down while that fails."""
    if bench.options.global_batch is None:
        return
    largest = batch_size
    for _ in range(PLAN_TRIALS):
        entry = _planned(bench, bench.options.global_batch, largest)
        if entry is None or entry.accumulation_steps == 1:
            return
        try:
            trial = bench.run(
                entry.micro_batch,
                Phase.CONFIRM,
                steps=1,
                cap_bytes=bench.cap_bytes,
                accumulation_steps=min(entry.accumulation_steps, MAX_CALLS),
            )
        except (TimeLimitError, StepFailedError) as error:
            reason = str(error).splitlines()[0]
            bench.notes[f"the plan for global_batch was not run to its end ({reason})"] = None
            return
        if trial.passed:
            return
        largest = int(PLAN_SHRINK * entry.micro_batch)


def _planned(bench: Workbench, global_batch: int, largest: int) -> PlanEntry | None:
    entries = plan(
        global_batch,
        world_size=1,
        max_micro_batch=largest,
        min_micro_batch=bench.options.min_batch,
        multiple_of=bench.options.multiple_of,
    )
    return next(iter(entries), None)
