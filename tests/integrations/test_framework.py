import random
import subprocess
import sys
import types
from functools import partial

import numpy as np
import pytest
import torch

import oomprobe
from oomprobe.integrations.framework import FrameworkError, load, state_kept


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


def test_importing_the_adapters_imports_no_framework():
    code = (
        "import sys\n"
        "from oomprobe.integrations import accelerate, lightning, transformers, ultralytics\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(names & {'accelerate', 'lightning', 'pytorch_lightning', 'transformers', 'ultralytics'})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# --- attributes and generators ---


class Owner:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def collate(self, examples):
        return self.own.random()


KINDS = {
    "torch": (lambda: torch.Generator().manual_seed(7), lambda one: torch.rand(1, generator=one).item()),
    "python": (lambda: random.Random(7), lambda one: one.random()),
    "numpy": (lambda: np.random.default_rng(7), lambda one: one.random()),
    "old numpy": (lambda: np.random.RandomState(7), lambda one: one.random_sample()),
    "default ones": (lambda: None, lambda _: (torch.rand(1).item(), np.random.random(), random.random())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_generators_are_restored(kind):
    make, draw = KINDS[kind]
    owner = Owner(own=make())
    drawn = []

    def interrupted():
        with state_kept([owner, "no attributes"]):
            drawn.append(draw(owner.own))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert draw(owner.own) == drawn[0]


def under(names, inner):
    for name in names:
        inner = Owner(**{name: [inner, inner] if name.endswith("s") else inner})
    return inner


WAYS = {
    "several data sets": lambda inner: under(["datasets"], inner),
    "a transform": lambda inner: under(["dataset", "transforms", "transform", "collate_fn"], inner),
    "another name": lambda inner: Owner(
        images=types.new_class("Images", (Owner, torch.utils.data.Dataset))(own=inner.own)
    ),
    "a method": lambda inner: torch.utils.data.DataLoader([1], collate_fn=inner.collate),
    "a keyword": lambda inner: torch.utils.data.DataLoader([1], collate_fn=partial(print, own=inner.own)),
    "an argument": lambda inner: torch.utils.data.DataLoader([1], collate_fn=partial(print, inner.own)),
}


@pytest.mark.parametrize("way", WAYS)
def test_generators_are_found_in_data_objects(way):
    inner = Owner(own=random.Random(7))
    outer = inner.dataset = WAYS[way](inner)  # a cycle is followed once
    with state_kept([outer]):
        first = inner.own.random()
    assert inner.own.random() == first


def test_attributes_are_restored():
    generator = random.Random(7)
    owner = Owner(own=generator, number=7)
    with state_kept([owner]):
        owner.own, owner.number, owner.other = torch.Generator(), 8, 1
    assert vars(owner) == {"own": generator, "number": 7}
