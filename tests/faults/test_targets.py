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
from faults.card import CARD

import oomprobe

with open("imported", "a") as file:
    file.write(f"{os.getpid()}\\n")


def build():
    print("noise", flush=True)
    model = torch.nn.Linear(2, 2)
    return model, lambda model, batch_size: model(torch.randn(batch_size, 2)).sum().backward()

"""
CALL = """
found = oomprobe.probe_target(build, device={device}, max_batch=2)
with open("answer", "w") as file:
    file.write(str(found.batch_size))
"""


def script(folder, mark, text, *redirections):
    """A script that has run in a folder."""
    (folder / "train.py").write_text(text)
    line = f'exec "$0" train.py {" ".join(redirections)}'
    return subprocess.run(
        ["sh", "-c", line, sys.executable],
        env=environment(mark),
        cwd=folder,
        timeout=PATIENCE_S,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def test_a_script_that_probes_itself_on_import_is_refused(tmp_path, mark):
    done = script(tmp_path, mark, SCRIPT + CALL.format(device="'cpu:1GiB'"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('put the call under if __name__ == "__main__":')
    assert "InvalidArgumentError" in done.stderr.splitlines()[-1]
    assert len((tmp_path / "imported").read_text().split()) == 2  # the script's process, and the one that was to build
    assert not (tmp_path / "answer").exists()


def test_a_script_without_standard_streams_has_its_answer(tmp_path, mark):
    guarded = 'if __name__ == "__main__":' + CALL.format(device="CARD").replace("\n", "\n    ")
    done = script(tmp_path, mark, SCRIPT + guarded, "0<&-", "1>&-", "2>&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "answer").read_text() == "2"


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
    model, step = trained(lambda _: Path(os.environ["RECORD"]).write_text(f"{os.getpid()} {os.getppid()}"))
    return model, step


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


def forks():
    os.fork()
    return recorded()


def test_each_trial_on_the_host_is_a_child_of_its_own(confirmed_by):
    children, templates, confirming, others = confirmed_by(forks, on_host)
    assert len(children) > 1
    assert not confirming & children
    assert len(templates) == 1
    assert others == templates


def test_on_a_card_an_answer_is_confirmed_in_another_child(confirmed_by):
    children, templates, confirming, others = confirmed_by(recorded_on_card, on_card)
    assert len(children) == 1
    assert not confirming & children
    assert others == templates


def forks_once_in_its_step():
    def fork_once(batch_size):
        flag = Path(os.environ["FORKED_ONCE"])
        if batch_size == 2 and not flag.exists():
            flag.touch()
            os.fork()

    return trained(fork_once)


def test_a_step_that_forked_has_one_answer_for_its_question(tmp_path, monkeypatch):
    """With two, the second would be taken for the answer to what is asked next."""
    monkeypatch.setenv("FORKED_ONCE", str(tmp_path / "forked"))
    asked = []
    options = {**on_card, "progress": asked.append}
    probe_target(forks_once_in_its_step, time_limit_s=60, max_batch=4, **options)
    assert [trial.batch_size for trial in asked][:3] == [1, 2, 4]


def forks_on_card():
    os.fork()
    return trained()


def test_a_target_that_forks_does_not_hang():
    assert probe_target(forks_on_card, time_limit_s=60, max_batch=2, **on_card).batch_size == 2
