import pytest
import torch
from ledger import MIB, LedgerDevice
from torch import nn

import oomprobe
from oomprobe.anatomy import Anatomy, AnatomyCounter


def counted(model, *args, batch_size=2, **kwargs):
    with AnatomyCounter(model, batch_size) as counter:
        model(*args, **kwargs)
    return counter.anatomy


def test_leaves_are_counted_and_containers_are_not():
    model = nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 3)))
    assert counted(model, torch.zeros(2, 8)) == Anatomy(parameters=51, sample_elements=8, activation_elements=4 + 4 + 3)


def test_inputs_by_keyword_and_in_containers_count():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, batch, *, mask):
            return self.inner(batch["x"]) + mask

    got = counted(Takes(), {"x": torch.zeros(2, 5)}, mask=torch.zeros(2, 5))
    assert (got.sample_elements, got.activation_elements) == (10, 5)


def test_frozen_parameters_are_not_trained():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    assert counted(model, torch.zeros(2, 8)).parameters == 5


def test_of_several_calls_the_largest_counts():
    model = nn.Identity()
    with AnatomyCounter(model, 1) as counter:
        for width in (3, 30, 6):
            model(torch.zeros(1, width))
    assert counter.anatomy.activation_elements == 30


def test_nothing_called_is_nothing_known():
    with AnatomyCounter(nn.Identity(), 1) as counter:
        torch.ones(3)
    assert counter.anatomy is None


@pytest.mark.parametrize("error", [None, ValueError])
def test_the_hooks_are_gone_afterwards(error):
    class Fails(nn.Module):
        def forward(self, x):
            if error:
                raise error
            return x

    model = Fails()
    before = str(vars(model))
    try:
        counted(model, torch.zeros(2, 1))
    except ValueError:
        assert error
    assert str(vars(model)) == before


# --- in a probe ---

FIRST = "available / 4 / (elements of a sample + parameters)"


def build():
    model = nn.Linear(100, 10)

    def step(model, batch_size):
        model(torch.randn(batch_size, 100)).sum().backward()

    return model, step


@pytest.mark.parametrize("isolate", [False, True])
def test_a_probe_tells_what_the_rules_would_have_answered(isolate):
    result = oomprobe.probe_target(build, isolate=isolate, device="cpu:1GiB", max_batch=8, progress="off")
    assert result.estimates[FIRST] == result.available_bytes // 4 // (100 + 1010)
    assert f"{FIRST}: " in str(result)
    assert "times the answer" in " ".join(str(result).split())


def test_it_costs_one_call_at_a_small_size_and_no_trial():
    device, sizes, at_end_of_trials = LedgerDevice(100 * MIB), [], []

    def step(model, batch_size):
        sizes.append(batch_size)
        device.take(batch_size * MIB)
        model(torch.zeros(batch_size, 1))

    def watch(trial):
        at_end_of_trials.append(len(sizes))

    result = oomprobe.find_max_batch(nn.Linear(1, 1), step, device=device, progress=watch)
    assert result.batch_size == 90
    assert sizes[at_end_of_trials[-1] :] == [1]


def test_a_call_that_fails_then_takes_no_answer_away():
    device, done = LedgerDevice(100 * MIB), []

    def step(model, batch_size):
        if done:
            raise ValueError("the data is used up")
        device.take(batch_size * MIB)
        model(torch.zeros(batch_size, 1))

    def watch(trial):
        if trial.phase == "confirm":
            done.append(trial)

    result = oomprobe.find_max_batch(nn.Linear(1, 1), step, device=device, progress=watch)
    assert result.batch_size == 90
    assert FIRST not in result.estimates
