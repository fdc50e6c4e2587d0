"""State: found, kept, put back and compared."""

from oomprobe.state.keeper import Keeper, preserved
from oomprobe.state.resident import resident_tensors, state_tensors
from oomprobe.state.tracker import Tracker

__all__ = ["Keeper", "Tracker", "preserved", "resident_tensors", "state_tensors"]
