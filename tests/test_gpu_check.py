"""scripts/gpu-check where there is no card: what it keeps, and that nothing outlives its limits."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import pytest
import torch

CHECK = Path(__file__).parent.parent / "scripts" / "gpu-check"
STARTS_ANOTHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_process_started_ends_with_it_when_its_time_is_up():
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        gpu_check.within([sys.executable, "-c", STARTS_ANOTHER], 1.0)
    child = int(raised.value.stdout)
    deadline_s = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not alive(child)


def test_within_its_time_a_process_says_how_it_ended():
    done = gpu_check.within([sys.executable, "-c", "import sys; print(1); sys.exit(3)"], 20)
    assert (done.returncode, done.stdout) == (3, "1\n")


def test_what_was_found_is_kept_when_the_rest_is_cut_off(monkeypatch, tmp_path):
    path = tmp_path / "evidence.json"

    def cut_off(part):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "surroundings", lambda: {"torch": "0", "driver": "0"})
    monkeypatch.setattr(gpu_check, "run_tests", lambda: {"ran": True, "exit_code": 0, "summary": "9 passed"})
    monkeypatch.setattr(gpu_check, "run_fault", lambda name, *_: {"fault": name, "as_promised": True})
    monkeypatch.setattr(gpu_check, "run_in_child", cut_off)
    monkeypatch.setattr(sys, "argv", ["gpu-check", str(path)])
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main()
    kept = json.loads(path.read_text())
    assert kept["tests"]["summary"] == "9 passed"
    assert [fault["fault"] for fault in kept["faults"]] == [fault[0] for fault in gpu_check.FAULTS]
    assert kept["wrong"] == []


def test_a_fault_finds_what_this_process_finds(monkeypatch, tmp_path):
    asked = {}

    def within(command, timeout_s, env):
        asked.update(env)
        return subprocess.CompletedProcess(command, 0, '{"error": "none"}', "")

    monkeypatch.setattr(gpu_check, "within", within)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpu_check.run_fault(*gpu_check.FAULTS[0])["as_promised"] is False
    assert asked["PYTHONPATH"] == os.pathsep.join([str(gpu_check.ROOT), str(tmp_path)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a card")
@pytest.mark.parametrize("name", ["gpu_check.py", "gpu_traces.py"])
def test_nothing_has_to_be_installed_or_on_the_path(name):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, CHECK.with_name(name)], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA device here" in done.stderr


def test_its_arguments_are_a_file_and_a_folder(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$(basename "$1") $2 $3" >> "$ASKED"\n')
    python.chmod(0o755)
    asked = tmp_path / "asked"
    environment = {**os.environ, "PYTHON": str(python), "ASKED": str(asked)}
    subprocess.run([CHECK, "evidence.json", "traces"], env=environment, check=True)
    subprocess.run([CHECK], env=environment, check=True)
    lines = ["gpu_check.py evidence.json", "gpu_traces.py traces", "gpu_check.py", "gpu_traces.py"]
    assert [line.strip() for line in asked.read_text().splitlines()] == lines
