"""What a probe costs as its answer grows from 1 to 1,000,000, on host memory, with allocations that fail for real.

    python scripts/benchmark_search.py [--answers 1 128 1000000] [--step-ms 1 10 100] [--runs 5]
        [--out tests/evidence/search_host.json]

The step takes a block of memory for each sample and as long as is asked for at the answer, less in proportion below it.
Printed for each answer and duration, of the run in the middle of five: trials of the search beside the bound
2 * ceil(log2 n) + 3, rechecks and confirmations, samples run and step-times spent (both in units of one step at the
answer), and the share of the probe that was outside the steps, with the least and most of the five. Goals: within the
bound; at most 26 step-times from 128 to 1000; outside the steps under 10 % at 10 ms and under 3 % at 100 ms.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from benchmark_peers import own_version

import oomprobe

BUDGET_MIB, PAGES_BYTES = 256, 64 * 4096
STEP_TIMES_GOAL, OUTSIDE_GOALS = 26, {10: 0.10, 100: 0.03}
PLAIN_HEAP = {  # one thread, one arena, and each block of 128 KiB and more in pages of its own
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_TOP_PAD_": "0",
}


RUN = []  # sizes, in the order of the calls


class Block(torch.nn.Module):
    """Keeps a block of memory for each sample from its forward until its backward, and sleeps as a card computes."""

    def __init__(self, bytes_per_sample, sample_s):
        super().__init__()
        self.bytes_per_sample, self.sample_s = bytes_per_sample, sample_s
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        RUN.append(len(x))
        done_s = time.perf_counter() + self.sample_s * len(x)
        block = torch.empty(len(x) * self.bytes_per_sample, dtype=torch.uint8)
        block[::PAGES_BYTES] = 1  # a few of its pages: each costs 2 us
        time.sleep(max(0.0, done_s - time.perf_counter()))
        return (x * self.scale).mean() + 0 * block[:1].sum()


def probe(answer, step_ms):
    """One probe whose answer is near `answer`."""
    torch.backends.mkldnn.enabled = False  # nothing here uses it, and a host probe would warm its kernels up
    model = Block(BUDGET_MIB * 2**20 // answer, step_ms / 1000 / answer)
    RUN.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        optimizer.zero_grad()
        model(torch.ones(batch_size, 1)).backward()
        optimizer.step()

    stated = f"cpu:{BUDGET_MIB + BUDGET_MIB // 10}MiB"
    return oomprobe.find_max_batch(model, step, device=stated, memory_fraction=1.0, progress="off")


def row(answer, step_ms):
    probe(4, 1)  # imports, threads
    result = probe(answer, step_ms)
    found = result.batch_size
    confirmed = next(trial for trial in reversed(result.trials) if trial.batch_size == found and trial.passed)
    searching = [trial for trial in result.trials if trial.phase in ("grow", "bisect")]
    return {
        "asked": answer,
        "answer": found,
        "step_ms": step_ms,
        "measured_step_ms": 1000 * confirmed.step_s,
        "trials": len(searching),
        "bound": 2 * math.ceil(math.log2(max(found, 1))) + 3,
        "more": len(result.trials) - len(searching),
        "samples": sum(RUN) / found,
        "step_times": result.elapsed_s / confirmed.step_s,
        "outside": 1 - result.in_steps_s / result.elapsed_s,
    }


def in_a_process_of_its_own(answer, step_ms):
    command = [sys.executable, __file__, "--row", str(answer), str(step_ms)]
    environment = {**os.environ, **PLAIN_HEAP}
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def middle_of(lines):
    """The run with as many above as below it in its share outside the steps."""
    return sorted(lines, key=lambda line: line["outside"])[len(lines) // 2]


def missed(lines):
    """The goals that these runs do not meet: in trials all of them, in time the one in the middle."""
    line = middle_of(lines)
    goals = {
        "trials": all(line["trials"] <= line["bound"] for line in lines),
        "step-times": line["step_ms"] < 100
        or not 128 <= line["answer"] <= 1000
        or line["step_times"] <= STEP_TIMES_GOAL,
        "outside": line["outside"] < OUTSIDE_GOALS.get(line["step_ms"], 1),
    }
    return [name for name, met in goals.items() if not met]


def told(lines):
    line, outside = middle_of(lines), sorted(line["outside"] for line in lines)
    return (
        f"{line['step_ms']:7}  {line['measured_step_ms']:8.1f}  {line['answer']:7}  {line['trials']:6}  {line['bound']:5}  "
        f"{line['more']:4}  {line['samples']:7.1f}  {line['step_times']:10.1f}  "
        f"{line['outside']:7.1%} ({outside[0]:.1%} to {outside[-1]:.1%})  {', '.join(missed(lines)) or '-'}"
    )


def main():
    if sys.argv[1:2] == ["--row"]:
        return print(json.dumps(row(*map(int, sys.argv[2:]))))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--answers", nargs="+", type=int, default=[1, 2, 10, 100, 128, 250, 500, 1000, 10**4, 10**5, 10**6]
    )
    parser.add_argument("--step-ms", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--runs", type=int, default=5, choices=range(1, 100), metavar="N", help="of each row")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    measured = []
    print("step_ms  measured   answer  trials  bound  more  samples  step-times  outside (all runs)  missed")
    for step_ms in arguments.step_ms:
        for answer in arguments.answers:
            lines = [in_a_process_of_its_own(answer, step_ms) for _ in range(arguments.runs)]
            measured += lines
            print(told(lines), flush=True)
    if arguments.out:
        lines = ",\n".join(map(json.dumps, measured))
        versions = json.dumps({"torch": torch.__version__, "oomprobe": own_version()})
        arguments.out.write_text(f'{versions[:-1]}, "lines": [\n{lines}\n]}}\n')
    return None


if __name__ == "__main__":
    main()
