"""What a probe costs, in steps of its answer's size: counts, so that they mean the same on any machine."""

import statistics

from bed import forked
from benchmark_work import work
from zoo import MODELS

import oomprobe

STEADY = ("mlp", "mlp fused", "mlp bf16 clipped", "deep mlp", "many small tensors", "conv", "frozen base, adapters")


def cost(name):
    """Return the work of a probe, and the calls after which its confirmation settled."""
    result = oomprobe.find_max_batch(*MODELS[name](), progress="off")
    return sum(work(result).values()), result.trials[-1].settled_after


def test_a_probe_of_a_steady_step_costs_at_most_26_steps():
    costs = [forked(cost, name, memory="1GiB") for name in STEADY]
    assert statistics.median(steps for steps, _ in costs) <= 26
    assert all(settled is not None and settled <= 6 for _, settled in costs)
