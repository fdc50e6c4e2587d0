import os
import sys
import textwrap
import types

import pytest
import torch

from oomprobe.errors import InvalidArgumentError
from oomprobe.runners.targets import RECIPE, build, load, name_of

TRAIN = """
import torch

def build():
    model = torch.nn.Linear(2, 1)

    def step(model, batch_size):
        model(torch.ones(batch_size, 2)).sum().backward()

    return model, step

def a_model_alone():
    return torch.nn.Linear(2, 1)

def the_wrong_way_round():
    return build()[::-1]

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def _imports_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if not name.startswith(("torch", "oomprobe", "numpy")):
            del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, text=TRAIN):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def refused(call):
    with pytest.raises(InvalidArgumentError) as caught:
        call()
    text = str(caught.value)
    assert text.endswith(RECIPE)
    return text.removesuffix(RECIPE).strip()


# --- found ---


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("my_train.py", "my_train.py:build"),
        ("deep/er/my_other.py", "{}/deep/er/my_other.py:build"),
        ("my_train.py", "below/../my_train.py:build"),
        ("my_train.py", "my_train:build"),
        ("my_package/train.py", "my_package.train:build"),
    ],
)
def test_a_target_in_a_file_or_a_module(folder, path, target):
    (folder / "below").mkdir()
    write(folder / path)
    model, step = build(target.format(folder))
    step(model, 3)
    assert torch.equal(model.bias.grad, torch.tensor([3.0]))


def test_a_file_can_import_its_siblings_at_any_time(folder):
    write(folder / "there" / "my_layers.py", "width = 7")
    write(
        folder / "there" / "my_train.py",
        """
        def build():
            import my_layers
            return my_layers.width
        """,
    )
    assert load("there/my_train.py:build")() == 7


def test_a_file_named_like_a_module_does_not_replace_it(folder):
    """It is imported anew each time."""
    write(folder / "types.py", "made = object()\ndef build(): return made")
    first, before = load("types.py:build")(), len(sys.path)
    assert load("types.py:build")() is not first
    assert sys.modules["types"] is types
    assert len(sys.path) == before


# --- not found ---


@pytest.mark.parametrize(
    ("target", "told"),
    [
        *((text, f"{text!r} is not a target.") for text in ("", "train.py", "train.py:", ":build", "train.py:build()")),
        ("no_such.py:build", "there is no file '{}/no_such.py'."),
        ("my_trian.py:build", "there is no file '{}/my_trian.py'; did you mean my_train.py?"),
        ("my_train.py:biuld", "my_train.py has no function 'biuld'; did you mean build?"),
        ("no_such.train:build", "there is no module 'no_such' to import."),
        ("my_train:no_such", "my_train has no function 'no_such'."),
        ("my_train:not_a_function", "my_train has no function 'not_a_function'."),
        ("my_train.py:a_model_alone", "my_train.py:a_model_alone returned Linear, not a pair (model, step_fn)."),
        (
            "my_train.py:the_wrong_way_round",
            "my_train.py:the_wrong_way_round returned (function, Linear): return the model and the step, in this order and "
            "without more. The step reaches the optimizer and all else as a variable of the function that builds them.",
        ),
    ],
)  # fmt: skip
def test_what_is_no_target_is_named(folder, target, told):
    write(folder / "my_train.py")
    assert refused(lambda: build(target)) == told.format(os.path.realpath(folder))


@pytest.mark.parametrize("name", ["my_train_big.py", "my_train_big"])
@pytest.mark.parametrize("missing", ["my_train", "my_train_big_too"])
def test_a_failing_import_inside_the_target_is_its_own_error(folder, name, missing):
    write(folder / "my_train_big.py", f"import {missing}\ndef build(): pass")
    with pytest.raises(ModuleNotFoundError) as caught:
        load(f"{name}:build")
    assert caught.value.name == missing


def test_a_failing_file_raises_its_own_error(folder):
    write(folder / "my_train.py", "1 +")
    with pytest.raises(SyntaxError):
        load("my_train.py:build")
    assert "my_train" not in sys.modules


# --- named ---


def at_the_top():
    return torch.nn.Linear(1, 1), lambda model, batch_size: None


def test_importable_functions_are_named_by_their_module(folder):
    write(folder / "train.py")
    assert name_of("train.py:build") == "train.py:build"
    assert refused(lambda: name_of("tarin.py:build")).startswith("there is no file")
    assert name_of(at_the_top) == f"{__name__}:at_the_top"


def test_a_function_of_a_script_is_named_by_its_file(monkeypatch):
    main = types.ModuleType("__main__")
    main.__file__, main.build = "/somewhere/train.py", at_the_top
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(at_the_top, "__module__", "__main__")
    monkeypatch.setattr(at_the_top, "__qualname__", "build")
    assert name_of(at_the_top) == "/somewhere/train.py:build"
    del main.__file__
    with pytest.raises(InvalidArgumentError, match="was defined interactively"):
        name_of(at_the_top)
