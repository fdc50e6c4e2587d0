"""Run the tests of CUDA's allocator and of the simulation on several versions of torch, and write their table."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ("2.6.0", "2.8.0", "2.10.0", "2.12.1", "2.14.1", "2.15.0", "2.15.0:python3.12")
SUITES = {
    "tests/cuda": ["tests/cuda", "tests/bed"],
    "simulation": [
        "tests/simulation",
        "tests/test_torch_versions.py",
        "oomprobe/simulation",
        "oomprobe/devices",
    ],
}
PAGE, BEGIN, END = (
    ROOT / "docs" / "evidence.md",
    "<!-- versions: begin -->",
    "<!-- versions: end -->",
)
COLUMNS = ("torch", "CUDA", "Python", *SUITES)


def bed(version: str, interpreter: str) -> str:
    """Return the Python of a bed, built if need be."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    environment |= {"PYTHON": interpreter} if interpreter else {}
    command = [ROOT / "scripts" / "cuda-bed", version]
    said = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return said.splitlines()[-1]


def outcome(python: str, paths: list[str]) -> str:
    """Return the counts on pytest's last line, such as "214 passed, 6 skipped"."""
    command = [
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal", "-m", "not slow",
    ]  # fmt: skip
    ran = subprocess.run([*command, *paths], cwd=ROOT, capture_output=True, text=True)
    for said in ran.stdout.splitlines():
        if said.startswith(("FAILED", "ERROR")):
            print(said)
    *_, last = ran.stdout.splitlines() or [ran.stderr]
    return (
        ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last))
        or f"did not run: {last}"
    )


def row(text: str) -> tuple[str, ...]:
    version, _, interpreter = text.partition(":")
    python = bed(version, interpreter)
    about = "import sys, torch; print(torch.__version__.split('+')[0], torch.version.cuda, sys.version.split()[0])"
    names = subprocess.run(
        [python, "-c", about], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return (*names, *(outcome(python, paths) for paths in SUITES.values()))


def line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def write(table: list[str]) -> None:
    """Put the rows into the page, in place of those of the same version of torch and of Python."""
    before, rest = PAGE.read_text().split(BEGIN)
    old, after = rest.split(END)
    rows = {
        tuple(text.split("|")[1:4]): text
        for text in (*old.split("\n"), *table)
        if text.startswith("|")
    }
    head, rule, *versions = rows.values()
    versions.sort(key=lambda text: [int(part) for part in re.findall(r"\d+", text)][:2])
    PAGE.write_text("\n".join([before + BEGIN, "", head, rule, *versions, "", END + after]))


def main(arguments: list[str]) -> int:
    versions = [text for text in arguments if text != "--write"] or list(VERSIONS)
    table = [line(COLUMNS), line(("---",) * len(COLUMNS))]
    for text in versions:
        table.append(line(row(text)))
        print(table[-1], flush=True)
    if "--write" in arguments:
        write(table)
    return int(
        any("failed" in cells or "error" in cells or "did not run" in cells for cells in table)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
