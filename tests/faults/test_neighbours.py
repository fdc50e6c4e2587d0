"""Others on the card, who take and return memory, and whom a fault would kill."""

import weakref

import pytest
import tenacity
from fake_accelerator import MIB, ledger

from faults.card import CARD, scanned, trained
from oomprobe import Verdict, find_max_batch

QUIET = {"progress": "off"}
TOTAL, FIXED, SAMPLE = 1024 * MIB, 64 * MIB, 32 * MIB


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("oomprobe.session.WAIT", tenacity.wait_none())


def alone():
    return scanned(lambda n: FIXED + n * SAMPLE <= int(0.9 * TOTAL), largest=64)


def shared_with(schedule):
    """A card whose other user holds `schedule(call number, batch size)` bytes."""

    def move(fake, batch_size, number):
        fake.outside_bytes = schedule(number, batch_size)

    return ledger(total_bytes=TOTAL, fixed_bytes=FIXED, per_sample_bytes=SAMPLE, before_alloc=move)


@pytest.mark.parametrize("first", [4, 12, 20])
def test_row_11_a_passing_neighbour_changes_no_answer(first):
    device, model, step, called = shared_with(lambda number, _: 600 * MIB if first <= number < first + 3 else 0)
    result = find_max_batch(model, step, device=device, **QUIET)
    assert len(called) > first
    assert (result.batch_size, result.contaminated) == (alone(), False)


def test_row_29_a_waiting_trial_keeps_nothing_alive(monkeypatch):
    kept, alive = [], []

    def wait(state):
        alive.append([one() for one in kept if one() is not None])
        CARD.fake.outside_bytes = 0
        return 0

    monkeypatch.setattr("oomprobe.session.WAIT", wait)
    model, step = trained()

    def watched(model, batch_size):
        held = step(model, batch_size)
        kept.append(weakref.ref(held))
        if batch_size == 4 and CARD.fake.outside_bytes == 0 and not alive:
            CARD.fake.outside_bytes = 600 * MIB
            CARD.fake.alloc(2 * CARD.total_bytes)
        return held

    result = find_max_batch(model, watched, device=CARD, memory_fraction=1.0, **QUIET)
    assert alive
    assert not any(alive)
    assert Verdict.FITS in [t.verdict for t in result.trials]
