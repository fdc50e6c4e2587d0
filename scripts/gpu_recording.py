"""Record what torch's allocator does on a real card, in the format of tests/data/recordings.

The part of gpu-check that records the first calls of a demo model from an empty allocator, and compares their peaks with those of a
simulated card.
"""

import bisect


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
        address, size = event.get("addr", event.get("device_free", 0)), event["size"]
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
