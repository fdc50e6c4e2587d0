"""Several probes in one process, with faults: what it has in memory must not grow with their number."""

import json
import os
import tempfile
from pathlib import Path

import oomprobe
from soaking import faults, ledger, plan, targets

PROBES, WARM = 24, 8
GROWTH_BYTES = 8 * 2**20  # over the probes after the warm ones; a leaked model or trial each would be more of it


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def violations(seed):
    """What grew, as a list of one violation or none."""
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                Path(folder, "grown").write_text(str(grown_bytes(seed, folder)))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        if status:
            return [(seed, "endurance", f"the process of many probes ended with status {status}")]
        grown = int(Path(folder, "grown").read_text())
    return [(seed, "endurance", f"{grown} bytes more after {PROBES - WARM} probes")] if grown > GROWTH_BYTES else []


def grown_bytes(seed, folder):
    """Resident memory after many probes beyond that after a few."""
    warm = 0
    for number in range(PROBES):
        if number == WARM:
            warm = resident_bytes()
        _one(seed, number, folder)
    return resident_bytes() - warm


def _one(seed, number, folder):
    place = Path(folder, str(number))
    place.mkdir()
    probe = plan.probe(seed, 100 * number, 0)  # of the kind that runs here
    happens = [{"id": 0, "kind": "oom", "call": 5 + number}]
    (place / "run.json").write_text(json.dumps({"faults": happens, "card": probe.card}))
    os.environ[faults.MARK] = str(place)
    model, step = targets.on_ledger()
    options = {name: probe.options[name] for name in ("memory_fraction", "min_batch")}
    oomprobe.find_max_batch(model, step, device=ledger.Card(probe.card["total"]), progress="off", **options)
