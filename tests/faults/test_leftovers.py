"""What a probe leaves: nothing in the model, in the process, in memory or in logs."""

import contextlib
import gc
import logging
import logging.handlers
import sys
import time
import weakref

import pytest
import torch
from test_state import Training
from torch import nn

from faults.card import CARD, ROOM, SAMPLE_BYTES, trained
from oomprobe import (
    NothingFitsError,
    OomProbeError,
    StepFailedError,
    TimeLimitError,
    find_max_batch,
    probe_target,
)

QUIET = {"progress": "off"}


def raises(error):
    def fault(batch_size):
        if batch_size == 4:
            raise error

    return fault


def sleeps(batch_size):
    if batch_size == 4:
        time.sleep(60)


# --- 3: the model, the optimizer, the schedule and the random numbers ---


@pytest.mark.parametrize(
    ("fault", "options", "ends"),
    [
        (lambda batch_size: None, {}, None),
        (lambda batch_size: CARD.fake.alloc(2 * CARD.total_bytes), {}, NothingFitsError),
        (raises(KeyError("labels")), {}, StepFailedError),
        (raises(KeyboardInterrupt()), {}, KeyboardInterrupt),
        (raises(SystemExit(3)), {}, SystemExit),
        (sleeps, {"trial_time_limit_s": 0.3}, TimeLimitError),
    ],
    ids=["answer", "nothing fits", "bug", "ctrl-c", "exit", "time limit"],
)
def test_row_03_everything_is_as_it_was(fault, options, ends):
    training = Training(warm_steps=1)
    before = training.picture()
    CARD.fake.set_per_process_memory_fraction(0.75)

    def step(model, batch_size):
        held = CARD.fake.alloc(SAMPLE_BYTES * batch_size)
        training.step(model, batch_size)
        fault(batch_size)
        return held

    with pytest.raises(ends) if ends else contextlib.nullcontext():
        find_max_batch(training.model, step, device=CARD, min_batch=2, **QUIET, **options)
    assert training.picture() == before
    assert CARD.fake.get_per_process_memory_fraction() == 0.75  # row 28 too


# --- 7: memory of a trial that failed ---


def test_row_07_no_failed_trial_is_alive_in_the_next():
    """Without the garbage collector: what is held is held by a name."""
    alive, before = [], []
    model = nn.Linear(2, 2)

    class Activations:
        pass

    def step(model, batch_size):
        before.append(sum(one() is not None for one in alive))
        activations = Activations()
        activations.held = CARD.fake.alloc(SAMPLE_BYTES * batch_size) if batch_size <= ROOM else None
        alive.append(weakref.ref(activations))
        if batch_size > ROOM:
            CARD.fake.alloc(SAMPLE_BYTES * batch_size)
        model(torch.randn(batch_size, 2)).sum().backward()

    gc.disable()
    try:
        result = find_max_batch(model, step, device=CARD, memory_fraction=1.0, **QUIET)
    finally:
        gc.enable()
    assert result.batch_size == ROOM
    assert any(not t.passed for t in result.trials)
    assert set(before) == {0}


# --- 28: settings of the process and of the card (those of the process are in the fixture of all tests here) ---


def sets_everything():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    sys.path.insert(0, "/nowhere")
    return trained()


def test_row_28_a_targets_settings_stay_in_its_process():
    result = probe_target(sets_everything, device=CARD, max_batch=2, **QUIET)
    assert (result.batch_size, result.state_verified) == (2, True)


# --- 32: logs ---


def test_row_32_records_hold_texts_alone():
    """Whatever a program hoards of a probe (its trials, its error, log records) holds no memory of a step."""
    hoard, log, made = [], logging.handlers.MemoryHandler(10**6, flushLevel=100), []
    logging.getLogger().addHandler(log)
    model, step = trained()

    def failing(model, batch_size):
        held = step(model, batch_size)
        made.append(weakref.ref(held))
        if batch_size > 2:
            CARD.fake.alloc(2 * CARD.total_bytes)
        return held

    try:
        result = find_max_batch(model, failing, device=CARD, memory_fraction=1.0, progress=hoard.append)
        assert result.batch_size == 2
        assert any(not trial.passed for trial in hoard)
        assert not any(one() for one in made)
        assert not any(record.exc_info for record in log.buffer)
        with pytest.raises(OomProbeError) as error:
            find_max_batch(model, failing, device=CARD, min_batch=3, progress="off")
        hoard.append(error.value)
        del error
        assert not any(one() for one in made)
    finally:
        logging.getLogger().removeHandler(log)
