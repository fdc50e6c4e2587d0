"""Training state: finding, saving, restoring and comparing it.

What comes back when (`walk.When` names the times; a worker or a forked child ends instead of restoring anything):

- never kept: gradients and optimizer state that trials create, which each trial drops (`Tracker.start_cold`);
- before each trial: the user's counters, lists, caches and attributes, tensors and arrays beside the model up to 4 KiB, schedulers,
  parameter groups, random generators, and modes (at each turn of a step);
- at the end: all of that, and weights, optimizer state that existed, larger tensors, objects with ``state_dict``, and torch's
  global flags (`Snapshot.restore`), compared bit for bit;
- named, not restored: positions of iterators, objects of libraries, containers and tensors past the budgets (`Tracker.changes`).
"""

from oomprobe.state.snapshot import Snapshot, preserved
from oomprobe.state.surroundings import generator_states
from oomprobe.state.tensors import addresses_of, can_copy
from oomprobe.state.tracker import Tracker, largest_added, state_tensors

__all__ = [
    "Snapshot",
    "Tracker",
    "addresses_of",
    "can_copy",
    "generator_states",
    "largest_added",
    "preserved",
    "state_tensors",
]
