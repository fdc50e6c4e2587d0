"""A confirmation never ends early where the step counts its calls, whatever it counts with: each counter is made by the step."""

import pytest
from bed import forked
from counters import COUNTERS
from zoo import mlp

import oomprobe

COUNTERS = COUNTERS | {"none": (lambda: None, lambda _: None)}


def counting(name):
    make, count = COUNTERS[name]

    def build():
        model, train = mlp()
        counters = {}

        def step(model, batch_size):
            if batch_size not in counters:
                counters[batch_size] = make()
            train(model, batch_size)
            count(counters[batch_size])

        return model, step

    return build


def counting_down():
    """Hold -1 and -2, which have one hash, when a confirmation checks what the step counts with: after 5 calls and after 6."""
    model, step = counting("none")()
    left = [4]

    def counted(model, batch_size):
        left[0] -= 1
        step(model, batch_size)

    return model, counted


def test_numbers_with_one_hash_are_two():
    trial = forked(
        lambda: oomprobe.find_max_batch(*counting_down(), progress="off", max_batch=4096).trials[-1]
    )
    assert (trial.steps, trial.settled_after) == (50, None)


@pytest.mark.parametrize("name", ["none", "generator", "file", "thread-local"])
def test_a_step_that_counts_makes_all_its_calls(name):
    """`tests/test_counted.py` has every counter."""
    # Near the limit, allocations that are tried again may keep a steady step from repeating.
    trial = forked(
        lambda: oomprobe.find_max_batch(*counting(name)(), progress="off", max_batch=4096).trials[
            -1
        ]
    )
    if name == "none":
        assert trial.steps == trial.settled_after <= 8
    else:
        assert (trial.steps, trial.settled_after) == (50, None)
