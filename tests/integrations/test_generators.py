import random
from functools import partial

import numpy as np
import pytest
import torch

import oomprobe
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


@pytest.mark.parametrize("wrapping", [["dataset"], ["datasets"], ["dataset", "transforms", "transform", "collate_fn"]])
def test_one_of_a_data_set_in_another_goes_on_where_it_was(wrapping):
    inner = outer = Owner(own=random.Random(7))
    for name in wrapping:
        outer = Owner(**{name: [outer, outer] if name.endswith("s") else outer})
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


@pytest.mark.parametrize("before", [7, "a generator", None], ids=str)
def test_what_one_took_the_place_of_is_there_again(before):
    owner = Owner(own=random.Random(7) if before == "a generator" else before)
    was = owner.own
    with generators_kept([owner]):
        owner.own = torch.Generator()
    assert owner.own is was


def test_a_data_set_is_found_under_any_name():
    inner = torch.utils.data.TensorDataset(torch.zeros(3))
    inner.own = random.Random(7)
    with generators_kept([Owner(images=inner)]):
        first = inner.own.random()
    assert inner.own.random() == first


class Collator(Owner):
    def collate(self, examples):
        return self.own.random()


@pytest.mark.parametrize("way", ["method", "keyword", "argument"])
def test_so_is_that_of_a_function_that_collates(way):
    collator = Collator(own=random.Random(7))
    ways = {
        "method": collator.collate,
        "keyword": partial(lambda examples, own: own.random(), own=collator.own),
        "argument": partial(lambda own, examples: own.random(), collator.own),
    }
    loader = torch.utils.data.DataLoader([1, 2], collate_fn=ways[way])
    with generators_kept([loader]):
        first = list(loader)
    assert list(loader) == first


def test_one_without_a_state_is_passed_over():
    with generators_kept([Owner(own=random.SystemRandom(), odd=np.random.RandomState(np.random.PCG64(1)))]):
        pass


def test_on_a_lost_device_only_those_of_the_host_are_put_back():
    class OfACard(torch.Generator):
        device = torch.device("cuda")

        def set_state(self, state):
            raise RuntimeError("illegal memory access")

    owner, first = Owner(card=OfACard(), host=random.Random(7)), []

    def draw_and_lose():
        with generators_kept([owner]):
            first.append(owner.host.random())
            raise oomprobe.DeviceLostError("gone")

    with pytest.raises(oomprobe.DeviceLostError):
        draw_and_lose()
    assert owner.host.random() == first[0]
