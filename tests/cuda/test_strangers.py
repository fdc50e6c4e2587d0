"""Loops of other projects: near its limit, a simulated card does what torch's allocator does, to the byte."""

import pytest
from bed import forked
from strangers import STRANGERS
from zoo import runs

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
    """It has holes, and a replay goes on for more calls than a trial makes: the answers lie apart, and the replayed one runs."""
    build = STRANGERS["llama"]
    simulated, cap_bytes = forked(
        windows.simulated_answer, build, MEMORY, windows.EXPANDABLE, limit_s=120
    )
    on_bed = {"memory": MEMORY, "card": windows.A100}
    searched, same_bytes = forked(windows.answer, build, windows.EXPANDABLE, **on_bed)
    assert same_bytes == cap_bytes
    assert searched <= simulated <= searched * (1 + 1 / 64)
    prepared = {**on_bed, "PYTORCH_CUDA_ALLOC_CONF": windows.EXPANDABLE}
    assert forked(lambda: runs(build, simulated, steps=50, cap_bytes=cap_bytes), **prepared)
