"""Global flags and random number generators."""

import os
import random
import warnings

import numpy as np
import pytest
import torch
from processes import start

from oomprobe.state.surroundings import Surroundings

FLAGS = {
    "os.environ": lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"),
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


MIXED = [  # set by the user, and then by the step
    ("b.fp32_precision = 'ieee'", "b.fp32_precision = 'tf32'"),
    ("torch.set_float32_matmul_precision('high')", "b.cuda.matmul.fp32_precision = 'ieee'"),
    ("b.cuda.matmul.fp32_precision = 'ieee'", "torch.set_float32_matmul_precision('medium')"),
    ("", "b.cudnn.allow_tf32 = False"),
    ("", "b.fp32_precision = 'tf32'; torch.set_float32_matmul_precision('high')"),
]


def set_and_restore(before, step):
    warnings.simplefilter("ignore")
    b = torch.backends
    owners = (b, b.cuda.matmul, b.cudnn, b.cudnn.conv, b.cudnn.rnn)
    exec(before)
    then = [owner.fp32_precision for owner in owners]
    kept = Surroundings("cpu")
    exec(step)
    assert bool(kept.differences()) == bool(step)
    assert kept.restore() == []
    assert [owner.fp32_precision for owner in owners] == then
    assert kept.differences() == []


@pytest.mark.parametrize(("before", "step"), MIXED)
def test_mixed_precision_interfaces_are_restored(before, step):
    start(
        set_and_restore, before, step
    ).result()  # in a new process, because a precision cannot be unset
