"""What is stated of operators by hand; tests/cuda/test_sequences.py compares all of them with torch's own allocator."""

import contextlib
import re

import pytest
import sequences
from helpers import GOLDEN, same_as_golden
from operators import CASES, COUNTING, STATED

from oomprobe.ground.torch_versions import VERSION
from oomprobe.tape.calls import parts_of


def events(name, variant):
    """Return the requests on a simulated card, and what is freed."""
    device, case = sequences.simulated(sequences.A100, "40GiB"), {**CASES, **COUNTING}[name]
    if hasattr(case, "builds"):
        with device.building():
            case = case(sequences.tensors(variant))
    return sequences.of_a_simulated_card(device, sequences.runner(case, variant))


def requests(name, variant="fp32"):
    """Return the bytes of each request on a simulated card."""
    return [nbytes for _, nbytes in events(name, variant) if nbytes > 0]


@pytest.mark.parametrize(
    ("variant", "name"), [(variant, name) for variant in STATED for name in STATED[variant]]
)
def test_an_operator_requests_what_is_stated_of_it(variant, name):
    assert [nbytes for nbytes in requests(name, variant) if nbytes >= 100_000] == STATED[variant][
        name
    ]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if hasattr(case, "builds")])
def test_each_optimizer_runs(name):
    if name == "Adagrad, fused" and VERSION < (2, 13):
        pytest.skip("this torch may have no such kernel")
    assert requests(name)


def test_a_kernel_is_around_as_many_results_at_each_size(monkeypatch):
    """A call that was recorded at one size is replayed at others, which only its numbers tell."""
    launched = {}

    def noticing(kernel, numbers):
        launched[kernel] = numbers
        return parts_of(kernel, numbers)

    monkeypatch.setattr("oomprobe.simulation.memory.parts_of", noticing)
    for name in filter(re.compile("attention|sort|topk|norm|index|conv").search, CASES):
        with contextlib.suppress(Exception):  # not of this dtype
            requests(name, "bf16")
    assert len(launched) > 30
    for kernel, numbers in launched.items():
        parts = len(parts_of(kernel, numbers))
        for factor in (2, 16):
            larger = tuple(factor * number for number in numbers)
            assert len(parts_of(kernel, larger)) == parts, kernel


@pytest.mark.skipif(VERSION not in {(2, 13), (2, 14)}, reason="recorded with both, which agree")
def test_kernels_request_what_is_recorded():
    """For each line of a rule at least two cases, which tests/cuda/test_sequences.py compares with torch's own allocator."""
    recorded = [
        line.partition(": [")[0] for line in (GOLDEN / "requests.txt").read_text().splitlines()
    ]
    found = []
    for line in recorded:
        variant, _, name = line.partition(" | ")
        # Of 64 bits, efficient attention takes two numbers more since 2.14.
        larger = [event for event in events(name, variant) if abs(event[1]) != 8]
        found.append(f"{line}: {sequences.in_order(larger)}\n")
    same_as_golden("".join(found), "requests.txt")
