"""Probe with forked ranks on the bed: a group of two starts in 0.2 s, where processes that import torch take 3 s."""

from dataclasses import replace

from bed import forked
from workers.forks import install

from oomprobe.records.patience import Patience

HASTY = Patience(failing_s=0.5)
BRIEF = replace(HASTY, look_calls=8)  # where a promise is not about the calls of a confirmation


def forking(function):
    """Run a function that probes with forked processes."""
    install()
    return function()


def on_ranks(tmp_path, function, *, fault="none", limit_s=30, **options):
    """Run a function that probes with forked ranks; `ranked.py` describes the faults."""
    return forked(forking, function, limit_s=limit_s, FAULT=fault, **cards(tmp_path, **options))


def cards(tmp_path, *, count=2, **options):
    """Return the options of a bed with `count` devices that processes share."""
    (tmp_path / "cards").mkdir(exist_ok=True)
    return {
        "memory": ",".join(["1GiB"] * count),
        "nccl": "16MiB",
        "shared": tmp_path / "cards/card",
        **options,
    }
