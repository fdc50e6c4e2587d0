"""Other processes on the card that take and return memory."""

import weakref

import pytest
from fake_accelerator import MIB, ledger
from helpers import find_hastily
from ledger import Log

from faults.card import CARD, scanned, trained
from oomprobe import Verdict
from oomprobe.records.patience import Patience

TOTAL, FIXED, SAMPLE = 1024 * MIB, 64 * MIB, 32 * MIB


@pytest.mark.parametrize("first", [4, 12, 20])
def test_a_neighbour_for_three_calls_changes_no_answer(first):
    def share(fake, batch_size, call):
        fake.outside_bytes = 600 * MIB if first <= call < first + 3 else 0

    device, model, step, called = ledger(FIXED, SAMPLE, before_alloc=share, total_bytes=TOTAL)
    result = find_hastily(Patience(sleep=lambda seconds: None), model, step, device=device)
    assert len(called) > first
    alone = scanned(lambda n: FIXED + n * SAMPLE <= int(0.9 * TOTAL), largest=64)
    assert (result.batch_size, result.contaminated) == (alone, False)


def test_nothing_of_a_trial_is_alive_while_its_repetition_waits():
    activations, alive = Log(), Log()

    def wait(seconds):
        alive.append([reference() for reference in activations if reference() is not None])
        CARD.fake.outside_bytes = 0

    model, step = trained()

    def watched(model, batch_size):
        held = step(model, batch_size)
        activations.append(weakref.ref(held))
        if batch_size == 4 and CARD.fake.outside_bytes == 0 and not alive:
            CARD.fake.outside_bytes = 600 * MIB
            CARD.fake.alloc(2 * CARD.total_bytes)
        return held

    result = find_hastily(Patience(sleep=wait), model, watched, device=CARD, memory_fraction=1.0)
    assert alive
    assert not any(alive)
    assert Verdict.FITS in [t.verdict for t in result.trials]
