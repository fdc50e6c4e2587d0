"""Results as text, to be printed by somebody else."""

from oomprobe.report.facts import FAST_ENOUGH
from oomprobe.report.page import text
from oomprobe.report.table import trial_line, trials_table
from oomprobe.report.words import WIDTH

__all__ = ["FAST_ENOUGH", "WIDTH", "text", "trial_line", "trials_table"]
