"""The program of a worker: build a target, and answer for whoever runs its trials."""

from __future__ import annotations

import gc
import os
import socket
import sys

from oomprobe.devices import Device, choose_device, is_host
from oomprobe.hooks import preload_dynamo
from oomprobe.isolation.process import begin
from oomprobe.isolation.runner import Forks, ProcessRunner, Spec
from oomprobe.isolation.serve import local_runner, serve
from oomprobe.isolation.wire import Wire
from oomprobe.options import check_model, named_steps, refuse_ranks
from oomprobe.signals import Clock, Interrupts
from oomprobe.state import Tracker
from oomprobe.targets import build
from oomprobe.trial import Runner

is_worker = False  # whether this process is a worker, or was forked from one


def main(descriptor: int) -> None:
    """Serve the process at the other end of a socket, until that closes it."""
    global is_worker
    is_worker = True
    sys.argv = [""]
    begin()
    wire = Wire(socket.socket(fileno=descriptor))
    while not wire.ended:
        for message in wire.read():
            spec = Spec.from_message(message)
            serve(wire, lambda spec=spec: _runner_of(spec), building=spec.target)  # type: ignore[misc]
            return
    os._exit(0)


def _runner_of(spec: Spec) -> tuple[Runner, Device | None]:
    """Build the target, and make what runs its trials: here, or on host memory in children."""
    model, step_fn = build(spec.target)
    check_model(model)
    steps = named_steps(step_fn)
    refuse_ranks()
    device = choose_device(spec.open_device(), model)
    preload_dynamo()
    tracker = Tracker(model, [step.run for step in steps.values()])
    if not is_host(device) or not spec.forks:
        return local_runner(model, steps, tracker, device, spec.options), device
    gc.collect()
    gc.freeze()  # forked children then neither scan nor copy what is here
    runner = ProcessRunner(Forks(model, steps, tracker, device, spec.options), Clock(spec.options), Interrupts())
    runner.open()
    return runner, None
