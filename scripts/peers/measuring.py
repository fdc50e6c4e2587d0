"""Each call in a process of its own: what is true, what a tool answers, whether the answer survives. All of it is kept."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from peers import limits, seen, tools, truth

SCRIPTS = Path(__file__).resolve().parents[1]
LONGEST_S = 300
SCAN_S = 1800  # of all sizes, in one child
SURVIVED_STEPS = 50


def run_child(kind, workload, *arguments, log=None, longest_s=None):
    """The child's answer, or how it ended."""
    longest_s = longest_s or LONGEST_S
    path = filter(None, [str(SCRIPTS.parent), str(SCRIPTS), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, **limits.of(workload).environment, "PYTHONPATH": os.pathsep.join(path)}
    if log is not None:
        environment[seen.LOG_VARIABLE] = str(log)
    command = [sys.executable, "-W", "ignore", "-m", "peers.child", kind, workload.name, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=longest_s
            )
        except subprocess.TimeoutExpired:
            return {"ended": f"no answer within {longest_s} s"}
    if done.returncode:
        return {
            "ended": f"process ended with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}"
        }
    return json.loads(done.stdout.strip().splitlines()[-1])


def ask(workload, name):
    package = tools.PACKAGES.get(name)
    if tools.missing(package):
        return {"not_installed": package}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        told = run_child("tool", workload, name, log=log)
        was = seen.read(log)
    if told.get("answer") is not None:
        told |= {"ran": was.ran(told["answer"])}
    return {**told, "trials": was.trials, "in_steps_s": was.in_steps_s}


def true_sizes(workload):
    """All sizes where they can be scanned; else what a bisection says of them."""
    if limits.of(workload).forks:
        return run_child("scan", workload, longest_s=SCAN_S)
    return truth.bisected(
        lambda size: run_child("survive", workload, size, workload.scan_steps).get("ended"), workload.smallest
    )


def measure(results, path, workloads, names):
    """Adds to `results` what it has not yet, and keeps it."""
    for workload in workloads:
        if tools.missing(workload.needs):
            print(f"{workload.name}: left out, {workload.needs} is not installed", flush=True)
            continue
        row = results["workloads"].setdefault(workload.name, {"tools": {}, "survived": {}})
        with limits.of(workload).beside(workload.budget_mib) as free_bytes:
            if free_bytes is not None:
                row["free_bytes"] = free_bytes
            measure_one(row, workload, names, lambda: keep(results, path))


def measure_one(row, workload, names, keep):
    if "fits" not in row.get("truth", {}):
        row["truth"] = true_sizes(workload)
        keep()
        print(workload.name, row["truth"], flush=True)
    for name in names:
        asked = "not_installed" in row["tools"].get(name, {"not_installed": None})
        if asked:
            row["tools"][name] = ask(workload, name)
        answer = row["tools"][name].get("answer")
        survives = answer is not None and str(answer) not in row["survived"]
        if survives:
            row["survived"][str(answer)] = run_child("survive", workload, answer, SURVIVED_STEPS)
        if asked or survives:
            keep()
        print(workload.name, name, row["tools"][name], flush=True)


def keep(results, path):
    """Whole or not at all: an interruption leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    beside.replace(path)


def measured_before(results, now):
    """Versions that earlier runs had, each once, where they are not those of now: their rows stay."""
    were = [*results.get("versions_before", ()), *filter(None, [results.get("versions")])]
    return [versions for number, versions in enumerate(were) if versions != now and versions not in were[:number]]
