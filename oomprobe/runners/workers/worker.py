"""The program of a worker: build a target and run its trials on request."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from oomprobe.devices import Device, choose_device, is_host
from oomprobe.devices.choose import model_device
from oomprobe.ground import processes
from oomprobe.records.options import check_model, named_steps
from oomprobe.records.patience import Clock
from oomprobe.records.trials import Runner
from oomprobe.runners.hooks import preload_dynamo
from oomprobe.runners.local import FurtherCalls, further_here
from oomprobe.runners.ranks_here import check_process_group, refuse_host
from oomprobe.runners.signals import Interrupts
from oomprobe.runners.targets import build
from oomprobe.runners.workers.messages import Task, receive
from oomprobe.runners.workers.process import begin
from oomprobe.runners.workers.runner import WorkersRunner, forks
from oomprobe.runners.workers.serve import FurtherOfAll, local_runner, serve
from oomprobe.state import Tracker


def main(descriptor: int) -> NoReturn:
    """Serve the parent over the inherited descriptor until it closes its end."""
    sys.argv = [""]
    begin()
    answer(Connection(descriptor))
    processes.flush()
    os._exit(0)


def answer(wire: Connection) -> None:
    """Build the target of the first message, and answer all others until the other end is closed."""
    task = receive(wire)
    if isinstance(task, Task):
        serve(wire, lambda: _runner_of(task, FurtherOfAll(wire)), building=task.target)


def _runner_of(task: Task, further: FurtherCalls) -> tuple[Runner, Device | None]:
    """Build the target and return the runner of its trials, with the device if they run in this process."""
    model, step_fn = build(task.target)
    check_model(model)
    axis = pickle.loads(bytes.fromhex(task.axis))
    steps = named_steps(step_fn, axis)
    ranks = task.ranks or 1
    check_process_group(ranks, has_stepped=False)
    home = model_device(model)
    if ranks > 1 and home is not None and home.type == "cpu":
        refuse_host(home)
    device = choose_device(pickle.loads(bytes.fromhex(task.device)), model)
    tracker = Tracker(model, [step.function for step in steps.values()], device=device)
    if not is_host(device):
        preload_dynamo()
        if ranks == 1:
            further = further_here
        return local_runner(model, steps, tracker, device, ranks, axis, further), device
    clock = Clock(task.options)
    source = forks(model, steps, tracker, device, axis, clock.patience)
    gc.collect()
    gc.freeze()  # so that forked children neither scan nor copy existing objects
    # Host memory takes a third process: the caller's, this one, which holds the model, and a child for each trial.
    return WorkersRunner(source, clock, Interrupts()).__enter__(), None
