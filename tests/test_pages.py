"""README and docs: their code runs, their outputs are real, and the files and options they name exist."""

import doctest
import json
import re
from pathlib import Path

import benchmark_peaks
import benchmark_peers
import pytest
import site_pages
from peers import table
from processes import run_script

import oomprobe
from oomprobe.cli import parser

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *(ROOT / name / "README.md" for name in ("examples", "scripts", "scripts/evidence")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ON_REQUEST = {"recipes", "savings", "tables"}  # each runs for longer than all other pages together
BY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page, *languages):
    return [
        body
        for language, body in BLOCK.findall(page.read_text(encoding="utf-8"))
        if language in languages
    ]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page.stem in ON_REQUEST), id=page.stem)
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_its_code_runs_and_prints_what_it_shows(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    status, out, err = run_script(script)
    assert status == 0, err
    out = out.replace(f"{script.name}:", "")
    for shown in blocks(page, "text"):
        assert all(part in out for part in shown.split("...\n"))


def test_the_five_lines_make_the_script_find_its_size(tmp_path):
    page = ROOT / "docs" / "my-script.md"
    text, (changes,) = blocks(page, "py")[0], blocks(page, "diff")
    for hunk in changes.split("...\n"):
        before = [line[1:] for line in hunk.splitlines() if line[:1] in ("-", " ")]
        after = [line[1:] for line in hunk.splitlines() if line[:1] in ("+", " ")]
        assert "\n".join(before) in text
        text = text.replace("\n".join(before), "\n".join(after))
    added, removed = ({*re.findall(rf"^\{sign}(.+)", changes, re.MULTILINE)} for sign in "+-")
    assert len(added - removed) == 5
    script = tmp_path / "train.py"
    card = 'find_max_batch(model, step, device="sim:4GiB", progress="off")'
    text = text.replace("find_max_batch(model, step)", card).replace("range(1000)", "range(0)")
    script.write_text(f"{text}print(result.batch_size)\n")
    status, out, err = run_script(script)
    assert (status, int(out) > 8) == (0, True), err


@BY_PAGE
def test_code_for_frameworks_compiles_and_files_exist(page):
    for block in blocks(page, "py"):
        compile(block, page.name, "exec")
    for name in re.findall(
        r"`((?:scripts|tests|oomprobe|examples)/[\w/.]+)`", page.read_text(encoding="utf-8")
    ):
        assert (ROOT / name).exists(), name


@BY_PAGE
def test_its_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.*)", linked.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, target


def test_its_commands_and_options_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for command in re.findall(r"^(scripts/\w+) ", text, re.MULTILINE):
        assert (ROOT / command).stat().st_mode & 0o111, command
    known = (
        parser().format_help() + parser()._subparsers._group_actions[0].choices["run"].format_help()
    )
    for options in re.findall(r"oomprobe run ([^`#\n)]*)", text):
        own = f" {options}".partition(" -- ")[0]  # a command follows the two dashes
        for option in re.findall(r"--[a-z-]+", own):
            assert option in known, option


def test_the_exit_statuses_are_those_of_the_errors():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \|.* \| (`.*`) \|$", page, re.MULTILINE)
    told = {(name, int(status)) for status, names in rows for name in re.findall(r"`(\w+)`", names)}
    expected = {(name, getattr(oomprobe, name).exit_status) for name, _ in told}
    assert told == expected | {("NothingFitsError", 5)}
    assert {status for _, status in told} == {1, 2, 3, 4, 5, 6}


def examples_of(thing):
    return "".join(
        example.source for example in doctest.DocTestParser().get_examples(thing.__doc__ or "")
    )


def test_every_public_name_has_a_docstring_and_an_example():
    assert [*site_pages.undocumented()] == []
    examples = {name: examples_of(thing) for name, thing in site_pages.public()}
    for name, text in examples.items():
        kind, _, method = name.partition(".")
        is_called = method and re.search(rf"\.{method}\b", examples.get(kind, ""))
        assert text or is_called or name.startswith("Device."), (
            name
        )  # a probe calls the methods of a device


def test_the_release_files_name_this_version():
    assert f"\n## {oomprobe.__version__} (" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {oomprobe.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_map_of_the_code_is_complete():
    drawn = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\noomprobe/\n")[2]
    for name in re.findall(r"\b(\w+\.py|\w+/)(?=\s)", drawn.partition("```")[0]):
        found = [ROOT / "oomprobe" / name, *(ROOT / "oomprobe").glob(f"*/{name}")]
        assert any(path.exists() for path in found), name
    for path in (ROOT / "oomprobe").glob("*.py"):
        assert path.name.startswith("__") or path.name in drawn, path.name
    for path in (ROOT / "oomprobe").glob("*/__init__.py"):
        assert f"{path.parent.name}/" in drawn, path.parent.name


def rows_of(page):
    lines = re.findall(r"^\|(.*)\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


def paths_in(text):
    """Return the names in code that are paths from the root; options and arguments may follow."""
    return [
        name
        for name in re.findall(r"`([\w./-]+)[^`]*`", text)
        if "/" in name or name == README.name
    ]


def test_the_table_of_evidence_is_complete():
    room = ROOT / "scripts" / "evidence"
    rows = rows_of(room / "README.md")
    named = {name for row in rows for name in paths_in(" ".join(row))}
    for name in named:
        assert (ROOT / name).exists(), name
    for page, command, data, last_run in rows:
        assert page.startswith(("the same", "none")) or all(
            name.endswith(".md") for name in paths_in(page)
        ), page
        assert paths_in(data) or data.startswith(("the page", "none")), data
        assert paths_in(command) or "by hand" in command or "commit" in command, command
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", last_run), last_run
    below = (
        (room / "README.md").read_text(encoding="utf-8").rpartition("|\n")[2]
    )  # it names the folders
    scripts = [path for path in room.iterdir() if path.name not in ("README.md", "__pycache__")]
    kept = (ROOT / "tests" / "evidence").rglob("*.json")
    assert {path.relative_to(ROOT).as_posix() for path in (*scripts, *kept)} <= named | {
        *paths_in(below)
    }


def test_the_table_of_scripts_is_complete():
    named = {name for row in rows_of(ROOT / "scripts" / "README.md") for name in paths_in(row[0])}
    commands = {
        path
        for path in (ROOT / "scripts").iterdir()
        if path.is_file() and path.stat().st_mode & 0o111
    }
    assert named == {path.relative_to(ROOT).as_posix() for path in commands}


def test_no_cuda_claim_without_evidence():
    files = (ROOT / "tests" / "evidence").glob("*.json")
    of_a_card = [file for file in files if not file.stem.endswith(("_host", "_bed"))]
    assert bool(of_a_card) != (
        "oomprobe has not run on a physical GPU yet" in README.read_text(encoding="utf-8")
    )


def test_the_peers_tables_match_the_evidence(tmp_path):
    page = ROOT / "docs" / "compare.md"
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    table.into_page(copy, benchmark_peers.EVIDENCE)
    assert copy.read_text() == page.read_text(), (
        "run python scripts/evidence/benchmark_peers.py --docs"
    )
    peaks = json.loads(benchmark_peaks.EVIDENCE.read_text())
    table.write_sections(
        copy, {"peaks": table.peaks_table(peaks), "brackets": table.brackets_table(peaks)}
    )
    assert copy.read_text() == page.read_text(), (
        "run python scripts/evidence/benchmark_peaks.py --docs"
    )


def test_the_short_peers_table_matches_the_evidence():
    rows = json.loads(benchmark_peers.EVIDENCE["cuda_bed"].read_text())["rows"]
    told = re.findall(
        r"^\| ([^|]+) \| (\d+ / \d+) \| (\d+) \| ([\d.]+) \|$", README.read_text(), re.MULTILINE
    )
    assert len(told) >= 4
    for name, dies, never_run, share in told:
        tool = name.partition(" (")[0]
        cells = table.line([row for row in rows if row["tool"] == tool])
        assert (dies, never_run, share) == (cells[0], cells[4], cells[1].partition(" ")[0]), name
