"""Functions of torch that a step calls on a simulated card: what they take, and what resets leave of a trial's peaks."""

import functools
import warnings

import pytest
import torch
from helpers import find_hastily
from ledger import Log
from resets import RESETS
from torch import nn
from torch.cuda import empty_cache, max_memory_allocated, synchronize
from zoo import numbered, training_step

import oomprobe
from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.devices.simulated import SimulatedDevice
from oomprobe.errors import SimulationError
from oomprobe.ground.torch_versions import VERSION
from oomprobe.records.patience import Patience
from oomprobe.simulation.cuda_api import replacements
from oomprobe.simulation.memory import CardMemory
from oomprobe.tape.calls import replay_call

WIDTH = 256
MIB = 2**20


def set_by_torch(text):
    torch._C._accelerator_setAllocatorSettings(text)


def set_by_cuda(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(text)


@pytest.mark.skipif(VERSION < (2, 10), reason="without CUDA it has neither function")
@pytest.mark.parametrize("change", [set_by_torch, set_by_cuda])
def test_settings_change_at_run_time(change):
    device = SimulatedDevice("1GiB")
    device.start_trial()

    def step():
        before = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
        change("roundup_power2_divisions:2,per_process_memory_fraction:0.5")
        after = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == before.nbytes + after.nbytes + MIB
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        return torch.cuda.memory_stats()["reserved_bytes.all.current"]

    with device.session():
        assert step() == 20 * MIB
    replayed = device.replay(device.calls, None, 0)
    assert replayed.peak_allocated_bytes == 11 * MIB
    with device.session(), pytest.raises(oomprobe.InvalidArgumentError, match="'block_size:1'"):
        change("block_size:1")


def probed(act):
    """Probe a loop that trains, evaluates at every 7th call, and then does something; return what the trials showed."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters())
    train = training_step(
        optimizer, lambda batch_size: torch.randn(batch_size, WIDTH, device="cuda")
    )

    @numbered
    def step(number, model, batch_size):
        train(model, batch_size)
        if number % 7 == 0:
            with torch.no_grad():
                model(torch.randn(8 * batch_size, WIDTH, device="cuda"))
        act()

    functions = vars(torch._C).copy()
    options = {
        "min_batch": 1024,
        "max_batch": 1536,
        "resolution": 0.2,
        "patience": Patience(look_calls=15),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        result = find_hastily(model=model, step=step, device="sim:64MiB", **options)
    assert vars(torch._C) == functions
    return [
        (
            one.batch_size,
            one.verdict,
            one.steps,
            one.peak_allocated_bytes,
            one.peak_reserved_bytes,
            one.alloc_retries,
        )
        for one in result.trials
    ]


@functools.cache
def probed_without():
    return probed(lambda: None)


@pytest.mark.parametrize("way", RESETS)
def test_a_reset_hides_nothing(way):
    seen = Log()

    def reset():
        RESETS[way]()
        stats = torch.cuda.memory_stats()
        seen.append(
            (max_memory_allocated() == torch.cuda.memory_allocated(), stats["num_alloc_retries"])
        )

    assert probed(reset) == probed_without()
    assert {is_peak_reset for is_peak_reset, _ in seen} == {"peaks" in way}
    if "counters" in way:
        assert {retries for _, retries in seen} == {0}


@pytest.mark.parametrize("way", RESETS)
def test_what_builds_may_reset(way):
    with oomprobe.SimulatedDevice("1GiB").building(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert RESETS[way]() is None


CONTEXTS = {
    "cuda.stream": lambda: torch.cuda.stream(stream=torch.cuda.Stream(device=0, priority=-1)),
    "cuda.stream of none": lambda: torch.cuda.stream(None),
    "StreamContext": lambda: torch.cuda.StreamContext(stream=torch.cuda.current_stream(device=0)),
    "cuda.device": lambda: torch.cuda.device(device="cuda:0"),
    "cuda.device_of": lambda: torch.cuda.device_of(obj=torch.empty(1, device="cuda")),
}
CALLS = (
    empty_cache,
    lambda: synchronize(device="cuda"),
    lambda: torch.cuda.current_stream().wait_stream(stream=torch.cuda.Stream()),
    lambda: torch.cuda.current_stream().wait_event(event=torch.cuda.Event()),
    lambda: torch.cuda.Event().record(stream=torch.cuda.Stream()),
    lambda: torch.cuda.current_stream().record_event(event=None),
    lambda: torch.cuda.Event().elapsed_time(end_event=torch.cuda.Event()),
    lambda: torch.cuda.memory_allocated(device=0),
    lambda: torch.cuda.memory_reserved(device=0),
    lambda: torch.cuda.max_memory_allocated(device=0),
    lambda: torch.cuda.max_memory_reserved(device=0),
    lambda: torch.cuda.mem_get_info(device=0),
    lambda: torch.cuda.set_per_process_memory_fraction(fraction=0.9, device=0),
    lambda: torch.cuda.get_rng_state(device="cuda"),
)


def test_functions_take_what_torchs_take():
    entered = Log()

    def step(model, batch_size):
        for call in CALLS:
            call()
        for name, make in CONTEXTS.items():
            with make() as value:
                entered.append((name, value, isinstance(make(), torch.cuda.device)))
        model(torch.zeros(batch_size, 8, device="cuda"))

    oomprobe.check(nn.Linear(8, 8).eval(), step, 4, device="sim:1GiB", progress="off")
    assert set(entered) == {(name, None, name.startswith("cuda.device")) for name in CONTEXTS}


# Names that need no CUDA, or call only what is replaced.
UNCHANGED = {
    "CudaError", "DeferredCudaCallError", "caching_allocator_disabled", "cudaStatus", "device_index", "export_dot",
    "export_graph_data", "get_gencode_flags",
    "get_rng_state_all", "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_peak_memory_stats",
}  # fmt: skip


def public(module):
    """Yield the names of functions and classes of a module; the classes of tensors and storages are torch's oldest interface."""
    for name in module.__all__:
        is_old = name.endswith(("Tensor", "Storage"))
        if callable(getattr(module, name)) and not is_old:
            yield name


def test_every_public_name_is_answered_refused_or_needs_no_cuda():
    replaced = {*replacements(CardMemory(SimulatedDevice("1GiB").card, AllocatorSettings()), str)}
    names = {*public(torch.cuda), *public(torch.accelerator)}
    assert names - replaced - UNCHANGED == set()


@pytest.mark.parametrize("name", ["make_graphed_callables", "memory_snapshot", "ExternalStream"])
def test_what_a_simulated_card_cannot_do_is_refused_in_a_sentence(name):
    refused = getattr(torch.cuda, name)

    def step(model, batch_size):
        assert not isinstance(model, torch.cuda.ExternalStream)
        getattr(torch.cuda, name)(64)

    with pytest.raises(
        SimulationError, match=rf"torch\.cuda\.{name} at test_cuda_api\.py:\d+ .*: "
    ):
        oomprobe.check(nn.Linear(8, 8), step, 4, device="sim:1GiB", progress="off")
    assert getattr(torch.cuda, name) is refused


def test_a_pool_with_an_allocator_of_its_own_is_refused():
    def step(model, batch_size):
        torch.cuda.MemPool(object())

    with pytest.raises(SimulationError, match=r"MemPool at test_cuda_api\.py:\d+ has an allocator"):
        oomprobe.check(nn.Linear(8, 8), step, 4, device="sim:1GiB", progress="off")


def test_pools_are_moved_where_a_cap_is_below_what_is_reserved():
    """They keep their users: what is free in them stays, and their blocks come from them."""
    device = SimulatedDevice("1GiB")
    with device.building():
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept, dropped = (nn.Linear(1024, 1024).cuda() for _ in range(2))
        torch.zeros(64 * MIB, device="cuda")
        del dropped
    device.place(kept.parameters())
    with device.cap(64 * MIB):
        device.start_trial()
        with device.session(), torch.cuda.use_mem_pool(pool):
            assert pool.use_count() == 2
            more = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
            assert torch.cuda.memory_reserved() == 22 * MIB
            del more
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 22 * MIB


@pytest.mark.skipif(VERSION < (2, 10), reason="some of these functions are newer")
def test_what_a_simulated_card_answers():
    answers = Log()

    def step(model, batch_size):
        kept = model(torch.zeros(batch_size, 8, device="cuda"))
        answers.append((
            torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == torch.cuda.memory_allocated(),
            torch.cuda.memory_cached() == torch.cuda.memory_reserved() == torch.cuda.device_memory_used(),
            torch.cuda.get_allocator_backend(), torch.cuda.get_arch_list(), torch.cuda.initial_seed() == torch.initial_seed(),
            torch.cuda.utilization(), torch.cuda.host_memory_stats()["allocated_bytes.peak"], len(torch.cuda.default_generators), kept.is_cuda,
        ))  # fmt: skip

    oomprobe.check(nn.Linear(8, 8).eval(), step, 4, device="sim:RTX-4090", progress="off")
    assert answers[0] == (True, True, "native", ["sm_89"], True, 0, 0, 1, True)


# --- streams ---


def stepping_on_streams(model, batch_size):
    side = torch.cuda.Stream()
    assert isinstance(side, torch.cuda.Stream)
    assert side != torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        x = torch.zeros(batch_size, 8, device="cuda")
    with side:
        assert torch.cuda.current_stream() == side
    torch.cuda.set_stream(side)
    assert torch.cuda.current_stream() == side
    torch.cuda.set_stream(torch.cuda.default_stream())
    model(x)


def stepping_with_a_shared_block(model, batch_size):
    side = torch.cuda.Stream()
    x = torch.zeros(batch_size, 8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    x.record_stream(side)
    model(x)
    del x
    model(torch.zeros(batch_size, 8, device="cuda"))


@pytest.mark.parametrize(
    ("step", "is_on_side", "is_held"),
    [(stepping_on_streams, True, False), (stepping_with_a_shared_block, False, True)],
)
def test_what_is_assumed_of_streams_is_said(step, is_on_side, is_held):
    result = oomprobe.check(nn.Linear(8, 8).eval(), step, 4, device="sim:1GiB", progress="off")
    assert any("side streams" in item for item in result.not_covered) is is_on_side
    assert any("record_stream" in note for note in result.notes) is is_held


def test_a_shared_block_is_held_until_the_step_ends():
    def peak(step):
        result = oomprobe.check(
            nn.Linear(8, 8).eval(), step, 2**20, device="sim:1GiB", progress="off"
        )
        return result.trials[-1].peak_reserved_bytes

    def alone(model, batch_size):
        for _ in range(2):
            model(torch.zeros(batch_size, 8, device="cuda"))

    assert peak(stepping_with_a_shared_block) - peak(alone) == 2**20 * 8 * 4


def test_a_shared_block_waits_in_replays_too():
    memory = CardMemory(SimulatedDevice("1GiB").card, AllocatorSettings())
    memory.tape.start()
    storage = torch.UntypedStorage(2**25, device="meta")
    memory.allocate(storage)
    assert memory.record_stream(storage, 1)
    del storage
    following = torch.UntypedStorage(2**25, device="meta")
    memory.allocate(following)
    allocator = memory.allocator.empty_copy()
    replay_call(allocator, memory.finish_call(), {})
    assert allocator.peak_reserved_bytes == memory.peaks[1] == 2**26


def test_recording_the_memory_history_has_no_effect_and_dumping_it_is_refused():
    model = nn.Linear(4, 4)

    def step(model, batch_size):
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        model(torch.ones(batch_size, 4, device="cuda")).sum().backward()
        torch.cuda.memory._record_memory_history(enabled=None)

    def dump(model, batch_size):
        torch.cuda.memory._dump_snapshot("snapshot.pickle")

    result = oomprobe.check(model, step, 8, device="sim:1GiB", progress="off")
    assert any("torch's memory history records" in item for item in result.not_covered)
    with pytest.raises(SimulationError, match="_dump_snapshot at test_cuda_api"):
        oomprobe.check(model, dump, 8, device="sim:1GiB", progress="off")
