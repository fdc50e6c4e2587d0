"""The workloads as functions of a module: what a process started anew can find by name."""

import re

from peers import limits
from peers.cards import ALL


def identifier(name):
    return re.sub(r"\W", "_", f"w_{name}")


def function_name(name):
    return f"target_{identifier(name)}"


def _target(workload):
    def build():
        limits.plain_kernels()
        model = workload.placed()
        return model, workload.step(workload.optimizer(model))

    return build


def _model(workload, name):
    def build():
        limits.plain_kernels()
        return workload.build()

    build.__name__ = build.__qualname__ = name
    return build


for _workload in ALL.values():
    globals()[function_name(_workload.name)] = _target(_workload)
    _name = f"model_{identifier(_workload.name)}"
    globals()[_name] = _model(_workload, _name)
