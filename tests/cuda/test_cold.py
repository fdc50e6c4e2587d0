"""Each trial starts cold, however the step creates its state, and a probe leaves nothing behind."""

import gc
import re
from contextlib import nullcontext

import pytest
import torch
from bed import forked
from ledger import Log
from torch import nn
from zoo import classifier, mlp, runs

import oomprobe
from oomprobe.ground.torch_versions import VERSION
from oomprobe.state.surroundings import FROZEN_BY_PYTHON

if VERSION >= (
    2,
    14,
):  # older ones use CUDA while they import it, and then this process cannot fork
    import torch._inductor.compile_fx  # otherwise each child that compiles imports it, in 2 s

MIB = 2**20
QUIET = {"progress": "off"}


def reserved():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()


def created_in_the_first_step():
    model, made = mlp()[0], []

    def step(model, batch_size):
        made.append(torch.optim.AdamW(model.parameters())) if not made else None
        classifier(model, made[0])[1](model, batch_size)

    return model, step


def in_backward():
    """torch's recipe to save the memory of gradients; on a GPU the hooks run on a thread of autograd."""
    model, _ = mlp()
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def step(model, batch_size):
        model(torch.randn(batch_size, 256, device="cuda")).square().mean().backward()

    return model, step


def in_use():
    """A process that has trained already: state and gradients exist, and are part of every trial."""
    model, step = mlp()
    for _ in range(3):
        step(model, 64)
    return model, step


def lazy_buffer():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def forward(self, x):
            if "mask" not in self._buffers or len(self.mask) < len(x):
                self.register_buffer("mask", torch.ones_like(x), persistent=False)
            return self.layer(x) * self.mask[: len(x)]

    model = Masked().cuda()
    return classifier(model, torch.optim.SGD(model.parameters(), lr=0.1))


def autocast_entered_once():
    """Autocast keeps its casts of the weights until it is left, which such a script never does."""
    torch.autocast("cuda", torch.bfloat16).__enter__()
    return mlp(amp=torch.bfloat16)


def compiled():
    model, _ = mlp()
    model.compile(backend="cudagraphs")
    return classifier(model, torch.optim.AdamW(model.parameters()))


WAYS = {
    "created in the first step": created_in_the_first_step,
    "in backward": in_backward,
    "in use": in_use,
    "lazy buffer": lazy_buffer,
    "autocast entered once": autocast_entered_once,
    "compiled to graphs": compiled,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_trial_starts_cold(way):
    build = WAYS[way]

    def probe():
        model, step = build()
        before, held, ended = reserved(), Log(), Log(["no trial yet"])

        def watched(model, batch_size):
            if ended:  # this call is the first of a trial
                held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
                ended.clear()
            step(model, batch_size)

        result = oomprobe.find_max_batch(
            model, watched, min_batch=8192, resolution=0.2, progress=ended.append
        )
        assert reserved() <= before
        allocated, in_segments = zip(*held, strict=True)
        ran = sum(not trial.replayed for trial in result.trials)
        # Where no trial has told why the size above fails, it runs after them.
        assert ran <= len(held) <= ran + (result.why() is not None)
        # torch keeps 1024 bytes for random numbers in CUDA graphs, in a segment of 2 MiB.
        assert max(allocated) - min(allocated) <= 1024
        assert max(in_segments) - min(in_segments) <= 2 * MIB
        # A warm trial would hold more before its first step, and so reach a higher peak.
        again = oomprobe.check(model, step, result.batch_size, **QUIET)
        assert reserved() <= before
        return (
            result.to_dict(),
            result.trials[-1].peak_reserved_bytes,
            again.trials[-1].peak_reserved_bytes,
        )

    result, peak, peak_again = forked(probe)
    assert peak == peak_again
    assert not [n for n in result["notes"] if "leak" in n or "no optimizer" in n or "cold" in n]
    assert forked(lambda: runs(build, result["batch_size"], steps=10))


def raising(error):
    def step(model, batch_size):
        model(torch.randn(8, 256, device="cuda"))  # leaves casts of the weights to autocast
        kept = torch.empty(batch_size * MIB, device="cuda", dtype=torch.uint8)
        if batch_size == 64:
            raise error
        return kept

    return step


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (None, None),
        (raising(KeyError("labels")), oomprobe.StepFailedError),
        (raising(KeyboardInterrupt()), KeyboardInterrupt),
        (lambda model, size: torch.empty(2**40, device="cuda"), oomprobe.NothingFitsError),
    ],
    ids=["answer", "bug", "Ctrl-C", "nothing fits"],
)
def test_nothing_stays_reserved(step, error):
    def probe():
        gc.unfreeze()  # conftest has frozen objects
        model, own_step = autocast_entered_once()
        before, held_before = reserved(), torch.cuda.memory_allocated()
        with (
            pytest.raises(error) if error else nullcontext() as caught
        ):  # keeps its traceback, as a debugger does
            oomprobe.find_max_batch(model, step or own_step, resolution=0.05, **QUIET)
        held = torch.cuda.memory_allocated()
        return before, reserved(), held_before, held, gc.get_freeze_count(), caught is not None

    before, after, held_before, held, frozen, is_kept = forked(probe)
    assert is_kept is (error is not None)
    assert after <= before
    assert held <= held_before
    assert frozen <= FROZEN_BY_PYTHON  # a probe freezes many more


def test_workspaces_stay_under_a_captured_graph():
    def probe():
        x = torch.randn(64, 64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        x @ x
        with torch.cuda.graph(graph):
            x @ x
        model, step = mlp()
        held = torch.cuda.memory_allocated()
        result = oomprobe.find_max_batch(model, step, max_batch=64, **QUIET)
        return held, torch.cuda.memory_allocated(), result.notes

    before, after, notes = forked(probe)
    assert after >= before  # including the graph's workspace
    assert any(note.startswith("not fully cold") for note in notes)


def test_a_step_that_replays_a_cuda_graph_is_refused():
    def probe():
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        captured = {}

        def train(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        def step(model, batch_size):
            if batch_size not in captured:
                x, graph = torch.randn(batch_size, 64, device="cuda"), torch.cuda.CUDAGraph()
                with torch.cuda.stream(torch.cuda.Stream()):
                    train(x)
                with torch.cuda.graph(graph):
                    train(x)
                captured[batch_size] = x, graph
            captured[batch_size][1].replay()

        with pytest.raises(
            oomprobe.UnreliableError,
            match="has captured a CUDA graph: a step that replays one cannot",
        ):
            oomprobe.find_max_batch(model, step, **QUIET)

    forked(probe)


@pytest.mark.parametrize(
    ("zeroes", "max_batch", "said"),
    [
        (
            False,
            None,
            r"\. The gradients hold the graph of every step: backward\(create_graph=True\) makes a refer",
        ),
        (
            False,
            4,
            r"steps; the gradients hold the graph of every step \(backward\(create_graph=True\)\)$",
        ),
        (
            True,
            None,
            "Something keeps tensors of each step: a list of losses that still have their graph",
        ),
    ],
    ids=["never zeroed", "a small leak", "losses"],
)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_that_hold_graphs_are_the_cause_of_a_leak(zeroes, max_batch, said):
    def probe():
        model, losses = mlp()[0], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model, batch_size):
            if zeroes:
                optimizer.zero_grad()
            loss = model(torch.randn(batch_size, 256, device="cuda")).square().mean()
            loss.backward(create_graph=True)
            optimizer.step()
            losses.append(loss) if zeroes else None

        try:
            result = oomprobe.find_max_batch(model, step, max_batch=max_batch, **QUIET)
        except oomprobe.UnreliableError as error:
            return str(error)
        [leak] = [note for note in result.notes if note.startswith("leak: each step")]
        return leak

    assert re.search(said, forked(probe))
