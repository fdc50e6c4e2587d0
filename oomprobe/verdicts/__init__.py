"""From an exception, and what was seen around it, to a verdict."""

from oomprobe.verdicts.classify import Evidence, Facts, Link, Verdict, classify, classify_error, facts_of

__all__ = ["Evidence", "Facts", "Link", "Verdict", "classify", "classify_error", "facts_of"]
