"""oomprobe beside its peers: the same work, the same real limit on memory, a process of its own for each call.

    python scripts/benchmark_peers.py [--tools NAME ...] [--workloads NAME ...] [--out tests/evidence/peers_host.json]
    python scripts/benchmark_peers.py --show tests/evidence/peers_host.json
    python scripts/benchmark_peers.py --readme

Needs `pip install 'oomprobe[peers]'`. For each workload all sizes are run, each in a process that has seen no failure: that is
the truth. Then each tool is called as its documentation says; what it really ran is taken down by the model itself. Its
answer is run for fifty steps in a fresh process under the same limit. One result is added to the file after the other,
and what the file has is not run again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST_S = 300


def run_child(*arguments, log=None):
    """The child's answer, or how it ended."""
    from peers import limits, seen

    environment = {
        **os.environ,
        **limits.ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]),
    }
    if log is not None:
        environment[seen.LOG_VARIABLE] = str(log)
    command = [sys.executable, "-W", "ignore", "-m", "peers.child", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=LONGEST_S
            )
        except subprocess.TimeoutExpired:
            return {"ended": f"no answer within {LONGEST_S} s"}
    if done.returncode:
        return {
            "ended": f"process ended with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}"
        }
    return json.loads(done.stdout.strip().splitlines()[-1])


def ask(workload, name):
    from peers import seen

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        told = run_child("tool", workload, name, log=log)
        was = seen.read(log)
    if told.get("answer") is not None:
        told |= {"ran": was.ran(told["answer"])}
    return {**told, "trials": was.trials, "in_steps_s": was.in_steps_s}


def measure(results, path, workloads, names):
    """Adds to `results` what it has not yet, and keeps it."""
    for workload in workloads:
        row = results["workloads"].setdefault(workload, {"tools": {}, "survived": {}})
        if "truth" not in row:
            row["truth"] = run_child("scan", workload)
        for name in names:
            if name not in row["tools"]:
                row["tools"][name] = ask(workload, name)
            answer = row["tools"][name].get("answer")
            if answer is not None and str(answer) not in row["survived"]:
                row["survived"][str(answer)] = run_child("survive", workload, answer)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(workload, name, row["tools"][name], flush=True)


def versions():
    import platform
    from importlib import metadata

    from peers import tools

    packages = ["torch", *sorted(set(tools.PACKAGES.values()))]
    return {"python": platform.python_version(), **{package: metadata.version(package) for package in packages}}


def main():
    from peers import table, tools, workloads

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=tools.TOOLS, default=list(tools.TOOLS), metavar="NAME")
    parser.add_argument("--workloads", nargs="+", choices=workloads.HOST, default=list(workloads.HOST), metavar="NAME")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "evidence" / "peers_host.json")
    parser.add_argument("--show", type=Path, help="print the tables of a file, run nothing")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md, run nothing")
    arguments = parser.parse_args()
    if arguments.show:
        return print(table.whole(json.loads(arguments.show.read_text())))
    if arguments.readme:
        return table.into_readme(ROOT / "README.md", json.loads(arguments.out.read_text()))
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"device": "host", "workloads": {}}
    results["versions"] = versions()
    measure(results, arguments.out, arguments.workloads, arguments.tools)
    return print(table.whole(results))


if __name__ == "__main__":
    main()
