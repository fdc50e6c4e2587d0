"""What a recording or a log says: why memory ran out, and whether a real run peaks where the probe said."""

from oomprobe.explaining.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
