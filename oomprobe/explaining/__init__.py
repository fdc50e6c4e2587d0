"""What a recording or a log says: why memory ran out, and whether a real run peaks where the probe said."""

from oomprobe.explaining.explanation import explain
from oomprobe.explaining.monitor import PeakMonitor

__all__ = ["PeakMonitor", "explain"]
