"""The model of torch's allocator of pinned memory compared with torch's own, operation by operation."""

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
from allocations import PINNED_SETTINGS, STREAMS, pinned_operations, pinned_outcomes
from bed import forked, start
from processes import ChildDiedError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import oomprobe
from cuda.ranks import BRIEF, forking  # no relative import: this file is a target too
from oomprobe.allocator import AllocatorSettings, PinnedAllocator
from oomprobe.ground.torch_versions import VERSION

MIB = 2**20
pytestmark = pytest.mark.skipif(VERSION < (2, 10), reason="statistics that count the cache")


def outcomes_of_torch(count, text, folder):
    """Return torch's statistics after each operation; a stream is busy while a collective waits for the other rank."""
    if text:
        torch._C._accelerator_setAllocatorSettings(text)
    store, groups = joined(0, folder)
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in groups)]
    on_card, pinned, results = torch.empty(1, dtype=torch.uint8, device="cuda"), {}, []
    before = torch.cuda.host_memory_stats()
    assert not before["allocated_bytes.current"]
    for number, (kind, which, detail) in enumerate(pinned_operations(count, text)):
        if kind == "pin":
            pinned[which] = torch.empty(detail, dtype=torch.uint8, pin_memory=True)
        elif kind == "free":
            del pinned[which]
        elif kind == "copy":
            with torch.cuda.stream(streams[detail]):
                on_card.copy_(pinned[which][:1], non_blocking=True)
        elif kind == "hold":
            with torch.cuda.stream(streams[which]):
                dist.all_reduce(torch.ones(1, device="cuda"), group=groups[which - 1])
        elif kind == "let go":
            store.set(f"next {number}", str(which))
            streams[which].synchronize()
        else:
            torch._C._host_emptyCache()
        stats = torch.cuda.host_memory_stats()
        results.append({name: stats[name] for name in PinnedAllocator().stats()})
    return results


def follow(count, text, folder):
    """Do as the other rank's collectives wait for."""
    store, groups = joined(1, folder)
    for number, (kind, which, _) in enumerate(pinned_operations(count, text)):
        if kind == "let go":
            store.wait([f"next {number}"])
            dist.all_reduce(torch.ones(1, device="cuda"), group=groups[which - 1])


def joined(rank, folder):
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/meeting", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    groups = [dist.new_group() for _ in range(STREAMS - 1)]
    for group in groups:
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    return store, groups


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", PINNED_SETTINGS)
def test_pinned_memory_is_that_of_torch(text, count, tmp_path):
    bed = {"memory": "1GiB,1GiB", "shared": tmp_path / "cards"}
    other = start(follow, count, text, tmp_path, **bed)
    try:
        expected = start(outcomes_of_torch, count, text, tmp_path, **bed).result(limit_s=300)
    finally:
        other.kill()
        with contextlib.suppress(ChildDiedError):
            other.result()
    found = pinned_outcomes(count, text)
    for number, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert here == there, number


# --- loops that offload ---

WIDTH = 350  # no power of two


def layers():
    torch.manual_seed(0)
    stack = (
        nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        for _ in range(3)
    )
    return nn.Sequential(*stack)


def trained(model, forward, batches=1):
    """Return a call that trains on some micro-batches of rows, whose forward may offload."""
    optimizer = torch.optim.AdamW(model.parameters())

    def call(rows):
        optimizer.zero_grad()
        for _ in range(batches):
            with forward():
                loss = model(torch.randn(rows, WIDTH, device="cuda")).square().mean()
            loss.backward()
        optimizer.step()

    return call


def activations():
    return trained(layers().cuda(), lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


def activations_of_micro_batches():
    offload = torch.autograd.graph.save_on_cpu
    return trained(layers().cuda(), lambda: offload(pin_memory=True), batches=3)


def activations_by_hand():
    """Activations that hooks copy to pinned memory on a stream of their own."""
    side = torch.cuda.Stream()

    def pack(tensor):
        kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with torch.cuda.stream(side):
            kept.copy_(tensor, non_blocking=True)
        return kept

    def unpack(kept):
        return kept.to("cuda", non_blocking=True)

    return trained(layers().cuda(), lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))


def batches_of_a_loader():
    model, images = layers().cuda(), torch.zeros(1000, WIDTH)

    def call(rows):
        loader = DataLoader(TensorDataset(images, torch.zeros(1000)), rows, pin_memory=True)
        for batch, _ in loader:
            model(batch.to("cuda", non_blocking=True)).square().mean().backward()

    return call


def gradients_and_optimizer():
    """An optimizer on the host: gradients go there, and weights come back from pinned copies."""
    model = layers().cuda()
    on_host = [p.detach().cpu().pin_memory() for p in model.parameters()]
    optimizer = torch.optim.AdamW(on_host)

    def call(rows):
        model(torch.randn(rows, WIDTH, device="cuda")).square().mean().backward()
        for weight, kept in zip(model.parameters(), on_host, strict=True):
            kept.grad = weight.grad.to("cpu", non_blocking=True)
            weight.grad = None
        torch.cuda.synchronize()
        optimizer.step()
        for weight, kept in zip(model.parameters(), on_host, strict=True):
            weight.data.copy_(kept, non_blocking=True)

    return call


def streamed_weights():
    """Weights that stay in pinned memory, and come to the card for their layer only."""
    weights = [torch.randn(WIDTH, WIDTH).pin_memory() for _ in range(6)]

    def call(rows):
        data = torch.randn(rows, WIDTH, device="cuda")
        for weight in weights:
            data = data @ weight.to("cuda", non_blocking=True)
        kept.append(data.to("cpu", non_blocking=True))

    kept = []
    return call


LOOPS = (
    activations, activations_of_micro_batches, activations_by_hand, batches_of_a_loader, gradients_and_optimizer,
    streamed_weights,
)  # fmt: skip
ROWS = (300, 130, 1000, 130)


def pinned_by(build, session):
    """Return what is pinned after each call, and at most until then."""
    with session():
        call = build()
    found = []
    for rows in ROWS:
        with session():
            call(rows)
            torch.empty(1, pin_memory=True)  # torch looks for blocks whose copies have ended
            stats = torch.cuda.host_memory_stats()
        found.append((stats["allocated_bytes.current"], stats["allocated_bytes.peak"]))
    return found


def pinned_on_the_bed(text):
    torch._C._accelerator_setAllocatorSettings(text)
    torch.cuda.init()
    found = {}
    for build in LOOPS:
        found[build.__name__] = pinned_by(build, contextlib.nullcontext)
        gc.collect()
        torch._C._host_emptyCache()
        torch.cuda.reset_peak_host_memory_stats()
    return found


def pinned_on_simulated_cards(text):
    settings = AllocatorSettings.from_text(text)
    cards = (oomprobe.SimulatedDevice("4GiB", settings=settings) for _ in LOOPS)
    return {
        build.__name__: pinned_by(build, card.session)
        for build, card in zip(LOOPS, cards, strict=True)
    }


@pytest.mark.parametrize(
    "text", ["", "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:3"]
)
def test_loops_pin_on_a_simulated_card_what_they_pin_of_torch(text):
    found = forked(pinned_on_simulated_cards, text)
    assert min(peak for calls in found.values() for _, peak in calls) > MIB
    assert found == forked(pinned_on_the_bed, text, memory="4GiB")


# --- of a trial ---


def offloading():
    """A step that offloads its activations, and pins 5 MiB more at first."""
    model, calls = layers().cuda(), []
    call = trained(model, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))

    def step(model, batch_size):
        if not calls:
            calls.append(torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True))
        call(batch_size)

    return model, step


def taken(device, **options):
    """Return what a check of one size, after one of twice as much, took of the host, and what its report says."""
    target = f"{__file__}:offloading"
    results = [
        oomprobe.check_target(target, size, device=device, progress="off", **options)
        for size in (1200, 600)
    ]
    return [(one.pinned_bytes, one.host_bytes, "host memory" in str(one)) for one in results]


def test_a_trial_tells_what_it_took_of_the_host():
    found = forked(taken, "sim:4GiB")
    assert found == [(pinned, pinned, True) for pinned, _, _ in found]
    assert [pinned for pinned, _, _ in found] == sorted({one[0] for one in found}, reverse=True)
    on_the_bed = forked(forking, lambda: taken("cuda"), memory="4GiB")
    assert on_the_bed == [(pinned, None, True) for pinned, _, _ in found]


@pytest.mark.parametrize("device", ["cuda", "sim:4GiB"])
def test_trials_begin_without_pinned_memory_of_earlier_ones(device):
    def searched():
        limits = {"min_batch": 64, "max_batch": 256, "device": device, "progress": "off"}
        result = oomprobe.probe_target(f"{__file__}:offloading", **limits)
        return [(trial.batch_size, trial.pinned_bytes) for trial in result.trials]

    found = forked(forking, searched, memory="4GiB")
    by_size = {}
    for size, pinned_bytes in found:
        if pinned_bytes is not None:
            by_size.setdefault(size, set()).add(pinned_bytes)
    assert all(len(figures) == 1 for figures in by_size.values()), found
    assert len(by_size) > 1


@pytest.mark.parametrize("device", ["cuda", "sim:1GiB"])
def test_host_memory_limits_a_size(device):
    def searched(**host):
        options = {"device": device, "patience": BRIEF, "progress": "off"}
        sizes = {"min_batch": 512, "max_batch": 1280, "multiple_of": 128}
        return oomprobe.probe_target(f"{__file__}:offloading", **sizes, **options, **host)

    def bracketed():
        result = searched(host_memory="64MiB")
        [failed] = {
            (trial.verdict, trial.batch_size)
            for trial in result.trials
            if trial.batch_size == result.first_failing_batch_size
        }
        return result.limited_by, result.batch_size, failed, result.pinned_bytes, str(result)

    limited_by, size, failed, pinned_bytes, report = forked(forking, bracketed, memory="1GiB")
    assert (limited_by, failed) == ("host_memory", (oomprobe.Verdict.HOST_OOM, size + 128))
    assert pinned_bytes <= 64 * MIB
    assert f"host memory; batch {size} ran" in report
    assert forked(forking, lambda: searched().limited_by, memory="1GiB") == "max_batch"


def test_host_memory_too_small_for_the_smallest_size_says_so():
    def checked():
        with pytest.raises(oomprobe.NothingFitsError) as caught:
            oomprobe.check_target(
                f"{__file__}:offloading",
                1200,
                device="sim:4GiB",
                host_memory="8MiB",
                progress="off",
            )
        return str(caught.value)

    said = forked(checked)
    assert "of host memory were taken, " in said
    assert "of them pinned, and host_memory allows 8.00 MiB" in said
