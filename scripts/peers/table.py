"""Results as tables: one for the README, a cell for each answer, and one with every column for each workload."""

import re
from pathlib import Path

from peers import tools, workloads

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
RIGHT = "✓"


def true_max(row):
    return max((last for _, last in row["truth"].get("fits", [])), default=None)


def survived(row, answer):
    return "step_s" in row["survived"].get(str(answer), {})


def cell(workload, row, told):
    """A word for an answer: its share of the true maximum, and what is wrong with it."""
    if "not_for" in told:
        return "-"
    if "ended" in told:
        return "**hangs**" if told["ended"].startswith("no answer") else "**crashes**"
    answer = told.get("answer")
    if answer is None:
        expected = not workload.sizes_fit or workload.an_error_is_right
        return f"error {RIGHT}" if expected else "error"
    if not survived(row, answer):
        return f"**{answer}: dies**"
    if told["ran"] == "no":
        return f"**{_share(row, answer)}, never run**"
    return f"**{_share(row, answer)}**" if workload.name == "bug" else _share(row, answer)


def _share(row, answer):
    return f"{answer / true_max(row):.0%}"


def compact(results):
    """Workloads by tools."""
    names = [name for name in tools.TOOLS if any(name in row["tools"] for row in results["workloads"].values())]
    lines = ["| workload | largest that fits | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for name, row in results["workloads"].items():
        workload = workloads.HOST[name]
        cells = [cell(workload, row, row["tools"][tool]) if tool in row["tools"] else "" for tool in names]
        lines.append(f"| {workload.says} | {true_max(row) or 'none'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


HEAD = (
    "tool", "answer", "share", "ran", "50 steps", "trials", "time in steps", "outside steps", "state changed", "left", "error",
)  # fmt: skip


def detailed(name, row):
    """Every column for one workload."""
    lines = [
        f"### {workloads.HOST[name].says} (`{name}`): sizes that fit {_ranges(row)}",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---" * len(HEAD) + "|",
    ]
    for tool, told in row["tools"].items():
        lines.append("| " + " | ".join([tool, *columns(row, told)]) + " |")
    return "\n".join(lines)


def columns(row, told):
    if "wall_s" not in told:
        why = told.get("not_for") or told.get("ended")
        return ["-"] * (len(HEAD) - 2) + [why]
    answer = told["answer"]
    step_s = row["survived"].get(str(answer), {}).get("step_s")
    return [
        "none" if answer is None else str(answer),
        "" if answer is None or true_max(row) is None else _share(row, answer),
        told.get("ran", ""),
        "" if answer is None else "survives" if survived(row, answer) else "dies",
        str(told["trials"]),
        "" if step_s is None else f"{told['wall_s'] / step_s:.0f}",
        f"{1 - min(1, told['in_steps_s'] / told['wall_s']):.0%}",
        ", ".join(told["changed"]) or "nothing",
        f"{told['left_bytes'] / 2**20:.0f} MiB",
        (told["error"] or "").replace("|", "\\|")[:120],
    ]


def _ranges(row):
    return ", ".join(f"{first} to {last}" for first, last in row["truth"].get("fits", [])) or "none"


def whole(results):
    rows = results["workloads"].items()
    return "\n\n".join([compact(results), *(detailed(name, row) for name, row in rows)])


def versions(results):
    return ", ".join(f"{name} {version}" for name, version in results["versions"].items())


def into_readme(readme: Path, results):
    """Put the table where the README's markers are."""
    text = readme.read_text()
    section = f"{BEGIN}\n{compact(results)}\n\n{versions(results)}.\n{END}"
    readme.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: section, text, flags=re.DOTALL))
