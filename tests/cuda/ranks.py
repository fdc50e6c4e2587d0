"""Probe with forked ranks on the bed: a group of two starts in 0.2 s, where processes that import torch take 3 s."""

from bed import forked
from helpers import hasty
from workers.forks import fork

from oomprobe.probing import opening
from oomprobe.runners.workers.process import Process


def searching(function, *, grace_s, late_s):
    Process.spawned, opening.Clock = fork, hasty(failing_s=grace_s, late_s=late_s)
    return function()


def on_ranks(tmp_path, function, *, count=2, fault="none", limit_s=30, grace_s=0.5, late_s=300.0, **options):
    """Run a function that probes with forked ranks, on a bed of `count` devices; `ranked.py` describes the faults."""
    (tmp_path / "cards").mkdir(exist_ok=True)
    options = {"memory": ",".join(["1GiB"] * count), "nccl": "16MiB", "shared": tmp_path / "cards/card", **options}
    return forked(lambda: searching(function, grace_s=grace_s, late_s=late_s), limit_s=limit_s, FAULT=fault, **options)
