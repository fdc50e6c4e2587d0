"""State: found, kept, put back and compared."""

from oomprobe.state.keeper import Keeper, preserved
from oomprobe.state.resident import resident_tensors, state_tensors

__all__ = ["Keeper", "preserved", "resident_tensors", "state_tensors"]
