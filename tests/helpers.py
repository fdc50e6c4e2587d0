"""What several test modules share."""

import array
import collections
import io
import itertools
import operator
import os
import random
import types
from pathlib import Path

import numpy as np
import torch
from torch import nn

from oomprobe.probing.finish import finish
from oomprobe.probing.opening import open_model
from oomprobe.probing.order import Order
from oomprobe.probing.session import Session
from oomprobe.probing.summary import result_of
from oomprobe.records.fit import fit_line
from oomprobe.records.options import Options
from oomprobe.records.patience import Clock
from oomprobe.records.trials import (
    CallRecord,
    DeviceInfo,
    Measured,
    Phase,
    RunnerInfo,
    Trial,
    Verdict,
)
from oomprobe.results.blocks import as_text
from oomprobe.results.html import page
from oomprobe.results.progress import Reporter
from oomprobe.results.result import ProbeResult

GIB = 2**30
GOLDEN = Path(__file__).parent / "golden"


def find_hastily(patience, model, step, **options):
    """Do as `oomprobe.find_max_batch` does, with another patience."""
    with open_model(
        Order.of({"progress": "off", **options, "patience": patience}), model, step
    ) as session:
        found = finish(session, session.find())
    return result_of(session, found)


class ARunner:
    """A runner on a device that is not there; each test says how its trials end."""

    def __init__(self, **facts):
        device = DeviceInfo(
            name="a card", torch_device="cuda:0", total_bytes=24 * GIB, on_host=False
        )
        self.facts = RunnerInfo(
            **{"device": device, "step_names": ("step",), "threads": 1, **facts}
        )

    def measure(self):
        return Measured(available_bytes=20 * GIB, outside_bytes=GIB)

    def session(self, **options):
        options = Options(**options)
        return Session(self, options, Reporter(), Clock(options), [])


def texts(notes):
    return [note.text for note in notes]


# --- results ---


def a_trial(batch_size=1, verdict=Verdict.FITS, phase=Phase.GROW, **rest):
    return Trial(batch_size=batch_size, verdict=verdict, phase=phase, **rest)


def records(calls, *, names=("step",), first=1, served=(), seconds=None):
    """Return the records of so many calls of each step, whose optimizer steps at each call from the first on."""
    stepped = [None] * (first - 1) + [first] + [1] * calls
    sizes = [*served, *[0] * calls]
    return tuple(
        CallRecord(step=name, served_bytes=sizes[number], seconds=seconds, stepped=stepped[number])
        for name in names
        for number in range(calls)
    )


def a_result(**changes):
    values = {
        "batch_size": 4,
        "limit_batch_size": 4,
        "first_failing_batch_size": 5,
        "limited_by": "memory",
        "trials": (a_trial(4), a_trial(5, Verdict.OOM), a_trial(4, phase=Phase.CONFIRM)),
        "fit": fit_line([(1, 10), (2, 20), (4, 40)], 40),
        "device": "test device",
        "budget_bytes": 90,
        "available_bytes": 100,
    }
    return ProbeResult(**{**values, **changes})


def text_of(record, *, verbose=False):
    return as_text(record.report(verbose=verbose))


def page_of(record):
    return page(record.report(all_trials=True))


def same_as_golden(text, name):
    """Compare with a file in tests/golden, or overwrite it if OVERWRITE_GOLDEN is set: then review the difference."""
    path = GOLDEN / name
    if os.environ.get("OVERWRITE_GOLDEN"):
        path.write_text(text, encoding="ascii", newline="\n")
    assert text == path.read_text(encoding="ascii")


# --- training ---


def bits(value):
    """Convert a value to bytes for an exact comparison, including NaN payloads and signed zeros."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        return (value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return {repr(k): bits(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [bits(v) for v in value]
    return repr(value)


class Net(nn.Module):
    """A model with tied weights, a frozen BatchNorm, a non-persistent buffer and a parameter without gradient."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.BatchNorm1d(8).eval()
        self.decode = nn.Linear(8, 4, bias=False)
        self.tied = nn.Linear(4, 8, bias=False)
        self.tied.weight = self.encode.weight
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.count += 1
        hidden = self.frozen(self.norm(self.encode(x) + self.tied(x)))
        return self.decode(nn.functional.dropout(hidden))


class Training:
    def __init__(self, *, warm_steps=0):
        torch.manual_seed(3)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.1
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(warm_steps):
            self.step(self.model, 4)

    def step(self, model, batch_size):
        self.optimizer.zero_grad()
        loss = (
            model(torch.randn(batch_size, 4)).square().mean() + random.random() + np.random.rand()
        )
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.ema.update_parameters(model)

    def picture(self):
        return picture([vars(self), [p.data_ptr() for p in self.model.parameters()], generators()])


# --- pictures ---


def generators():
    return [torch.get_rng_state(), repr(random.getstate()), np.random.get_state()]


PLAIN = int | float | str | bytes | np.generic | torch.dtype | type | types.NoneType


def picture(value, path=(), met=None):
    """Describe a value and all that it holds, bit for bit, and what is held at two places, without using the package."""
    met = {} if met is None else met
    if isinstance(value, PLAIN):
        return type(value).__name__, repr(value)
    if id(value) in met:
        return "as in", met[id(value)][0]
    if not isinstance(value, tuple):
        met[id(value)] = path, value
    own, parts = inside(value)
    shown = []
    for place, (name, part) in enumerate(parts):
        at = name if isinstance(name, str) else place
        shown.append((picture(name, (*path, at, "key"), met), picture(part, (*path, at), met)))
    return type(value).__name__, own, shown


def inside(value):
    """Return what a value shows by itself, and pairs of a name and a value of all that it holds."""
    if hasattr(type(value), "__tensor_flatten__"):
        return None, [(name, getattr(value, name)) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, torch.Tensor):
        own = (
            value.dtype,
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.requires_grad,
            value.is_leaf,
        )
        held = {
            "storage": value.untyped_storage(),
            "grad": value.grad if value.is_leaf else None,
            **vars(value),
        }
        has_memory = value.untyped_storage().nbytes() > 0
        # Of a clone, as memory that numpy has seen cannot be resized.
        content = (
            value.detach().clone(memory_format=torch.contiguous_format).numpy().tobytes()
            if has_memory
            else b""
        )
        return (*own, content), held.items()
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tobytes()), ()
    if isinstance(value, random.Random | torch.Generator | np.random.Generator | io.StringIO):
        names = ("getstate", "get_state", "getvalue")
        read = [getattr(value, name) for name in names if hasattr(value, name)]
        return None, [("state", read[0]() if read else value.bit_generator.state)]
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return frame and frame.f_lasti, [
            (None, frame and frame.f_locals),
            (None, value.gi_yieldfrom),
        ]
    if isinstance(value, dict):
        return None, value.items()
    if isinstance(value, list | tuple | collections.deque):
        return None, [(None, part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(str(picture(part)) for part in value), ()
    if isinstance(value, itertools.count | array.array):
        return repr(value), ()
    parts = dict(sorted(getattr(value, "__dict__", {}).items()))
    for base in type(value).__mro__:
        parts |= {
            name: getattr(value, name)
            for name in getattr(base, "__slots__", ())
            if hasattr(value, name)
        }
    parts.pop("_per_optimizer_states", None)  # of a GradScaler, by ids
    if isinstance(value, nn.Module):  # hooks have numbers of the process
        parts |= {
            name: [*hooks.values()]
            for name, hooks in parts.items()
            if "_hooks" in name and isinstance(hooks, dict)
        }
    return None if parts else operator.length_hint(value), parts.items()
