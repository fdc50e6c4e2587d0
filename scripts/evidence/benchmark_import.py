"""Measure what `import oomprobe` adds to `import torch`, as a ratio of whole processes. Target: under 5 %.

python scripts/evidence/benchmark_import.py [--runs 11]
"""

import argparse
import subprocess
import sys
import time

CASES = {
    "torch": "import torch",
    "torch, then oomprobe": "import torch, oomprobe",
    "torch, then find_max_batch": "import torch; from oomprobe import find_max_batch",
}


def seconds(code):
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    times = {name: [] for name in CASES}
    for _ in range(runs):  # interleaved, so that a slow minute affects all of them
        for name, code in CASES.items():
            times[name].append(seconds(code))
    base = min(times["torch"])  # the fastest run is the least disturbed one
    for name, values in times.items():
        print(f"{name:36} fastest {min(values):.3f} s  ratio {min(values) / base:.3f}")


if __name__ == "__main__":
    main()
