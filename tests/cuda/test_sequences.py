"""Every operator of the table asks a simulated card for the same blocks, in the same order, as torch's own allocator."""

import contextlib
import warnings

import pytest
import torch
from bed import forked

from oomprobe.ground.torch_versions import VERSION
from oomprobe.simulation import card_mode
from oomprobe.simulation.kernels.compared import COMPARED, is_compared

from . import sequences
from .operators import CASES, COUNTING, EXCEPTIONS
from .test_simulated import A100, simulated

pytestmark = pytest.mark.skipif(
    VERSION != (2, 14), reason="the table is of torch 2.14; what other versions do differently is not"
)
GROUPS = [[*CASES][first : first + 40] for first in range(0, len(CASES), 40)]
REFUSED = "refused"


def in_variants(names, record, variants):
    """Return the sequence of requests of each case in each variant, or that it was refused; `record` takes what runs it."""
    found = {}
    warnings.simplefilter("ignore")
    for name in names:
        for variant in variants:
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


def of_torch(names, variants=sequences.VARIANTS):
    def record(case, variant):
        step = built(case, variant, contextlib.nullcontext())
        return sequences.of_torch(sequences.runner(step, variant))

    torch.cuda.init()
    return in_variants(names, record, variants)


def of_a_simulated_card(names, variants=sequences.VARIANTS):
    device = simulated(A100, "40GiB")
    device.start_trial()

    def record(case, variant):
        step = built(case, variant, device.building())
        return sequences.of_a_simulated_card(device, sequences.runner(step, variant))

    return in_variants(names, record, variants)


def excepted(name, variant):
    variants, _ = EXCEPTIONS.get(name, ((), ""))
    return variant in variants


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]} to {names[-1]}")
def test_requests_are_those_of_torch_in_their_order(names):
    wanted = forked(of_torch, names, memory="40GiB", card=A100)
    found = forked(of_a_simulated_card, names)
    different = {key for key, sequence in wanted.items() if sequence != REFUSED and found[key] != sequence}
    assert different == {key for key in wanted if excepted(*key)}


@pytest.mark.parametrize("name", COUNTING)
def test_requests_of_operators_that_count_are_those_of_torch(name):
    variants = ["fp32"]
    wanted = forked(of_torch, [name], variants, memory="40GiB", card=A100)
    assert wanted[name, "fp32"] != REFUSED
    assert forked(of_a_simulated_card, [name], variants) == wanted


def dispatched():
    """Return the operators that the table dispatches on a simulated card."""
    names, run = set(), card_mode.CardMode._run

    def noted(mode, func, args, kwargs):
        if func.namespace == "aten":
            names.add(func.overloadpacket.__name__.removesuffix("_"))
        return run(mode, func, args, kwargs)

    card_mode.CardMode._run = noted
    of_a_simulated_card({**CASES, **COUNTING})
    return names


def test_what_counts_as_compared_is_in_the_table():
    in_table = forked(dispatched, limit_s=120)
    assert in_table >= COMPARED
    needed = set()
    for name in in_table - COMPARED:
        packet = getattr(torch.ops.aten, name)
        if not any(is_compared(getattr(packet, overload)) for overload in packet.overloads()):
            needed.add(name)
    assert not needed
