"""What oomprobe answers on a real card, beside the truth, as one JSON file of evidence.

Runs the tests marked gpu. Then faults that only isolated trials survive: an out-of-bounds kernel, and out of memory with
and without expandable segments. Then, for each demo model, in a process of its own (a poisoned one must not spoil the rest):
`find_max_batch` on a card made small by the user's fraction, and on the whole card; and after each, sizes around the
answer are run under the same cap, without oomprobe's search, to find where they really end.

    scripts/gpu-check [EVIDENCE.json]       default: tests/evidence/<card>-torch<version>.json

Takes under ten minutes; the file is written after each part, so that what was measured is there when it is ended before.
Exit codes: 0 all as promised; 1 a test failed, a part failed, or an answer was wrong; 2 no
CUDA device here, or no torch.
"""

import argparse
import gc
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SMALL_BYTES = 4 * 2**30
TESTS_TIME_S = 140
# Sum of all limits: 140 + 3 * 32 + 2 * 55 + 2 * 105 s, which is under ten minutes.
SHORT = {"limit_bytes": SMALL_BYTES, "resolution": 0.0, "time_limit_s": 30, "scan_s": 10, "kill_s": 55}
FULL = {"limit_bytes": None, "resolution": 0.02, "time_limit_s": 60, "scan_s": 25, "kill_s": 105}
PARTS = [{"model": model, **kind} for kind in (SHORT, FULL) for model in ("conv_net", "small_gpt")]
NEIGHBOURS = 4  # sizes on either side of the answer that are run one by one
CALLS = 6  # what a confirmation runs: one call in which optimizers step, and five more
MARK = "RESULT "
# What only processes that may die survive: name, target, environment, the answer (None: any), what limits.
FAULTS = [
    ("out-of-bounds kernel", "out_of_bounds", {}, 10, "size_limit"),
    ("out of memory", "gibibytes", {}, None, "memory"),
    (
        "out of memory, expandable segments",
        "gibibytes",
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        None,
        "memory",
    ),
]
FAULT_TIME_S = 32


def main():
    try:
        import torch
    except ImportError:
        print(f"gpu-check: {sys.executable} has no torch; name one that has: PYTHON=... gpu-check", file=sys.stderr)
        return 2

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("evidence", nargs="?", type=Path, help="where to write the JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"gpu-check: no CUDA device here (torch {torch.__version__}); nothing was checked", file=sys.stderr)
        return 2
    if arguments.part:
        part = json.loads(arguments.part)
        print(MARK + json.dumps(run_part(part)), flush=True)
        os._exit(0)  # what a dead context does at exit is not our matter
    started = time.monotonic()
    # This process asks for names only: a context of its own would take memory from the parts.
    evidence = {**surroundings(), "tests": NOT_RUN, "faults": [], "parts": []}
    path = arguments.evidence or default_path(evidence)
    for whose, found in measured():
        evidence[whose] = found if whose == "tests" else [*evidence[whose], found]
        evidence |= {"wrong": wrong(evidence), "seconds": round(time.monotonic() - started, 1)}
        keep(evidence, path)
    print_summary(evidence, path)
    return 1 if evidence["wrong"] else 0


NOT_RUN = {"ran": False, "exit_code": None, "summary": "not run"}


def measured():
    """Each thing that was found, as it is found, and where it belongs."""
    yield "tests", run_tests()
    for fault in FAULTS:
        yield "faults", run_fault(*fault)
    for part in PARTS:
        yield "parts", run_in_child(part)


def keep(evidence, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")


def within(command, timeout_s, **options):
    """Run it, and after the time end all that it started too: that would go on, and keep the card's memory."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


# --- what this is ---


def surroundings():
    import torch

    import oomprobe

    properties = json.loads(output_of([sys.executable, "-c", CARD_CODE], 60) or "{}")
    return {
        **properties,
        "driver": driver(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "oomprobe": oomprobe.__version__,
        "commit": (output_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"], 10) or "").strip() or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "allocator_settings": {n: os.environ[n] for n in os.environ if n.startswith("PYTORCH_") and "ALLOC" in n},
        "date": time.strftime("%Y-%m-%d"),
    }


CARD_CODE = """
import json, torch
p = torch.cuda.get_device_properties(0)
free, total = torch.cuda.mem_get_info(0)
print(json.dumps({"card": p.name, "capability": [p.major, p.minor], "total_memory_bytes": p.total_memory,
    "mem_get_info_total_bytes": total, "free_bytes_at_start": free, "cards": torch.cuda.device_count()}))
"""


def driver():
    if shutil.which("nvidia-smi"):
        said = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 20)
        if said and said.strip():
            return said.splitlines()[0].strip()
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return None


def output_of(command, timeout_s):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def default_path(evidence):
    card = re.sub(r"[^a-z0-9]+", "-", str(evidence.get("card", "card")).lower()).strip("-")
    version = evidence["torch"].partition("+")[0]
    return ROOT / "tests" / "evidence" / f"{card}-torch{version}.json"


# --- faults, isolated ---

FAULT_CODE = """
import json, sys, torch, oomprobe
try:
    result = oomprobe.probe_target(sys.argv[1], device="cuda", resolution=0.05, time_limit_s=28, progress="off")
    print(json.dumps({"answer": result.batch_size, "limited_by": result.limited_by, "notes": result.notes,
        "trials": [[t.batch_size, t.phase, t.verdict, t.error] for t in result.trials],
        "context_in_the_probe": torch.cuda.is_initialized()}))
except oomprobe.OomProbeError as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}",
        "trials": [[t.batch_size, t.phase, t.verdict, t.error] for t in error.trials]}))
"""


def run_fault(name, target, environment, answer, limited_by):
    command = [sys.executable, "-c", FAULT_CODE, f"{ROOT / 'tests' / 'gpu_targets.py'}:{target}"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, **environment, "PYTHONPATH": path}
    try:
        done = within(command, FAULT_TIME_S, env=env)
        said = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = {"error": f"no answer: {error!r}"}
    as_promised = (
        (answer is None or said.get("answer") == answer)
        and said.get("limited_by") == limited_by
        and said.get("context_in_the_probe") is False
    )
    return {"fault": name, "environment": environment, "as_promised": as_promised, **said}


# --- the tests ---


def run_tests():
    if importlib.util.find_spec("pytest") is None:
        return {"ran": False, "summary": "pytest is not installed here: the tests marked gpu were not run"}
    options = ["-m", "gpu", "-q", "-rfEs", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(ROOT / "tests" / "test_gpu.py")]
    progress("tests marked gpu")
    try:
        done = within(command, TESTS_TIME_S, cwd=ROOT)
    except subprocess.TimeoutExpired as error:
        return {"ran": True, "exit_code": None, "summary": f"not done in {TESTS_TIME_S} s", "tail": text(error.stdout)}
    lines = done.stdout.strip().splitlines()
    return {
        "ran": True,
        "exit_code": done.returncode,
        "summary": lines[-1] if lines else done.stderr[-300:],
        "not_passed": [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))],
        **({} if done.returncode == 0 else {"tail": done.stdout[-6000:] + done.stderr[-1000:]}),
    }


def text(output):
    return (output.decode(errors="replace") if isinstance(output, bytes) else output or "")[-3000:]


# --- a part: one model, one size of card ---


def run_in_child(part):
    progress(f"{part['model']} on {'the whole card' if part['limit_bytes'] is None else 'a small card'}")
    command = [sys.executable, str(Path(__file__).resolve()), "--part", json.dumps(part)]
    try:
        done = within(command, part["kill_s"], cwd=ROOT)
    except subprocess.TimeoutExpired as error:
        return {**part, "error": f"not done in {part['kill_s']} s", "stderr": text(error.stderr)}
    said = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not said:
        return {**part, "error": f"exit code {done.returncode} without a result", "stderr": done.stderr[-3000:]}
    return {**part, **json.loads(said[-1][len(MARK) :])}


def run_part(part):
    """Make the card small where that is asked for, and measure."""
    import torch

    from oomprobe import demo
    from oomprobe.devices import choose_device

    if part["limit_bytes"] is not None:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, part["limit_bytes"] / total_bytes), 0)
    own_fraction = torch.cuda.get_per_process_memory_fraction(0)
    model, step = getattr(demo, part["model"])()
    found = measure(part, choose_device(None, model), model, step)
    try:
        found["fraction_restored"] = torch.cuda.get_per_process_memory_fraction(0) == own_fraction
    except RuntimeError as error:  # a poisoned process
        found["fraction_restored"] = repr(error)
    return found


def measure(part, device, model, step):
    """The answer, then the sizes around it under the same cap."""
    import oomprobe

    options = {"resolution": part["resolution"], "time_limit_s": part["time_limit_s"]}
    try:
        result = oomprobe.find_max_batch(model, step, device=device, progress="off", **options)
    except oomprobe.OomProbeError as error:
        trials = [[t.phase, t.batch_size, t.verdict.name, t.cap_bytes, t.error] for t in error.trials]
        return {"error": f"{type(error).__name__}: {error}"[:2000], "trials_before_the_error": trials}
    started = time.monotonic()
    scan = Scan(device, model, step, result.budget_bytes, started + part["scan_s"])
    scan.around(result.batch_size, tolerance=part["resolution"] / 10)
    return {
        "answer": result.batch_size,
        "true_boundary": scan.boundary,
        "boundary_is_closed": scan.closed,
        "answer_share_of_truth": None if not scan.boundary else round(result.batch_size / scan.boundary, 4),
        "outside_steps_s": round(result.elapsed_s - result.in_steps_s, 3),
        "scan": {str(size): said or "ran" for size, said in sorted(scan.tried.items())},
        "scan_s": round(time.monotonic() - started, 1),
        "result": result.to_dict(),
    }


class Scan:
    """Runs sizes under a cap, each from a clean state, and keeps what each said (None: it ran)."""

    def __init__(self, device, model, step, cap_bytes, deadline_s):
        self.device, self.model, self.step = device, model, step
        self.cap_bytes, self.deadline_s = cap_bytes, deadline_s
        self.tried, self.good, self.bad = {}, None, None

    @property
    def boundary(self):
        return max((size for size, said in self.tried.items() if said is None), default=None)

    @property
    def closed(self):
        """Whether the size above the boundary was run, and failed."""
        return self.boundary is not None and self.tried.get(self.boundary + 1) is not None

    def around(self, answer, tolerance):
        if self.runs(answer):
            self._climb(answer)
        else:
            self._descend(answer)
        while self.good and self.bad and self.bad - self.good > max(1, int(tolerance * answer)) and self._in_time():
            self.runs((self.good + self.bad) // 2)
        for distance in range(1, NEIGHBOURS + 1):  # a limit need not be a clean one
            for size in (answer + distance, answer - distance):
                if size > 0 and size not in self.tried and self._in_time():
                    self.runs(size)

    def _climb(self, size):
        stride = 1
        while self.bad is None and self._in_time():
            size += stride
            self.runs(size)
            stride *= 2

    def _descend(self, size):
        stride = 1
        while self.good is None and size > 1 and self._in_time():
            size = max(1, size - stride)
            self.runs(size)
            stride *= 2

    def _in_time(self):
        return time.monotonic() < self.deadline_s

    def runs(self, size):
        said = self._failure(size)
        self.tried[size] = said
        # Outside the except block: the frames of a failed step are gone by now.
        if said is not None and not self.device.healthy():
            self.bad, self.deadline_s = size, 0.0  # poisoned: nothing it says from here on counts
            return False
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        self.device.release()
        if said is None:
            self.good = size if self.good is None else max(self.good, size)
        else:
            self.bad = size if self.bad is None else min(self.bad, size)
        return said is None

    def _failure(self, size):
        try:
            with self.device.cap(self.cap_bytes):
                for _ in range(CALLS):
                    self.step(self.model, size)
                    self.device.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:160]
        return None


# --- what is wrong, and what to print ---


def wrong(evidence):
    """Promises that this card did not see kept."""
    found = []
    if evidence["tests"].get("exit_code", 0) != 0:
        found.append(f"tests marked gpu: {evidence['tests']['summary']}")
    found += [f"{fault['fault']}: not as promised, {fault}" for fault in evidence["faults"] if not fault["as_promised"]]
    for part in evidence["parts"]:
        name = f"{part['model']}, {'whole' if part['limit_bytes'] is None else 'small'} card"
        if "error" in part:
            found.append(f"{name}: {part['error'].splitlines()[0]}")
            continue
        if part["scan"].get(str(part["answer"])) != "ran":
            found.append(f"{name}: the answer {part['answer']} did not run again under the same cap")
        if not part["result"]["state_verified"]:
            found.append(f"{name}: the state was not verified")
        if part["fraction_restored"] is not True:
            found.append(f"{name}: the user's memory fraction was not restored")
    return found


def progress(what):
    print(f"gpu-check: {what} ...", file=sys.stderr, flush=True)


def print_summary(evidence, path):
    print(f"{evidence.get('card')}  driver {evidence['driver']}  torch {evidence['torch']}  {evidence['seconds']} s")
    print(f"tests: {evidence['tests']['summary']}")
    for fault in evidence["faults"]:
        kept = "as promised" if fault["as_promised"] else "NOT as promised"
        print(f"{fault['fault']}: {kept}, answer {fault.get('answer')} {fault.get('error', '')}")
    for part in evidence["parts"]:
        card = "whole card" if part["limit_bytes"] is None else "small card"
        if "error" in part:
            print(f"{part['model']:10} {card}: {part['error'].splitlines()[0]}")
        else:
            print(
                f"{part['model']:10} {card}: answer {part['answer']}, ran up to {part['true_boundary']}, "
                f"{len(part['result']['trials'])} trials, {part['outside_steps_s']} s outside the steps"
            )
    for line in evidence["wrong"]:
        print(f"WRONG: {line}")
    print(f"evidence: {path}")


if __name__ == "__main__":
    sys.exit(main())
