"""Classification of exceptions into verdicts."""

from oomprobe.verdicts.classify import Evidence, Facts, Link, classify, classify_error, facts_of

__all__ = ["Evidence", "Facts", "Link", "classify", "classify_error", "facts_of"]
