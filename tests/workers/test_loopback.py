"""What SECURITY.md says of the network: nothing connects to it, and only ranks listen, on the loopback address."""

import ipaddress
import os
import socket
import sys

import pytest
from processes import start

import oomprobe
from oomprobe.records.axis import NO_AXIS
from oomprobe.records.options import Options
from oomprobe.records.patience import PATIENCE
from oomprobe.runners.workers.crew import variables
from oomprobe.runners.workers.runner import workers
from workers.forks import install

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")
TARGET = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
from processes import listening, with_all_below

def build():
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
    if rank == 0:
        addresses = listening(with_all_below(int(os.environ["SEARCHER"])))
        Path(os.environ["SEEN"]).write_text(" ".join(map(str, addresses)))
    if "RANK" in os.environ:
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


@pytest.mark.parametrize("ranks", [None, 2])
def test_workers_do_not_listen_and_ranks_on_the_loopback_address_only(target, ranks):
    """The store in this process, and a group that the target makes."""
    name, seen = target
    source = workers(name, "cpu", Options(), NO_AXIS, PATIENCE, ranks)
    crew = source.start()
    crew.ask(source.tasks, None)  # ranks on the CPU are refused once they have built the target
    crew.end()
    source.end()
    assert bool(seen()) == bool(ranks)
    assert all(address.is_loopback for address in seen())


def test_groups_use_the_loopback_interface_unless_the_user_names_another(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    added = {one for one in variables(0, 2, 29500).items() if one[0].endswith("_IFNAME")}
    assert added == {("NCCL_SOCKET_IFNAME", "lo"), ("TP_SOCKET_IFNAME", "lo")}


def test_a_simulated_rank_does_not_listen(target):
    name, seen = target
    oomprobe.probe_target(name, device="sim:1GiB", nproc_per_node=2, max_batch=1, progress="off")
    assert seen() == set()


def refuse_network(event, given):
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto"):
        raise PermissionError(event)


def test_nothing_connects_to_the_network():
    """Neither the process that searches, nor its forked workers."""

    def probe():
        sys.addaudithook(refuse_network)  # until this child ends
        install()
        for device in ("sim:1GiB", "cpu:1GiB"):
            oomprobe.probe_target(
                "oomprobe.demo:wide_mlp", device=device, max_batch=2, progress="off"
            )
        oomprobe.check_command(["true", "{batch}"], 2, memory_fraction=1.0, progress="off")
        with pytest.raises(OSError, match="attempting to bind"):
            socket.create_server(("127.0.0.1", 0))

    start(probe).result()
