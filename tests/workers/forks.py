"""Workers and ranks that are forked from the tests' process, in 0.1 s, where a new interpreter imports torch for seconds."""

import os

import torch

from oomprobe.records.patience import PATIENCE
from oomprobe.runners.workers import worker
from oomprobe.runners.workers.process import Process
from oomprobe.runners.workers.template import Template


def fork(variables=None, label="", patience=PATIENCE):
    """Start a worker as `Process.spawned` does, but by forking this process, without a keeper."""

    def serve(wire):
        os.environ.update(variables or {})
        torch.set_num_threads(1)
        worker.answer(wire)

    return Process.forked(serve, patience)


def install():
    """Let all workers of this process be forked from it."""
    Process.spawned, Template.of = fork, lambda target: None
