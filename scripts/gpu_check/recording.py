"""The part of gpu-check that records what torch's allocator does on a card, and what a simulated card predicts.

A recording has the format of tests/data/recordings, so it can become a test.
"""

import bisect
import difflib
from collections import Counter

from gpu_check.models import MODELS

CALLS = 3
MOST_EVENTS = 200_000


def record(name, batch_size):
    """Return the events of the first calls of a model on the card, their peaks, and how the simulated ones differ.

    Call it in a process that has not used CUDA.
    """
    import torch

    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, context=None)
    model, step = MODELS[name]()
    loop = loop_of(step)
    for _ in range(CALLS):
        with loop.keeping():
            step(model, batch_size)
    torch.cuda.synchronize()
    [trace, *_] = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    events = events_of(trace)
    found = simulate(name, batch_size)
    on_card = [
        event[0] for event in events if isinstance(event, list) and isinstance(event[0], int)
    ]
    return {
        "model": name,
        "batch_size": batch_size,
        "calls": CALLS,
        "card": peaks_of(torch.cuda),
        "simulated": {**found["peaks"], **compared(on_card, found["requests"])},
        "begins": [],
        "events": events,
    }


def peaks_of(memory):
    return {
        "peak_allocated_bytes": memory.max_memory_allocated(),
        "peak_reserved_bytes": memory.max_memory_reserved(),
    }


def loop_of(step):
    """Return what keeps the variables of a step between its calls, as the loop of a script does."""
    import oomprobe
    from oomprobe.runners.loop_variables import LoopVariables

    return LoopVariables(oomprobe.Step(step))


def this_card():
    """Return the card of this process, as one that leaves all its memory to torch."""
    import torch

    from oomprobe.simulation.cards import Card

    properties = torch.cuda.get_device_properties(0)
    return Card(
        name="card",
        full_name=properties.name,
        total_bytes=properties.total_memory,
        context_bytes=0,
        compute_capability=(properties.major, properties.minor),
        multi_processor_count=properties.multi_processor_count,
    )


def simulate(name, batch_size, calls=CALLS):
    """Return the peaks and the requests of the first calls on a simulation of this card."""
    import oomprobe

    card = oomprobe.SimulatedDevice(this_card())
    with card.history() as history:
        with card.building():
            model, step = MODELS[name]()
        card.place([*model.parameters(), *model.buffers()])
        card.start_trial()
        loop = loop_of(step)
        for _ in range(calls):
            with card.session(), loop.keeping():
                step(model, batch_size)
    usage = card.usage()
    peaks = {
        "peak_allocated_bytes": usage.peak_allocated_bytes,
        "peak_reserved_bytes": usage.peak_reserved_bytes,
        "peak_upper_bytes": usage.peak_upper_bytes,
    }
    return {"peaks": peaks, "requests": [nbytes for _, nbytes in history.events if nbytes > 0]}


def compared(on_card, simulated):
    """Return how many requests are the same in order, and the sizes that only one of the two has, with their number."""
    matcher = difflib.SequenceMatcher(None, on_card, simulated, autojunk=False)
    missing, surplus = Counter(on_card), Counter(simulated)
    return {
        "requests_on_the_card": len(on_card),
        "requests": len(simulated),
        "same_in_order": sum(block.size for block in matcher.get_matching_blocks()),
        "missing": sorted((missing - surplus).items(), reverse=True)[:50],
        "surplus": sorted((surplus - missing).items(), reverse=True)[:50],
    }


def events_of(trace):
    """Return the events of a trace that begins with an empty allocator; see tests/data/recordings/README.md.

    Args:
        trace: Of one device, from `torch.cuda.memory._snapshot()["device_traces"]`.

    Raises:
        ValueError: the allocator was not empty, or has expandable segments.
    """
    addresses = sorted({event["addr"] for event in trace if event["action"] == "segment_alloc"})
    events, block_of, blocks = [], {}, 0
    for event in trace:
        address, size = event.get("addr", 0), event["size"]
        segment = bisect.bisect_right(addresses, address) - 1
        match event["action"]:
            case "segment_alloc":
                events.append(["s", segment, size])
            case "segment_free":
                events.append(["r", segment])
            case "alloc":
                if segment < 0:
                    raise ValueError("the allocator was not empty when recording began")
                events.append([size, segment, address - addresses[segment]])
                block_of[address], blocks = blocks, blocks + 1
            case "free_completed":
                events.append(-1 - block_of.pop(address))
            case "oom":
                events.append(["o", size])
            case "segment_map" | "segment_unmap":
                raise ValueError("expandable segments are not recorded")
    return events
