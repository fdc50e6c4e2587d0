"""Targets and scripts that make it hard for the processes that build them."""

import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest
import torch
from torch import nn

from faults.card import CARD, trained
from faults.processes import PATIENCE_S, environment, marked
from oomprobe import Phase, TimeLimitError, UnreliableError, probe_target
from oomprobe.by_name import check_target
from oomprobe.isolation import process

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


def test_a_script_that_probes_itself_whenever_it_is_imported_is_told_so_and_starts_nothing_more(tmp_path, mark):
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
def test_a_target_that_hangs_while_it_is_built_ends_with_the_time(tmp_path, monkeypatch, mark, where):
    monkeypatch.setenv("REACHED", str(tmp_path / "reached"))
    monkeypatch.setattr(process, "CLOSE_S", 0.5)
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


def test_on_host_memory_an_answer_is_confirmed_below_another_template_even_of_a_target_that_forks_itself(confirmed_by):
    children, templates, confirming, others = confirmed_by(forks, on_host)
    assert len(children) > 1  # one for each trial
    assert len(templates) == 1
    assert len(others) == len(confirming)
    assert not others & templates


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


def test_a_target_that_forks_itself_in_a_child_neither_hangs_nor_breaks_the_answer():
    assert probe_target(forks_on_card, time_limit_s=60, max_batch=2, **on_card).batch_size == 2


# --- steps that keep something ---


def leaking():
    """Each step keeps half a MiB: less than libraries keep of a new shape, and the margin is gone after fifty steps."""
    model, kept = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        kept.append(torch.ones(2**17))
        block = torch.ones(batch_size * 2**20)
        (model(torch.randn(batch_size, 2)).sum() + 0 * block.sum()).backward()
        optimizer.step()

    return model, step


def test_a_step_that_leaks_has_no_answer_although_each_process_begins_anew():
    with pytest.raises(
        UnreliableError, match=r"each step at batch \d+ keeps 5\d\d\.\d+ KiB.* after about \d+ more"
    ) as caught:
        probe_target(leaking, device="cpu:256MiB", progress="off", max_batch=4)
    assert [trial.leaked_bytes > 0 for trial in caught.value.trials if trial.passed][-1]


def test_a_step_that_leaks_is_no_size_that_survives():
    with pytest.raises(UnreliableError, match=r"each step at batch 8 keeps 5\d\d\.\d+ KiB"):
        check_target(leaking, 8, device="cpu:256MiB", progress="off")


def slow():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        time.sleep(0.6)
        model(torch.randn(batch_size, 2)).sum().backward()
        optimizer.step()

    return model, step


@pytest.mark.slow
def test_a_trial_that_passed_in_time_is_not_ended_while_it_is_looked_for_leaks():
    options = {"device": "cpu:256MiB", "memory_fraction": 1.0, "max_batch": 1, "progress": "off"}
    result = probe_target(slow, confirm_steps=4, trial_time_limit_s=4.0, **options)
    assert (result.batch_size, [trial.verdict.name for trial in result.trials]) == (1, ["FITS", "FITS"])


def keeping_the_last():
    """What a step keeps of the last three batches is no leak, although it comes a step at a time."""
    model, kept = nn.Linear(2, 2), deque(maxlen=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        kept.append(torch.ones(2**20))
        model(torch.randn(batch_size, 2)).sum().backward()
        optimizer.step()

    return model, step


def test_a_step_that_keeps_the_last_batches_has_an_answer_also_without_a_margin():
    checked = check_target(keeping_the_last, 4, device="cpu:256MiB", memory_fraction=1.0, progress="off")
    assert (checked.batch_size, checked.trials[-1].leaked_bytes) == (4, 0)


def cutting_the_heap():
    """Blocks of two megabytes: malloc takes them from its heap, once it has seen one freed, and leaves holes there."""
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters())

    def step(model, batch_size):
        optimizer.zero_grad()
        model(torch.randint(100, (batch_size,))).square().mean().backward()
        optimizer.step()

    return model, step


@pytest.mark.parametrize(("batch_size", "calls"), [(8192, 51), (2, 6)])
def test_where_steps_leave_holes_in_the_heap_a_fresh_process_runs_fifty_of_them(batch_size, calls):
    [trial] = check_target(cutting_the_heap, batch_size, device="cpu:32MiB", progress="off").trials
    assert trial.passed
    assert trial.steps == calls
    assert (trial.holes_bytes > 2**20) is (calls == 51)
