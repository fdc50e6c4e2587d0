"""The tracker by the name that isolated trials know it by: in their processes nothing has to be given back."""

from oomprobe.state.tracker import Tracker as Seen

__all__ = ["Seen"]
