"""State: found, kept, put back and compared."""

from oomprobe.state.keeper import Keeper

__all__ = ["Keeper"]
