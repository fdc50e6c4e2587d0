import random
import subprocess
import sys
import types
from functools import partial

import numpy as np
import pytest
import torch

import oomprobe
from oomprobe.integrations.framework import FrameworkError, attributes_kept, framework, refuse_several


@pytest.fixture
def installed(monkeypatch):
    def install(version):
        module = types.ModuleType("someframe")
        module.__version__ = version
        monkeypatch.setitem(sys.modules, "someframe", module)

    return install


def test_a_framework_that_is_not_there_says_what_to_type():
    with pytest.raises(
        FrameworkError, match=r"nothere 3.1 or newer, and it is not installed: pip install 'oomprobe\[x\]'"
    ):
        framework("nothere.part", minimum="3.1", extra="x")


def test_an_old_one_says_its_version(installed):
    installed("8.3.9")
    with pytest.raises(FrameworkError, match=r"8.4 or newer, and 8.3.9 is installed: .*--upgrade"):
        framework("someframe", minimum="8.4", extra="x")


@pytest.mark.parametrize("version", ["8.4", "8.4.0", "8.4.190+cpu", "8.10.0rc1", "9.0.dev2"])
def test_a_newer_one_is_imported(installed, version):
    installed(version)
    assert framework("someframe", minimum="8.4", extra="x").__version__ == version


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "torchvision::nms"),
        ("import what_it_lacks", "No module named 'what_it_lacks'"),
    ],
)
def test_one_that_breaks_as_it_is_imported_is_told(tmp_path, monkeypatch, code, said):
    (tmp_path / "brokenframe.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FrameworkError, match=rf"brokenframe is installed and cannot be imported.*{said}"):
        framework("brokenframe", minimum="1", extra="x")


def test_it_is_an_import_error_and_ours():
    assert issubclass(FrameworkError, ImportError)
    assert issubclass(FrameworkError, oomprobe.OomProbeError)


def test_ranks_are_refused():
    refuse_several("strategy='auto'", 1)
    with pytest.raises(oomprobe.InvalidArgumentError, match=r"devices=4 trains on 4 ranks.*memory_fraction"):
        refuse_several("devices=4", 4)


def test_importing_the_adapters_imports_no_framework():
    code = (
        "import sys\n"
        "from oomprobe.integrations import accelerate, lightning, transformers, ultralytics\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(names & {'accelerate', 'lightning', 'pytorch_lightning', 'transformers', 'ultralytics'})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# --- attributes and generators ---


KINDS = {
    "torch": (lambda: torch.Generator().manual_seed(7), lambda one: torch.rand(1, generator=one).item()),
    "python": (lambda: random.Random(7), lambda one: one.random()),
    "numpy": (lambda: np.random.default_rng(7), lambda one: one.random()),
    "old numpy": (lambda: np.random.RandomState(7), lambda one: one.random_sample()),
}


class Owner:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def collate(self, examples):
        return self.own.random()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_generator_goes_on_where_it_was(kind, error):
    make, draw = KINDS[kind]
    owner = Owner(own=make())
    try:
        with attributes_kept([owner, "no attributes"]):
            first = draw(owner.own)
            if error:
                raise error
    except KeyboardInterrupt:
        pass
    assert draw(owner.own) == first


def test_the_default_ones_go_on_where_they_were():
    def draw():
        return torch.rand(1).item(), np.random.random(), random.random()

    with attributes_kept([]):
        first = draw()
    assert draw() == first


def under(names, inner):
    for name in names:
        inner = Owner(**{name: [inner, inner] if name.endswith("s") else inner})
    return inner


WAYS = {
    "a data set": lambda inner: under(["dataset"], inner),
    "several": lambda inner: under(["datasets"], inner),
    "a transform": lambda inner: under(["dataset", "transforms", "transform", "collate_fn"], inner),
    "another name": lambda inner: Owner(
        images=types.new_class("Images", (Owner, torch.utils.data.Dataset))(own=inner.own)
    ),
    "a method": lambda inner: torch.utils.data.DataLoader([1], collate_fn=inner.collate),
    "a keyword": lambda inner: torch.utils.data.DataLoader([1], collate_fn=partial(print, own=inner.own)),
    "an argument": lambda inner: torch.utils.data.DataLoader([1], collate_fn=partial(print, inner.own)),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_is_found_wherever_data_draw_from_it(way):
    inner = Owner(own=random.Random(7))
    outer = inner.dataset = WAYS[way](inner)  # a circle ends
    with attributes_kept([outer]):
        first = inner.own.random()
    assert inner.own.random() == first


@pytest.mark.parametrize(
    "before", [{}, {"own": None}, {"own": 7}, {"own": random.Random(7)}], ids=["", "None", "7", "one"]
)
def test_each_attribute_is_what_it_was(before):
    owner = Owner(**before)
    with attributes_kept([owner]):
        owner.own, owner.other = torch.Generator(), 1
    assert vars(owner) == before
