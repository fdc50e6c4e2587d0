import importlib
import sys

import pytest
import torch

from oomprobe.journal.sources import sources_of

FILES = {
    "train_of_sources": "import losses_of_sources\nfrom losses_of_sources import feats\nimport json\n"
    "def step(model, n):\n    return feats(n)\n",
    "losses_of_sources": "import torch\nfrom base_of_sources import Base\ndef feats(n):\n    return n\nclass Net(Base):\n    pass\n",
    "base_of_sources": "import torch\nclass Base(torch.nn.Module):\n    pass\n",
    "other_of_sources": "def unrelated():\n    pass\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in FILES:
        importlib.import_module(name)
    yield tmp_path
    for name in FILES:
        del sys.modules[name]


def test_a_step_is_in_its_file_and_in_those_it_uses(folder):
    assert set(sources_of([sys.modules["train_of_sources"].step])) == FILES.keys() - {"other_of_sources"}
    assert set(sources_of([sys.modules["losses_of_sources"].Net])) == {"losses_of_sources", "base_of_sources"}


@pytest.mark.parametrize("name", ["train_of_sources", "losses_of_sources", "base_of_sources"])
def test_an_edit_of_any_of_them_shows(folder, name):
    step = sys.modules["train_of_sources"].step
    before = sources_of([step])
    assert sources_of([step]) == before
    (folder / f"{name}.py").write_text(FILES[name] + "# edited\n")
    assert {one for one in before if before[one] != sources_of([step])[one]} == {name}


def test_packages_builtins_and_what_has_no_file_are_left_out():
    assert sources_of([torch.nn.Linear, len, print, 7, None, sources_of]) == {}


def test_a_file_that_is_gone_is_left_out(folder):
    (folder / "base_of_sources.py").unlink()
    assert "base_of_sources" not in sources_of([sys.modules["train_of_sources"].step])
