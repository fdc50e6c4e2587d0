"""Real torch.compile, with a backend that records the shapes it compiles and runs the graph as it is."""

import logging
import time

import pytest
import torch
from helpers import find_hastily
from ledger import MIB, LedgerDevice, Log

import oomprobe
from oomprobe.records.patience import Patience
from oomprobe.runners.hooks import Compiled

SIZES = [2, 8, 5, 8]


@pytest.fixture(autouse=True)
def fresh(caplog):
    """Reset dynamo to the state of a new process."""
    caplog.set_level(logging.CRITICAL, logger="torch")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recorder:
    """A backend that compiles nothing. `seen` holds the sizes of each graph's inputs, "?" for dynamic ones."""

    def __init__(self, fail_at=(), error=None):
        self.seen, self.fail_at, self.error = [], fail_at, error

    def __call__(self, graph, inputs):
        shapes = [tuple(i.shape) if isinstance(i, torch.Tensor) else (i,) for i in inputs]
        sizes = tuple(
            tuple("?" if isinstance(d, torch.SymInt) else d for d in shape) for shape in shapes
        )
        self.seen.append(sizes)
        if any(shape[0] in self.fail_at for shape in shapes if shape):
            raise self.error
        return graph.forward

    def take(self):
        taken, self.seen = self.seen, []
        return taken


def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())


def forward_and_backward(model, batch_size):
    model(torch.ones(batch_size, 4)).square().sum().backward()


def compiled_model(**options):
    return torch.compile(net(), **options), forward_and_backward


def compiled_step(**options):
    def step(model, batch_size):
        return model(torch.ones(batch_size, 4)).square().sum()

    return net(), torch.compile(step, **options)


def run_sizes(model, step, sizes, *, drops=True):
    """Run each size twice, as in a probe if `drops`, and return the `Compiled` used."""
    compiled = Compiled()
    for size in sizes:
        if drops:
            compiled.start_size(size)
        step(model, size)
        step(model, size)
    if drops:
        compiled.drop()
    return compiled


@pytest.mark.parametrize("way", [compiled_model, compiled_step])
def test_each_size_is_compiled_as_if_alone(way):
    recorder, alone = Recorder(), []
    for size in SIZES:
        torch._dynamo.reset()
        run_sizes(*way(backend=recorder), [size], drops=False)
        alone += recorder.take()
    assert len(alone) == len(SIZES)
    torch._dynamo.reset()
    run_sizes(*way(backend=recorder), SIZES)
    assert recorder.take() == alone
    torch._dynamo.reset()
    run_sizes(*way(backend=recorder), SIZES, drops=False)  # dynamo then compiles dynamic shapes
    assert len(recorder.seen) == 2
    assert "?" in str(recorder.seen[-1]) or "SymInt" in str(recorder.seen[-1])


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory"), KeyboardInterrupt()], ids=repr
)
def test_a_size_that_fails_to_compile_leaves_no_trace(error):
    recorder = Recorder(fail_at=[64], error=error)
    model, step = compiled_model(backend=recorder)
    compiled = Compiled()
    compiled.start_size(64)
    with pytest.raises((torch._dynamo.exc.BackendCompilerFailed, KeyboardInterrupt)):
        step(model, 64)
    assert not compiled.is_used
    compiled.start_size(48)
    step(model, 48)
    compiled.drop()
    step(model, 24)
    assert [graph[-1] for graph in recorder.seen] == [(64, 4), (48, 4), (24, 4)]


def test_a_step_that_is_not_compiled_resets_nothing(monkeypatch):
    """Only graphs of this probe count."""
    model, step = compiled_model(backend="eager")
    assert run_sizes(model, step, [2]).is_used
    step(model, 8)
    monkeypatch.setattr(
        torch._dynamo, "reset", lambda: pytest.fail("code the user compiled was dropped needlessly")
    )
    assert not run_sizes(net(), forward_and_backward, SIZES).is_used


def test_sizes_that_take_long_to_start_are_skipped_while_memory_is_far():
    device, seen = LedgerDevice(1000 * MIB), Log([0])

    def step(model, batch_size):
        if batch_size != seen[-1]:  # as where a size is compiled
            time.sleep(0.1)
        seen.append(batch_size)
        device.take(batch_size * MIB)

    options = {"device": device, "max_batch": 512, "resolution": 0.5, "confirm_steps": 1}
    result = find_hastily(
        Patience(slow_start_s=0.05, look_s=0.1), torch.nn.Linear(1, 1), step, **options
    )
    grown = [
        trial.batch_size for trial in result.trials if trial.phase == "grow" and trial.steps < 50
    ]
    assert grown[:7] == [1, 4, 16, 64, 128, 256, 512]
    assert not any("compiling" in note for note in result.notes)


def test_the_result_says_what_compiling_took():
    device = LedgerDevice(100 * MIB)
    recorder = Recorder()
    compiled = torch.compile(
        net(), backend=lambda graph, inputs: time.sleep(0.2) or recorder(graph, inputs)
    )

    def step(model, batch_size):
        model(torch.ones(batch_size, 4))
        device.take(batch_size * MIB)

    result = oomprobe.find_max_batch(compiled, step, device=device, max_batch=4, progress="off")
    [note] = [note for note in result.notes if note.startswith("compiling took about")]
    assert "for 3 sizes" in note
    assert 1 <= int(note.split()[3]) <= 5
