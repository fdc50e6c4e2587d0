"""Compare how fast the simulated allocator is with that of another commit, on the recordings of physical cards.

python scripts/evidence/benchmark_allocator.py [COMMIT]     # 9de3212: blocks were objects, each request a call

Requests and frees per second of processor time, the best of five: as one recorded call of a step is replayed, and one
request after the other. Both commits run in turn, three times; both must reserve the same.
"""

import importlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = sorted((ROOT / "tests" / "data" / "recordings").glob("*.json"))
TIMES, ROUNDS = 5, 3


def module(*names):
    """Return the first of these modules that the commit has."""
    for name in names:
        with suppress(ModuleNotFoundError):
            return importlib.import_module(f"oomprobe.{name}")
    raise ModuleNotFoundError(names)


def requests_of(events, before):
    """Return sizes of requests, and -n to free the n-th, without blocks from before the recording."""
    for event in events:
        if isinstance(event, list) and isinstance(event[0], int):
            yield event[0]
        elif isinstance(event, int) and -event > before:
            yield event + before


def seconds(run, *begins):
    """Return the shortest time of several runs, and what the last left reserved at most."""
    best = float("inf")
    for _ in range(TIMES):
        made = [begin() for begin in begins]
        started = time.process_time()
        run(*made)
        best = min(best, time.process_time() - started)
    return best, made[0].peak_reserved_bytes


def measure():
    """Print, for each recording, its requests, and seconds and peak of both ways."""
    caching = module("allocator.caching", "simulation.allocator")
    settings = module("allocator.settings", "simulation.allocator").AllocatorSettings
    tape = module("tape.calls", "simulation.tape")
    for path in RECORDINGS:
        recording = json.loads(path.read_text())
        before = sum(len(inside) // 2 for _, _, *inside in recording["begins"])
        requests = [*requests_of(recording["events"], before)]
        text = "expandable_segments:True" * recording["expandable_segments"]
        sizes = [nbytes for nbytes in requests if nbytes > 0]
        events, number = [], 0
        for request in requests:
            events.append(
                (tape.ALLOCATED, number, 0) if request > 0 else (tape.FREED, 0, -request - 1)
            )
            number += request > 0
        call = tape.RecordedCall(tuple(events), tuple(sizes))

        def one_by_one(allocator, requests=requests):
            handles = []
            for request in requests:
                if request > 0:
                    handles.append(allocator.malloc(request))
                else:
                    allocator.free(handles[-request - 1])

        def begin(text=text):
            return caching.CachingAllocator(2**40, settings.from_text(text))

        replayed = seconds(
            lambda allocator, call=call: tape.replay_call(allocator, call, {}), begin
        )
        print(json.dumps([path.stem, len(requests), [*replayed, *seconds(one_by_one, begin)]]))


def main(commit="9de3212"):
    with TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "oomprobe"], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        found = defaultdict(list)
        for root in (folder, str(ROOT)) * ROUNDS:
            lines = subprocess.run(
                [sys.executable, __file__, "--measure"], env={"PYTHONPATH": root}, stdout=subprocess.PIPE, text=True, check=True
            ).stdout.splitlines()  # fmt: skip
            found[root].append([json.loads(line) for line in lines])
    print(f"{'requests/s':>40} {'as a call':>20} {'one by one':>20}")
    for at, (name, count, _) in enumerate(found[folder][0]):
        before, now = (
            [min(figures) for figures in zip(*(run[at][2] for run in found[root]), strict=True)]
            for root in (folder, str(ROOT))
        )
        if before[1::2] != now[1::2]:
            raise SystemExit(f"{name}: {before[1]} bytes reserved before, {now[1]} now")
        ways = [
            f"{count / now[way] / 1e6:6.2f} M ({before[way] / now[way]:4.2f} x)" for way in (0, 2)
        ]
        print(f"{name:>32} {count:7,} {ways[0]:>20} {ways[1]:>20}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        measure()
    else:
        main(*sys.argv[1:])
