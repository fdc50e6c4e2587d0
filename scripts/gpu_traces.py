"""Record the requests to a real card's allocator in three training steps, and the peaks that a simulated card predicts.

python scripts/gpu_traces.py [FOLDER]        default: tests/data/traces

Writes one gzipped JSON file per model: the events of the allocator (action, address, size, stream), the true peaks, and
the peaks of the same steps on a simulated card of that size. Exit code 2: no CUDA device here.
"""

import gzip
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import oomprobe  # noqa: E402
from oomprobe import demo  # noqa: E402

CALLS = 3
BATCHES = {"conv_net": 2048, "small_gpt": 256, "small_gpt_amp": 256}


def build(name):
    model, step = getattr(demo, name.removesuffix("_amp"))()
    if not name.endswith("_amp"):
        return model, step

    def in_low_precision(model, batch_size):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            step(model, batch_size)

    return model, in_low_precision


def record(name):
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python", context=None)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    model, step = build(name)
    for _ in range(CALLS):
        step(model, BATCHES[name])
    torch.cuda.synchronize()
    [trace, *_] = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "name": name,
        "batch_size": BATCHES[name],
        "calls": CALLS,
        "allocated_before_bytes": before[0],
        "reserved_before_bytes": before[1],
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "events": [[e["action"], e.get("addr", 0), e["size"], e.get("stream", 0)] for e in trace],
    }


def simulate(name, total_bytes, capability):
    """Return the simulated peaks of the same calls, with weights in place from the start, as on the card."""
    card = oomprobe.SimulatedDevice(total_bytes)
    with card.building():
        model, step = build(name)
    card.place([*model.parameters(), *model.buffers()])
    card.start_trial()
    for _ in range(CALLS):
        with card.session():
            step(model, BATCHES[name])
    usage = card.usage()
    return {
        "capability_of_the_card": capability,
        "peak_allocated_bytes": usage.peak_allocated_bytes,
        "peak_reserved_bytes": usage.peak_reserved_bytes,
        "peak_upper_bytes": usage.peak_upper_bytes,
    }


def main():
    if not torch.cuda.is_available():
        print("gpu_traces: no CUDA device here", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests" / "data" / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    properties = torch.cuda.get_device_properties(0)
    for name in BATCHES:
        trace = record(name)
        trace["simulated"] = simulate(name, properties.total_memory, [properties.major, properties.minor])
        path = folder / f"{name}-{trace['card'].replace(' ', '-')}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))
        simulated = trace["simulated"]["peak_allocated_bytes"] / trace["peak_allocated_bytes"]
        print(f"{name}: {len(trace['events'])} events, simulated / true peak {simulated:.4f}, {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
