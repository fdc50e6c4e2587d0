"""Holds the allocator's model to traces that scripts/gpu_traces.py recorded on real cards, as far as there are some."""

import gzip
import json
from pathlib import Path

import pytest

from oomprobe.simulation.recorded import replay_trace
from oomprobe.simulation.settings import AllocatorSettings

TRACES = sorted((Path(__file__).parents[1] / "data" / "traces").glob("*.json.gz"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_the_replay_of_a_recorded_trace_has_the_true_peaks(path):
    trace = json.loads(gzip.decompress(path.read_bytes()))
    entries = [dict(zip(("action", "addr", "size", "stream"), event, strict=True)) for event in trace["events"]]
    replay = replay_trace(entries, AllocatorSettings(), 2**50)
    true_reserved = trace["peak_reserved_bytes"] - trace["reserved_before_bytes"]
    assert replay.missing_frees == 0
    assert abs(replay.peak_reserved_bytes - true_reserved) <= 0.02 * true_reserved
