"""What was really run: each forward, backward and optimizer step, written to a file as it happens.

The file outlives a process that dies, and takes the lines of processes that a tool starts on its own.
"""

import os
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

LOG_VARIABLE = "PEERS_LOG"
_size = None  # of the batch that went through a model last
_hooked = False


def note(event, size):
    """Append a line; nothing where no log is kept (scans, survival)."""
    path = os.environ.get(LOG_VARIABLE)
    if path is None:
        return
    settled()
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"{event} {size} {time.perf_counter():.6f}\n".encode())
    os.close(log)


def settled():
    """What was sent to a card is done, so that a clock means something."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def last_size():
    """Of the batch that the model was given last."""
    return _size


def forward(size):
    global _size, _hooked
    _size = size
    if not _hooked:
        register_optimizer_step_pre_hook(lambda *_: note("stepping", _size))
        register_optimizer_step_post_hook(lambda *_: note("stepped", _size))
        _hooked = True
    note("forward", size)


def backward(size):
    note("backward", size)


@dataclass(frozen=True)
class Seen:
    """What a log says: how often the size changed, which sizes finished a step, which came through backward."""

    trials: int
    stepped: frozenset
    backwards: frozenset
    in_steps_s: float
    steps: bool = False  # whether an optimizer began to step at all

    def ran(self, size):
        """How far a batch of this size came: "stepped", "backward" where the tool never tries to step, or "no"."""
        if size in self.stepped:
            return "stepped"
        return "backward" if not self.steps and size in self.backwards else "no"


def read(path):
    lines = [line.split() for line in Path(path).read_text().splitlines()] if Path(path).exists() else []
    events = [(kind, int(size), float(at_s)) for kind, size, at_s in lines]
    sizes = [size for kind, size, _ in events if kind == "forward"]
    return Seen(
        trials=len(list(groupby(sizes))),
        stepped=frozenset(size for kind, size, _ in events if kind == "stepped"),
        backwards=frozenset(size for kind, size, _ in events if kind == "backward"),
        in_steps_s=_in_steps_s(events),
        steps=any(kind in ("stepping", "stepped") for kind, _, _ in events),
    )


def _in_steps_s(events):
    """From a forward to the last thing that is known of its step; what failed before a backward counts nothing."""
    total, began = 0.0, None
    last = None
    for kind, _, at_s in [*events, ("forward", 0, 0.0)]:
        if kind == "forward":
            if began is not None and last is not None:
                total += last - began
            began, last = at_s, None
        else:
            last = at_s
    return total
