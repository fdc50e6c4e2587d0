"""Confirmations that end once calls repeat, and loops whose calls only seem to; compared with fresh processes on the bed."""

import ctypes
import statistics
from functools import partial

import pytest
import torch
from bed import forked
from benchmark_work import probed as work_of
from benchmark_work import survives
from torch import nn
from zoo import MODELS, runs

import oomprobe
from oomprobe.devices.accelerator import AcceleratorDevice
from oomprobe.ground.torch_versions import VERSION

CALLS = 200
WIDTH = 256


def probed(build, **options):
    """Probe, and return the answer, the calls of its confirmation, and those after which it settled, or None."""
    result = oomprobe.find_max_batch(*build(), progress="off", **options)
    confirmed = result.trials[-1]
    assert any("identical further calls cannot fail" in note for note in result.notes) == bool(
        confirmed.settled_after
    )
    return result.batch_size, confirmed.steps, confirmed.settled_after


def begun():
    model = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, WIDTH)).cuda()
    return model, torch.optim.AdamW(model.parameters())


def train(model, optimizer, samples, after=lambda output: None):
    optimizer.zero_grad()
    output = model(torch.randn(samples, WIDTH, device="cuda"))
    after(output)
    output.square().mean().backward()
    optimizer.step()


KEPT = []


def with_hidden_count(act):
    """Pass the number of the call to `act`, from a count that oomprobe cannot see: in memory of C's, of which the step has the address."""
    model, optimizer = begun()
    KEPT.append(ctypes.c_long())
    address = ctypes.addressof(KEPT[-1])

    def step(model, batch_size):
        number = ctypes.c_long.from_address(address)
        number.value += 1
        act(number.value, model, optimizer, batch_size)

    return model, step


def quadratic(every):
    """Take memory at some calls that grows with the square of the batch: at a sixteenth of the answer 0.05 % of the call's."""

    def act(number, model, optimizer, size):
        train(model, optimizer, size)
        if number % every == 0:
            torch.empty(size**2 // 512, dtype=torch.uint8, device="cuda")

    return with_hidden_count(act)


def of_lengths_in_turn(lengths):
    """Count the calls of a turn, from 0 at each turn."""
    (model, optimizer), number = begun(), 0

    def step(model, size):
        nonlocal number
        train(model, optimizer, size * lengths[number])
        number = (number + 1) % len(lengths)

    return model, step


def in_cycles():
    """Keep a part of each output in a reference cycle; Python collects it in the same call, or in a later one."""
    model, optimizer = begun()

    def keep(output):
        cycle = [output.detach()[:64].clone()]
        cycle.append(cycle)
        del cycle
        return [[] for _ in range(2000)]

    return model, lambda model, size: train(model, optimizer, size, keep)


def through_gradients(keeps_graph=False):
    """Ask for gradients, or keep a graph: the thread of the backward pass lets go of them at some time."""
    model, optimizer = begun()

    def ask(output):
        if keeps_graph:
            output.square().mean().backward(retain_graph=True)
        else:
            torch.autograd.grad(output.mean(), model[0].weight, retain_graph=True)

    return model, lambda model, size: train(model, optimizer, size, ask)


def on_a_side_stream(record=False):
    """Use each output on another stream: in a tensor that is made there, or recorded, so that its memory waits for that stream."""
    model, optimizer = begun()
    stream = torch.cuda.Stream()

    def use(output):
        with torch.cuda.stream(stream):
            output.detach().zero_() if record else output.detach()[:64] * 2
        if record:
            output.record_stream(stream)

    return model, lambda model, size: train(model, optimizer, size, use)


def outside():
    """Take 1 MiB from the driver, as plans of a library do, and hold it."""
    ctypes.CDLL("libcuda.so.1").cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(2**20))


def outside_the_allocator():
    model, optimizer = begun()
    return model, lambda model, size: (train(model, optimizer, size), outside())


def recompiling():
    """A module whose compiled code is made once more in a late call."""
    model, optimizer = begun()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    return model, lambda _, size: train(compiled, optimizer, size)


def keeping():
    """Keep a tensor of 1 KiB of each call."""
    (model, optimizer), held = begun(), []

    def step(model, size):
        train(model, optimizer, size)
        held.append(torch.empty(2**10, dtype=torch.uint8, device="cuda"))

    return model, step


def chained_elsewhere():
    """Keep a tensor of each call on another card, in the graph of a running product."""
    (model, optimizer), total = begun(), 1
    weight = torch.ones(2**18, device="cuda:1", requires_grad=True)

    def step(model, size):
        nonlocal total
        train(model, optimizer, size)
        total = total * weight

    return model, step


def in_turn(count):
    """Keep the first weight in so many places in turn."""
    places = [torch.zeros(1024, WIDTH, device="cuda") for _ in range(count)]

    def act(number, model, optimizer, size):
        train(model, optimizer, size)
        model[0].weight.data = places[number % count]

    return with_hidden_count(act)


SEEMING = {
    "growth on another card": (chained_elsewhere, {"memory": "1GiB,1GiB"}),
    "a quadratic event at every 23rd call": (partial(quadratic, 23), {}),
    "reference cycles": (in_cycles, {}),
    "returned gradients": (through_gradients, {}),
    "a kept graph": (partial(through_gradients, keeps_graph=True), {}),
    "side stream": (on_a_side_stream, {}),
    "record_stream": (partial(on_a_side_stream, record=True), {}),
    "1 MiB a call outside the allocator": (outside_the_allocator, {"memory": "8GiB"}),
    "garbage_collection_threshold": (
        MODELS["gpt"],
        {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"},
    ),
    "compiled": (recompiling, {}),
    "leak of 1 KiB": (keeping, {}),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch 2.11 compiles with it
@pytest.mark.parametrize("name", SEEMING)
def test_calls_that_only_seem_to_repeat_do_not_settle(name):
    build, options = SEEMING[name]
    # Each further size is compiled in half a second.
    sizes = {"start_batch": 32, "max_batch": 64} if name == "compiled" else {}
    _, *calls = forked(lambda: probed(build, **sizes), **options)
    assert calls == [50, None]


PERIODS = [
    (partial(in_turn, 3), 3),
    (partial(quadratic, 10), 10),
    (partial(of_lengths_in_turn, [1, 1, 3]), 3),
]


@pytest.mark.parametrize(("build", "period"), PERIODS)
def test_a_period_settles_once_it_has_repeated(build, period):
    answer, calls, settled_after = forked(probed, build)
    if VERSION == (2, 14) or settled_after is not None:  # where blocks lie is a version's own
        assert settled_after == calls >= 2 * period + 1
    assert forked(partial(runs, build, answer, steps=CALLS))


def in_order(*more, times=1):
    for size in (1000, *[2**22] * times):
        torch.empty(size, dtype=torch.uint8, device="cuda")
    for act in more:
        act()


def at_once():
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1000, 2**22)]


def replacing():
    """Keep a tensor in place of the last one: at two addresses in turn."""
    KEPT[:] = [torch.empty(1000, dtype=torch.uint8, device="cuda")]


ELSEWHERE = partial(in_order, lambda: torch.empty(1000, dtype=torch.uint8, device="cuda:1"))


@pytest.mark.parametrize(
    ("calls", "like_last"),
    [
        (
            [in_order, in_order, partial(in_order, times=2), in_order, at_once, in_order],
            [True, False, True, False],
        ),
        ([replacing] * 6, [False, False, True, False]),
        ([ELSEWHERE, in_order, ELSEWHERE, in_order], [True, False]),
        ([in_order, in_order, partial(in_order, outside)], [False]),
    ],
    ids=["more at a time", "other addresses", "another card", "outside the allocator"],
)
def test_calls_are_told_apart_by_what_they_did_and_left(calls, like_last):
    def fingerprints():
        device, found = AcceleratorDevice(torch.device("cuda")), []
        for call in calls:
            call()
            found.append(device.fingerprint())
        return found

    _, *others, last = forked(fingerprints, memory="1GiB,1GiB")
    assert [other == last for other in others] == like_last


STEADY = ["mlp fp16 scaled", "conv", "frozen base, adapters"]


def test_steady_answers_settle_and_run_on_for_half_the_work():
    every = {}
    for name in STEADY:
        answer, cap_bytes, settled_after, units = forked(work_of, MODELS[name])
        every[name] = sum(units.values())
        assert settled_after <= 16, name  # two batches of a loop are alive in turn
        assert forked(survives, name, answer, cap_bytes), name
    assert max(every.values()) <= 70, every
    assert statistics.median(every.values()) <= 38, every
