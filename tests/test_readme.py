"""The README's code runs, and its promises about files hold."""

import re
import subprocess
import sys
from pathlib import Path

import benchmark_peers
from peers import table

ROOT = Path(__file__).parent.parent
EVIDENCE = ROOT / "tests" / "evidence"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_blocks_run_in_order(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^verdict: batch \d+", done.stdout, re.MULTILINE)


def test_the_commands_exist_and_are_executable():
    for command in re.findall(r"^scripts/\S+", README, re.MULTILINE):
        assert (ROOT / command).stat().st_mode & 0o111, command


def test_the_house_is_the_house():
    drawn = re.search(r"^oomprobe/\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    for name in re.findall(r"\b(\w+\.py|\w+/)(?=\s)", drawn):
        assert (ROOT / "oomprobe" / name).exists(), name
    for path in (ROOT / "oomprobe").glob("*.py"):
        assert path.name.startswith("__") or path.name in drawn, f"{path.name} is not in the README's house"
    for path in (ROOT / "oomprobe").glob("*/__init__.py"):
        assert f"{path.parent.name}/" in drawn, f"{path.parent.name}/ is not in the README's house"


def test_no_cuda_claim_without_evidence():
    of_a_card = [file for file in EVIDENCE.glob("*.json") if not file.stem.endswith(("_host", "_bed"))]
    assert bool(of_a_card) != ("No physical card has been seen yet" in README)


def test_the_table_of_the_peers_is_what_was_measured(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text(README)
    table.into_readme(copy, benchmark_peers.EVIDENCE)
    assert copy.read_text() == README, "run python scripts/benchmark_peers.py --readme"
