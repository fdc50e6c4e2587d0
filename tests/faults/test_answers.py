"""Answers under faults: the size ran, the margin is memory, and the report says what is doubtful."""

import pytest
import torch
from fake_accelerator import MIB
from torch import nn

from faults.card import CARD, ROOM, SAMPLE_BYTES, trained
from oomprobe import UnreliableError, find_max_batch
from oomprobe.records import fit

QUIET = {"progress": "off"}


def does_nothing(model, batch_size):
    return None


def ignores_its_size(model, batch_size):
    model(torch.ones(4, 2)).sum().backward()


@pytest.mark.parametrize("step", [does_nothing, ignores_its_size])
def test_a_step_that_does_no_work_has_no_answer(step):
    with pytest.raises(UnreliableError, match=r"no torch operator|ignores batch_size"):
        find_max_batch(nn.Linear(2, 2), step, device="cpu:1GiB", **QUIET)


def test_a_wrong_linear_fit_changes_no_answer(monkeypatch):
    wrong = fit.LinearFit(
        fixed_bytes=0, bytes_per_sample=1e-9, r_squared=1, max_relative_error=0, predicted_max_batch=253731
    )
    monkeypatch.setattr("oomprobe.probing.summary.fit_line", lambda points, budget: wrong)
    result = find_max_batch(*trained(), device=CARD, memory_fraction=1.0, **QUIET)
    assert (result.batch_size, result.fit) == (ROOM, wrong)


@pytest.mark.parametrize("pressed", [True, False])
def test_an_answer_that_needs_retries_at_each_call_is_marginal(pressed):
    model = nn.Linear(2, 2)

    def step(model, batch_size):
        first = CARD.fake.alloc(SAMPLE_BYTES * batch_size)
        del first  # cached: only an allocation of the same size reuses it
        second = CARD.fake.alloc(SAMPLE_BYTES * batch_size - (MIB if pressed else 0))
        model(torch.randn(batch_size, 2)).sum().backward()
        return second

    result = find_max_batch(model, step, device=CARD, memory_fraction=1.0, **QUIET)
    assert result.batch_size == ROOM
    assert any(note.startswith("marginal: ") for note in result.notes) is pressed
