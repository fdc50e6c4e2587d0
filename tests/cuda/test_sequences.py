"""Every operator of the table asks a simulated card for the same blocks, in the same order, as torch's own allocator."""

import contextlib
import warnings

import pytest
import sequences
import torch
from bed import forked
from operators import CASES, COUNTING, EVERY_VERSION, EXCEPTIONS
from sequences import A100
from torch.nn import functional as F

from oomprobe.ground.torch_versions import VERSION
from oomprobe.simulation import card_mode
from oomprobe.simulation.kernels.compared import COMPARED, is_compared
from oomprobe.simulation.kernels.composites import composite_of

IS_OF_THE_TABLE = VERSION == (
    2,
    14,
)  # other versions differ in some cases and in the order of requests
in_this_version = pytest.mark.skipif(not IS_OF_THE_TABLE, reason="the table is of torch 2.14")
REFUSED = "refused"
# Each layout, half precision and autocast; all dtypes, and gradients that are expanded, run on request.
OFTEN = ("fp32", "fp32 last", "amp fp16 gaps")


def pairs(names, variants):
    return [(name, variant) for name in names for variant in variants]


def requests(asked, record):
    """Return the sequence of requests of each case in its variant, or that it was refused; `record` takes what runs it."""
    found = {}
    warnings.simplefilter("ignore")
    for name, variant in asked:
        try:
            found[name, variant] = sequences.in_order(record({**CASES, **COUNTING}[name], variant))
        except (RuntimeError, NotImplementedError):
            found[name, variant] = REFUSED
    return found


def built(case, variant, context):
    if not hasattr(case, "builds"):
        return case
    with context:
        return case(sequences.tensors(variant))


def of_torch(asked):
    def record(case, variant):
        step = built(case, variant, contextlib.nullcontext())
        return sequences.of_torch(sequences.runner(step, variant))

    torch.cuda.init()
    return requests(asked, record)


def of_a_simulated_card(asked):
    device = sequences.simulated(A100, "40GiB")
    device.start_trial()

    def record(case, variant):
        step = built(case, variant, device.building())
        return sequences.of_a_simulated_card(device, sequences.runner(step, variant))

    return requests(asked, record)


def excepted(name, variant):
    variants, _ = EXCEPTIONS.get(name, ((), ""))
    return variant in variants


@in_this_version
@pytest.mark.parametrize(
    "variants", [OFTEN, pytest.param(tuple(sequences.VARIANTS), marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("first", range(0, len(CASES), 40), ids=lambda first: [*CASES][first])
def test_requests_are_those_of_torch_in_their_order(first, variants):
    asked = pairs([*CASES][first : first + 40], variants)
    wanted = forked(of_torch, asked, memory="40GiB", card=A100)
    found = forked(of_a_simulated_card, asked)
    different = {
        key for key, sequence in wanted.items() if sequence != REFUSED and found[key] != sequence
    }
    assert different == {key for key in wanted if excepted(*key)}


@in_this_version
@pytest.mark.parametrize("name", COUNTING)
def test_requests_of_operators_that_count_are_those_of_torch(name):
    asked = pairs([name], ["fp32"])
    wanted = forked(of_torch, asked, memory="40GiB", card=A100)
    assert REFUSED not in wanted.values()
    assert forked(of_a_simulated_card, asked) == wanted


# In `torch.func`, formulas write into none of the tensors that it wraps.
PER_SAMPLE = {
    "cross entropy": F.cross_entropy,
    "extremes": lambda out, _: out.clamp(min=0).maximum(out / 2),
}


@in_this_version
@pytest.mark.parametrize("of", PER_SAMPLE.values(), ids=PER_SAMPLE)
def test_gradients_per_sample_request_what_they_do_of_torch(of):
    """In order, but for frees: the thread of the backward pass lets go of its graph when it gets to it."""

    def run():
        def loss(weight, x, label):
            return of(F.linear(x[None], weight), label[None]).sum()

        make = sequences.Tensors()
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        gradients(make(10, 384).detach(), make(64, 384, grad=False), make.indices(64))

    def on_a_simulated_card():
        device = sequences.simulated(A100, "1GiB")
        device.start_trial()
        return sequences.of_a_simulated_card(device, run)

    def requested(events):
        return [nbytes for _, nbytes in events if nbytes > 0]

    wanted = requested(forked(sequences.of_torch, run, card=A100))
    assert requested(forked(on_a_simulated_card)) == wanted


def sizes(sequence):
    return sorted(nbytes for nbytes in sequence if isinstance(nbytes, int))


@pytest.mark.skipif(IS_OF_THE_TABLE, reason="compared in their order")
def test_sizes_of_requests_are_those_of_torch():
    asked = [
        (name, variant)
        for variant, cases in EVERY_VERSION.items()
        for name, since in cases.items()
        if since <= VERSION
    ]
    wanted = forked(of_torch, asked, memory="40GiB", card=A100)
    found = forked(of_a_simulated_card, asked)
    assert {key: sizes(sequence) for key, sequence in found.items()} == {
        key: sizes(sequence) for key, sequence in wanted.items()
    }


def dispatched():
    """Return the operators that the table dispatches on a simulated card."""
    names, run = set(), card_mode.CardMode._run

    def noted(mode, func, args, kwargs):
        if func.namespace == "aten":
            names.add(func.overloadpacket.__name__.removesuffix("_"))
        return run(mode, func, args, kwargs)

    card_mode.CardMode._run = noted
    of_a_simulated_card(
        pairs({**CASES, **COUNTING}, ["fp32"]) + pairs(["attention: plain"], ["bf16"])
    )
    return names


@in_this_version
def test_what_counts_as_compared_is_in_the_table():
    in_table = forked(dispatched, limit_s=120)
    assert in_table >= COMPARED
    needed = set()
    for name in in_table - COMPARED:
        packet = getattr(torch.ops.aten, name)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if not any(map(is_compared, overloads)) and not any(map(composite_of, overloads)):
            needed.add(name)
    assert not needed
