"""Integers and booleans from the host keep their values on a simulated card; what they select is counted, other choices are bounded."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import oomprobe
from simulation.bench import Bench, bytes_of


def labels(device):
    values = torch.arange(32).reshape(4, 8) % 5
    values[0, :3] = -100
    return values.to(device)


def lengths(device):
    return torch.tensor([3, 1, 2]).to(device)


def sequences(device):
    return torch.ones(4, 8, 16, device=device)


def written_in_place(device):
    values = labels(device)
    values[values == -100] = 7
    values[1:].clamp_(max=2)
    values.view(-1)[::2].zero_()
    return values


def shuffled(device):
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(8, generator=generator).to(device).argsort()


KNOWN = {
    "labels that count": lambda device: sequences(device)[labels(device) != -100],
    "numbers of them": lambda device: (labels(device) != -100).sum(),
    "classes and their counts": lambda device: labels(device).unique(
        return_inverse=True, return_counts=True
    ),
    "masked select": lambda device: sequences(device).masked_select(
        (labels(device) == 0)[..., None]
    ),
    "positions": lambda device: (labels(device) == 3).nonzero(as_tuple=True),
    "packed": lambda device: sequences(device)[:3].repeat_interleave(lengths(device), dim=0),
    "graphs of a batch": lambda device: F.one_hot(torch.tensor([0, 0, 1, 2, 2]).to(device)),
    "split by lengths": lambda device: (
        sequences(device).flatten(0, 1).split([*lengths(device).tolist(), 26])
    ),
    "in place": written_in_place,
    "masks of nothing": lambda device: sequences(device)[
        torch.zeros(4, 8, dtype=torch.bool, device=device)
    ],
    "an order": shuffled,
    "of numpy": lambda device: torch.from_numpy(np.arange(6) % 3).to(device).unique(),
    "to host and back": lambda device: labels(device).cpu().max().to(device).item(),
    "a mask from the host": lambda device: sequences(device)[labels("cpu") == 1],
}


def described(result):
    """Return shapes, and values of what is no floating-point number."""
    if not isinstance(result, torch.Tensor):
        return [described(item) for item in result] if isinstance(result, list | tuple) else result
    return tuple(result.shape), None if result.is_floating_point() else result.tolist()


@pytest.mark.parametrize("name", KNOWN)
def test_known_values_are_those_of_the_host(name):
    bench = Bench()
    assert bench.run(lambda: described(KNOWN[name]("cuda"))) == described(KNOWN[name]("cpu"))
    assert "reads" not in bench.notes
    assert "chooses" not in bench.notes


def test_a_selection_takes_the_memory_of_what_it_selects():
    bench = Bench()

    def step():
        x = sequences("cuda")
        before = bench.allocated_bytes
        chosen = x[labels("cuda") == 0]
        return bench.allocated_bytes - before, bytes_of(chosen), tuple(chosen.shape)

    taken, expected, shape = bench.run(step)
    assert shape == (6, 16)
    assert taken == expected


MOST = {
    "mask": (lambda x: x[x > 0], (64,)),
    "rows": (lambda x: x[x[:, 0] > 0], (4, 16)),
    "positions": (lambda x: (x > 0).nonzero(), (64, 2)),
    "masked select": (lambda x: x.masked_select(x > 0), (64,)),
    "classes": (lambda x: x.long().unique(), (64,)),
}


@pytest.mark.parametrize(("choose", "shape"), MOST.values(), ids=MOST)
def test_unknown_values_choose_as_many_as_they_can(choose, shape):
    bench = Bench()
    assert bench.run(lambda: tuple(choose(torch.randn(4, 16, device="cuda")).shape)) == shape
    assert (
        "chooses elements by values that are unknown: counted as if it chose all of them"
        in bench.notes
    )


def test_what_is_too_large_for_the_host_is_unknown():
    def of_mib(mib):
        bench = Bench()
        values = torch.zeros(mib * 2**20, dtype=torch.uint8)
        return bench.run(lambda: values.cuda().nonzero().shape[0])

    assert of_mib(64) == 0
    assert of_mib(65) == 65 * 2**20


def overwritten_views():
    """Yield writes of unknown numbers, each to a tensor and through one of its views."""
    unknown = torch.empty(8, dtype=torch.int64, device="cuda")
    yield lambda values: values.copy_(unknown.expand(4, 8))
    yield lambda values: values[1].add_(unknown)
    yield lambda values: values.index_put_([torch.tensor([0], device="cuda")], unknown)
    yield lambda values: torch.add(values, unknown, out=values)
    yield lambda values: values.random_(5)
    yield lambda values: values.masked_fill_(unknown > 0, 3)


@pytest.mark.parametrize("which", range(6))
def test_an_unknown_number_makes_all_views_unknown(which):
    def step():
        values = labels("cuda")
        rows, flat, copy = values[2:], values.view(-1), values.clone()
        [*overwritten_views()][which](values)
        return [tuple(tensor.nonzero().shape) for tensor in (values, rows, flat, copy)]

    bench = Bench()
    known = int((labels("cpu") != 0).sum())
    assert bench.run(step) == [(32, 2), (16, 2), (32, 1), (known, 2)]


def test_values_that_nobody_has_filled_in():
    positions = torch.full((8,), 10**12)
    chosen = Bench().run(
        lambda: torch.zeros(4, 8, dtype=torch.int64, device="cuda").gather(
            1, positions.cuda()[None]
        )
    )
    assert chosen.shape == (1, 8)


def test_values_of_a_tensor_are_taken_anew_for_each_trial():
    bench = Bench()
    values = torch.zeros(8, dtype=torch.int64)
    assert bench.run(lambda: values.cuda().nonzero().shape[0]) == 0
    values[:5] = 1
    bench.device.start_trial()
    assert bench.run(lambda: values.cuda().nonzero().shape[0]) == 5


def test_no_line_predicts_what_is_counted():
    model = torch.nn.Embedding(100, 64)

    def step(model, batch_size):
        tokens = torch.randint(1, 100, (batch_size, 32))
        tokens[:, ::2] = 0
        tokens = tokens.to("cuda")
        model(tokens)[tokens != 0].square().mean().backward()
        model.zero_grad()

    result = oomprobe.find_max_batch(model, step, device="sim:64MiB", max_batch=64, progress="off")
    said = " ".join(map(str, result.notes))
    assert "test_values.py:" in said
    assert (
        "counts elements by values of this batch: a batch with more of them takes more memory"
        in said
    )
    assert "what it allocates depends on values of the batch" in said
