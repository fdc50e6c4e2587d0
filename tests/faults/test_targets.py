"""Targets and scripts that make it hard for the processes that build them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from faults.card import CARD, trained
from faults.processes import PATIENCE_S, environment, marked
from oomprobe import Phase, TimeLimitError, probe_target

GRACE_S = 25  # for what hangs to be ended, on a busy machine
on_host = {"device": "cpu:1GiB", "memory_fraction": 1.0, "max_batch": 2, "progress": "off"}
on_card = {"device": CARD, "memory_fraction": 1.0, "progress": "off"}

# --- scripts ---

SCRIPT = """
import os

import torch

import oomprobe

with open("imported", "a") as file:
    file.write(f"{os.getpid()}\\n")


def build():
    model = torch.nn.Linear(2, 2)
    return model, lambda model, batch_size: model(torch.randn(batch_size, 2)).sum().backward()


oomprobe.probe_target(build, device="cpu:1GiB", max_batch=2)
"""


def test_a_script_that_probes_itself_on_import_is_refused(tmp_path, mark):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py"]
    done = subprocess.run(
        command, env=environment(mark), cwd=tmp_path, timeout=PATIENCE_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('put the call under if __name__ == "__main__":')
    assert "InvalidArgumentError" in done.stderr.splitlines()[-1]
    assert len((tmp_path / "imported").read_text().split()) == 2  # the script's process, and the one that was to build


# --- time that passes while a target is built ---


def hangs():
    """Beside workers that have sessions of their own, and workers of their own."""
    worker = subprocess.Popen(["sh", "-c", 'setsid sh -c "setsid sleep 600 & wait" & wait'], start_new_session=True)
    worker.returncode = 0  # no warning about it
    time.sleep(0.3)  # until all are there
    Path(os.environ["REACHED"]).touch()
    time.sleep(600)


@pytest.mark.parametrize("where", [on_host, on_card], ids=["host", "card"])
def test_a_target_that_hangs_ends_with_the_time(tmp_path, monkeypatch, mark, where):
    monkeypatch.setenv("REACHED", str(tmp_path / "reached"))
    began_s = time.monotonic()
    with pytest.raises(TimeLimitError, match="time_limit_s=5,"):
        probe_target(hangs, time_limit_s=5, **where)
    assert 5 <= time.monotonic() - began_s < 5 + GRACE_S
    assert not marked(mark)
    if not (tmp_path / "reached").exists():
        pytest.skip("this machine is too busy to begin with it")


# --- second opinions ---


def recorded():
    model = nn.Linear(2, 2)

    def step(model, batch_size):
        Path(os.environ["RECORD"]).write_text(f"{os.getpid()} {os.getppid()}")
        model(torch.randn(batch_size, 2)).sum().backward()

    return model, step


def recorded_on_card():
    return trained(lambda _: Path(os.environ["RECORD"]).write_text(f"{os.getpid()} {os.getppid()}"))


@pytest.fixture
def confirmed_by(tmp_path, monkeypatch):
    """The processes, and their parents, of the search and of the confirmation of an answer."""
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))

    def probed(target, where):
        trials = []

        def keep(trial):
            trials.append((trial.phase is Phase.CONFIRM, *map(int, (tmp_path / "record").read_text().split())))

        probe_target(target, **{**where, "max_batch": 2, "progress": keep})
        search, confirm = ([trial[1:] for trial in trials if trial[0] is last] for last in (False, True))
        assert search
        assert confirm
        return [set(column) for half in (search, confirm) for column in zip(*half, strict=True)]

    return probed


@pytest.mark.parametrize(
    ("target", "where", "each_trial_alone"), [(recorded, on_host, True), (recorded_on_card, on_card, False)]
)
def test_an_answer_is_confirmed_in_another_child(confirmed_by, target, where, each_trial_alone):
    children, templates, confirming, others = confirmed_by(target, where)
    assert (len(children) > 1) is each_trial_alone
    assert not confirming & children
    assert len(templates) == 1
    assert others == templates
