"""Compare oomprobe's simulated card with other tools that predict or measure the peak memory of a training step.

    scripts/cuda-bed 2.11.0    # the torch with which the H200 was measured
    .venv-cuda-2.11.0/bin/pip install --no-deps -r scripts/evidence/peers/requirements_peaks.txt
    .venv-cuda-2.11.0/bin/python scripts/evidence/benchmark_peaks.py --bed [--again WORD ...]
    python scripts/evidence/benchmark_peaks.py --docs

Each tool is asked about each case in a process of its own. The true peaks are those of tests/data/measured_h200.json; of
two small models, those of torch's own allocator on the bed. Then each is asked about two sizes of a network that somebody
trained on an RTX 3090: one that ran, and one that failed. What the evidence has is not asked again but with `--again`.
"""

import argparse
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys

from benchmark_peers import PATHS, ROOT, version

sys.path[:0] = PATHS
EVIDENCE = ROOT / "tests" / "evidence" / "peaks.json"


def measure(words):
    """Ask the tools, and write each answer to the evidence at once."""
    from peers.peaks import BRACKETS, CASES, TOOLS, measured, row

    for module in (
        "torch._dynamo",
        "timm",
        "transformers",
        "torch_preflight.cli",
        "kitsune.predict",
        "accelerate",
    ):
        importlib.import_module(module)  # once here instead of in each process
    gc.freeze()
    anew = [name for name in TOOLS if any(word.lower() in name.lower() for word in words)]
    kept = json.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else {"cases": {}}
    packages = ("torch", *(tool.package for tool in TOOLS.values()), "timm", "transformers")
    packages = ("torch", *(tool.package for tool in TOOLS.values()), "timm", "transformers")
    versions = {package: version(package) for package in dict.fromkeys(packages)}
    for case, name in itertools.product(CASES.values(), TOOLS):
        found = kept["cases"].setdefault(case.name, {})
        if "measured" not in found:
            found["measured"] = measured(case)
        if name in found and name not in anew:
            continue  # an interrupted run goes on
        found[name] = row(name, case)
        kept["versions"] = versions
        write(kept)
        print(case.name, name, found[name], flush=True)
    brackets = kept.setdefault("brackets", {})
    for (bracket, (ran, failed)), name in itertools.product(BRACKETS.items(), TOOLS):
        found = brackets.setdefault(bracket, {"ran": ran.size, "failed": failed.size})
        if name in found and name not in anew:
            continue
        found[name] = [row(name, ran), row(name, failed)]
        kept["bracket_versions"] = versions
        write(kept)
        print(bracket, name, found[name], flush=True)


def write(kept):
    """Write a line for each case and bracket."""
    parts = [
        f'"{part}": {json.dumps(kept.get(part, {}))}' for part in ("versions", "bracket_versions")
    ]
    for part in ("cases", "brackets"):
        lines = ",\n".join(
            f" {json.dumps(name)}: {json.dumps(found)}"
            for name, found in kept.get(part, {}).items()
        )
        parts.append(f'"{part}": {{\n{lines}\n}}')
    EVIDENCE.write_text(f"{{{', '.join(parts)}}}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--bed", action="store_true", help="on the test bed, with a card of 141 GiB")
    what.add_argument(
        "--docs", action="store_true", help="write the table to docs/compare.md, run nothing"
    )
    parser.add_argument(
        "--again",
        nargs="+",
        metavar="WORD",
        default=[],
        help="ask these tools again, whose names contain one of these",
    )
    asked = parser.parse_args()
    if asked.docs:
        from peers import table

        results = json.loads(EVIDENCE.read_text())
        sections = {"peaks": table.peaks_table(results), "brackets": table.brackets_table(results)}
        return table.write_sections(ROOT / "docs" / "compare.md", sections)
    if "CUDASTUB_MEMORY" not in os.environ:  # the stub reads it once, when loaded
        card = {"CUDASTUB_MEMORY": "141GiB", "PYTHONPATH": os.pathsep.join(PATHS)}
        return subprocess.run(
            [sys.executable, "-W", "ignore", *sys.argv], env={**os.environ, **card}, check=False
        ).returncode
    return measure(asked.again)


if __name__ == "__main__":
    sys.exit(main())
