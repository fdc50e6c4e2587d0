"""Tensors that lack what others have, wherever a step holds them: each is put up with, or refused in a sentence."""

import contextlib

import pytest
import torch
from ledger import LedgerDevice
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedParameter

import oomprobe

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of each kind that is a prototype


def inference():
    with torch.inference_mode():
        return torch.zeros(4)


def inside_vmap():
    seen = []

    def keep(x):
        seen.append(x)
        return x

    torch.func.vmap(keep)(torch.ones(3))
    return seen[0]


def fake():
    with FakeTensorMode():
        return torch.ones(3)


def without_memory():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


PLAIN = {
    "inference": inference,
    "fp8": lambda: torch.zeros(2).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.zeros(2, dtype=torch.uint16),
    "not a leaf": lambda: torch.ones(2, requires_grad=True) * 2,
    "empty": lambda: torch.empty(0),
    "without memory": without_memory,
}
ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "inside vmap": inside_vmap,
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.ones(2, device="meta"),
    "fake": fake,
    "lazy parameter": UninitializedParameter,
}


PLACES = ("held", "attribute", "buffer")
DEVICES = pytest.mark.parametrize(
    "device", [LedgerDevice, lambda: "sim:1GiB"], ids=["ledger", "simulated"]
)


def check(tensors, place, device):
    """Check a step that holds tensors in a closure, a dict, a list and a tuple, or whose model has them."""
    model, held = nn.Linear(2, 2), {}
    optimizer = torch.optim.AdamW(model.parameters())
    in_closure = tensors if place == "held" else None
    for number, tensor in enumerate(tensors):
        if place == "attribute":
            setattr(model, f"extra{number}", tensor)
        elif place == "buffer":
            model.register_buffer(f"extra{number}", tensor, persistent=False)
        else:
            held |= {
                number: tensor,
                "list": [*held.get("list", []), tensor],
                "tuple": (held.get("tuple"), tensor),
            }

    def step(model, batch_size):
        held["itself"] = in_closure
        optimizer.zero_grad()
        nn.functional.linear(torch.ones(batch_size, 2), model.weight, model.bias).sum().backward()
        optimizer.step()

    return oomprobe.check(model, step, 2, device=device(), progress="off")


@DEVICES
@pytest.mark.parametrize("place", PLACES)
def test_dense_tensors_may_be_anywhere(place, device):
    assert check([make() for make in PLAIN.values()], place, device).state_verified


@DEVICES
def test_others_may_be_held(device):
    tensors = [make() for make in ODD.values()]
    assert (
        check([tensor for tensor in tensors if not tensor.requires_grad], "held", device).batch_size
        == 2
    )


@pytest.mark.parametrize("kind", ODD)
def test_others_may_be_put_back_or_are_refused(kind):
    for place, device in (
        ("attribute", LedgerDevice),
        ("buffer", LedgerDevice),
        ("buffer", lambda: "sim:1GiB"),
    ):
        with contextlib.suppress(oomprobe.OomProbeError):
            check([ODD[kind]()], place, device)
