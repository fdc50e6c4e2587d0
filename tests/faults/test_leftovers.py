"""A probe leaves nothing behind: not in the model, the process, memory or logs."""

import contextlib
import gc
import logging
import logging.handlers
import multiprocessing
import sys
import time
import weakref

import pytest
import torch
from helpers import Training
from ledger import MIB, Log
from torch.utils.data import DataLoader

from faults.card import CARD, trained
from oomprobe import (
    NothingFitsError,
    OomProbeError,
    Step,
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


@pytest.mark.parametrize(
    ("fault", "options", "ends"),
    [
        (lambda batch_size: None, {}, None),
        (lambda batch_size: CARD.take(2 * CARD.total_bytes), {}, NothingFitsError),
        (raises(KeyError("labels")), {}, StepFailedError),
        (raises(KeyboardInterrupt()), {}, KeyboardInterrupt),
        (raises(SystemExit(3)), {}, SystemExit),
        (sleeps, {"trial_time_limit_s": 0.3}, TimeLimitError),
    ],
    ids=["answer", "nothing fits", "bug", "ctrl-c", "exit", "time limit"],
)
def test_training_state_is_restored_however_a_probe_ends(fault, options, ends):
    training = Training(warm_steps=1)
    before = training.picture()

    def step(model, batch_size):
        CARD.take(batch_size * MIB)
        training.step(model, batch_size)
        fault(batch_size)

    with pytest.raises(ends) if ends else contextlib.nullcontext():
        find_max_batch(training.model, step, device=CARD, min_batch=2, **QUIET, **options)
    assert training.picture() == before
    assert CARD.limit == CARD.total_bytes


@pytest.mark.parametrize(
    ("device", "fault", "ends"),
    [
        ("sim:1GiB", lambda batch_size: None, None),
        (CARD, raises(KeyError("labels")), StepFailedError),
    ],
    ids=["simulated", "bug"],
)
def test_no_worker_of_a_data_loader_is_left(device, fault, ends):
    training, loaders = Training(), {}

    def step(model, batch_size):
        if batch_size not in loaders:
            data = range(64 * batch_size)
            # Tensors would be shared through a socket in the folder of temporary files, whose path is too long here.
            loader = DataLoader(
                data, batch_size, num_workers=1, persistent_workers=True, collate_fn=list
            )
            loaders[batch_size] = iter(loader)
        next(loaders[batch_size])
        training.step(model, batch_size)
        fault(batch_size)

    with (
        pytest.raises(ends) if ends else contextlib.nullcontext() as caught
    ):  # a caught error keeps its traceback
        find_max_batch(training.model, step, device=device, min_batch=2, max_batch=4, **QUIET)
    assert not multiprocessing.active_children()
    del caught


def sets_everything():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    sys.path.insert(0, "/nowhere")
    return trained()


def test_a_targets_settings_stay_in_its_process():
    result = probe_target(
        sets_everything, device=CARD, max_batch=2, **QUIET
    )  # the fixture compares the settings
    assert (result.batch_size, result.state_verified) == (2, True)


@pytest.mark.parametrize("is_loop", [True, False])
def test_no_trial_error_or_log_record_holds_memory_of_a_step(is_loop):
    log, kept, activations, alive = (
        logging.handlers.MemoryHandler(10**6, flushLevel=100),
        [],
        Log(),
        Log(),
    )
    logging.getLogger().addHandler(log)
    model, step = trained(lambda batch_size: batch_size > 2 and CARD.take(2 * CARD.total_bytes))

    def failing(model, batch_size):
        alive.append(sum(reference() is not None for reference in activations))
        held = torch.ones(batch_size)
        activations.append(weakref.ref(held))
        step(model, batch_size)

    function = Step(failing, is_loop=is_loop)
    gc.disable()  # so that a reference cycle is not collected by chance
    try:
        result = find_max_batch(
            model, function, device=CARD, memory_fraction=1.0, progress=kept.append
        )
        assert result.batch_size == 2
        assert any(not trial.passed for trial in kept)
        assert len(activations) > 50
        assert not any(reference() is not None for reference in activations)
        assert not any(record.exc_info for record in log.buffer)
        with pytest.raises(OomProbeError) as error:
            find_max_batch(model, function, device=CARD, min_batch=3, **QUIET)
        kept.append(error.value)
        del error
        assert not any(reference() is not None for reference in activations)
        assert set(alive) == ({0, 1} if is_loop else {0})  # of the last call, in the same trial
    finally:
        gc.enable()
        logging.getLogger().removeHandler(log)
