import gc
import weakref
from pathlib import Path

import pytest
import torch

from oomprobe.verdicts.failure import MAX_TEXT, failure_of


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")


def in_a_users_function():
    FailsBackward.apply(torch.ones(2, requires_grad=True)).sum().backward()


def in_a_layer():
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(4, 5))


def in_backward():
    x = torch.ones(2, requires_grad=True)
    (x * 2).backward()


def in_an_optimizer():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = torch.ones(7)
    optimizer.step()


def backward():
    raise ValueError("mine")


def failure_in(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011  any exception may come
        call()
    return failure_of(caught.value)


@pytest.mark.parametrize(
    ("call", "part", "raises"),
    [
        (in_a_layer, "forward", in_a_layer),
        (in_backward, "backward", in_backward),
        (in_a_users_function, "backward", FailsBackward.backward),
        (in_an_optimizer, "optimizer", in_an_optimizer),
        (backward, "forward", backward),
    ],
)
def test_the_location_is_the_users_line(call, part, raises):
    last_line = max(line for *_, line in raises.__code__.co_lines() if line)
    assert failure_in(call).where == f"{part}, {Path(__file__).name}:{last_line}"


def test_folders_of_the_user_may_have_names_of_torch():
    for path, function in {
        "/home/me/torch/optim/train.py": "train",
        "/home/me/net/__init__.py": "backward",
    }.items():
        namespace = {}
        exec(compile(f"def {function}():\n    raise ValueError", path, "exec"), namespace)
        assert failure_in(namespace[function]).where == f"forward, {Path(path).name}:2"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("labels"), "KeyError: 'labels'"),
        (AssertionError(), "AssertionError:"),
        (ValueError("x" * 10**6), f"ValueError: {'x' * (MAX_TEXT - 16)} ..."),
        (ValueError("x" * (MAX_TEXT - 12)), f"ValueError: {'x' * (MAX_TEXT - 12)}"),
    ],
    ids=["a key", "no text", "long", "just short enough"],
)
def test_the_text_is_the_class_and_the_message(error, text):
    assert (failure_of(error).text, failure_of(error).where) == (text, None)
    assert len(text) <= MAX_TEXT


class Activation:
    """An object in a frame of the failed step that takes weak references."""


@pytest.mark.parametrize(
    ("keep", "dies"), [(failure_of, True), (lambda error: error, False)], ids=["failure", "error"]
)
def test_a_failure_keeps_no_frames(keep, dies):
    watched = []

    def step():
        activation = Activation()
        watched.append(weakref.ref(activation))
        try:
            raise KeyError("inner")
        except KeyError:
            raise RuntimeError(f"with {type(activation).__name__} in the frame")  # noqa: B904  an implicit chain

    gc.disable()
    try:
        step()
    except RuntimeError as error:
        kept = keep(error)
    finally:
        gc.enable()
    assert kept is not None
    assert (watched[0]() is None) == dies
