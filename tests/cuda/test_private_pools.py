"""Private pools of the model compared with those of torch's own allocator, operation by operation."""

import pytest
from allocations import Modelled, Torchs, operations, outcomes
from bed import forked

from oomprobe.ground.torch_versions import VERSION

from .test_simulated import PAIRS, SETTINGS

in_this_version = pytest.mark.skipif(VERSION != (2, 14), reason="the version of the model")


@in_this_version
@pytest.mark.parametrize("text", SETTINGS.values())
def test_private_pools_have_the_same_outcome_as_in_torch(text):
    check(text, 1500, 0)


# Later, torch 2.14.1 itself crashes with expandable segments: it forgets a pool of which blocks are in use.
LONG = [text for text in (*SETTINGS.values(), *PAIRS) if "expandable" not in text]


@in_this_version
@pytest.mark.slow
@pytest.mark.parametrize("text", LONG)
def test_many_operations_on_private_pools(text):
    check(text, 20_000, 1)


def check(text, count, seed):
    bed = {"memory": "3000MiB", "context": "2710MiB", "limit_s": 300}
    expected = forked(lambda: outcomes(operations(count, seed), Torchs(text)), **bed)
    found = outcomes(operations(count, seed), Modelled(text))
    assert {"drop", "reset", "end capture", "leave"} <= {kind for kind, *_ in found}
    for number, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert here == there, number
