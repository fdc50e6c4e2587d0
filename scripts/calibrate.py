"""Compare published measurements of GPU memory with `oomprobe.SimulatedDevice`: `scripts/calibrate`.

Each family is described with its source in its module under scripts/calibration. Nothing is fitted here: each row names
the switches that imitate an older torch.

    scripts/calibrate                        all families, 20 rows of timm: about ten minutes on one core
    scripts/calibrate timm --rows 61 --sweep
    scripts/calibrate segmentation --write   and write tests/evidence/published/segmentation.json
    scripts/calibrate --page                 write these files into docs/validated.md
"""

import argparse
import logging
import sys
import time
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main():
    arguments = arguments_of()
    if arguments.page:
        from calibration import page

        page.write()
        return
    quiet()
    for name in arguments.families or FAMILIES:
        started = time.monotonic()
        for line in FAMILIES[name](arguments):
            print(line, flush=True)
        print(f"({time.monotonic() - started:.0f} s)\n", flush=True)


def arguments_of():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help=f"one or more of {', '.join(FAMILIES)} (default: all)"
    )
    parser.add_argument("--rows", type=int, default=20, help="rows of timm, evenly spaced; 0: all (default: 20)")
    parser.add_argument(
        "--capacity", type=int, metavar="MIB", help="allocator capacity of the RTX 3090 (default: 22,000)"
    )
    parser.add_argument("--sweep", action="store_true", help="count hits at other capacities too")
    parser.add_argument("--write", action="store_true", help="also write tests/evidence/published/FAMILY.json")
    parser.add_argument("--page", action="store_true", help="only write docs/validated.md from these files")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.families if name not in FAMILIES]
    if unknown:
        parser.error(f"no family {unknown[0]!r}: {', '.join(FAMILIES)}")
    return arguments


def quiet():
    """Silence deprecations and hints of transformers and timm."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def figures(name, arguments):
    """Compare the peaks of a family, in the unit of its publication."""
    from calibration import rows

    module = import_module(f"calibration.{name}")
    unit, unit_bytes, digits = UNITS[name]
    yield f"{name}, {module.ABOUT['card']}: {module.ABOUT['how']}"
    compared = list(module.compare())
    if arguments.write:
        rows.write_figures(name, compared, **module.ABOUT)
    yield from rows.shown_figures(compared, unit, unit_bytes, digits)


def timm(arguments):
    from calibration import timm_brackets
    from calibration.rows import shown_brackets

    capacity_mib = arguments.capacity or timm_brackets.CAPACITY_MIB
    recorded = []
    for row in timm_brackets.rows(arguments.rows or None):
        print(f"\r{len(recorded)} {row['model']:50}", end="", file=sys.stderr, flush=True)
        recorded.append((row, timm_brackets.record(row)))
    print(f"\r{'':60}\r", end="", file=sys.stderr)
    yield f"timm, training, fp16 autocast, RTX 3090: brackets of batch size, {capacity_mib:,} MiB for the allocator"
    yield from shown_brackets([timm_brackets.bracket(row, sizes, capacity_mib) for row, sizes in recorded])
    if arguments.sweep:
        yield from sweep(recorded)


def sweep(recorded):
    from calibration import timm_brackets

    yield "capacity, MiB: hits; misses"
    for capacity_mib in timm_brackets.SWEEP_MIB:
        rows = [timm_brackets.bracket(row, sizes, capacity_mib) for row, sizes in recorded]
        missed = ", ".join(f"{row.verdict} {row.name}" for row in rows if row.verdict != "HIT")
        yield f"{capacity_mib:,}: {sum(row.verdict == 'HIT' for row in rows)} of {len(rows)}; {missed}"


UNITS = {
    "bert": ("MiB", 2**20, 0),
    "litgpt": ("GB", 10**9, 2),
    "cublas": ("bytes", 1, 0),
    "fms": ("bytes", 1, 0),
    "segmentation": ("GiB", 2**30, 2),
    "detection": ("GiB", 2**30, 2),
}
FAMILIES = {**{name: partial(figures, name) for name in UNITS}, "timm": timm}

if __name__ == "__main__":
    main()
