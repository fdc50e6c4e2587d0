"""Compare oomprobe with other tools that find batch sizes, on torch's CUDA allocator.

    .venv-cuda/bin/pip install --no-deps -r scripts/evidence/peers/requirements.txt    # once, after scripts/cuda-bed
    .venv-cuda/bin/python scripts/evidence/benchmark_peers.py --bed [--only WORD ...] [--models NAME ...]
    .venv-cuda/bin/python scripts/evidence/benchmark_peers.py --ranks    # two ranks with DDP, on two cards of the bed
    .venv-cuda/bin/python scripts/evidence/benchmark_peers.py --lengths  # training whose shapes vary, on the bed
    python scripts/evidence/benchmark_peers.py --device cuda     # the first on a real card, at its own size
    python scripts/evidence/benchmark_peers.py --docs

Each call runs in its own process. Its answer then runs for fifty steps in a fresh process that has the whole card, and is
compared with the cold frontier: the largest size that runs ten steps in a fresh process. New rows replace those in the
evidence; `--only oomprobe` keeps the rows of all other tools.
"""

import argparse
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = [
    str(path) for path in (ROOT, ROOT / "scripts", ROOT / "scripts" / "evidence", ROOT / "tests")
]
sys.path[:0] = PATHS
PARTS = ("cuda", "cuda_bed", "ranks_cuda_bed", "lengths_cuda_bed")
EVIDENCE = {part: ROOT / "tests" / "evidence" / f"peers_{part}.json" for part in PARTS}
BED_CARDS_GIB = (1, 4, 24)
LENGTHS_GIB = 2


def own_version():
    """Return the commit, with a "+" if the code differs from it; the release outside a repository."""
    import oomprobe

    try:
        commit, differs = (
            git("rev-parse", "--short", "HEAD"),
            git("status", "--porcelain", "oomprobe", "scripts"),
        )
    except (OSError, subprocess.CalledProcessError):
        return oomprobe.__version__
    return f"{commit}+" if differs else commit


def git(*arguments):
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def version(package):
    return own_version() if package == "oomprobe" else metadata.version(package)


def is_yolo(model):
    return model.startswith("yolo")


def measure(path, tools, models, row_of):
    """Measure on the card that this process sees, and write each row, of `row_of`, to the evidence at once."""
    import torch
    from peers import measuring
    from peers.tools import TOOLS

    if not measuring.forked(torch.cuda.is_available):
        raise SystemExit(
            f"benchmark_peers: torch {torch.__version__} sees no CUDA device; run scripts/cuda-bed"
        )
    modules = ["torch", *(TOOLS[tool].imports for tool in tools)]
    if any(map(is_yolo, models)):
        modules.append("ultralytics.nn.tasks")
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # forked processes need not collect what was imported here
    results = json.loads(path.read_text()) if path.exists() else {"versions": {}, "rows": []}
    versions = {
        package: version(package)
        for package in dict.fromkeys(module.partition(".")[0] for module in modules)
    }
    if results["versions"].get("torch", versions["torch"]) != versions["torch"]:
        raise SystemExit(
            f"benchmark_peers: {path} was measured with torch {results['versions']['torch']}; move it away"
        )
    results["versions"] |= versions
    card_gib = measuring.forked(measuring.card_gib)
    frontiers = {
        row["model"]: row["frontier"] for row in results["rows"] if row["card_gib"] == card_gib
    }
    for model in models:
        frontier = frontiers.get(model) or measuring.cold_frontier(model)
        for tool in tools:
            if tool.startswith("Ultralytics") and not is_yolo(model):
                continue
            case = {"card_gib": card_gib, "model": model, "tool": tool}
            row = {
                **case,
                "frontier": frontier,
                **getattr(measuring, row_of)(tool, model, frontier),
            }
            results["rows"] = replaced(results["rows"], row)
            write(path, results)
            print(json.dumps(row), flush=True)


def measure_ranks(path):
    """Measure on two ranks, and write each row to the evidence at once."""
    from peers import ranks

    versions = {
        package: version(package) for package in ("torch", "oomprobe", "accelerate", "lightning")
    }
    results = {"versions": versions, "rows": []}
    for tool, cards, model in itertools.product(ranks.TOOLS, ranks.CARDS, ranks.STARTS):
        row = {"tool": tool, "cards": cards, "model": model, **ranks.row(tool, model, cards)}
        results["rows"].append(row)
        write(path, results)
        print(json.dumps(row), flush=True)


def replaced(rows, row):
    """Return the rows in order, with `row` in place of the row of the same case."""

    def case(row):
        return row["card_gib"], row["model"], row["tool"]

    return sorted([other for other in rows if case(other) != case(row)] + [row], key=case)


def write(path, results):
    rows = ",\n".join(map(json.dumps, results["rows"]))
    path.write_text(f'{{"versions": {json.dumps(results["versions"])}, "rows": [\n{rows}\n]}}\n')


def main():
    from peers import table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--bed", action="store_true", help="on the test bed, with cards of 1, 4 and 24 GiB"
    )
    what.add_argument(
        "--ranks", action="store_true", help="on two cards of the test bed, with a rank on each"
    )
    what.add_argument(
        "--lengths",
        action="store_true",
        help="on the test bed, how many trainings die at each answer",
    )
    what.add_argument("--device", choices=["cuda"], help="on this machine's own card")
    what.add_argument(
        "--docs", action="store_true", help="write the tables to docs/compare.md, run nothing"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        default=[""],
        help="only tools whose names contain one of these",
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="default: all")
    asked = parser.parse_args()
    if asked.docs:
        return table.into_page(ROOT / "docs" / "compare.md", EVIDENCE)
    os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)  # for all child processes
    if asked.ranks:
        return measure_ranks(EVIDENCE["ranks_cuda_bed"])
    on_bed = asked.bed or asked.lengths
    if on_bed and "CUDASTUB_MEMORY" not in os.environ:  # the stub reads it once, when loaded
        for gib in (LENGTHS_GIB,) if asked.lengths else BED_CARDS_GIB:
            card = {"CUDASTUB_MEMORY": f"{gib}GiB"}
            subprocess.run(
                [sys.executable, "-W", "ignore", *sys.argv], env={**os.environ, **card}, check=True
            )
        return None
    from peers.models import VARYING, WORKLOADS
    from peers.tools import TOOLS, WITH_EPOCH

    tools = [name for name in TOOLS if any(word.lower() in name.lower() for word in asked.only)]
    if asked.lengths:
        models, tools = asked.models or VARYING, [name for name in tools if "Ultra" not in name]
        return measure(EVIDENCE["lengths_cuda_bed"], tools, models, "varying_row")
    tools = [name for name in tools if name not in WITH_EPOCH]
    part = "cuda_bed" if asked.bed else "cuda"
    return measure(EVIDENCE[part], tools, asked.models or WORKLOADS, "row")


if __name__ == "__main__":
    sys.exit(main())
