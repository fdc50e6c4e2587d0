"""oomprobe beside its peers: the same work, the same real limit on memory, a process of its own for each call.

    python scripts/benchmark_peers.py [--device cuda] [--tools NAME ...] [--workloads NAME ...] [--out FILE.json]
    python scripts/benchmark_peers.py --show tests/evidence/peers_host.json
    python scripts/benchmark_peers.py --readme

Needs `pip install -e '.[peers]'` in a clone. For each workload all sizes are run, each in a process that has seen no failure: that is
the truth. Then each tool is called as its documentation says; what it really ran is taken down by the model itself. Its
answer is run for fifty steps in a fresh process under the same limit. One result is added to the file after the other,
and what the file has is not run again: interrupted, the same command goes on where it was. Versions that an earlier run
had are kept beside those of the last one.

On a card a second process takes memory by plain allocations until only the budget is left, and keeps it while the others
work (peers/ballast.py). A process that has come to CUDA cannot be forked: there the truth is found by bisection, each size
in a fresh process, and the sizes beside it are run too (peers/truth.py). Exit code 4: no CUDA device here.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
EVIDENCE = ROOT / "tests" / "evidence"


def versions():
    import platform
    from importlib import metadata

    from peers import tools

    packages = [package for package in sorted(set(tools.PACKAGES.values())) if not tools.missing(package)]
    found = {name: metadata.version(name) for name in ["torch", *packages]}
    return {"python": platform.python_version(), "oomprobe": own_version(), **found}


def own_version():
    """The commit, with a "+" where the code differs from it; the release, where there is no repository."""
    import oomprobe

    try:
        commit, differs = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "oomprobe", "scripts")
    except (OSError, subprocess.CalledProcessError):
        return oomprobe.__version__
    return f"{commit}+" if differs else commit


def git(*arguments):
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def surroundings(device):
    """What it ran on: versions, and the card."""
    if device == "host":
        return {"versions": versions()}
    import gpu_check

    return {"versions": versions(), "card": gpu_check.surroundings()}


def parsed():
    from peers import cards, tools

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=cards.BY_DEVICE, default="host")
    parser.add_argument("--tools", nargs="+", choices=tools.TOOLS, default=list(tools.TOOLS), metavar="NAME")
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="default: all of the device")
    parser.add_argument("--out", type=Path, help="default: tests/evidence/peers_DEVICE.json")
    parser.add_argument("--show", type=Path, help="print the tables of a file, run nothing")
    parser.add_argument("--readme", action="store_true", help="put the tables into README.md, run nothing")
    arguments = parser.parse_args()
    there = cards.BY_DEVICE[arguments.device]
    unknown = [name for name in arguments.workloads or () if name not in there]
    if unknown:
        parser.error(f"no workload {unknown[0]} on {arguments.device}; there are {', '.join(there)}")
    arguments.workloads = [there[name] for name in arguments.workloads or there]
    arguments.out = arguments.out or EVIDENCE / f"peers_{arguments.device}.json"
    return arguments


def main():
    import torch
    from peers import measuring, table

    arguments = parsed()
    if arguments.show:
        return print(table.whole(json.loads(arguments.show.read_text())))
    if arguments.readme:
        host, cuda = EVIDENCE / "peers_host.json", EVIDENCE / "peers_cuda.json"
        measured = json.loads(cuda.read_text()) if cuda.exists() else None
        return table.into_readme(ROOT / "README.md", json.loads(host.read_text()), measured)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        told = (
            f"no CUDA device here (torch {torch.__version__}), nothing was run; the host rows need none: --device host"
        )
        print(f"benchmark_peers: {told}", file=sys.stderr)
        return 4
    results = {"device": arguments.device, "workloads": {}}
    if arguments.out.exists():
        results = json.loads(arguments.out.read_text())
    found = surroundings(arguments.device)
    results |= {**found, "versions_before": measuring.measured_before(results, found["versions"])}
    measuring.measure(results, arguments.out, arguments.workloads, arguments.tools)
    return print(table.whole(results))


if __name__ == "__main__":
    sys.exit(main())
