"""From an exception, and what was seen around it, to a verdict."""

from oomprobe.verdicts.classify import Evidence, Facts, Link, classify, classify_error, facts_of
from oomprobe.verdicts.texts import Verdict

__all__ = ["Evidence", "Facts", "Link", "Verdict", "classify", "classify_error", "facts_of"]
