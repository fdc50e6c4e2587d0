"""Count the work of a probe in steps of its answer's size, by phase, on torch's CUDA allocator (the bed).

    .venv-cuda/bin/python scripts/evidence/benchmark_work.py [--memory 1GiB 4GiB 24GiB] [--only WORD]

For each model and card: the answer, the calls after which its confirmation settled, and the work of each phase: calls times batch
size, divided by the answer. A call that failed counts whole. "with 50" is the work if the confirmation had made all its 50 calls. With
`--survive`, each answer also runs 200 steps in a fresh process that is held to the same cap.
"""

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bed import forked  # noqa: E402
from zoo import MODELS, runs  # noqa: E402

import oomprobe  # noqa: E402

PHASES = ("grow", "look", "bisect", "recheck", "confirm")
LOOK_CALLS, SURVIVED_STEPS = 50, 200


def work(result):
    """Return the work of each phase of a probe's result, in steps of the answer's size."""
    answer, units, largest = result.batch_size, dict.fromkeys(PHASES, 0.0), 0
    for trial in result.trials:
        if trial.replayed:
            continue
        looks = trial.phase == "grow" and trial.batch_size < largest
        largest = max(largest, trial.batch_size)
        calls = trial.steps + (not trial.passed)
        units["look" if looks else str(trial.phase)] += calls * trial.batch_size / answer
    return units


def probed(build):
    """Probe; return the answer, the cap, the calls after which the confirmation settled, and the work."""
    result = oomprobe.find_max_batch(*build(), progress="off")
    return result.batch_size, result.budget_bytes, result.trials[-1].settled_after, work(result)


def survives(name, batch_size, cap_bytes):
    """Return whether this fresh process runs that size under the cap."""
    return runs(MODELS[name], batch_size, steps=SURVIVED_STEPS, cap_bytes=cap_bytes)


def line(name, units, calls):
    """Return a line of the table: the sum, what it would be with all calls of the confirmation, and the parts."""
    total = sum(units.values())
    all_calls = total - units["confirm"] + max(units["confirm"], LOOK_CALLS)
    parts = "".join(f"{units[phase]:9.1f}" for phase in PHASES)
    return f"{name:34}{calls!s:>8}{total:8.1f}{all_calls:9.1f}{parts}"


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", nargs="+", default=["1GiB", "4GiB", "24GiB"])
    parser.add_argument("--only", default="")
    parser.add_argument("--survive", action="store_true")
    arguments = parser.parse_args()
    print(
        f"{'':34}{'settled':>8}{'work':>8}{'with 50':>9}"
        + "".join(f"{phase:>9}" for phase in PHASES)
    )
    every, died = [], []
    for name in (name for name in MODELS if arguments.only in name):
        for memory in arguments.memory:
            answer, cap_bytes, calls, units = forked(
                probed, MODELS[name], memory=memory, limit_s=600
            )
            every.append(units)
            print(line(f"{name}, {memory}: {answer}", units, calls), flush=True)
            if arguments.survive and not forked(
                survives, name, answer, cap_bytes, memory=memory, limit_s=600
            ):
                died.append(f"{name}, {memory}")
    medians = {phase: statistics.median(units[phase] for units in every) for phase in PHASES}
    totals = [sum(units.values()) for units in every]
    print(line("median of each phase", medians, ""))
    print(f"median {statistics.median(totals):.1f}, from {min(totals):.1f} to {max(totals):.1f}")
    if arguments.survive:
        print(f"ran out of memory within {SURVIVED_STEPS} steps: {', '.join(died) or 'none'}")


if __name__ == "__main__":
    main()
