"""A probe restores the user's state.

The trials run in this process on a ledger device: trials on host memory run in children, and could not change anything.
"""

import collections
import copy
import gc
import mmap
import sys
import threading
import warnings
import weakref

import ledger
import numpy as np
import pytest
import torch
from composed import Average, Hidden
from helpers import Training, bits
from ledger import Box, Log
from processes import start
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from zoo import training_step

from oomprobe import Step
from oomprobe.errors import InvalidArgumentError, UnreliableError
from oomprobe.ground import linux
from oomprobe.state import Snapshot, Tracker, snapshot
from oomprobe.state.compare import same
from oomprobe.state.tensors import PIECE_WORDS, StorageCopy


def probe(model, step, **options):
    return ledger.probe(model, step, **{"max_batch": 4, **options})


# --- what a probe checks at its end ---


SKIPPED = [
    (snapshot.Snapshot, "restore"),
    (snapshot.Surroundings, "restore"),
    (StorageCopy, "write"),
]


@pytest.mark.parametrize(("owner", "name"), SKIPPED)
def test_a_skipped_restore_is_noticed(monkeypatch, owner, name):
    training = Training(warm_steps=1)
    monkeypatch.setattr(owner, name, lambda self, **_: [])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)

    def step(model, batch_size):
        torch.backends.cudnn.benchmark = True
        training.step(model, batch_size)

    with pytest.raises(UnreliableError, match="not everything came back"):
        probe(training.model, step, min_batch=2)


def linear(**attributes):
    model = nn.Linear(2, 2)
    vars(model).update(attributes)
    return model


@pytest.mark.filterwarnings("ignore:.*norm.*is deprecated")
def test_a_normed_weight_can_be_copied_afterwards():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2)), nn.Linear(2, 1))
    before = bits(model[0].weight)
    assert probe(model, lambda model, n: model(torch.ones(n, 3)).sum().backward()).state_verified
    assert bits(model[0].weight) == before
    copy.deepcopy(model)


def test_python_attributes_of_ddp_are_not_restored():
    model = type("Parallel", (nn.Module,), {"__module__": "torch.nn.parallel.distributed"})()
    model.rebuilt = False
    assert probe(model, lambda model, n: setattr(model.eval(), "rebuilt", True)).state_verified
    assert model.rebuilt
    assert model.training


def test_a_frozen_weight_that_joins_a_graph_is_a_leaf_again():
    """An average that is updated without no_grad."""
    model, target = linear(), linear().requires_grad_(False)

    def step(model, batch_size):
        target.weight.lerp_(model.weight, 0.1)

    assert probe(model, step).state_verified
    assert target.weight.is_leaf
    assert not target.weight.requires_grad


# --- preserve ---


class OnlyRead(Hidden):
    load_state_dict = None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (OnlyRead(), "preserve is a OnlyRead"),
        (3, "preserve is a int"),
        ({"a": 1}, "preserve holds a str"),
    ],
)
def test_preserving_an_object_without_state_is_refused(given, text):
    with pytest.raises(InvalidArgumentError, match=text):
        probe(linear(), lambda model, batch_size: None, preserve=given)


def test_preserved_tensors_and_objects_are_restored():
    kept = [torch.ones(3), torch.ones(3, requires_grad=True) * 1, Average()]
    hidden = Box(kept)

    def step(model, batch_size):
        tensor, derived, average = hidden.held
        for one in (tensor, derived.data, average.shadow["weight"]):
            one.zero_()

    assert probe(linear(), step, preserve=iter(kept)).state_verified
    assert bits([*kept[:2], kept[2].shadow["weight"]]) == [bits(torch.ones(3))] * 3
    hidden.held = kept[0], torch.ones(3), Average()
    assert probe(linear(), step, preserve=kept[0]).state_verified
    assert bits(kept[0]) == bits(torch.ones(3))


def test_objects_created_in_each_call_are_not_kept_alive():
    created, alive, copies = Log(), Log(), Log()

    def step(model, batch_size):
        alive.append(sum(one() is not None for one in created))
        copies.append(sum(type(one) is StorageCopy for one in gc.get_objects()))
        other = nn.Linear(3, 3)
        optimizer = torch.optim.Adam(other.parameters())
        other(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        created.extend(
            map(weakref.ref, (other.weight, optimizer, optimizer.state[other.weight]["exp_avg"]))
        )
        model(torch.ones(1, 3))

    probe(nn.Linear(3, 3), Step(step, is_loop=False))
    assert set(alive) == {0}
    assert copies[-1] <= copies[2]


# --- state that cannot be saved or restored ---


class Stubborn(Hidden):
    def load_state_dict(self, state):
        raise ValueError("another version")


def test_one_failed_restore_does_not_stop_the_others():
    training, stuck = Training(warm_steps=1), Stubborn()

    def step(model, batch_size):
        stuck.box.held["seen"] = [2]
        training.step(model, max(2, batch_size))

    before = training.picture()
    with pytest.raises(
        UnreliableError, match=r"state of Stubborn \(ValueError: another version\)\. Do not train"
    ):
        probe(training.model, step)
    assert training.picture() == before


def test_unreadable_state_is_noted():
    class WantsArgument:
        count = 0

        def state_dict(self, epoch):
            return {}

        def load_state_dict(self, state):
            raise NotImplementedError

    wants = WantsArgument()

    def step(model, batch_size):
        wants.count += 1

    result = probe(linear(), step)
    assert wants.count == 0
    assert "state of WantsArgument: its state_dict() could not be read (TypeError: " in " ".join(
        result.notes
    )


def test_a_snapshot_larger_than_host_memory_is_refused(monkeypatch):
    """Memory that tensors share is copied once."""
    flat = torch.ones(10_000)
    model = nn.ParameterList(nn.Parameter(flat[place:]) for place in range(100))
    monkeypatch.setattr(linux, "free_bytes", lambda: 1000)
    with pytest.raises(
        UnreliableError, match=r"a copy of 39\.06 KiB .* but only 1000 B is free: nothing was run"
    ):
        probe(model, lambda model, batch_size: pytest.fail("it ran"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory figures of Linux")
def test_memory_that_was_never_written_takes_none():
    """A model of 7 billion parameters that is only simulated need not fit in host memory."""

    def resident_mib():
        with open("/proc/self/statm") as numbers:
            return int(numbers.read().split()[1]) * mmap.PAGESIZE // 2**20

    pages = mmap.mmap(
        -1, 2**28, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # malloc's may have been written to
    model = nn.Linear(1, 1, bias=False, device="meta")
    model.weight = nn.Parameter(torch.frombuffer(pages, dtype=torch.float32).view(2**13, 2**13))
    before = resident_mib()
    kept = Snapshot(model, [], [], "cpu")
    assert kept.differences() == []
    assert resident_mib() < before + 60
    with torch.no_grad():
        model.weight[5] = 1
    assert kept.differences() == ["model.weight"]
    kept.restore()
    assert not model.weight[5].any()
    assert kept.differences() == []


CHANGES = {
    "value": lambda model: model.weight.data.add_(1),
    "memory": lambda model: setattr(model.weight, "data", model.weight.data.clone()),
    "view": lambda model: setattr(model.weight, "data", model.weight.data.t()),
    "freezing": lambda model: model.weight.requires_grad_(False),
    "gradient": lambda model: setattr(model.weight, "grad", torch.ones(2, 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_of_a_weight_is_seen(change):
    model = linear()
    kept = Snapshot(model, [], [], "cpu")
    CHANGES[change](model)
    assert kept.differences() == ["model.weight.grad" if change == "gradient" else "model.weight"]
    kept.restore()
    assert (kept.differences(), kept.notes) == ([], [])


def test_what_has_changed_inside_a_wrapper_is_seen():
    model = linear()
    model.weight = nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2)))
    kept = Snapshot(model, [], [], "cpu")
    model.weight.b.add_(1)
    assert kept.differences() == ["model.weight", "model.weight.b"]
    kept.restore()
    assert kept.differences() == []
    assert not model.weight.b.any()


def test_weights_of_optimizers_that_nobody_holds_come_back():
    heads = [nn.Linear(2_000, 1) for _ in range(2)]
    before = bits([head.weight for head in heads])
    kept = Snapshot(linear(), [], [], "cpu")
    for head in heads:
        optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
        kept.add(optimizer)
        head(torch.ones(1, 2_000)).sum().backward()
        optimizer.step()
    kept.restore()
    assert bits([head.weight for head in heads]) == before


def test_a_weight_whose_memory_was_given_back_comes_back():
    model = nn.Linear(1, 2 * PIECE_WORDS, bias=False)
    kept = Snapshot(model, [], [], "cpu")
    model.weight.untyped_storage().resize_(0)
    assert kept.differences() == ["model.weight"]
    kept.restore()
    assert kept.differences() == []


def test_a_hook_that_was_left_is_named():
    model = linear()
    kept = Snapshot(model, [], [], "cpu")
    hook = model.register_forward_hook(print)
    assert kept.differences() == [f"model._forward_hooks.{hook.id}"]


def test_unchanged_host_memory_is_not_written(tmp_path):
    """A mapped file may be read-only: writing to it ends the process."""
    np.save(tmp_path / "a.npy", np.ones((4, 4), "f4"))

    def restored():
        warnings.simplefilter("ignore")
        model = linear()
        model.register_buffer("table", torch.from_numpy(np.load(tmp_path / "a.npy", mmap_mode="r")))
        kept = Snapshot(model, [], [], "cpu")
        kept.restore()
        return kept.differences()

    assert start(restored).result() == []


# --- tensors that cannot be copied ---


def with_sparse_parameter():
    model = linear()
    model.adjacency = nn.Parameter(torch.eye(3).to_sparse())
    return model


def with_sparse_gradient():
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    return model


@pytest.mark.parametrize(
    ("make", "told"),
    [(with_sparse_parameter, "model.adjacency"), (with_sparse_gradient, "model.weight.grad")],
)
def test_tensors_that_cannot_be_copied_are_refused(make, told):
    with pytest.raises(
        InvalidArgumentError,
        match=f"^{told} is a sparse_coo tensor, .* oomprobe run path/to/train.py:build",
    ):
        probe(make(), lambda model, batch_size: None)


def test_a_lazy_module_beside_the_model_is_refused():
    head = nn.LazyLinear(2)
    with pytest.raises(
        InvalidArgumentError, match=r"^the parameter head\.weight of a lazy module has no shape yet"
    ):
        probe(
            linear(),
            lambda model, batch_size: head(model(torch.ones(batch_size, 2))).sum().backward(),
        )


def test_workers_keep_track_of_tensors_that_cannot_be_copied():
    model = with_sparse_parameter()
    tracker = Tracker(model, [])
    model.adjacency.grad = torch.ones(3, 3).to_sparse()
    tracker.start_cold()
    assert model.adjacency.grad is None


# --- comparison ---


class Plain:
    """A class without a comparison."""

    def __init__(self, value):
        self.value = value


COMPARED = {  # a value, and another that differs
    "object": (lambda: Plain(3), lambda: Plain(4)),
    "array of objects": (lambda: np.array([Plain(1)]), lambda: np.array([Plain(2)])),
    "deque of tensors": (
        lambda: collections.deque([torch.zeros(2)]),
        lambda: collections.deque([torch.ones(2)]),
    ),
    "set": (lambda: {"a", 2}, lambda: {"a", 3}),
    "zero": (lambda: 0.0, lambda: -0.0),
    "zero in a tensor": (lambda: torch.tensor([0.0]), lambda: torch.tensor([-0.0])),
    "nan in a tensor": (lambda: torch.tensor([float("nan")]), lambda: torch.tensor([0.0])),
    "dtype of a tensor": (lambda: torch.zeros(2), lambda: torch.zeros(2, dtype=torch.int32)),
    "shape of a tensor": (lambda: torch.zeros(1, 2), lambda: torch.zeros(2, 1)),
    "layout of a tensor": (lambda: torch.eye(2), lambda: torch.eye(2).to_sparse()),
    "device of a tensor": (lambda: torch.ones(2, device="meta"), lambda: torch.ones(2)),
    "length": (lambda: [1, 2], lambda: [1, 2, 3]),
    "kind": (lambda: [1], lambda: (1,)),
    "dtype": (lambda: torch.float32, lambda: torch.float64),
    "function": (lambda: len, lambda: abs),
}


@pytest.mark.parametrize("kind", COMPARED)
def test_only_changed_state_differs(kind):
    one, other = COMPARED[kind]
    assert same(one(), one())
    assert not same(one(), other())


def test_incomparable_state_and_the_order_of_a_dict_count_as_equal():
    assert same({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    inside, again = [], []
    inside.append(inside)
    again.append(again)
    assert same(threading.Lock(), threading.Lock())
    assert same(inside, again)


def test_a_model_sharded_over_a_mesh_of_one_rank_comes_back():
    """A DTensor names its mesh among what it is made of."""

    def restored():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        step = training_step(torch.optim.AdamW(model.parameters()), lambda n: torch.randn(n, 4))
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        verified = probe(model, step).state_verified
        return verified and all(
            map(torch.equal, before, (p.to_local() for p in model.parameters()))
        )

    assert start(restored).result()
