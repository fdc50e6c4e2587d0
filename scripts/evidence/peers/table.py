"""Render the evidence as tables in a page, one line per tool."""

import json
import re
import statistics

from calibration.timm_training import CAPACITY_MIB

from peers.models import VARYING
from peers.tools import TOOLS

HIT = "both right"
SAID = {  # by whether the size that ran fits, and the one that failed
    (True, False): HIT, (True, True): "both fit", (False, False): "neither fits", (False, True): "only the one that failed fits",
}  # fmt: skip
HEAD = (
    "tool", "answers that die / cases", "share of the true limit: median (range)", "work in steps: median (range)",
    "sizes tried (median)", "answers never run", "state changed",
)  # fmt: skip


def line(rows):
    """Return the cells of one tool; shares are of the answers that last."""
    answers = [row for row in rows if row.get("answer") is not None]
    dies = sum(not row["lasts"] for row in answers)
    shares = [row["answer"] / row["frontier"] for row in answers if row["lasts"]]
    never_run = sum(not row["answer_was_run"] for row in answers)
    changed = sorted({part for row in rows for part in row.get("changed", ())})
    failed = f", no answer {len(rows) - len(answers)}" if len(answers) < len(rows) else ""
    return [
        f"{dies} / {len(rows)}{failed}",
        middle(shares, 2),
        middle([row["work"] for row in answers], 0),
        middle([row["sizes_tried"] for row in answers], 0).partition(" ")[0],
        str(never_run),
        ", ".join(changed) or "-",
    ]


def middle(values, digits):
    """Return the median and the range as text."""
    if not values:
        return "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ranks_cell(rows):
    """Return what one tool answered on one pair of ranks; one number if both answered the same."""
    if not any(row["answers"] for row in rows):
        return "; ".join(sorted({row["ended"].partition(",")[0] for row in rows}))
    told = ", ".join(f"{row['model']} {each(row['answers'])}" for row in rows)
    return f"{told}: {sum(row['lasts'] for row in rows)} of {len(rows)} last"


def each(answers):
    agree = len(answers) == 2 and answers[0] == answers[1]
    return str(answers[0]) if agree else " and ".join(map(str, [*answers, "-", "-"][:2]))


def drawn(*lines):
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    )


def versions(results, name="versions"):
    return f"{', '.join(' '.join(pair) for pair in results[name].items())}."


def tools_table(results, where, is_timed):
    rows_of = {name: [row for row in results["rows"] if row["tool"] == name] for name in TOOLS}
    lines = [[name, *line(rows)] for name, rows in rows_of.items() if rows]
    if is_timed:
        lines = [
            [*cells, middle([row["wall_s"] for row in rows_of[cells[0]] if "wall_s" in row], 1)]
            for cells in lines
        ]
    cards = sorted({row["card_gib"] for row in results["rows"]})
    models = len({row["model"] for row in results["rows"]})
    return [
        f"On {where}: {models} models, cards of {', '.join(map(str, cards))} GiB.",
        drawn([*HEAD, "seconds: median (range)"] if is_timed else HEAD, *lines),
        versions(results),
    ]


def ranks_table(results):
    rows_of = {}
    for row in results["rows"]:
        rows_of.setdefault(row["tool"], {}).setdefault(row["cards"], []).append(row)
    lines = [[tool, *map(ranks_cell, cases.values())] for tool, cases in rows_of.items()]
    return [drawn(["tool", *next(iter(rows_of.values()))], *lines), versions(results)]


def lengths_table(results):
    """Return a line for each tool with its answer for each model, and how many trainings die there."""
    models = [*VARYING]
    lines = []
    for tool in TOOLS:
        rows = {row["model"]: row for row in results["rows"] if row["tool"] == tool}
        if rows:
            lines.append([tool, *(deaths_cell(rows.get(model, {})) for model in models)])
    return [drawn(["tool", *models], *lines), versions(results)]


def deaths_cell(row):
    """Return what one tool answered for one model, and how many trainings died there."""
    if row.get("answer") is None:
        return row.get("error") or "no answer"
    return f"{row['answer']}: {row['deaths']} of {row['orders']}"


def peaks_table(results):
    """Return a line for each case with what each tool's figures differ from the card's, then the sums of all cases."""
    cases = results["cases"]
    figures = [
        (tool, figure)
        for tool in next(iter(cases.values()))
        for figure in ("allocated", "reserved")
    ]
    claims = [
        (tool, figure)
        for tool, figure in figures
        if any(figure in found[tool] for found in cases.values())
    ]
    truth, claims = claims[:2], claims[2:]
    lines = []
    for case, found in cases.items():
        true = [f"{found[tool][figure] / 2**30:.2f}" for tool, figure in truth]
        lines.append(
            [
                case,
                found["measured"]["where"],
                *true,
                *(difference(found, *claim) for claim in claims),
            ]
        )
    off = [
        [away for found in cases.values() if (away := away_from(found, *claim)) is not None]
        for claim in claims
    ]
    seconds = [[found[tool]["seconds"] for found in cases.values()] for tool, _ in claims]
    lines += [
        [
            "median, without sign",
            "",
            "",
            "",
            *(f"{100 * statistics.median(map(abs, one)):.1f} %" for one in off),
        ],
        ["worst", "", "", "", *(f"{100 * max(one, key=abs):+.1f} %" for one in off)],
        ["seconds: median (range)", "", "", "", *(middle(one, 1) for one in seconds)],
    ]
    head = [
        "training step",
        "measured on",
        "GiB allocated",
        "GiB reserved",
        *(f"{tool}: {figure}" for tool, figure in claims),
    ]
    return [drawn(head, *lines), *refusals(cases), versions(results)]


def brackets_table(results):
    """Return a line for each network with what each tool says of the size that ran and of the one that failed; then the hits."""
    brackets = results["brackets"]
    tools = [tool for tool in next(iter(brackets.values())) if tool not in ("ran", "failed")]
    said = {
        name: {tool: SAID.get(tuple(map(fits, found[tool])), "no figure") for tool in tools}
        for name, found in brackets.items()
    }
    lines = [
        [name, str(found["ran"]), str(found["failed"]), *said[name].values()]
        for name, found in brackets.items()
    ]
    hits = [sum(cells[tool] == HIT for cells in said.values()) for tool in tools]
    lines.append([HIT, "", "", *(f"{count} of {len(brackets)}" for count in hits)])
    return [
        drawn(["network", "ran", "failed", *tools], *lines),
        versions(results, "bracket_versions"),
    ]


def fits(told):
    """Whether a tool says that a step fits into the card's memory; None if it says nothing."""
    if "error" in told:
        return None
    if "refused" in told:
        return False
    return told.get("reserved", told.get("allocated")) <= CAPACITY_MIB * 2**20


def difference(found, tool, figure):
    away = away_from(found, tool, figure)
    return "no figure" if away is None else f"{100 * away:+.1f} %"


def away_from(found, tool, figure):
    """Return the relative difference of a tool's figure from that of the card; None if it gave none."""
    if figure not in found[tool]:
        return None
    return found[tool][figure] / found["measured"][figure] - 1


def refusals(cases):
    """Return a list of what tools said in place of a figure."""
    said = {}
    for case, found in cases.items():
        for tool, told in found.items():
            if "error" in told:
                said.setdefault(f"{tool}: {told['error']}", []).append(case)
    lines = [f"- {words} ({', '.join(names)})" for words, names in said.items()]
    return ["\n".join(lines)] if lines else []


def into_page(page, evidence):
    """Write the table of each existing evidence file between its markers in the page."""
    sections = {"peers": [], "ranks": [], "lengths": []}
    for name, path in evidence.items():
        if path.exists():
            results = json.loads(path.read_text())
            if name.startswith("ranks"):
                sections["ranks"] += ranks_table(results)
            elif name.startswith("lengths"):
                sections["lengths"] += lengths_table(results)
            else:
                where = (
                    "a CUDA card" if name == "cuda" else "torch's CUDA allocator, kernels stubbed"
                )
                sections["peers"] += tools_table(results, where, is_timed=name == "cuda")
    write_sections(page, sections)


def write_sections(page, sections):
    """Write the paragraphs of each section between its markers in the page."""
    text = page.read_text()
    for name, parts in sections.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        section = "\n\n".join([begin, *parts, end])
        text, found = re.subn(
            f"{begin}.*?{end}", lambda _, section=section: section, text, flags=re.DOTALL
        )
        if not found:
            raise SystemExit(f"{page} has no place for a table, {begin} ... {end}")
    page.write_text(text)
