"""Say whether memory grew since a commit: probe a target there and in the working tree, and compare the two.

python scripts/compare_commits.py --target train.py:build --base main --options="--require 8 --breakdown"

It ends as `oomprobe compare` does (5: memory grew), or with 0 if only the base has no answer. The action in
.github/actions/compare runs it; the summary of its job gets a table.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from oomprobe.ground.units import format_bytes
from oomprobe.results.blocks import cell
from oomprobe.results.table import read_result

# Exit statuses of a base that are no fault of the change.
NO_ANSWER = {
    1: "nothing fits",
    2: "it lacks the target",
    3: "its step fails",
    5: "the required size does not fit",
}
DEFAULTS = {"target": "train.py:build", "device": "sim:24GiB", "tolerance": "2%", "base": "HEAD^"}
OOMPROBE = (sys.executable, "-m", "oomprobe")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], stdout=subprocess.PIPE, text=True).stdout.strip()


def probe(root: Path, saved: Path, given: argparse.Namespace) -> int:
    paths = [
        str(root),
        str(root / "src"),
        os.environ.get("PYTHONPATH", ""),
    ]  # before what is installed
    command = [
        *OOMPROBE,
        "run",
        given.target,
        f"--device={given.device}",
        f"--json={saved}",
        *given.options,
    ]
    print(f"--- {saved.stem} ---", flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, cwd=root, env=environment).returncode


def tell(given: argparse.Namespace, text: str) -> None:
    print(text, flush=True)
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(path, "a", encoding="utf-8") as summary:
            summary.write(f"### Memory of `{given.target}` on {given.device}\n\n{text}\n")


def compared(given: argparse.Namespace, commit: str, folder: Path) -> int:
    base, head, root = folder / "base.json", folder / "head.json", folder / "root"
    if status := probe(Path(git("rev-parse", "--show-toplevel")), head, given):
        tell(given, f"The head has no answer: `oomprobe run` ended with {status}.")
        return status
    git("worktree", "add", "--quiet", "--detach", str(root), commit)
    try:
        status = probe(root, base, given)
    finally:
        git("worktree", "remove", "--force", str(root))
    if status:
        tell(
            given,
            f"Nothing to compare with, the base has no answer: {NO_ANSWER.get(status, status)}.",
        )
        return 0 if status in NO_ANSWER else status
    compare = [*OOMPROBE, "compare", base.name, head.name, f"--tolerance={given.tolerance}"]
    ended = subprocess.run(compare, cwd=folder, stdout=subprocess.PIPE, text=True)
    if ended.stdout:
        rows = ["| | base | head |", "|---|---|---|"]
        before, after = (read_result(path).summary() for path in (base, head))
        for name, write in {"batch_size": str, "peak_allocated_bytes": format_bytes}.items():
            rows.append(f"| {name} | {cell(before[name], write)} | {cell(after[name], write)} |")
        tell(given, "\n".join([*rows, "", "```text", f"{ended.stdout}```"]))
    return ended.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument(
        "--options", type=shlex.split, default=[], help="more options of oomprobe run, in quotes"
    )
    given = parser.parse_args()
    if not (
        commit := git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{given.base}^{{commit}}"
        )
    ):
        parser.error(
            f"there is no commit {given.base} here; a checkout with fetch-depth: 2 has HEAD^"
        )
    with TemporaryDirectory() as folder:
        sys.exit(compared(given, commit, Path(folder)))
