"""Loops of other projects: near its limit, a simulated card does what torch's allocator does, to the byte."""

import pytest
from bed import forked
from strangers import STRANGERS

from oomprobe.ground.torch_versions import VERSION

from . import windows

pytestmark = pytest.mark.skipif(
    VERSION != (2, 14), reason="kernels ask for what torch 2.14 asks for"
)
MEMORY = "1GiB"


@pytest.mark.parametrize(
    "name", [*STRANGERS][1::2]
)  # scripts/evidence/benchmark_windows.py runs all, at more sizes
def test_verdicts_and_peaks_near_the_limit_are_those_of_torchs_allocator(name):
    build = STRANGERS[name]
    limit, cap_bytes = forked(windows.simulated_answer, build, MEMORY, limit_s=120)
    _, in_simulation, on_torchs = windows.window(
        build, limit, cap_bytes, each_side=1, memory=MEMORY
    )
    assert in_simulation == on_torchs


def test_an_answer_with_expandable_segments():
    build = STRANGERS["llama"]
    in_simulation = forked(windows.simulated_answer, build, MEMORY, windows.EXPANDABLE, limit_s=120)
    assert in_simulation == forked(
        windows.answer, build, windows.EXPANDABLE, memory=MEMORY, card=windows.A100
    )
