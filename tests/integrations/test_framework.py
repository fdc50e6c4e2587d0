import random
import sys
import types
from functools import partial
from itertools import cycle

import numpy as np
import pytest
import torch

import oomprobe
from oomprobe.integrations.framework import FrameworkError, load, skipped_callbacks, state_kept


def test_a_missing_framework_names_the_command(tmp_path, monkeypatch):
    with pytest.raises(
        FrameworkError, match=r"nothere 3.1 or newer, and it is not installed: pip .*'oomprobe\[x\]'"
    ) as caught:
        load("nothere.part", minimum="3.1", extra="x")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, oomprobe.OomProbeError)
    (tmp_path / "lacking.py").write_text("import its_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'its_dependency'$"):
        load("lacking", minimum="1", extra="x")


@pytest.mark.parametrize("version", ["8.3.9", "8.4", "8.4.190+cpu", "8.10.0rc1", "9.0.dev2"])
def test_an_old_framework_is_refused(monkeypatch, version):
    module = types.SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "someframe", module)
    if version != "8.3.9":
        assert load("someframe", minimum="8.4", extra="x") is module
        return
    with pytest.raises(FrameworkError, match=r"8.4 or newer, and 8.3.9 is installed: .*--upgrade"):
        load("someframe", minimum="8.4", extra="x")


def test_weight_averaging_is_said_to_copy_the_weights():
    callback = type("StochasticWeightAveraging", (), {})()
    said = (
        "callbacks, which trials do not call: StochasticWeightAveraging (weight averaging keeps a copy of the weights)"
    )
    assert skipped_callbacks([callback, 1], (int,)) == [said]


# --- generators ---


class Owner:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def collate(self, examples):
        return self.own.random()


GENERATORS = [
    lambda: torch.Generator().manual_seed(7),
    lambda: random.Random(7),
    lambda: np.random.default_rng(7),
    lambda: np.random.RandomState(7),
]


def drawn(generator):
    return torch.rand(1, generator=generator).item() if isinstance(generator, torch.Generator) else generator.random()


def under(names, inner):
    for name in names:
        inner = Owner(**{name: [inner, inner] if name.endswith("s") else inner})
    return inner


class Images(Owner, torch.utils.data.Dataset):
    pass


WAYS = {
    "several data sets": lambda inner: under(["datasets"], inner),
    "a transform": lambda inner: under(["dataset", "transforms", "transform", "collate_fn"], inner),
    "another name": lambda inner: Owner(images=Images(own=inner.own)),
    "a method": lambda inner: torch.utils.data.DataLoader([1], collate_fn=inner.collate),
    "a keyword": lambda inner: torch.utils.data.DataLoader([1], collate_fn=partial(print, own=inner.own)),
    "an argument": lambda inner: torch.utils.data.DataLoader([1], collate_fn=partial(print, inner.own)),
}


@pytest.mark.parametrize(("way", "make"), [*zip(WAYS, cycle(GENERATORS))], ids=WAYS)
def test_generators_are_found_in_data_objects(way, make):
    inner = Owner(own=make())
    outer = inner.dataset = WAYS[way](inner)  # a cycle is followed once
    with state_kept([outer]):
        first = drawn(inner.own)
    assert drawn(inner.own) == first
