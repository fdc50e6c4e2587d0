"""Results as tables: one for the README, a cell for each answer, and one with every column for each workload."""

import re
import statistics
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
        return _without_a_number(workload, row, told.get("error"))
    if not survived(row, answer):
        return f"**{answer}: dies**"
    if answer > (true_max(row) or answer):
        return f"{answer}: beyond the data"
    share = _share(row, answer) + (", computed" if told["ran"] == "no" else "")
    if not workload.a_number_hides:
        return share
    return f"{share}, told" if any(_says(workload, note) for note in told.get("notes", ())) else f"**{share}**"


def _without_a_number(workload, row, error):
    """An error, or None, which says that nothing fits."""
    if not error:
        return f"nothing {RIGHT}" if row["truth"].get("fits") == [] else "nothing"
    return f"error {RIGHT}" if _says(workload, error) else _other(workload, error)


def _says(workload, text):
    """Whether it names what is the matter with the workload."""
    return workload.right_words is not None and re.search(workload.right_words, text) is not None


def _other(workload, error):
    """An error about something else, where one is right; where none is, they are all the same."""
    return "error" if workload.right_words is None else error.partition(":")[0]


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
        largest = true_max(row) or ("none" if "fits" in row["truth"] else "?")
        lines.append(f"| {workload.says} | {largest} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TOTALS = (
    "tool", "wrong", "errors that say what is the matter", "answers that were run", "share", "trials", "time in steps",
    "weights or optimizer changed", "left at most",
)  # fmt: skip


def totals(results):
    """A line for each tool: counts of workloads, and medians over those with an answer that survives."""
    lines = ["| " + " | ".join(TOTALS) + " |", "|---" * len(TOTALS) + "|"]
    for tool in tools.TOOLS:
        asked = [(cards.ALL[name], row, row["tools"].get(tool, {})) for name, row in results["workloads"].items()]
        asked = [(workload, row, told) for workload, row, told in asked if not {"not_for", "not_installed"} & {*told}]
        if asked := [one for one in asked if one[2]]:
            lines.append("| " + " | ".join([tool, *_total(asked)]) + " |")
    return "\n".join(lines)


def _total(asked):
    cells = [cell(*one) for one in asked]
    ended = [one for one in asked if "wall_s" in one[2]]
    answers = [told for _, _, told in ended if told["answer"] is not None]
    good = [(row, told) for _, row, told in ended if told["answer"] is not None and survived(row, told["answer"])]
    known = [(row, told) for row, told in good if true_max(row) and told["answer"] <= true_max(row)]
    changed = [told for _, _, told in ended if {"weights", "buffers", "optimizer"} & {*told["changed"]}]
    return [
        f"{sum(text.startswith('**') for text in cells)} of {len(asked)}",
        str(sum(RIGHT in text for text in cells)),
        f"{sum(told['ran'] != 'no' for told in answers)} of {len(answers)}",
        _median([100 * told["answer"] / true_max(row) for row, told in known], "%"),
        _median([told["trials"] for _, told in good]),
        _median([told["wall_s"] / row["survived"][str(told["answer"])]["step_s"] for row, told in good]),
        f"{len(changed)} of {len(ended)}",
        f"{max((told['left_bytes'] for _, _, told in ended), default=0) / 2**20:.0f} MiB",
    ]


def _median(values, unit=""):
    return f"{statistics.median(values):.0f}{unit}" if values else "-"


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
    if "fits" not in row["truth"]:
        return f"not known, {row['truth']['ended']}"
    return ", ".join(f"{first} to {last}" for first, last in row["truth"]["fits"]) or "none"


def whole(results):
    rows = results["workloads"].items()
    return "\n\n".join([compact(results), totals(results), *(detailed(name, row) for name, row in rows)])


def versions(results):
    now = results["versions"]
    told = [f"{name} {version}" for name, version in now.items()]
    for before in results.get("versions_before", ()):
        others = [f"{name} {before.get(name, 'missing')}" for name in now if before.get(name) != now[name]]
        told.append(f"some rows with {' and '.join(others)}")
    return ", ".join(told)


TOTALS_ARE = (
    "The same by tool. A time is that of the whole call, in steps at its answer; shares, trials and times are medians over the\n"
    "answers that survive:"
)
NO_CARD = (
    "On CUDA this has not been measured yet: no card was at hand, and the rows above stand alone. Where there is one:\n"
    "`python scripts/benchmark_peers.py --device cuda`."
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
    section = "\n\n".join(
        [compact(host), TOTALS_ARE, totals(host), f"{versions(host)}.", on_card(cuda) if cuda else NO_CARD]
    )
    section = f"{BEGIN}\n{section}\n{END}"
    readme.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: section, text, flags=re.DOTALL))
