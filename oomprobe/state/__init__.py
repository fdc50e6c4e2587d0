"""Training state: finding, saving, restoring and comparing it."""

from oomprobe.state.snapshot import Snapshot, preserved
from oomprobe.state.surroundings import generator_states
from oomprobe.state.tracker import Tracker, state_tensors

__all__ = ["Snapshot", "Tracker", "generator_states", "preserved", "state_tensors"]
