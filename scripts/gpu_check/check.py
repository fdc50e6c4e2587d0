"""Compare oomprobe's answers on a real card with the truth, and write one JSON file of evidence.

First what no recording shows: memory outside the allocator, and what errors look like (facts.py). Then, for each of four models on a
card limited to 4 GiB, and one on the whole card: the answer of `find_max_batch`; the answer without the cap (fifty steps), with its peaks
beside those of a simulated card; and sizes around it under the same cap (ten steps), each run cold in its own process. Then recordings of
the allocator for two models (recording.py), what isolating trials costs, and a table over lengths whose sizes train in buckets
(table.py). With two cards or more, DDP and FSDP2 with a rank on each (ranks.py). Then the tests marked gpu, in the remaining
time.

    scripts/gpu-check [EVIDENCE.json]       default: tests/evidence/<card>-torch<version>.json
    scripts/gpu-check --plan [EVIDENCE.json]    what no card has been asked yet (plan.py), in twelve minutes

Takes eight minutes of a card, or twelve of several. The file is written after each step, so an interrupted check keeps its findings; the output
of the tests is next to it, in .tests.txt.
Exit codes: 0 all promises kept; 1 a test failed, or an answer was wrong or missing; 2 no CUDA device here, or no torch.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

SMALL = {"limit_bytes": 4 * 2**30, "resolution": 0.0, "time_limit_s": 30, "cold_s": 20}
WHOLE = {"limit_bytes": None, "resolution": 0.02, "time_limit_s": 50, "cold_s": 30}
PARTS = [
    *({"model": model, **SMALL} for model in ("readme", "conv_net", "small_gpt", "gpt_bfloat16")),
    {"model": "small_gpt", **WHOLE},
]
RECORDED = {"conv_net": 2048, "gpt_bfloat16": 256}  # batch sizes
TABLE_S, BUCKETS = 60, 2  # a limit; trainings in buckets
FACT_S, RECORDING_S, COST_S, SIMULATION_S = 60, 60, 60, 60  # limits
SEND = (
    "to send it: open an issue with the form 'Numbers from a GPU' and attach this file, which names the card, the driver, and the "
    "versions of torch and Python"
)
START_S = (
    20  # on top of these limits: a child on a card needs 5 to 10 s for its context and libraries
)
COLD_STEPS, WHOLE_CARD_STEPS = 10, 50
# The limits of all parts add up to 280 s, plus START_S for each slow child; the tests get the rest of 480 s.
CHECK_S, TESTS_AT_LEAST_S = 480, 60
RANKS_S = 150  # for each strategy on several cards; searching stops earlier


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("evidence", nargs="?", type=Path, help="where to write the JSON")
    parser.add_argument(
        "--without-tests", action="store_true", help="leave out the tests marked gpu"
    )
    parser.add_argument(
        "--plan", action="store_true", help="what no card has been asked yet, instead: 12 minutes"
    )
    arguments = parser.parse_args()
    try:
        import torch._dynamo  # otherwise the first optimizer imports it in each child, in 3 s

        import oomprobe.demo  # noqa: F401
        from gpu_check import facts  # noqa: F401
    except ImportError as error:
        print(
            f"gpu-check: {sys.executable}: {error}; use one that has torch: PYTHON=... gpu-check",
            file=sys.stderr,
        )
        return 2

    started = time.monotonic()
    card = find_card()
    if "error" in card:
        print(
            f"gpu-check: {card['error']} (torch {torch.__version__}); nothing was checked",
            file=sys.stderr,
        )
        return 2
    evidence = {**card, **surroundings()}
    path = arguments.evidence or default_path(evidence)
    if arguments.plan:
        from gpu_check import plan

        path = arguments.evidence or path.with_name(f"{path.stem}-plan.json")
        plan.carry_out(evidence, lambda: write(evidence, path, started), in_child)
        print(f"evidence: {path}")
        return 0
    return check(evidence, path, started, with_tests=not arguments.without_tests)


NOT_RUN = {"ran": False, "summary": "not run"}


# --- processes ---


def in_child(function, *args, limit_s):
    """Return the dict that `function(*args)` returns in a child process, or {"error": how the process ended}."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_answer, args=(sender, function, *args))
    process.start()
    sender.close()
    try:
        return (
            receiver.recv() if receiver.poll(limit_s) else {"error": f"not done in {limit_s:.0f} s"}
        )
    except EOFError:
        process.join()
        return {"error": f"exit code {process.exitcode} without an answer"}
    finally:
        process.kill()
        process.join()


def _answer(sender, function, *args):
    try:
        sender.send(function(*args))
    except Exception as error:
        sender.send({"error": f"{type(error).__name__}: {error}"[:2000]})


def within(command, timeout_s, **options):
    """Run a command; on time-out, also kill the processes it started, which would keep the card's memory."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with subprocess.Popen(command, start_new_session=True, text=True, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


# --- the machine ---


def find_card():
    # A forked child starts in 60 ms, but cannot use CUDA if an import in this process has used it.
    for method in ("fork", "spawn"):
        multiprocessing.set_start_method(method, force=True)
        card = in_child(describe_card, limit_s=120)
        if "error" not in card:
            return {**card, "children": method}
    return card


def describe_card():
    import torch

    if not torch.cuda.is_available():
        return {"error": "no CUDA device here"}
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {
        "card": properties.name,
        "capability": [properties.major, properties.minor],
        "total_memory_bytes": properties.total_memory,
        "mem_get_info_total_bytes": total,
        "free_bytes_at_start": free,
        "cards": torch.cuda.device_count(),
    }


def surroundings():
    import torch

    import oomprobe

    return {
        "driver": driver(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "oomprobe": oomprobe.__version__,
        "commit": (output_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"], 10) or "").strip()
        or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "allocator_settings": {
            n: os.environ[n] for n in os.environ if n.startswith("PYTORCH_") and "ALLOC" in n
        },
        "date": time.strftime("%Y-%m-%d"),
    }


def driver():
    said = (
        output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 20) or ""
    )
    return next(iter(said.split()), None)


def output_of(command, timeout_s):
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def default_path(evidence):
    card = re.sub(r"[^a-z0-9]+", "-", evidence["card"].lower()).strip("-")
    version = evidence["torch"].partition("+")[0]
    return ROOT / "tests" / "evidence" / f"{card}-torch{version}.json"


# --- the check ---


def check(
    evidence, path, started, *, parts=PARTS, recorded=RECORDED, with_tests=True, in_child=in_child
):
    """Add findings to the evidence, write it to the path after each of them, and return the exit code.

    `started` is on the monotonic clock; `in_child` runs a function as the function of that name does.
    """
    from gpu_check import facts, ranks, recording, table

    evidence |= {"outside_bytes": {}, "errors": {}, "parts": [], "recordings": []}
    evidence |= {"isolation": {}, "table": {}, "ranks": {}, "tests": NOT_RUN}

    def keep():
        evidence.update(wrong=wrong(evidence))
        write(evidence, path, started)

    progress("memory outside the allocator, and errors")
    evidence["outside_bytes"] = in_child(facts.outside_bytes, limit_s=FACT_S)
    for function in facts.FAILURES:
        evidence["errors"][function.__name__] = in_child(facts.error_of, function, limit_s=FACT_S)
    keep()
    for part in parts:
        evidence["parts"].append(dict(part))
        for _ in measure(evidence["parts"][-1], in_child):
            keep()
    for name, batch_size in recorded.items():
        progress(f"recording of {name}")
        evidence["recordings"].append(
            in_child(recording.record, name, batch_size, limit_s=RECORDING_S)
        )
        keep()
    progress("the cost of isolation")
    for kind, isolate in (("in this process", False), ("isolated", True)):
        evidence["isolation"][kind] = in_child(facts.cost, isolate, limit_s=COST_S)
    keep()
    progress("a table over lengths")
    evidence["table"] = in_child(table.table, hold_small, limit_s=TABLE_S)
    for kind in ("alone", "mixed"):
        if sizes := evidence["table"].get(kind):
            ended = [
                in_child(table.in_buckets, hold_small, sizes, seed, limit_s=COST_S)
                for seed in range(BUCKETS)
            ]
            evidence["table"][f"trained {kind}"] = [
                one.get("ended") or one["error"] for one in ended
            ]
    keep()
    for strategy in ("ddp", "fsdp") if evidence.get("cards", 1) > 1 else ():
        progress(f"{strategy} on {evidence['cards']} cards")
        evidence["ranks"][strategy] = in_child(
            ranks.check_ranks, strategy, evidence["cards"], limit_s=RANKS_S
        )
        keep()
    if with_tests:
        left_s = CHECK_S - (time.monotonic() - started)
        evidence["tests"] = run_tests(max(TESTS_AT_LEAST_S, left_s), path.with_suffix(".tests.txt"))
    keep()
    print_summary(evidence, path)
    return 1 if evidence["wrong"] else 0


def write(evidence, path, started):
    """Write the evidence whole, with the seconds since the start."""
    evidence.update(seconds=round(time.monotonic() - started, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(value)}" for name, value in evidence.items()
    )
    part = path.with_name(f"{path.name}.part")
    part.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    part.replace(path)


# --- one part: a model and a card size ---


def measure(part, in_child):
    """Add findings to the part; yield after each of them."""
    progress(f"{part['model']} on the {card_of(part)}")
    part.update(in_child(probe, part, limit_s=part["time_limit_s"] + START_S))
    yield
    if "error" in part:
        return
    started = time.monotonic()
    part.update(cold_runs_capped={}, cold_runs_whole_card={})

    def runs(runs_so_far, size, steps, cap_bytes):
        limit_s = START_S + max(0.0, started + part["cold_s"] - time.monotonic())
        ended = in_child(train, part["model"], size, steps, cap_bytes, limit_s=limit_s)
        runs_so_far[size] = ended.pop("error", "ran")[:200]
        part.setdefault("peaks_on_the_card", ended)
        return runs_so_far[size] == "ran"

    answer, budget_bytes = part["answer"], part["result"]["budget_bytes"]
    runs(part["cold_runs_whole_card"], answer, WHOLE_CARD_STEPS, part["limit_bytes"])
    yield
    part["peaks_simulated"] = in_child(simulated_peaks, part["model"], answer, limit_s=SIMULATION_S)
    yield
    stride = max(1, int(part["resolution"] * answer))
    for size in search_around(
        answer, stride, lambda size: runs(part["cold_runs_capped"], size, COLD_STEPS, budget_bytes)
    ):
        part["cold_frontier"] = size
        part["answer_share_of_frontier"] = round(answer / size, 4) if size else None
        part["cold_s_taken"] = round(time.monotonic() - started, 1)
        yield
        if part["cold_s_taken"] > part["cold_s"]:
            return


def probe(part):
    """Return the answer, on a card limited to `limit_bytes`."""
    import oomprobe
    from gpu_check.models import MODELS

    hold_to(part["limit_bytes"])
    own_fraction = user_fraction()
    model, step = MODELS[part["model"]]()
    options = {"resolution": part["resolution"], "time_limit_s": part["time_limit_s"]}
    try:
        result = oomprobe.find_max_batch(model, step, progress="off", **options)
    except oomprobe.OomProbeError as error:
        trials = [
            [t.phase, t.batch_size, t.verdict.name, t.cap_bytes, t.error] for t in error.trials
        ]
        return {
            "error": f"{type(error).__name__}: {error}"[:2000],
            "trials_before_the_error": trials,
        }
    return {
        "answer": result.batch_size,
        "fraction_restored": user_fraction() == own_fraction,
        "outside_steps_s": round(result.elapsed_s - result.in_steps_s, 3),
        "result": result.to_dict(),
    }


def train(model_name, batch_size, steps, cap_bytes):
    """Run steps as at the start of a training script, and return the peaks."""
    import torch

    from gpu_check.models import MODELS
    from gpu_check.recording import loop_of, peaks_of

    hold_to(cap_bytes)
    model, step = MODELS[model_name]()
    loop = loop_of(step)
    for _ in range(steps):
        with loop.keeping():
            step(model, batch_size)
    torch.cuda.synchronize()
    return peaks_of(torch.cuda)


def simulated_peaks(model_name, batch_size):
    """Return the peaks of the same steps on a simulation of this card."""
    from gpu_check.recording import simulate

    return simulate(model_name, batch_size)["peaks"]


def user_fraction():
    import torch

    return min(
        1.0, torch.cuda.get_per_process_memory_fraction(0)
    )  # cudaMallocAsync returns 2^33 if none was set


def hold_to(cap_bytes):
    import torch

    if cap_bytes is not None:
        fraction = cap_bytes / torch.cuda.get_device_properties(0).total_memory
        # torch rounds down to whole bytes.
        torch.cuda.set_per_process_memory_fraction(min(1.0, math.nextafter(fraction, 1.0)), 0)


def hold_small():
    hold_to(SMALL["limit_bytes"])


def search_around(answer, stride, runs):
    """Run sizes, the answer first; after each yield the largest that ran, until it is known to a tenth of the stride."""
    good, bad, size, closed = 0, None, answer, max(1, stride // 10)
    while bad is None or bad - good > closed:
        if runs(size):
            good = size
        else:
            bad = size
        yield good
        if good and bad:
            size = (good + bad) // 2
        else:
            size = max(1, size + stride if good else size - stride)
            stride *= 2


# --- the tests ---


def run_tests(limit_s, log):
    """Run the tests marked gpu, and write their output to the log as they run."""
    if importlib.util.find_spec("pytest") is None:
        return {
            "ran": False,
            "summary": "pytest is not installed here: the tests marked gpu were not run",
        }
    options = [
        "-m",
        "gpu",
        "-v",
        "-rfEs",
        "--no-header",
        "--tb=short",
        "--color=no",
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-m", "pytest", *options, str(ROOT / "tests" / "test_gpu.py")]
    progress(f"tests marked gpu, for {limit_s:.0f} s at most")
    with log.open("w") as file:
        try:
            status = within(command, limit_s, cwd=ROOT, stdout=file, stderr=file).returncode
        except subprocess.TimeoutExpired:
            return {
                "ran": True,
                "exit_code": None,
                "summary": f"not done in {limit_s:.0f} s: {log.name}",
            }
    lines = log.read_text(errors="replace").strip().splitlines()
    not_passed = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return {
        "ran": True,
        "exit_code": status,
        "summary": "".join(lines[-1:]),
        "not_passed": not_passed,
    }


# --- broken promises, and the summary ---


def wrong(evidence):
    """Return the promises that were broken on this card; a simulated peak that differs is a finding, not a promise."""
    found = []
    verdict = evidence["errors"].get("out_of_memory", {}).get("verdict", "OOM")
    if verdict != "OOM":
        found.append(f"an out-of-memory error was taken for {verdict}")
    if evidence["tests"]["ran"] and evidence["tests"]["exit_code"] != 0:
        found.append(f"tests marked gpu: {evidence['tests']['summary']}")
    for said in evidence["table"].get("trained mixed", []):
        if said != "ran":
            found.append(f"table over lengths: {said.splitlines()[0]}")
    for strategy, found_there in evidence["ranks"].items():
        said = found_there.get("error") or found_there["whole_card"]
        if said != "ran":
            found.append(f"{strategy} on several cards: {said.splitlines()[0]}")
    for part in evidence["parts"]:
        name = f"{part['model']}, {card_of(part)}"
        if "error" in part:
            found.append(f"{name}: {part['error'].splitlines()[0]}")
        for where in ("cold_runs_capped", "cold_runs_whole_card"):
            said = part.get(where, {}).get(part.get("answer"), "ran")
            if said != "ran":
                found.append(f"{name}: the answer {part['answer']} died, {where}: {said}")
        if not part.get("result", {}).get("state_verified", True):
            found.append(f"{name}: the state was not verified")
        if not part.get("fraction_restored", True):
            found.append(f"{name}: the user's memory fraction was not restored")
    return found


def card_of(part):
    return "whole card" if part["limit_bytes"] is None else "small card"


def progress(what):
    print(f"gpu-check: {what} ...", file=sys.stderr, flush=True)


def print_summary(evidence, path):
    print(
        f"{evidence['card']}  driver {evidence['driver']}  torch {evidence['torch']}  {evidence['seconds']} s"
    )
    for part in evidence["parts"]:
        if "error" not in part:
            print(
                f"{part['model']:10} {card_of(part)}: answer {part['answer']}, ran cold up to {part['cold_frontier']}, "
                f"{len(part['result']['trials'])} trials, {part['outside_steps_s']} s outside the steps; simulated peak "
                f"{ratio(part['peaks_simulated'], part['peaks_on_the_card'])} of the card's"
            )
    for recording in evidence["recordings"]:
        if "error" not in recording:
            simulated = recording["simulated"]
            print(
                f"{recording['model']}: {simulated['same_in_order']} of {simulated['requests_on_the_card']} requests simulated "
                f"in order, simulated peak {ratio(simulated, recording['card'])} of the card's"
            )
    print(f"outside the allocator: {evidence['outside_bytes']}")
    print(f"isolation: {evidence['isolation']}")
    table = {name: value for name, value in evidence["table"].items() if name != "notes"}
    print(f"table over lengths: {table}")
    for strategy, found in evidence["ranks"].items():
        if "error" not in found:
            print(
                f"{strategy:10} {evidence['cards']} cards: answer {found['answer']}, {found['whole_card']} with all memory"
            )
    print(f"tests: {evidence['tests']['summary']}")
    for line in evidence["wrong"]:
        print(f"WRONG: {line}")
    print(f"evidence: {path}")
    print(SEND)


def ratio(one, other, name="peak_allocated_bytes"):
    return f"{one[name] / other[name]:.4f}" if one.get(name) and other.get(name) else "unknown"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes end too
    sys.exit(main())
