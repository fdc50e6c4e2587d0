"""From an exception, and what was seen around it, to a verdict."""

from oomprobe.verdicts.judge import SIGNALS, Evidence, Facts, Link, Verdict, classify_error, facts_of, judge

__all__ = ["SIGNALS", "Evidence", "Facts", "Link", "Verdict", "classify_error", "facts_of", "judge"]
