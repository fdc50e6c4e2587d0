"""Context managers that leave exceptions alone: of any class, with their own traceback, and no cycle through it."""

import contextlib
import dataclasses
import gc
import resource
import traceback
import weakref

import fake_accelerator
import pytest
import torch
from ledger import LedgerDevice
from torch import nn

import oomprobe
from oomprobe.cli import main
from oomprobe.devices.host import HostDevice
from oomprobe.scope import scope

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int = 3


class Immutable(Exception):
    def __setattr__(self, name, value):
        raise RuntimeError("immutable")


class ImmutableBase(BaseException):
    def __setattr__(self, name, value):
        raise RuntimeError("immutable")


class ImmutableInterrupt(KeyboardInterrupt):
    def __setattr__(self, name, value):
        raise RuntimeError("immutable")


@scope
def told(seen):
    seen.append("in")
    try:
        yield len(seen)
    finally:
        seen.append("out")


def test_it_gives_what_the_body_yields_and_leaves_once():
    seen = []
    with told(seen) as value:
        seen.append("inside")
    assert (value, seen) == (1, ["in", "inside", "out"])


@pytest.mark.parametrize("own", [Frozen(), Immutable(), ImmutableBase(), StopIteration(3), KeyboardInterrupt()])
def test_every_exception_passes_as_it_is(own):
    seen = []
    with pytest.raises(type(own)) as caught, told(seen):
        raise own
    assert caught.value is own
    assert (own.__context__, own.__cause__) == (None, None)
    assert seen == ["in", "out"]
    assert [f.name for f in traceback.extract_tb(own.__traceback__)] == ["test_every_exception_passes_as_it_is"]


def test_a_stop_iteration_of_the_body_itself_is_no_end():
    @scope
    def ends():
        yield
        raise StopIteration

    with pytest.raises(RuntimeError), ends():
        pass


def test_a_body_may_raise_another_or_handle_it():
    @scope
    def replaces():
        try:
            yield
        except KeyError as error:
            raise ValueError("other") from error

    @scope
    def handles():
        with contextlib.suppress(KeyError):
            yield

    with pytest.raises(ValueError, match="other") as caught, replaces():
        raise KeyError
    assert isinstance(caught.value.__cause__, KeyError)
    with handles():
        raise KeyError


def test_an_exception_that_passed_dies_without_the_garbage_collector():
    class Held:
        pass

    def fail():
        held = Held()
        watched.append(weakref.ref(held))
        with told([]):
            raise KeyError

    watched = []
    gc.disable()
    try:
        with contextlib.suppress(KeyError):
            fail()
        assert watched[0]() is None
    finally:
        gc.enable()


# --- where a step's exception passes ---


def devices():
    return {"ledger": LedgerDevice(), "accelerator": fake_accelerator.ledger()[0]}


@pytest.mark.parametrize("name", ["ledger", "accelerator"])
@pytest.mark.parametrize("own", [Frozen(), Immutable()])
def test_a_step_that_fails_is_told_with_its_own_exception(name, own):
    def step(model, batch_size):
        raise own

    with pytest.raises(oomprobe.StepFailedError, match=type(own).__name__) as caught:
        oomprobe.find_max_batch(nn.Linear(2, 2), step, device=devices()[name], progress="off", max_batch=4)
    assert caught.value.__cause__ is own
    assert caught.value.batch_size == 1
    assert len(caught.value.trials) == 0


@pytest.mark.parametrize("name", ["ledger", "accelerator"])
@pytest.mark.parametrize("own", [ImmutableBase(), ImmutableInterrupt()])
def test_what_is_no_exception_arrives_as_it_is_and_everything_is_restored(name, own):
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()

    def step(model, batch_size):
        nn.init.zeros_(model.weight)
        if batch_size > 1:
            raise own

    with pytest.raises(type(own)) as caught:
        oomprobe.find_max_batch(model, step, device=devices()[name], progress="off", max_batch=4)
    assert caught.value is own
    assert torch.equal(model.weight, before)
    if isinstance(own, KeyboardInterrupt):
        assert "the trials so far" in own.__notes__[0]


def test_a_failure_while_gradients_accumulate():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = LedgerDevice()
    own = Frozen()

    def step(model, batch_size):
        if "step" in vars(optimizer):  # held back: the micro-batches of the plan
            raise own
        device.take(batch_size * 100 * MIB)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    result = oomprobe.find_max_batch(model, step, device=device, global_batch=64, progress="off")
    assert any("Frozen" in note for note in result.notes), result.notes


def test_leaving_with_a_limit_restores_it():
    before = resource.getrlimit(resource.RLIMIT_AS)
    own = Frozen()
    with pytest.raises(Frozen) as caught, HostDevice(64 * MIB).cap(32 * MIB):
        raise own
    assert caught.value is own
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_target_that_leaves_while_stdout_is_kept(tmp_path, capsys):
    target = tmp_path / "leaves.py"
    target.write_text(
        "class Leaves(SystemExit):\n"
        "    def __setattr__(self, name, value):\n"
        "        raise RuntimeError('immutable')\n"
        "def build():\n"
        "    raise Leaves(7)\n"
    )
    assert main(["run", f"{target}:build", "--quiet"]) == 3
    assert "left the process" in capsys.readouterr().err
