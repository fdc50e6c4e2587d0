"""The journal of a probe: what was asked, and every trial, on the disk before it runs and when it has ended."""

from oomprobe.journal.book import SCHEMA_VERSION, Journal
from oomprobe.journal.past import Key

__all__ = ["SCHEMA_VERSION", "Journal", "Key"]
