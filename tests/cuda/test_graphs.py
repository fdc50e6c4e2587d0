"""Private pools and captured graphs: a simulated card serves a program as torch's own allocator does."""

import re

import pytest
import torch
from bed import forked
from sequences import A100
from torch import nn

import oomprobe
from oomprobe.explaining.explanation import of_snapshot
from oomprobe.ground.torch_versions import VERSION

from . import windows

STATS = [
    "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current", "reserved_bytes.all.peak",
    "num_alloc_retries",
]  # fmt: skip
WIDTH, ROWS = 512, 700


def built():
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*layers).cuda()
    return model, torch.optim.AdamW(model.parameters(), capturable=True)


def rows(count=ROWS):
    return torch.randn(count, WIDTH, device="cuda")


def train(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


# Each returns a step, which gets a function that notes the statistics.


def rollouts():
    """A cache of keys and values in a pool of its own, beside training."""
    (model, optimizer), pool = built(), torch.cuda.MemPool()

    def step(note):
        with torch.cuda.use_mem_pool(pool), torch.no_grad():
            cache = [torch.zeros(ROWS, 4096, device="cuda") for _ in range(4)]
            model(rows())
        del cache
        note()
        train(model, optimizer, rows())
        note()

    return step


def training_in_a_pool():
    """The thread of its backward pass is outside."""
    (model, optimizer), pool = built(), torch.cuda.MemPool()

    def step(note):
        with torch.cuda.use_mem_pool(pool):
            train(model, optimizer, rows())
        note()
        torch.cuda.empty_cache()
        note()

    return step


def a_captured_step():
    """As torch's documentation captures one: after three steps on another stream."""
    (model, optimizer), captured = built(), []

    def step(note):
        if not captured:
            x, side, graph = rows(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    train(model, optimizer, x)
            torch.cuda.current_stream().wait_stream(side)
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                train(model, optimizer, x)
                note()
            captured.extend([graph, x])
        captured[1].copy_(rows())
        captured[0].replay()
        note()

    return step


def graphs_that_share_a_pool():
    """And keep another, which was used while they were captured."""
    model, _ = built()

    def step(note):
        handle, graphs, other = torch.cuda.graph_pool_handle(), [], torch.cuda.MemPool()
        for count in (ROWS, ROWS // 2):
            x, graph = rows(count), torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph, pool=handle):
                assert torch.cuda.is_current_stream_capturing()
                y = model(x)
                with torch.cuda.use_mem_pool(other):
                    y.mul(2)
            graphs.append((graph, x, y))
            note()
        del other
        torch.cuda.empty_cache()
        note()
        graphs[0][0].reset()
        torch.cuda.empty_cache()
        note()
        del graph, graphs, x, y
        torch.cuda.empty_cache()
        note()

    return step


def kinds_of_pools():
    def step(note):
        lending = torch.cuda.MemPool(use_on_oom=True)
        with torch.cuda.use_mem_pool(lending):
            lent = [torch.zeros(ROWS, 4096, device="cuda") for _ in range(3)]
        del lent
        whole = torch.cuda.MemPool(no_split=True)
        with torch.cuda.use_mem_pool(whole):
            kept = [torch.zeros(ROWS // 4, 1024 * wide, device="cuda") for wide in range(1, 5)]
        note()
        with pytest.raises(torch.OutOfMemoryError):
            kept += [torch.zeros(ROWS, 4096, device="cuda") for _ in range(300)]
        note()
        del kept, lending
        note()
        torch.cuda.empty_cache()
        note()

    return step


PROGRAMS = [
    rollouts,
    training_in_a_pool,
    a_captured_step,
    graphs_that_share_a_pool,
    kinds_of_pools,
]


def noted(run):
    found = []

    def note():
        stats = torch.cuda.memory_stats()
        found.append([stats[name] for name in STATS])

    for _ in range(3):
        run(note)
    return found


def of_torch(build, settings):
    windows.prepare(settings)
    return noted(build())


def of_a_simulated_card(build, settings):
    device = windows.device_of("1GiB", settings)
    with device.building():
        step = build()
    device.start_trial()

    def call(note):
        with device.session():
            step(note)

    found = noted(call)
    again = device.replay(device.calls, None, 0)
    assert again.error is None or build is kinds_of_pools
    return found, again.peak_reserved_bytes


@pytest.mark.skipif(VERSION != (2, 14), reason="the version of the model")
@pytest.mark.parametrize("settings", ["", windows.EXPANDABLE], ids=["default", "expandable"])
@pytest.mark.parametrize("build", PROGRAMS)
def test_a_program_with_private_pools_takes_what_it_takes_of_torch(build, settings):
    expected = forked(of_torch, build, settings, memory="1GiB", context="0", card=A100)
    found, reserved = forked(of_a_simulated_card, build, settings)
    assert found == expected
    assert reserved == max(peak for *_, peak, _ in expected)


def rolling():
    """A cache in a pool, and training, as a target's step."""
    (model, optimizer), pool = built(), torch.cuda.MemPool()

    def step(model, batch_size):
        with torch.cuda.use_mem_pool(pool):
            cache = [torch.zeros(batch_size, 4096, device="cuda") for _ in range(4)]
        del cache
        train(model, optimizer, rows(batch_size))

    return model, step


@pytest.mark.parametrize("settings", ["", windows.EXPANDABLE], ids=["default", "expandable"])
def test_an_answer_with_a_pool_is_that_of_fresh_processes(settings):
    """Each trial begins with an empty pool, though the pool is the one that building made."""
    limit, cap_bytes = forked(windows.simulated_answer, rolling, "1GiB", settings, limit_s=120)
    _, simulated, on_torchs = windows.window(
        rolling, limit, cap_bytes, each_side=2, memory="1GiB", settings=settings
    )
    assert simulated == on_torchs


def test_a_step_that_captures_itself_is_checked():
    def probe():
        device = windows.device_of("256MiB", "")
        with device.building():
            model, optimizer = built()

        def step(model, batch_size):
            graph, x = torch.cuda.CUDAGraph(), rows(batch_size)
            with torch.cuda.graph(graph):
                train(model, optimizer, x)
            graph.replay()

        return oomprobe.check(model, step, 2000, device=device, progress="off")

    result = forked(probe)
    assert result.trials[-1].passed
    assert "captured graphs" in str(result.not_covered)


def test_a_recording_has_private_pools():
    """The size above an answer is explained from it."""

    def record():
        device = windows.device_of("256MiB", "")
        with device.building():
            _, step = rolling()
            model, _ = built()
        with device.recorded() as snapshots:
            device.start_trial()
            with device.session():
                graph = torch.cuda.CUDAGraph()
                with torch.no_grad(), torch.cuda.graph(graph):
                    model(rows())
                step(model, 1000)
                torch.cuda.empty_cache()
                with pytest.raises(torch.OutOfMemoryError):
                    step(model, 4000)
        return of_snapshot(snapshots[0], source="a trial"), snapshots[0].pools()

    explanation, pools = forked(record)
    assert len(pools) == 3
    requests, same = re.match(
        r"Replayed (\d+) requests: after (\d+) of them", explanation.notes[0]
    ).groups()
    assert requests == same
