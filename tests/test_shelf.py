"""Copies kept out of the address space: the same bytes, no descriptor left, and a process's own limits count none of it."""

import gc
import os
import signal
import sys
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_linux import run_python

import oomprobe
from oomprobe.state import Keeper, shelf, tensors
from oomprobe.state.kept_bytes import InProcess, keep_bytes
from oomprobe.state.shelf import OnShelf, Shelf, with_room
from oomprobe.state.storage import KeptStorage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")

PIECE = shelf.PIECE_BYTES


def some_bytes(count, seed=0):
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_what_is_put_there_comes_back(count):
    place, data = Shelf(), some_bytes(count)
    place.put(some_bytes(17, seed=1))
    kept = place.put(data)
    place.put(some_bytes(5, seed=2))
    assert len(kept) == count
    assert torch.equal(kept.whole(), data)
    into = torch.zeros(count, dtype=torch.uint8)
    kept.write_to(into)
    assert torch.equal(into, data)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 200), changed=st.integers(0, 199), piece=st.integers(1, 64))
def test_one_changed_byte_is_seen_wherever_it_lies(count, changed, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelf, "PIECE_BYTES", piece)
        data = some_bytes(count)
        kept = Shelf().put(data)
        assert kept.same_as(data)
        data[changed % count] ^= 1
        assert not kept.same_as(data)


def test_reads_and_writes_that_stop_half_way_go_on(monkeypatch):
    written, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, view, at: written(file, view[:7], at))
    monkeypatch.setattr(os, "preadv", lambda file, views, at: read(file, [views[0][:5]], at))
    data = some_bytes(100)
    assert torch.equal(Shelf().put(data).whole(), data)


def test_the_default_device_has_no_part_in_it():
    data = some_bytes(10)
    kept = Shelf().put(data)
    with torch.device("meta"):
        assert kept.same_as(data)
        assert kept.whole().device.type == "cpu"


def test_a_copy_that_is_cut_off_is_an_error_and_no_loop():
    place = Shelf()
    kept = place.put(some_bytes(100))
    os.ftruncate(place._file, 60)
    with pytest.raises(OSError, match="ends at byte 60, and 40 more were kept"):
        kept.whole()


def test_the_file_is_closed_with_the_last_thing_on_it():
    before = descriptors()
    first, second = (lambda place: (place.put(some_bytes(3)), place.put(some_bytes(4))))(Shelf())
    assert descriptors() == before + 1
    del first
    assert descriptors() == before + 1
    assert len(second.whole()) == 4
    del second
    assert descriptors() == before


def test_only_host_memory_goes_there(monkeypatch):
    place = Shelf()
    assert isinstance(keep_bytes(some_bytes(3), place), OnShelf)
    assert isinstance(keep_bytes(some_bytes(3), None), InProcess)
    assert isinstance(keep_bytes(some_bytes(0), place), InProcess)
    monkeypatch.setattr(place, "_file", -1)
    kept = keep_bytes(some_bytes(3), place)
    assert isinstance(kept, InProcess)
    assert torch.equal(kept.whole(), some_bytes(3))


def test_a_storage_is_put_back_from_there():
    tensor = torch.arange(4.0)
    kept = KeptStorage(tensor.untyped_storage(), Shelf())
    assert not kept.differs(tensor.untyped_storage())
    tensor.untyped_storage().resize_(0)
    assert kept.differs(tensor.untyped_storage())
    kept.put_back()
    assert tensor.tolist() == [0, 1, 2, 3]
    tensor[1] = float("nan")
    assert kept.differs(tensor.untyped_storage())
    kept.put_back()
    assert tensor.tolist() == [0, 1, 2, 3]
    del tensor
    gc.collect()
    assert kept.put_back() is kept.put_back()  # made anew, once
    assert torch.empty(0).set_(kept.put_back()).tolist() == [0, 1, 2, 3]
    assert torch.empty(0).set_(kept.on_host()).tolist() == [0, 1, 2, 3]


def test_a_comparison_takes_no_memory(monkeypatch):
    """A signal may have ended a step that holds it all, and whose frames are still there."""
    data = some_bytes(2 * PIECE + 5)
    kept = Shelf().put(data)
    monkeypatch.setattr(torch, "empty", None)
    assert kept.same_as(data)


def test_what_is_let_go_of_leaves_its_place_to_the_next_of_its_length():
    place, other = Shelf(), some_bytes(40)
    stays = place.put(other)
    for seed in range(9):
        data = some_bytes(100, seed)
        kept = place.put(data)
        assert torch.equal(kept.whole(), data)
        del kept
    assert os.fstat(place._file).st_size == 140
    assert torch.equal(stays.whole(), other)


def test_a_forked_child_writes_nothing_into_the_file_of_its_parent():
    place = Shelf()
    child = os.fork()
    if not child:
        os._exit(0 if isinstance(keep_bytes(some_bytes(10, seed=1), place), InProcess) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert os.fstat(place._file).st_size == 0


def test_memory_that_a_forked_child_still_has_open_is_given_back():
    place = Shelf()
    place.put(some_bytes(100))
    childs = os.dup(place._file)
    del place
    gc.collect()
    assert os.fstat(childs).st_size == 0
    os.close(childs)


def test_a_forked_child_that_lets_go_leaves_the_file_to_its_parent():
    place, data = Shelf(), some_bytes(100)
    kept = place.put(data)
    child = os.fork()
    if not child:
        del place, kept
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(kept.whole(), data)


def test_views_of_one_storage_share_one_copy_on_the_host_too(monkeypatch):
    monkeypatch.setattr(shelf, "limited_by_the_user", lambda: True)
    model = torch.nn.Linear(4, 4)
    model.bias = torch.nn.Parameter(model.weight.detach().view(-1)[:4])
    weight, bias = Keeper(model, [], [], "cpu").host_copy()["model"].values()
    assert torch.equal(weight, model.weight)
    assert bias.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_optimizers_that_show_themselves_late_need_no_descriptor_each(monkeypatch):
    monkeypatch.setattr(shelf, "limited_by_the_user", lambda: True)
    layers = torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(20)])
    keeper, before = Keeper(layers, [], [], "cpu"), descriptors()
    late = [torch.optim.Adagrad(layer.parameters(), initial_accumulator_value=1) for layer in layers]
    for optimizer in late:
        keeper.add(optimizer)
    assert descriptors() == before
    state = late[3].state[layers[3].weight]["sum"]
    state.zero_()
    keeper.put_back()
    assert state.item() == 1
    assert not keeper.differences()


def test_only_limits_of_the_users_own_count_and_not_those_of_a_trial():
    run_python(
        """
    import resource
    from oomprobe.devices.limits import address_space, limited_by_the_user
    assert not limited_by_the_user()
    with address_space(2**40), address_space(2**39, 2**38):
        assert not limited_by_the_user()
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        resource.setrlimit(kind, (2**41, resource.RLIM_INFINITY))
        with address_space(2**40), address_space(2**39, 2**38):
            assert limited_by_the_user()
        resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2)
    """
    )


@pytest.mark.parametrize(("left", "there"), [([100, 900], True), ([101], False), ([], True)])
def test_a_copy_counts_where_the_machine_has_no_room_for_it_beside_the_trials(monkeypatch, left, there):
    monkeypatch.setattr(shelf, "left_by_own_limits", lambda: left)
    place = Shelf()
    assert (with_room(place, 50, 150) is place) is there
    assert with_room(place, 50, None) is None
    assert with_room(None, 50, 150) is None


# --- in a process with a limit of its own ---

LIMITED = """
    import gc, os, resource, torch
    import oomprobe
    from oomprobe.devices import linux
    from oomprobe.state import Keeper
    torch.backends.mkldnn.enabled = False
    torch.set_num_threads(1)  # another would take 64 MiB of address space

    class Large(torch.nn.Module):
        def __init__(self, mib):
            super().__init__()
            self.table = torch.nn.Parameter(torch.arange(mib * 2**18, dtype=torch.float32), requires_grad=False)
            self.scale = torch.nn.Parameter(torch.ones(1))
        def forward(self, x):
            return (torch.ones(len(x), 2**14) * self.scale * self.table[:1].add(1)).mean()  # some 64 KiB a sample

    def step(model, batch_size):
        model.zero_grad()
        model(torch.ones(batch_size, 1)).backward()

    model = Large({state_mib})
    torch.optim.SGD(model.parameters(), lr=0.1)  # torch imports 70 MiB with the first optimizer, as training does
    step(model, 4)
    resource.setrlimit(resource.RLIMIT_AS, (linux.process_bytes("VmSize") + {room_mib} * 2**20, resource.RLIM_INFINITY))
"""


def test_a_copy_takes_nothing_of_the_address_space():
    run_python(
        LIMITED.format(state_mib=64, room_mib=32)
        + """
    was, address_space = model.table[:: 2**16].clone(), linux.process_bytes("VmSize")
    keeper = Keeper(model, [], [], "cpu")
    assert linux.process_bytes("VmSize") < address_space + 8 * 2**20
    with torch.no_grad():
        model.table.zero_()
    assert keeper.differences()
    keeper.put_back()
    assert not keeper.differences()
    assert torch.equal(model.table[:: 2**16], was)
    """
    )


def test_a_limit_on_the_size_of_files_leaves_the_copy_to_the_process():
    run_python(
        LIMITED.format(state_mib=8, room_mib=128)
        + """
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    keeper = Keeper(model, [], [], "cpu")
    with torch.no_grad():
        model.table.zero_()
    keeper.put_back()
    assert not keeper.differences()
    assert model.table[5] == 5
    """
    )


def test_an_answer_under_the_users_own_limit_is_that_of_a_process_without_a_copy():
    """A sample takes 0.4 MiB and more, so that beside a copy of 72 of 96 MiB 60 would be most."""
    run_python(
        LIMITED.format(state_mib=72, room_mib=96)
        + """
    result = oomprobe.find_max_batch(model, step, device="cpu", memory_fraction=1.0, progress="off")
    assert result.state_verified
    assert result.batch_size > 90, result.batch_size
    print(result.batch_size)
    """
    )


def test_no_descriptor_waits_for_a_collection_of_garbage_once_there_is_an_answer(monkeypatch):
    monkeypatch.setattr(shelf, "limited_by_the_user", lambda: True)
    model = torch.nn.Linear(1, 1)
    before = descriptors()
    gc.disable()
    try:
        oomprobe.find_max_batch(
            model, lambda m, b: m(torch.ones(b, 1)).sum().backward(), device="cpu:64MiB", max_batch=1, progress="off"
        )
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_what_lay_in_a_closed_file_cannot_be_read_from_another_of_its_number():
    place = Shelf()
    kept = place.put(some_bytes(10))
    place.close()
    with tempfile.TemporaryFile() as other:
        other.write(bytes(10))
        with pytest.raises(OSError, match="Bad file descriptor"):
            kept.whole()
    place.close()


def test_ctrl_c_in_the_midst_of_keeping_an_optimizer_leaves_the_state_whole(monkeypatch):
    model, optimizers = torch.nn.Linear(1, 1), []
    before, real = model.weight.item(), tensors.KeptStorage

    def interrupted(storage, place=None):
        if optimizers:
            signal.raise_signal(signal.SIGINT)
        return real(storage, place)

    def step(model, batch_size):
        model(torch.ones(batch_size, 1)).sum().backward()
        optimizers.append(torch.optim.Adagrad(model.parameters()))
        optimizers[-1].step()

    monkeypatch.setattr(tensors, "KeptStorage", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            oomprobe.find_max_batch(model, step, device="cpu:64MiB", max_batch=2, progress="off")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert model.weight.item() == before
