"""What `preserve` may be."""

import pytest
import torch
from torch import nn

import oomprobe
from oomprobe.errors import InvalidArgumentError
from oomprobe.state import preserved


def probe(preserve, step=lambda model, batch_size: None):
    return oomprobe.find_max_batch(
        nn.Linear(1, 1), step, device="cpu:1GiB", max_batch=1, preserve=preserve, progress="off"
    )


def test_none_and_one_object_with_state():
    scaler, network = torch.amp.GradScaler("cpu"), nn.Sequential(nn.Linear(1, 1))
    assert preserved(None) == preserved(()) == []
    assert preserved(scaler) == preserved([scaler]) == [scaler]
    assert preserved(network) == [network]
    kept = iter([scaler])
    assert preserved(kept) == [scaler]


def test_one_object_is_given_back():
    scaler = torch.amp.GradScaler("cpu", growth_factor=8.0)

    def step(model, batch_size):
        torch.zeros(batch_size, 100) @ torch.zeros(100, 10)
        held[0].set_growth_factor(4.0)

    held = [scaler]
    hidden = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    assert probe(scaler, step).state_verified
    assert scaler.get_growth_factor() == 8.0
    assert probe(hidden, step).state_verified
    assert probe(None, step).state_verified


@pytest.mark.parametrize(
    ("given", "said"),
    [(3, "preserve is a int"), (object(), "preserve is a object"), ({"a": 1}, "preserve holds a str")],
)
def test_what_has_no_state_is_refused(given, said):
    with pytest.raises(InvalidArgumentError, match=said):
        probe(given)
