"""State: found, kept, put back and compared."""

from oomprobe.state.resident import resident_tensors, state_tensors
from oomprobe.state.snapshot import Snapshot, preserved
from oomprobe.state.tracker import Tracker

__all__ = ["Snapshot", "Tracker", "preserved", "resident_tensors", "state_tensors"]
