"""Results as tables: one for the README, a cell for each answer, and one with every column for each workload."""

import re
from pathlib import Path

from peers import cards, tools

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
    if "not_installed" in told:
        return "not installed"
    if "ended" in told:
        return "**hangs**" if told["ended"].startswith("no answer") else "**crashes**"
    answer = told.get("answer")
    if answer is None:
        expected = not workload.sizes_fit or workload.an_error_is_right
        said = "error" if told.get("error") else "nothing"
        return f"{said} {RIGHT}" if expected else said
    if not survived(row, answer):
        return f"**{answer}: dies**"
    if answer > (true_max(row) or answer):
        return f"**{answer}: beyond the data**"
    share = _share(row, answer) + (", computed" if told["ran"] == "no" else "")
    return f"**{share}**" if workload.a_number_hides else share


def _share(row, answer):
    return "?" if true_max(row) is None else f"{answer / true_max(row):.0%}"


def spent(workload, row, told):
    """Of the budget, the share that fifty steps at the answer reserved; and the seconds the call was not in steps."""
    if "wall_s" not in told:
        return cell(workload, row, told)
    return f"{_budget_used(workload, row, told) or 'no answer'}, {_outside_s(told):.1f} s"


def _budget_used(workload, row, told):
    if told["answer"] is None:
        return ""
    if not survived(row, told["answer"]):
        return "dies"
    peak_bytes = row["survived"][str(told["answer"])].get("peak_reserved_bytes")
    return "" if peak_bytes is None else f"{peak_bytes / 2**20 / workload.budget_mib:.0%}"


def _outside_s(told):
    return max(0, told["wall_s"] - told["in_steps_s"])


def compact(results, write=cell):
    """Workloads by tools; `write` says what stands in a cell."""
    names = [name for name in tools.TOOLS if any(name in row["tools"] for row in results["workloads"].values())]
    lines = ["| workload | largest that fits | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for name, row in results["workloads"].items():
        workload = cards.ALL[name]
        cells = [write(workload, row, row["tools"][tool]) if tool in row["tools"] else "" for tool in names]
        lines.append(f"| {workload.says} | {true_max(row) or 'none'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


HEAD = (
    "tool", "answer", "share", "ran", "50 steps", "budget used", "trials", "time in steps", "outside steps",
    "state changed", "left", "error",
)  # fmt: skip


def detailed(name, row):
    """Every column for one workload."""
    lines = [
        f"### {cards.ALL[name].says} (`{name}`): sizes that fit {_ranges(row)}",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---" * len(HEAD) + "|",
    ]
    for tool, told in row["tools"].items():
        lines.append("| " + " | ".join([tool, *columns(cards.ALL[name], row, told)]) + " |")
    return "\n".join(lines)


def columns(workload, row, told):
    if "wall_s" not in told:
        why = told.get("not_for") or told.get("ended") or "not installed"
        return ["-"] * (len(HEAD) - 2) + [why]
    answer = told["answer"]
    step_s = row["survived"].get(str(answer), {}).get("step_s")
    return [
        "none" if answer is None else str(answer),
        "" if answer is None or true_max(row) is None else _share(row, answer),
        told.get("ran", ""),
        "" if answer is None else "survives" if survived(row, answer) else "dies",
        _budget_used(workload, row, told),
        str(told["trials"]),
        "" if step_s is None else f"{told['wall_s'] / step_s:.0f}",
        f"{_outside_s(told) / told['wall_s']:.0%}, {_outside_s(told):.1f} s",
        ", ".join(told["changed"]) or "nothing",
        _left(told),
        (told["error"] or "").replace("|", "\\|")[:120],
    ]


def _left(told):
    reserved_bytes = told.get("left_reserved_bytes")
    reserved = "" if reserved_bytes is None else f", {reserved_bytes / 2**20:.0f} MiB reserved"
    return f"{told['left_bytes'] / 2**20:.0f} MiB{reserved}"


def _ranges(row):
    return ", ".join(f"{first} to {last}" for first, last in row["truth"].get("fits", [])) or "none"


def whole(results):
    rows = results["workloads"].items()
    return "\n\n".join([compact(results), *(detailed(name, row) for name, row in rows)])


def versions(results):
    return ", ".join(f"{name} {version}" for name, version in results["versions"].items())


NO_CARD = (
    "On CUDA this has not been measured yet: no card was at hand, and the rows above stand alone. Where there is one:\n"
    "`scripts/benchmark_peers.py --device cuda`."
)


def on_card(results):
    """What a card said: the answers, what they use of it, and what they were on."""
    card = results["card"]
    about = f"On CUDA: {card['card']}, driver {card['driver']}, torch {card['torch']}."
    uses = "The share of the budget that the answer's steps reserve, and the time spent outside steps:"
    return "\n\n".join([about, compact(results), uses, compact(results, spent), f"{versions(results)}."])


def into_readme(readme: Path, host, cuda=None):
    """Put the tables where the README's markers are."""
    text = readme.read_text()
    if not (BEGIN in text and END in text):
        raise SystemExit(f"benchmark_peers: {readme} has no place for the tables, {BEGIN} ... {END}")
    section = "\n\n".join([compact(host), f"{versions(host)}.", on_card(cuda) if cuda else NO_CARD])
    section = f"{BEGIN}\n{section}\n{END}"
    readme.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: section, text, flags=re.DOTALL))
