import random

import numpy as np
import pytest
import torch

from oomprobe.integrations.generators import generators_kept

KINDS = {
    "torch": (lambda: torch.Generator().manual_seed(7), lambda one: torch.rand(1, generator=one).item()),
    "python": (lambda: random.Random(7), lambda one: one.random()),
    "numpy": (lambda: np.random.default_rng(7), lambda one: one.random()),
    "old numpy": (lambda: np.random.RandomState(7), lambda one: one.random_sample()),
}


class Owner:
    def __init__(self, **attributes):
        vars(self).update(attributes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_generator_goes_on_where_it_was(kind, error):
    make, draw = KINDS[kind]
    owner = Owner(own=make())
    try:
        with generators_kept([owner, "no attributes"]):
            first = draw(owner.own)
            if error:
                raise error
    except KeyboardInterrupt:
        pass
    assert draw(owner.own) == first


@pytest.mark.parametrize("wrapping", [["dataset"], ["datasets"], ["dataset", "datasets", "transform"]])
def test_one_of_a_data_set_in_another_goes_on_where_it_was(wrapping):
    inner = outer = Owner(own=random.Random(7))
    for name in wrapping:
        outer = Owner(**{name: [outer, outer] if name == "datasets" else outer})
    inner.dataset = outer  # a circle ends
    with generators_kept([outer]):
        first = inner.own.random()
    assert inner.own.random() == first


def test_the_default_ones_go_on_where_they_were():
    def draw():
        return torch.rand(1).item(), np.random.random(), random.random()

    with generators_kept([]):
        first = draw()
    assert draw() == first


@pytest.mark.parametrize("before", [{}, {"own": None}], ids=str)
def test_one_that_was_made_meanwhile_is_gone(before):
    owner = Owner(**before)
    with generators_kept([owner]):
        owner.own = random.Random(7)
    assert vars(owner) == before
