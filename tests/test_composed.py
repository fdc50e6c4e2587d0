"""Whatever a loop is composed of, training after a probe equals training without one."""

import itertools
import random

import pytest
import torch
from composed import PARTS, Trainer
from ledger import MIB, LedgerDevice, Log
from test_training_goes_on import different, picture

import oomprobe


def train(trainer, calls=12):
    losses = [picture(trainer.step(trainer.model, 4)) for _ in range(calls)]
    return {"losses": losses, **seen(trainer)}


def seen(trainer):
    model, optimizer = trainer.model, trainer.optimizer
    attributes = [[(name, picture(value)) for name, value in sorted(vars(p).items())] for p in model.parameters()]
    kept = vars(trainer) | {"model": [*model.parameters()], "optimizer": optimizer.state_dict(), "feed": None}
    kept["calls"] = vars(model).get("calls")
    order = {id(p): place for place, p in enumerate(model.parameters())}
    groups = [[order.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    return {name: picture(value) for name, value in kept.items()} | {"attributes": attributes, "groups": groups}


def shapes(picture):
    """Return what decides about memory in a picture: everything but the values in tensors."""
    if isinstance(picture, tuple) and picture and picture[0] in ("Tensor", "Parameter"):
        return picture[:3], picture[4:]
    if isinstance(picture, dict):
        return {name: shapes(value) for name, value in picture.items()}
    return [shapes(one) for one in picture] if isinstance(picture, tuple | list) else picture


FACTORS = (*PARTS, "mid-training", "out of memory")
RUNS = list(
    itertools.combinations(range(6), 4)
)  # of each factor: then each two of them are in a run together, and apart


@pytest.mark.parametrize("run", range(7))
def test_training_after_a_probe_equals_training_without(run):
    parts = {factor for factor, runs in zip(FACTORS, RUNS, strict=False) if run == 6 or run in runs}
    fails = "out of memory" in parts
    untouched, probed = Trainer(parts), Trainer(parts)
    for trainer in (untouched, probed):
        for _ in range(4 if "mid-training" in parts else 0):
            trainer.step(trainer.model, 4)
    device, before = LedgerDevice(10 * MIB), seen(probed)
    parameters = [id(p) for p in probed.model.parameters()]
    starts, draws = Log(), Log()

    def step(model, batch_size):
        if len(starts) < len(device.caps):
            starts.append(seen(probed))
            draws.append((random.random(), torch.rand(()).item()))
        probed.step(model, batch_size)
        device.take(batch_size * MIB if fails else 0)  # after the step has frozen, replaced and counted something

    result = oomprobe.find_max_batch(
        probed.model, step, device=device, max_batch=None if fails else 8, memory_fraction=1.0, progress="off"
    )
    assert result.batch_size == (10 if fails else 8)
    assert different(before, seen(probed)) == set()
    if "replaced parameter" not in parts:  # a step that replaces one frees it
        assert [id(p) for p in probed.model.parameters()] == parameters
    if "iterator" not in parts:  # every trial starts as the first did, but for the values of the weights
        assert {str(shapes(start)) for start in starts} == {str(shapes(before))}
    assert len(set(draws)) == 1
    lost = [note for note in result.notes if note.startswith("not restored: ")]
    assert bool(lost) == ("iterator" in parts) == (not result.state_verified), result.notes
    assert all("feed (an iterator)" in note and "," not in note for note in lost), lost
    assert different(train(probed), train(untouched)) == set()
