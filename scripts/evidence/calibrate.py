"""Compare published measurements of GPU memory with `oomprobe.SimulatedDevice`: `scripts/evidence/calibrate`.

Each family is described with its source in its module of the folder calibration. Nothing is fitted here: each row names
the switches that imitate an older torch.

    scripts/evidence/calibrate                        all families, 20 rows of timm: about ten minutes on one core
    scripts/evidence/calibrate timm_training --rows 61
    scripts/evidence/calibrate segmentation --write   and write tests/evidence/published/segmentation.json
    scripts/evidence/calibrate --page                 write these files into docs/validated.md
"""

import argparse
import logging
import sys
import time
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def main():
    arguments = arguments_of()
    if arguments.page:
        from calibration import page

        page.write()
        return
    quiet()
    if arguments.measure:
        from calibration import card

        card.measure(arguments.measure)
        return
    for name in arguments.families or FAMILIES:
        started = time.monotonic()
        for line in FAMILIES[name](arguments):
            print(line, flush=True)
        print(f"({time.monotonic() - started:.0f} s)\n", flush=True)


def arguments_of():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "families",
        nargs="*",
        metavar="FAMILY",
        help=f"one or more of {', '.join(FAMILIES)} (default: all)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=20,
        help="rows of timm for each card, evenly spaced; 0: all (default: 20)",
    )
    parser.add_argument(
        "--write", action="store_true", help="also write tests/evidence/published/FAMILY.json"
    )
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        help="only measure the rows of `card` on this machine's card",
    )
    parser.add_argument(
        "--page", action="store_true", help="only write docs/validated.md from these files"
    )
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
    answers = list(module.answers()) if hasattr(module, "answers") else []
    if arguments.write:
        rows.write_figures(name, compared, answers, **module.ABOUT)
    yield from rows.shown_figures(compared, unit, unit_bytes, digits)
    yield from (
        f"{row['name']:48} {row['published']:>10} {row['simulated']:>5}  {row['verdict']}"
        for row in answers
    )


def brackets(name, arguments):
    """Compare batch sizes that ran and that failed."""
    from calibration import rows

    module = import_module(f"calibration.{name}")
    yield f"{name}, {module.ABOUT['card']}: {module.ABOUT['how']}"
    compared = []
    for row in module.compare(arguments.rows or None):
        print(f"\r{len(compared)} {row.name:50}", end="", file=sys.stderr, flush=True)
        compared.append(row)
    print(f"\r{'':60}\r", end="", file=sys.stderr)
    if arguments.write:
        rows.write_brackets(name, compared, **module.ABOUT)
    yield from rows.shown_brackets(compared)


UNITS = {
    "bert": ("MiB", 2**20, 0),
    "litgpt": ("GB", 10**9, 2),
    "litgpt_hub": ("GB", 10**9, 2),
    "card": ("bytes", 1, 0),
    "cublas": ("bytes", 1, 0),
    "fms": ("bytes", 1, 0),
    "segmentation": ("GiB", 2**30, 2),
}
BRACKETS = ("timm_inference", "timm_training")
FAMILIES = {name: partial(figures, name) for name in UNITS} | {
    name: partial(brackets, name) for name in BRACKETS
}

if __name__ == "__main__":
    main()
