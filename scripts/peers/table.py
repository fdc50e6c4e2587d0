"""Render the evidence as tables in a page, one line per tool."""

import json
import re
import statistics

from peers.tools import TOOLS

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
TITLES = {"cuda_bed": "torch's CUDA allocator, kernels stubbed", "cuda": "a CUDA card"}
HEAD = (
    "tool", "answers that die / cases", "share of the true limit: median (range)", "sizes tried (median)",
    "answers never run", "state changed", "most memory left reserved",
)  # fmt: skip


def line(rows):
    """Return the cells of one tool; shares are of the answers that last."""
    answers = [row for row in rows if row.get("answer") is not None]
    dies = sum(not row["lasts"] for row in answers)
    shares = [row["answer"] / row["frontier"] for row in answers if row["lasts"]]
    never_run = sum(not row["answer_was_run"] for row in answers)
    changed = sorted({part for row in rows for part in row.get("changed", ())})
    failed = f", no answer {len(rows) - len(answers)}" if len(answers) < len(rows) else ""
    share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})" if shares else "-"
    tried = f"{statistics.median(row['sizes_tried'] for row in answers):.0f}" if answers else "-"
    left_gib = max(row.get("left_reserved_mib", 0) for row in rows) / 1024
    return [
        f"{dies} / {len(rows)}{failed}",
        share,
        tried,
        str(never_run),
        ", ".join(changed) or "-",
        f"{left_gib:.1f} GiB",
    ]


def table(title, results):
    rows_of = {name: [row for row in results["rows"] if row["tool"] == name] for name in TOOLS}
    lines = [[name, *line(rows)] for name, rows in rows_of.items() if rows]
    drawn = "\n".join(f"| {' | '.join(cells)} |" for cells in [HEAD, ["---"] * len(HEAD), *lines])
    cards = sorted({row["card_gib"] for row in results["rows"]})
    models = len({row["model"] for row in results["rows"]})
    about = f"On {title}: {models} models, cards of {', '.join(map(str, cards))} GiB."
    return f"{about}\n\n{drawn}\n\n{', '.join(' '.join(pair) for pair in results['versions'].items())}."


def into_page(page, evidence):
    """Write a table for each existing evidence file between the page's markers."""
    tables = [table(TITLES[name], json.loads(path.read_text())) for name, path in evidence.items() if path.exists()]
    section = "\n\n".join([BEGIN, *tables, END])
    text, found = re.subn(f"{BEGIN}.*?{END}", lambda _: section, page.read_text(), flags=re.DOTALL)
    if not found:
        raise SystemExit(f"benchmark_peers: {page} has no place for the tables, {BEGIN} ... {END}")
    page.write_text(text)
