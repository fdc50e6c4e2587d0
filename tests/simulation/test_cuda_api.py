"""Functions of torch that a step calls on a simulated card: what they take, and what resets leave of a trial's peaks."""

import warnings

import pytest
import torch
from ledger import Log
from resets import RESETS
from torch import nn
from torch.cuda import empty_cache, max_memory_allocated, synchronize
from zoo import numbered, training_step

import oomprobe

WIDTH = 256


def probed(act):
    """Probe a loop that trains, evaluates at every 7th call, and then does something; return what the trials showed."""
    model = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    train = training_step(optimizer, lambda batch_size: torch.randn(batch_size, WIDTH, device="cuda"))

    @numbered
    def step(number, model, batch_size):
        train(model, batch_size)
        if number % 7 == 0:
            with torch.no_grad():
                model(torch.randn(8 * batch_size, WIDTH, device="cuda"))
        act()

    functions = vars(torch._C).copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        result = oomprobe.find_max_batch(model, step, device="sim:1GiB", resolution=0.05, progress="off")
    assert vars(torch._C) == functions
    return [
        (one.batch_size, one.verdict, one.steps, one.peak_allocated_bytes, one.peak_reserved_bytes, one.alloc_retries)
        for one in result.trials
    ]


@pytest.mark.parametrize("way", RESETS)
def test_a_reset_hides_nothing(way):
    seen = Log()

    def reset():
        RESETS[way]()
        stats = torch.cuda.memory_stats()
        seen.append((max_memory_allocated() == torch.cuda.memory_allocated(), stats["num_alloc_retries"]))

    assert probed(reset) == probed(lambda: None)
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
CALLS = {
    "empty cache": lambda: empty_cache(),
    "synchronize": lambda: synchronize(device="cuda"),
    "wait": lambda: torch.cuda.current_stream().wait_stream(stream=torch.cuda.Stream()),
    "wait for an event": lambda: torch.cuda.current_stream().wait_event(event=torch.cuda.Event()),
    "record": lambda: torch.cuda.Event().record(stream=torch.cuda.Stream()),
    "record an event": lambda: torch.cuda.current_stream().record_event(event=None),
    "elapsed time": lambda: torch.cuda.Event().elapsed_time(end_event=torch.cuda.Event()),
    "allocated": lambda: torch.cuda.memory_allocated(device=0),
    "reserved": lambda: torch.cuda.memory_reserved(device=0),
    "most allocated": lambda: torch.cuda.max_memory_allocated(device=0),
    "most reserved": lambda: torch.cuda.max_memory_reserved(device=0),
    "free": lambda: torch.cuda.mem_get_info(device=0),
    "fraction": lambda: torch.cuda.set_per_process_memory_fraction(fraction=0.9, device=0),
    "generator": lambda: torch.cuda.get_rng_state(device="cuda"),
}


@pytest.mark.parametrize("name", [*CONTEXTS, *CALLS])
def test_functions_take_what_torchs_take(name):
    entered = Log()

    def step(model, batch_size):
        if name in CALLS:
            CALLS[name]()
        else:
            with CONTEXTS[name]() as value:
                entered.append((value, isinstance(CONTEXTS[name](), torch.cuda.device)))
        model(torch.zeros(batch_size, 8, device="cuda"))

    oomprobe.check(nn.Linear(8, 8).eval(), step, 4, device="sim:1GiB", progress="off")
    if name in CONTEXTS:
        assert set(entered) == {(None, name.startswith("cuda.device"))}
