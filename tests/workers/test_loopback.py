"""Ranks listen on this machine's loopback address only, and so does the process that searches."""

import ipaddress
import os
import sys

import pytest

import oomprobe
from oomprobe.records.axis import NO_AXIS
from oomprobe.records.options import Options
from oomprobe.records.patience import PATIENCE
from oomprobe.runners.workers.crew import variables
from oomprobe.runners.workers.runner import workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")
TARGET = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
from processes import listening, with_all_below

def build():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        addresses = listening(with_all_below(int(os.environ["SEARCHER"])))
        Path(os.environ["SEEN"]).write_text(" ".join(map(str, addresses)))
    dist.barrier()
    return torch.nn.Linear(2, 2), lambda model, n: model(torch.randn(n, 2)).sum().backward()
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    """Return the name of a target that writes where all processes of a probe listen, and a function that reads it."""
    (tmp_path / "train.py").write_text(TARGET)
    monkeypatch.setenv("SEARCHER", str(os.getpid()))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return f"{tmp_path}/train.py:build", lambda: {
        *map(ipaddress.ip_address, (tmp_path / "seen").read_text().split())
    }


def test_ranks_listen_on_the_loopback_address_only(target):
    """The store in this process, and a group that the target makes."""
    name, seen = target
    source = workers(name, "cpu", Options(), NO_AXIS, PATIENCE, ranks=2)
    crew = source.start()
    crew.ask(source.tasks, None)  # ranks on the CPU are refused once they have built the target
    crew.end()
    assert seen()
    assert all(address.is_loopback for address in seen())


def test_groups_use_the_loopback_interface_unless_the_user_names_another(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    added = {one for one in variables(0, 2, 29500).items() if one[0].endswith("_IFNAME")}
    assert added == {("NCCL_SOCKET_IFNAME", "lo"), ("TP_SOCKET_IFNAME", "lo")}


def test_a_simulated_rank_does_not_listen(target):
    name, seen = target
    oomprobe.probe_target(name, device="sim:1GiB", nproc_per_node=2, max_batch=1, progress="off")
    assert seen() == set()
