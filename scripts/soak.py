"""Faults injected into probes by a seeded script, judged by an independent scan.

No wrong answer, no hang, nothing left: open files, children, temporary files, memory, flags. Prints what was injected and
what came of it, and each violation with what repeats it; exits 1 where there is one.

    scripts/soak [--probes 100] [--faults 500] [--seed 0] [--jobs 2] [--only N]
"""

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

# The processes of the probes are forked from this one, which therefore never starts a thread.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from soaking import drive, endurance, plan, table  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probes", type=int, default=100)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, help="the number of one probe")
    parser.add_argument("--watchdog", type=float, default=drive.WATCHDOG_S, help="seconds after which a run hangs")
    parser.add_argument("--plant", help="what the judge has to see, in one probe: " + ", ".join(plan.PLANTS))
    arguments = parser.parse_args()
    numbers = range(arguments.probes) if arguments.only is None else [arguments.only]
    each, more = divmod(arguments.faults, arguments.probes)
    probes = [plan.probe(arguments.seed, number, each + (number < more)) for number in numbers]
    if arguments.plant:
        probes = [plan.planted(arguments.seed, arguments.plant)]
    tally, began_s, told = drive.Tally(), time.monotonic(), [0]

    def tell(number, tally):
        print(f"probe {number}: {tally.probes} probes, {sum(tally.injected.values())} faults, "
              f"{len(tally.violations)} violations, {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)  # fmt: skip

        if told[0] < len(tally.violations):
            print(
                *(f"VIOLATION in probe {n}: {text}" for _, n, text in tally.violations[told[0] :]),
                sep="\n",
                file=sys.stderr,
            )
            told[0] = len(tally.violations)

    with suppress(KeyboardInterrupt):  # the table of what there was
        drive.soak(probes, jobs=arguments.jobs, tally=tally, progress=tell, watchdog_s=arguments.watchdog)
    if arguments.only is None and not arguments.plant:
        tally.violations += endurance.violations(arguments.seed)
    print(table.text(tally, arguments, time.monotonic() - began_s))
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
