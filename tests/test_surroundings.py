"""Global flags and random number generators."""

import random

import numpy as np
import pytest
import torch
from ledger import probe
from processes import run_python
from torch import nn

from oomprobe.state.surroundings import Surroundings

FLAGS = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "autocast cpu": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast cuda": lambda: torch.set_autocast_enabled("cuda", True),
    "random": random.random,
    "numpy.random": np.random.rand,
    "torch (cpu)": lambda: torch.rand(1),
}


@pytest.mark.parametrize("name", FLAGS)
def test_each_flag_and_generator_is_restored(name):
    kept = Surroundings("cpu")
    try:
        FLAGS[name]()
        assert kept.differences() == [name]
    finally:
        assert kept.restore() == []
    assert kept.differences() == []


def test_a_probe_restores_every_flag_and_generator():
    def step(model, batch_size):
        torch.ones(batch_size)
        for change in FLAGS.values():
            change()

    model, kept = nn.Linear(1, 1), Surroundings("cpu")
    result = probe(model, step, max_batch=2)
    assert result.state_verified
    assert kept.differences() == []


MIXED = [  # set by the user, and then by the step
    ("b.fp32_precision = 'ieee'", "b.fp32_precision = 'tf32'"),
    ("b.cudnn.conv.fp32_precision = 'ieee'", ""),
    ("", "b.cuda.matmul.fp32_precision = 'tf32'"),
    ("torch.set_float32_matmul_precision('high')", "b.cuda.matmul.fp32_precision = 'ieee'"),
    ("b.cuda.matmul.fp32_precision = 'ieee'", "torch.set_float32_matmul_precision('medium')"),
    ("", "b.cudnn.allow_tf32 = False"),
    ("", "b.fp32_precision = 'tf32'; torch.set_float32_matmul_precision('high')"),
]
SCRIPT = """
import os, torch
from oomprobe.state.surroundings import Surroundings
b = torch.backends
owners = (b, b.cuda.matmul, b.cudnn, b.cudnn.conv, b.cudnn.rnn)
def run(before, step):
    exec(before)
    then = [owner.fp32_precision for owner in owners]
    kept = Surroundings("cpu")
    exec(step)
    assert bool(kept.differences()) == bool(step), "no difference found"
    assert kept.restore() == []
    assert [owner.fp32_precision for owner in owners] == then, "not restored"
    assert kept.differences() == []
for pair in {mixed}:
    child = os.fork()
    if not child:
        run(*pair)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, pair
"""


def test_mixed_precision_interfaces_are_restored():
    """Each case runs in a new process, because a precision cannot be unset."""
    run_python(SCRIPT.replace("{mixed}", repr(MIXED)), warnings="default")
