"""Compare published measurements of GPU memory with `oomprobe.SimulatedDevice`: `scripts/calibrate`.

Each family is described with its source in its module under scripts/calibration: bert-large on a V100, timm's training
benchmark on an RTX 3090, litgpt's LoRA table on an A100, cuBLAS's workspace on an A10G, and segmentation on a V100. Nothing
is fitted here: each row names the switches that imitate an older torch.

    scripts/calibrate                        all families, 20 rows of timm: about ten minutes on one core
    scripts/calibrate timm --rows 61 --sweep
    scripts/calibrate segmentation --write   and write tests/evidence/published/segmentation.json
"""

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main():
    arguments = arguments_of()
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
    parser.add_argument(
        "--torch", choices=("1.9", "1.10", "new"), default="1.9", help="torch version imitated for bert (default: 1.9)"
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


def bert(arguments):
    from calibration.bert import CONTEXT_MIB, compare
    from calibration.rows import MIB, shown_figures

    yield f"bert-large, sequence 512, V100-16GB: process, MiB (reserved + {CONTEXT_MIB}); torch: {arguments.torch}"
    yield from shown_figures(list(compare(torch_version=arguments.torch)), "MiB", MIB, 0)


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


def litgpt(_):
    from calibration.litgpt import compare
    from calibration.rows import GB, shown_figures

    yield "litgpt, LoRA, bf16-true, A100-40GB: peak allocated, GB; models and training loop are reimplemented"
    yield from shown_figures(list(compare()), "GB", GB, 2)


def cublas(_):
    from calibration.cublas import compare
    from calibration.rows import shown_figures

    yield "Linear(1, 1), A10G: bytes still allocated at the end"
    yield from shown_figures(list(compare()), "bytes", 1, 0)


def segmentation(arguments):
    from calibration.rows import GIB, shown_figures, write_figures
    from calibration.segmentation import ABOUT, compare

    yield "segmentation, V100-32GB: peak allocated, GiB; networks are written anew"
    rows = list(compare())
    if arguments.write:
        write_figures("segmentation", rows, **ABOUT)
    yield from shown_figures(rows, "GiB", GIB, 2)


FAMILIES = {"bert": bert, "timm": timm, "litgpt": litgpt, "cublas": cublas, "segmentation": segmentation}

if __name__ == "__main__":
    main()
