"""Classification of exceptions into verdicts."""

from oomprobe.verdicts.classify import Evidence, Facts, Link, classify, classify_error, facts_of
from oomprobe.verdicts.texts import Verdict

__all__ = ["Evidence", "Facts", "Link", "Verdict", "classify", "classify_error", "facts_of"]
