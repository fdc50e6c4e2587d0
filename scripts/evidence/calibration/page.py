"""The table of docs/validated.md, from tests/evidence/published."""

import json
import re

from calibration.rows import EVIDENCE, GIB

PAGE = EVIDENCE.parents[2] / "docs" / "validated.md"
BEGIN, END = "<!-- published: begin -->", "<!-- published: end -->"


def write():
    """Write the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text()))


def with_table(text):
    """Return the page's text with the table between its markers."""
    families = [json.loads(path.read_text()) for path in sorted(EVIDENCE.glob("*.json"))]
    lines = ["| family | what was published | source | compared |", "|---|---|---|---|"]
    lines += [
        f"| {one['family']} | {one['how']} | {one['source']} | {compared(one)} |"
        for one in families
    ]
    lines += [
        "",
        "| card | torch | model | published | oomprobe | result | how |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        line(family | row) for family in families for row in family["rows"]
    ]  # a row may have its own card
    section = "\n".join([BEGIN, "", *lines, "", END])
    return re.sub(f"{BEGIN}.*?{END}", lambda _: section, text, flags=re.DOTALL)


def compared(family):
    """Return with what a family was simulated; one whose script is gone names the last commit that has it."""
    torch = f"torch {family['simulated with torch']}"
    return f"{torch}, commit {family['commit']}" if "commit" in family else torch


def line(row):
    """Return one row: the difference of two peaks, and the verdict on an interval or a bracket."""
    published, simulated, upper = (row.get(name) for name in ("published", "simulated", "upper"))
    difference = ""
    if isinstance(published, int) and isinstance(simulated, int):
        difference = f"{100 * (simulated / published - 1):+.{1 if row.get('rounding') else 4}f} %"
    said = shown(simulated, row)
    if upper not in (None, simulated):
        said += f" to {shown(upper, row)}"
    if row.get("explained", simulated) != simulated:
        difference += (
            f" ({100 * (row['explained'] / published - 1):+.1f} % with Winograd's workspace)"
        )
    result = ", ".join(part for part in (row["verdict"], difference) if part)
    how = "; ".join(part for part in (row["family"], row["remark"]) if part)
    cells = row["card"], row["torch"], row["name"], shown(published, row), said, result, how
    return f"| {' | '.join(cells)} |"


def shown(value, row):
    """Return a number of bytes as exact as it was published; a text as it is."""
    if value is None:
        return "out of memory"
    if isinstance(value, str):
        return value
    return f"{value / GIB:.2f} GiB" if row.get("rounding") else f"{value:,}"
