import gc
import weakref
from pathlib import Path

import pytest
import torch

from oomprobe.verdicts.failure import MAX_TEXT, failure_of

HERE = Path(__file__).name


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")  # backward: a user's function


class FailingSGD(torch.optim.SGD):
    def step(self, closure=None):
        raise ValueError("in step")  # optimizer: a user's optimizer


def in_a_users_function():
    FailsBackward.apply(torch.ones(2, requires_grad=True)).sum().backward()


def in_a_layer():
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(4, 5))  # forward: a wrong shape


def in_backward():
    x = torch.ones(2, requires_grad=True)
    (x * 2).backward()  # backward: not a scalar


def in_the_engine():
    torch.autograd.backward([torch.ones(2, requires_grad=True) * 2])  # backward: the engine itself


def in_an_optimizer():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = torch.ones(7)
    optimizer.step()  # optimizer: the state has another shape


def in_a_users_optimizer():
    FailingSGD([torch.nn.Parameter(torch.ones(3))], lr=0.1).step()


def backward():
    raise ValueError("mine")  # forward: a function that happens to be named backward


PLACES = {
    in_a_layer: "forward: a wrong shape",
    in_backward: "backward: not a scalar",
    in_a_users_function: "backward: a user's function",
    in_the_engine: "backward: the engine itself",
    in_an_optimizer: "optimizer: the state has another shape",
    in_a_users_optimizer: "optimizer: a user's optimizer",
    backward: "forward: a function that happens to be named backward",
}


def line_of(mark):
    """Return the number of the line of this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    [number] = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return number


def failure_in(call):
    try:
        call()
    except Exception as error:
        return failure_of(error)
    raise AssertionError("nothing was raised")


# --- location ---


@pytest.mark.parametrize("call", PLACES, ids=lambda call: call.__name__)
def test_the_location_is_the_users_line(call):
    part = PLACES[call].partition(":")[0]
    assert failure_in(call).where == f"{part}, {HERE}:{line_of(PLACES[call])}"


def test_folders_of_the_user_may_have_names_of_torch():
    for path, function in {"/home/me/torch/optim/train.py": "train", "/home/me/net/__init__.py": "backward"}.items():
        namespace = {}
        exec(compile(f"def {function}():\n    raise ValueError", path, "exec"), namespace)
        assert failure_in(namespace[function]).where == f"forward, {Path(path).name}:2"


# --- text ---


class Speechless(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("labels"), "KeyError: 'labels'"),
        (AssertionError(), "AssertionError:"),
        (Speechless(), "Speechless: (no text)"),
        (ValueError("x" * 10**6), f"ValueError: {'x' * (MAX_TEXT - 16)} ..."),
    ],
    ids=["a key", "no text", "fails", "long"],
)
def test_the_text_is_the_class_and_the_message(error, text):
    assert (failure_of(error).text, failure_of(error).where) == (text, None)
    assert len(text) <= MAX_TEXT


# --- references ---


class Activation:
    """An object in a frame of the failed step that takes weak references."""


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize(("keep", "dies"), [(failure_of, True), (lambda error: error, False)], ids=["failure", "error"])
def test_a_failure_keeps_no_frames(keep, dies):
    watched, kept = [], None

    def step():
        activation = Activation()
        watched.append(weakref.ref(activation))
        try:
            raise KeyError("inner")
        except KeyError:
            raise RuntimeError(f"with {type(activation).__name__} in the frame")  # noqa: B904  an implicit chain

    try:
        step()
    except RuntimeError as error:
        kept = keep(error)
    assert kept is not None
    assert (watched[0]() is None) == dies
