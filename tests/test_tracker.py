import collections
import functools
import gc
import io
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from oomprobe.state import Snapshot, largest_added, snapshot, state_tensors
from oomprobe.state.places import MAX_ENTRIES
from oomprobe.state.tracker import Tracker


@pytest.mark.parametrize(
    ("state", "count"),
    [(None, 0), ({"w": torch.ones(2)}, 1), ({"w": 3, "v": [torch.ones(2)]}, 0), ([], 0)],
)
def test_unusual_optimizer_state_is_read(state, count):
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1.0)
    optimizer.state = state
    assert len(list(state_tensors(optimizer))) == count


def test_what_is_saved_does_not_grow_with_the_data():
    """Entries are counted over all containers together; of those beyond the budget only the length is compared."""
    data = types.SimpleNamespace(
        rows=[[*range(4_000)] for _ in range(500)], table={i: [i] * 900 for i in range(500)}
    )
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: data])
    assert sum(len(place._before) for place in tracker.places) <= 101_000
    data.rows[-1].append(1)
    data.rows[0][0] = data.rows[-1][0] = -1
    tracker.start_cold()
    assert (data.rows[0][0], data.rows[-1][0], len(data.rows[-1])) == (0, -1, 4_001)
    assert tracker.changes() == ["data.rows[499] (a list)"]


def test_a_container_that_is_too_long_to_save_comes_back_itself():
    rows = [*range(MAX_ENTRIES + 1)]
    data = types.SimpleNamespace(rows=rows)
    del rows
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: data])
    data.rows = []
    tracker.start_cold()
    assert len(data.rows) == MAX_ENTRIES + 1


def test_numbers_do_not_count_as_objects():
    """A walk meets at most 20,000 objects, and a counter may lie behind more numbers than these."""
    data = types.SimpleNamespace(
        rows=[[*range(900 * i, 900 * i + 900)] for i in range(30)], counts=[[[[[0]]]]]
    )
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: data])
    data.counts[0][0][0][0][0] = 1
    tracker.start_cold()
    assert data.counts == [[[[[0]]]]]


def test_only_small_tensors_beside_the_model_go_back_before_a_trial():
    count, table = torch.zeros(1), torch.zeros(2_000)

    def step(model, batch_size):
        count.add_(1)
        table.add_(1)

    tracker = Tracker(nn.Linear(1, 1), [step])
    step(None, 1)
    tracker.start_cold()
    assert (count.item(), table[0].item()) == (0, 1)


def test_arrays_and_tensors_beside_the_model_share_one_limit(monkeypatch):
    monkeypatch.setattr(snapshot, "COPIED_BYTES", 3 * 2**20)
    kept = [
        np.zeros(2**20),
        torch.zeros(2**18),
        np.zeros(2**17),
        np.zeros(3 * 2**16),
    ]  # 8, 1, 1 and 1.5 MiB
    saved = Snapshot(nn.Linear(1, 1), [lambda model, n: kept], [], "cpu")
    for one in kept:
        one[0] = 7
    saved.restore()
    assert [one[0].item() for one in kept] == [7, 0, 0, 7]
    assert saved.differences() == []


@pytest.mark.parametrize("changes", [0, 1, 2])
def test_a_tensor_that_was_not_copied_and_is_gone_is_named(monkeypatch, changes):
    """However often it was changed before: a new tensor may have the same version."""
    monkeypatch.setattr(snapshot, "COPIED_BYTES", 0)
    kept = types.SimpleNamespace(bank=torch.ones(2**18))
    for _ in range(changes):
        kept.bank.add_(1)
    saved = Snapshot(nn.Linear(1, 1), [lambda model, n: kept], [], "cpu")
    kept.bank = None
    saved.restore()
    assert kept.bank.shape == (2**18,)
    assert saved.tracker.changes() == ["kept.bank (a tensor)"]


@pytest.mark.parametrize(
    "make", [lambda inner: inner, lambda inner: torch.optim.lr_scheduler.StepLR(inner, 1)]
)
def test_what_only_a_library_held_does_not_count_as_changed(make):
    """What a library's object holds is not put back into it, and what it has let go of may be gone for good."""
    library = types.ModuleType("library")
    exec("class Holder: pass", vars(library))
    library.Holder.__module__ = "torch.library_of_a_test"
    holder = library.Holder()
    holder.held = make(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1))
    saved = Snapshot(nn.Linear(1, 1), [lambda model, n: holder], [], "cpu")
    holder.held = None
    gc.collect()
    saved.restore()
    assert saved.differences() == []


def test_what_stays_on_the_device_is_told():
    """Also optimizers that have not stepped yet, in the order in which the walk meets them."""
    model, other = nn.BatchNorm1d(2), nn.Linear(2, 2)
    model(torch.ones(2, 2)).sum().backward()
    optimizers = [torch.optim.Adam(model.parameters()), torch.optim.SGD(other.parameters())]
    optimizers[0].step()
    tracker = Tracker(model, [lambda model, n: optimizers])
    assert [*map(id, tracker.optimizers)] == [*map(id, optimizers)]
    averages = [
        state[name] for state in optimizers[0].state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    gradients = [p.grad for p in model.parameters()]
    resident = [*model.parameters(), *other.parameters(), *model.buffers(), *gradients, *averages]
    assert {*map(id, tracker.resident_tensors())} == {*map(id, resident)}


def test_what_a_step_has_added_is_named_largest_first():
    held = types.SimpleNamespace(losses=[], outputs={}, bank=None)
    model = nn.Linear(64, 64)
    tracker = Tracker(model, [lambda model, n: held])
    held.losses += [torch.zeros(256), torch.zeros(256)]
    held.outputs["first"] = [torch.zeros(1024)]
    held.bank = torch.zeros(768)
    held.losses.append(held.losses[0][1:])  # a view takes nothing
    model.weight.grad, model.weight.seen = torch.zeros(64, 64), torch.zeros(128)
    expected = ["held.outputs (4.00 KiB)", "held.bank (3.00 KiB)", "held.losses (2.00 KiB)"]
    assert largest_added(tracker, 1) == expected
    assert largest_added(tracker, 3 * 2**10) == expected[:2]


def a_class(**attributes):
    """Return a class of a library, whose objects have a state."""
    state = dict.fromkeys(("state_dict", "load_state_dict"), lambda self, *given: {})
    return type("Library", (), {"__module__": "torch.a_test", **state, **attributes})


def test_what_a_librarys_object_has_comes_back_at_the_end():
    """But for its slots, which are its own affair."""
    scale, slotted = a_class()(), a_class(__slots__=["n"])()
    scale.n = slotted.n = 0
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: (scale, slotted)])
    scale.n = slotted.n = 1
    tracker.start_cold()
    assert (scale.n, slotted.n) == (1, 1)
    tracker.put_back()
    assert (scale.n, slotted.n) == (0, 1)


def test_what_a_librarys_decorator_keeps_is_its_own_affair():
    seen = []
    step = functools.singledispatch(lambda model, n: seen)
    tracker = Tracker(nn.Linear(1, 1), [step])
    step.register(int, print)
    seen.append(1)
    tracker.start_cold()
    assert (int in step.registry, seen) == (True, [])


class Rows(torch.utils.data.Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise AssertionError("nothing is read")


def test_what_an_owner_of_data_holds_comes_back_whosever_it_is():
    resize, *transforms = (
        type("Transform", (), {"__module__": "torch.a_test"})() for _ in range(3)
    )
    dataset = Rows(transform=resize, transforms=transforms, other=object())
    loader = torch.utils.data.DataLoader(Rows(dataset=dataset))
    owner = types.SimpleNamespace(loader=loader)
    changed = [resize, *transforms, dataset, loader]
    for one in changed:
        one.n = 0
    tracker = Tracker(nn.Module(), [], owners=[owner])
    for one in changed:
        one.n = 1
    tracker.put_back()
    assert [one.n for one in changed] == [0] * 5


def test_a_cache_that_was_empty_is_emptied():
    cache = functools.cache(lambda n: [n])
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: cache(n)])
    for size in (3, 4):
        cache(size)
    assert tracker.changes() == ["cache.results (an int)"]
    tracker.start_cold()
    assert (cache.cache_info().currsize, tracker.changes()) == (0, [])


def test_a_full_cache_that_was_used_is_named():
    cache = functools.lru_cache(maxsize=1)(lambda n: n)
    cache(1)
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: cache(n)])
    assert tracker.changes() == []
    cache(2)
    assert tracker.changes() == ["cache (a cache, which cache.cache_clear() empties)"]


def test_mapped_files_and_arrays_of_objects_are_left_alone(tmp_path):
    mapped = np.lib.format.open_memmap(tmp_path / "a.npy", mode="w+", shape=(3,))
    arrays = [mapped, np.array([None, 1])]
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: arrays])
    for array in arrays:
        array[0] = 7
    tracker.start_cold()
    tracker.put_back()
    assert [array[0] for array in arrays] == [7, 7]


def test_an_optimizer_that_is_made_anew_is_tracked():
    model = nn.Linear(2, 2)
    held = types.SimpleNamespace(optimizer=torch.optim.Adam(model.parameters()))
    tracker = Tracker(model, [lambda model, n: held])
    held.optimizer = None
    gc.collect()
    tracker.start_cold()
    assert [*map(id, tracker.optimizers)] == [id(held.optimizer)]


def test_a_value_under_another_key_goes_back():
    held = {"a": 3}
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: held])
    held["b"] = held.pop("a")
    assert tracker.changes() == ["held['a'] (an int)", "held['b'] (an int)"]
    tracker.start_cold()
    assert held == {"a": 3}


@pytest.mark.parametrize(
    "act",
    [
        lambda held: setattr(held, "n", 1),
        lambda held: held.array.fill(1),
        lambda _: random.random(),
        lambda _: np.random.rand(),
    ],
)
def test_what_a_call_may_count_with_is_seen(act):
    held = types.SimpleNamespace(n=0, array=np.zeros(2))
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: held])
    before = tracker.plain_values()
    assert tracker.plain_values() == before
    act(held)
    assert tracker.plain_values() != before


def test_containers_that_are_gone_come_back_with_their_limits():
    window, groups = collections.deque([1, 2], maxlen=3), collections.defaultdict(list, a=[1])
    held = types.SimpleNamespace(window=window, groups=groups)
    del window, groups
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: held])
    held.window = held.groups = None
    tracker.start_cold()
    assert (held.window, held.window.maxlen) == (collections.deque([1, 2]), 3)
    assert held.groups == {"a": [1]}
    assert held.groups["b"] == []


def test_sources_of_data_that_have_moved_on_are_named_by_their_kind():
    """One that does not show how far it has come, if the step uses it."""
    held = types.SimpleNamespace(
        feed=iter([1, 2]), file=io.StringIO("a\nb"), pairs=zip([1]), others=zip([1]), done=iter([])
    )
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: (held.pairs, held.done)])
    next(held.feed)
    held.file.readline()
    assert tracker.changes() == [
        "held.feed (an iterator)",
        "held.file (a StringIO)",
        "held.pairs (an iterator)",
    ]


def test_what_a_librarys_object_reads_is_its_own_affair():
    """Unlike what the user's own model reads."""
    model = type("Reading", (nn.Linear,), {})(1, 1)
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))
    model.feed, schedule.feed = iter([1, 2]), iter([1, 2])
    tracker = Tracker(model, [lambda model, n: schedule])
    next(model.feed), next(schedule.feed)
    assert tracker.changes() == ["model.feed (an iterator)"]


def test_another_method_is_replaced():
    held = types.SimpleNamespace(one=Rows(), other=Rows())
    held.read = held.one.__len__
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: held])
    for other in (held.other.__len__, held.one.__getitem__):
        held.read = other
        tracker.start_cold()
        assert held.read == held.one.__len__


def test_a_counter_beside_a_log_goes_back(tmp_path):
    """Unlike one beside a file that is read, which must agree with its position."""
    with (tmp_path / "log").open("w") as log:
        held = types.SimpleNamespace(log=log, n=0)
        tracker = Tracker(nn.Linear(1, 1), [lambda model, n: held])
        log.write("a")
        held.n = 1
        tracker.start_cold()
        assert (held.n, tracker.is_exact) == (0, True)


def test_an_output_that_is_gone_is_named():
    held = types.SimpleNamespace(loss=nn.Linear(1, 1)(torch.ones(1, 1)))
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: held])
    assert tracker.changes() == []
    held.loss = None
    assert tracker.changes() == ["held.loss (a tensor)"]


def test_an_array_of_another_shape_is_named_by_the_object_of_the_step():
    data = Rows(table=np.zeros((2, 2)))
    tracker = Tracker(nn.Linear(1, 1), [data.__len__])
    data.table.shape = 4
    assert tracker.changes() == ["rows.table (an array)"]


def test_replaced_parameters_are_told():
    model = nn.Linear(1, 1)
    tracker = Tracker(model, [])
    assert not tracker.has_replaced_parameters
    model.weight.data = torch.ones(2, 1)
    assert tracker.has_replaced_parameters


def test_a_large_tensor_beside_the_model_is_named_once_it_has_changed():
    table = torch.zeros(2_000)
    tracker = Tracker(nn.Linear(1, 1), [lambda model, n: table])
    assert tracker.changes() == []
    table.add_(1)
    assert tracker.changes() == ["table (a tensor)"]
