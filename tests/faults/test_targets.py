"""Scripts that probe on import, targets that hang, and the processes that confirm an answer."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PATIENCE_S, environment, marked

from faults.card import CARD, trained
from oomprobe import Phase, TimeLimitError, probe_target

GRACE_S = 25  # for a hanging process to be terminated, on a busy machine
on_host = {"device": "cpu:1GiB", "memory_fraction": 1.0, "max_batch": 2, "progress": "off"}
on_card = {**on_host, "device": CARD}

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
        command,
        env=environment(),
        cwd=tmp_path,
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('put the call under if __name__ == "__main__":')
    assert "InvalidArgumentError" in done.stderr.splitlines()[-1]
    assert len((tmp_path / "imported").read_text().split()) == 2  # by the script, and by the worker


def hangs():
    """Start nested processes in three sessions, and hang."""
    worker = subprocess.Popen(["sh", "-c", 'setsid sh -c "setsid sleep 600 & wait" & wait'], start_new_session=True)
    worker.returncode = 0  # no ResourceWarning
    time.sleep(0.3)  # until all have started
    Path(os.environ["REACHED"]).touch()
    time.sleep(600)


@pytest.mark.usefixtures("spawned")
def test_a_hanging_target_ends_at_the_time_limit(tmp_path, monkeypatch, mark):
    monkeypatch.setenv("REACHED", str(tmp_path / "reached"))
    began_s = time.monotonic()
    with pytest.raises(TimeLimitError, match="time_limit_s=5,"):
        probe_target(hangs, time_limit_s=5, **on_host)
    assert 5 <= time.monotonic() - began_s < 5 + GRACE_S
    assert not marked(mark)
    if not (tmp_path / "reached").exists():
        pytest.skip("this machine was too busy to build the target in time")


def recorded():
    return trained(lambda _: Path(os.environ["RECORD"]).write_text(f"{os.getpid()} {os.getppid()}"))


@pytest.mark.usefixtures("spawned")
@pytest.mark.parametrize(("where", "each_trial_alone"), [(on_host, True), (on_card, False)], ids=["host", "card"])
def test_an_answer_is_confirmed_in_a_fresh_process(tmp_path, monkeypatch, where, each_trial_alone):
    record, searched, confirmed = tmp_path / "record", [], []
    monkeypatch.setenv("RECORD", str(record))

    def note_process(trial):
        (confirmed if trial.phase is Phase.CONFIRM else searched).append(record.read_text().split())

    probe_target(recorded, **{**where, "progress": note_process})
    processes, parents = map(set, zip(*searched, strict=True))
    confirming, their_parents = map(set, zip(*confirmed, strict=True))
    assert (len(processes) > 1) is each_trial_alone
    assert not confirming & processes
    assert len(parents) == 1
    assert their_parents == parents
