"""Probes that are killed in the middle of a trial, and resumed from their journal."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from faults.card import CARD, ROOM, trained
from faults.processes import PATIENCE_S, environment
from oomprobe import Verdict, find_max_batch

CALLED: list[int] = []  # sizes; by this process
END_AT: list[int] = []  # the number of the call in which this process ends itself


def counted(batch_size):
    CALLED.append(batch_size)
    if len(CALLED) in END_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def probed(journal):
    """The result, and the sizes that the step was called with."""
    CALLED.clear()
    model, step = trained(counted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def full_step(model, batch_size):
        held = step(model, batch_size)
        optimizer.step()
        return held

    result = find_max_batch(model, full_step, device=CARD, journal=journal, progress="off")
    return result.to_dict(), list(CALLED)


def killed_at(number, journal):
    """Probe in a process of its own, that ends itself in its call of that number."""
    pid = os.fork()
    if pid == 0:
        END_AT.append(number)
        probed(journal)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def every_death(folder):
    """For each call of the step: the probe that died in it, resumed."""
    whole, called = probed(f"{folder}/whole.jsonl")
    found = []
    for number in range(1, len(called) + 1):
        journal = f"{folder}/{number}.jsonl"
        killed_at(number, journal)
        found.append(probed(journal))
    return {"whole": whole, "called": called, "found": found}


@pytest.mark.slow
def test_row_16_a_probe_that_was_killed_anywhere_is_resumed_where_it_was(tmp_path, mark):
    """In a process that forks: here others have started threads."""
    code = f"import faults.test_resumed as t, json; print(json.dumps(t.every_death({str(tmp_path)!r})))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment(mark, OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        check=True,
        timeout=PATIENCE_S,
    )
    told = json.loads(done.stdout)
    whole, called = told["whole"], told["called"]
    assert whole["batch_size"] == ROOM - 1
    assert len(told["found"]) == len(called) > 20
    for number, (resumed, again) in enumerate(told["found"], start=1):
        assert resumed["batch_size"] == whole["batch_size"]
        crashed = [t["batch_size"] for t in resumed["trials"] if t["verdict"] == Verdict.CRASHED]
        # The last call is beside the trials: it counts what rules of thumb need, after the answer.
        assert crashed == ([called[number - 1]] if number < len(called) else [])
        verdicts = [(t["batch_size"], t["verdict"]) for t in resumed["trials"] if t["verdict"] != Verdict.CRASHED]
        assert verdicts == [(t["batch_size"], t["verdict"]) for t in whole["trials"]]
        assert again == called[len(called) - len(again) :]  # what the whole probe ran, from some call on:
        begun = len(called) - len(again)
        assert begun < number  # the dead trial again,
        assert set(called[begun:number]) == {called[number - 1]}  # and none that had ended before it


def test_row_16_a_command_that_was_killed_is_resumed(tmp_path, mark):
    (tmp_path / "once_target.py").write_text(
        "import os, pathlib, torch\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def build():\n"
        "    def step(model, batch_size):\n"
        "        with open(folder / 'calls', 'a') as calls:\n"
        "            calls.write(f'{batch_size}\\n')\n"
        "        model(torch.randn(batch_size, 8)).sum().backward()\n"
        "        if batch_size == 4 and not (folder / 'once').exists():\n"
        "            (folder / 'once').touch()\n"
        "            os.kill(os.getpid(), 9)\n"
        "        if batch_size > 5:\n"
        "            torch.empty(2**50)\n"
        "    return torch.nn.Linear(8, 8), step\n"
    )
    command = [sys.executable, "-m", "oomprobe", "run", f"{tmp_path}/once_target.py:build", "--in-process", "--quiet"]
    command += ["--device", "cpu:1GiB", "--progress", "off", "--journal", str(tmp_path / "probe.jsonl")]
    env = environment(mark)
    killed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "")
    (tmp_path / "calls").unlink()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "5\n"
    again = (tmp_path / "calls").read_text().split()
    assert "2" not in again
    assert "4" in again
    assert "crashed" in done.stderr
