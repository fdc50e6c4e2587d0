"""The simulated card compared with torch's own allocator: requests, kernels, cold steps and answers."""

import random
from functools import partial

import pytest
import torch
from bed import forked
from simulation.bench import ALLOCATOR_SETTINGS
from torch import nn
from torch.nn import functional as F
from zoo import CLASSES, classifier, gpt, mlp, peaks, runs, training_step

import oomprobe
from oomprobe.ground.torch_versions import VERSION
from oomprobe.ground.units import parse_bytes
from oomprobe.simulation.allocator import AllocatorOutOfMemory, CachingAllocator
from oomprobe.simulation.cards import Card
from oomprobe.simulation.settings import AllocatorSettings

MIB = 2**20

A100, H100, RTX_3090, RTX_4090, T4 = "8.0,108,2048", "9.0,132,2048", "8.6,82,1536", "8.9,128,1536", "7.5,40,1024"


# --- request by request ---

STATS = [
    "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current", "reserved_bytes.all.peak",
    "requested_bytes.all.current", "inactive_split_bytes.all.current", "num_alloc_retries", "num_ooms",
]  # fmt: skip


def operations(seed, count, streams):
    """Yield random operations in phases of growing and shrinking memory."""
    draw = random.Random(seed).random
    sizes = [int(2 ** (draw() * 27)) for _ in range(30)]
    sizes += [1, 512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 8_519_680, 21 * MIB]
    live, grows = [], 0.6
    for number in range(count):
        if number % 150 == 0:
            grows = 0.4 + draw() * 0.25
        kind = draw()
        if kind < 0.006:
            yield "empty", None, None
        elif kind < 0.01:
            yield "limit", 0.05 + int(draw() * 4) / 80, None
        elif kind < 0.01 + 0.06 * (streams > 1):
            yield "stream", int(draw() * streams), None
        elif not live or draw() < grows:
            live.append(number)
            yield "malloc", number, sizes[int(draw() * len(sizes))] + int(draw() * 2) * 5000
        else:
            yield "free", live.pop(-1 - int(draw() ** 3 * len(live))), None


def outcomes(streams, malloc, free, empty_cache, limit, use_stream, stats):
    """Return the figures and any error message after each operation."""
    handles, results = {}, []
    for kind, number, nbytes in operations(7, 3000, streams):
        message = ""
        if kind == "malloc":
            try:
                handles[number] = malloc(nbytes)
            except (torch.OutOfMemoryError, AllocatorOutOfMemory) as error:
                # Without its advice, which differs between versions of torch for expandable segments.
                message = str(error).partition(" by PyTorch but unallocated.")[0]
        elif kind == "free" and number in handles:
            free(handles.pop(number))
        elif kind == "empty":
            empty_cache()
        elif kind == "limit":
            limit(number)
        elif kind == "stream":
            use_stream(number)
        figures = stats()
        results.append(([figures[name] for name in STATS], message))
    return results


def torchs_outcomes(text, streams):
    cuda, since_2_10 = torch.cuda, getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (since_2_10 or cuda.memory._set_allocator_settings)(text)
    cuda.init()
    malloc, free = cuda.caching_allocator_alloc, cuda.caching_allocator_delete
    made = [cuda.default_stream(), *(cuda.Stream() for _ in range(1, streams))]

    def use_stream(number):
        cuda.set_stream(made[number])

    limit = cuda.set_per_process_memory_fraction
    return outcomes(streams, malloc, free, cuda.empty_cache, limit, use_stream, cuda.memory_stats)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("text", ALLOCATOR_SETTINGS)
def test_requests_have_the_same_outcome_as_in_torch(text, streams):
    settings = AllocatorSettings.from_text(text)
    if settings.per_process_memory_fraction < 1 and VERSION < (2, 10):
        pytest.skip("a setting since torch 2.10")
    # The large total gives an expandable segment room for everything; the driver would place a second one elsewhere.
    allocator = CachingAllocator(290 * MIB, settings, total_bytes=3000 * MIB)

    def limit(fraction):
        allocator.limit_bytes = int(fraction * allocator.total_bytes)

    if settings.per_process_memory_fraction < 1:
        limit(settings.per_process_memory_fraction)
    malloc, free, empty_cache, use_stream = (
        allocator.malloc,
        allocator.free,
        allocator.empty_cache,
        allocator.use_stream,
    )
    simulated = outcomes(streams, malloc, free, empty_cache, limit, use_stream, allocator.stats)
    assert simulated == forked(torchs_outcomes, text, streams, memory="3000MiB", context="2710MiB")


# --- on several streams ---


class Prefetching:
    """Batches of a loader that copies and scales the next one on a stream of its own, as timm's does."""

    def __init__(self, batch_size):
        self.batch_size = batch_size

    def __iter__(self):
        side, ready = torch.cuda.Stream(), None
        for _ in range(4):
            with torch.cuda.stream(side):
                following = torch.zeros(self.batch_size, 3, 32, 32, dtype=torch.uint8).to("cuda", non_blocking=True)
                following = following.float().sub_(127).div_(64)
            if ready is not None:
                yield ready
            torch.cuda.current_stream().wait_stream(side)
            ready = following
        yield ready


def prefetched(device, batch_size):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10)).to(device or "cpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        for images in Prefetching(batch_size):
            optimizer.zero_grad()
            model(images).logsumexp(1).mean().backward()
            optimizer.step()

    last = oomprobe.check(
        model, step, batch_size, device=device or "sim:1GiB", memory_fraction=1.0, progress="off"
    ).trials[-1]
    return last.peak_allocated_bytes, last.peak_reserved_bytes


@pytest.mark.parametrize("batch_size", [64, 777, 3000])
def test_a_loader_with_a_stream_of_its_own_takes_what_it_takes_of_torch(batch_size):
    assert forked(prefetched, None, batch_size) == forked(prefetched, "cuda", batch_size)


# --- kernel by kernel ---


def made(*shape, dtype=torch.float32):
    return torch.zeros(*shape, device="cuda", dtype=dtype, requires_grad=True)


def attended(dtype, width, *, mask=False, groups=8):
    query, key, value = (made(4, heads, 500, width, dtype=dtype) for heads in (8, groups, groups))
    bias = torch.zeros(500, 500, device="cuda", dtype=dtype) if mask else None
    out = F.scaled_dot_product_attention(query, key, value, bias, enable_gqa=groups < 8)
    return out.transpose(1, 2).contiguous()


KERNELS = {
    "softmax": lambda: made(1000, 4000).softmax(-1),
    "embedding": lambda: F.embedding(torch.zeros(100_000, dtype=torch.long, device="cuda"), made(5000, 100)),
    "rows by index": lambda: made(5000, 100)[torch.zeros(100_000, dtype=torch.long, device="cuda")],
    "elements by two indices": lambda: made(500, 500)[(torch.zeros(200_000, dtype=torch.int32, device="cuda"),) * 2],
    "flash attention": lambda: attended(torch.bfloat16, 80),
    "efficient attention": lambda: attended(torch.float32, 64),
    "flash attention, wide": lambda: attended(torch.bfloat16, 200),
    "flash attention, grouped": lambda: attended(torch.bfloat16, 64, groups=2),
    "efficient attention, wide": lambda: attended(torch.float16, 160, mask=True),
    "convolution": lambda: (
        F.conv2d(made(8, 30, 64, 64), made(40, 30, 3, 3), padding=1).permute(0, 2, 3, 1).contiguous()
    ),
    "bias": lambda: made(20_000, 1024) + made(1024),
}


def backward_bytes(name):
    result = KERNELS[name]()
    gradient, before = torch.ones_like(result), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result.backward(gradient)
    return torch.cuda.max_memory_allocated() - before


def simulated_bytes(name, card):
    with simulated(card, "40GiB").session():
        return backward_bytes(name)


@pytest.mark.parametrize("name", KERNELS)
def test_backward_allocates_as_much_as_in_torch(name):
    taken = forked(backward_bytes, name, memory="40GiB", card=A100)
    assert forked(simulated_bytes, name, A100) == pytest.approx(taken, rel=0.002)


# --- operator by operator ---


def attend(dtype, *, mask=False, dropout_p=0.0):
    query = made(8, 12, 197, 64, dtype=dtype)
    bias = torch.zeros(197, 197, device="cuda", dtype=dtype) if mask else None
    return F.scaled_dot_product_attention(query, query, query, bias, dropout_p)


def convolved(*, last=False, permute=False):
    kind = torch.channels_last if last else torch.contiguous_format
    images = torch.zeros(16, 64, 56, 56, device="cuda").to(memory_format=kind).requires_grad_()
    weight = torch.zeros(128, 64, 3, 3, device="cuda").to(memory_format=kind).requires_grad_()
    result = F.conv2d(images, weight, made(128), padding=1)
    return result.permute(0, 2, 3, 1).reshape(16, -1, 128) * 2 if permute else result.relu()


def channels(apply):
    return apply(torch.zeros(8, 64, 56, 56, device="cuda").to(memory_format=torch.channels_last).requires_grad_())


def norm(make, *shape, dtype=torch.float32, weights=torch.float32):
    return make(shape[1], device="cuda", dtype=weights)(made(*shape, dtype=dtype))


HALF, BFLOAT16 = torch.float16, torch.bfloat16
OPERATORS = {
    "layer norm in 16 bits": lambda: norm(nn.LayerNorm, 4096, 1024, dtype=BFLOAT16, weights=BFLOAT16),
    "RMS norm": lambda: norm(nn.RMSNorm, 4096, 1024),
    "RMS norm in 16 bits": lambda: norm(nn.RMSNorm, 4096, 1024, dtype=BFLOAT16, weights=BFLOAT16),
    "batch norm": lambda: norm(nn.BatchNorm2d, 8, 1024, 8, 8, dtype=HALF),
    "batch norm with weights in 16 bits": lambda: norm(nn.BatchNorm2d, 8, 1024, 8, 8, dtype=HALF, weights=HALF),
    "convolution": convolved,
    "convolution, channels last": lambda: convolved(last=True),
    "convolution, gradient channels last": lambda: convolved(permute=True),
    "softmax, channels last": lambda: channels(lambda x: x.softmax(1)),
    "log-softmax, channels last": lambda: channels(lambda x: x.log_softmax(1)),
    "roll, channels last": lambda: channels(lambda x: x.roll(1, 2)),
    "cumulative sum, channels last": lambda: channels(lambda x: x.cumsum(1)),
    "largest channels": lambda: channels(lambda x: x.topk(2, 1)[0]),
    "pixel shuffle": lambda: channels(lambda x: F.pixel_shuffle(x, 2).contiguous()),
    "layer norm of channels": lambda: channels(lambda x: F.layer_norm(x, x.shape[1:])),
    "layer norm of permuted channels": lambda: F.layer_norm(made(8, 64, 56, 56).permute(0, 2, 3, 1), (64,)),
    "efficient attention": lambda: attend(torch.float32),
    "efficient attention with dropout": lambda: attend(torch.float32, dropout_p=0.1),
    "efficient attention with a mask": lambda: attend(HALF, mask=True),
    "flash attention": lambda: attend(HALF),
}


def of_torch(name):
    torch.cuda.memory._record_memory_history(context=None)
    OPERATORS[name]().sum().backward()
    [trace] = torch.cuda.memory._snapshot()["device_traces"]
    sizes = sorted(event["size"] for event in trace if event["action"] == "alloc")
    return sizes, torch.cuda.max_memory_allocated()


def of_a_simulated_card(name):
    device = simulated(A100, "40GiB")
    device.start_trial()
    with device.history() as history, device.session():
        OPERATORS[name]().sum().backward()
    return sorted(nbytes for _, nbytes in history.events if nbytes > 0), device.usage().peak_allocated_bytes


OLDER = {"largest channels": (2, 12), "flash attention": (2, 9)}  # torch had other blocks before


@pytest.mark.parametrize("name", [name for name in OPERATORS if OLDER.get(name, VERSION) <= VERSION])
def test_requests_and_peak_are_those_of_torch(name):
    assert forked(of_a_simulated_card, name) == forked(of_torch, name, memory="40GiB", card=A100)


# --- step by step ---


def conv_net(dtype=None):
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64),
        nn.ReLU(), nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    ).cuda()  # fmt: skip
    return classifier(model, torch.optim.SGD(model.parameters()), sample=(3, 32, 32), amp=dtype)


# Sorted gradients of an embedding, attention, a loss over a vocabulary.
language_model = partial(gpt, vocabulary=8000, context=64)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.gate = nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, x):
        hidden = F.softplus(self.body(x))
        weights, chosen = self.gate(hidden).softmax(-1).topk(2)
        return F.mse_loss(hidden.gather(1, chosen) * weights, weights) + hidden.mean()


def routed():
    """Scattered gradients, and a loss that computes its own mean."""
    model = Routed().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, training_step(optimizer, lambda n: torch.randn(n, 64, device="cuda"), lambda loss: loss)


def evaluated():
    """Weights that autocast casts: since torch 2.11 it does not keep them in inference mode."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()

    @torch.inference_mode()
    def step(model, batch_size):
        with torch.autocast("cuda", torch.float16):
            model(torch.randn(batch_size, 2048, device="cuda"))

    return model, step


def channels_last():
    model, step = conv_net(torch.float16)
    return model.to(memory_format=torch.channels_last), step


def simulated(card, memory):
    capability, multiprocessors, _ = card.split(",")
    return oomprobe.SimulatedDevice(
        Card(
            name="bed", full_name="bed", total_bytes=parse_bytes(memory), context_bytes=0,
            compute_capability=tuple(map(int, capability.split("."))), multi_processor_count=int(multiprocessors),
        )
    )  # fmt: skip


def simulated_peaks(make, size, card):
    device = simulated(card, "40GiB")
    with device.building():
        model, step = make()
    device.start_trial()
    for _ in range(3):
        with device.session():
            step(model, size)
    usage = device.usage()
    return usage.peak_allocated_bytes, usage.peak_reserved_bytes


@pytest.mark.parametrize(
    ("make", "size", "card"),
    [
        (mlp, 100, A100),  # few weights, much data: bias gradients take the most memory
        (mlp, 20_000, H100),
        (mlp, 20_000, T4),
        (lambda: mlp(amp=torch.bfloat16), 20_000, RTX_4090),
        (lambda: mlp(make=lambda p: torch.optim.AdamW(p, foreach=False)), 30_000, RTX_3090),
        (language_model, 100, A100),
        (lambda: language_model(bf16=True), 100, RTX_3090),
        (conv_net, 400, RTX_4090),
        (lambda: conv_net(torch.float16), 400, H100),
        (routed, 30_000, A100),
        (evaluated, 100, A100),
        (channels_last, 400, A100),
    ],
)
def test_peaks_match_torchs_allocator(make, size, card):
    *_, (allocated, reserved) = forked(peaks, make, size, 3, memory="40GiB", card=card)
    found = forked(simulated_peaks, make, size, card)
    assert found == (pytest.approx(allocated, rel=0.001), pytest.approx(reserved, rel=0.01))


def simulated_answer(make, card, memory):
    device = simulated(card, memory)
    with device.building():
        model, step = make()
    result = oomprobe.find_max_batch(model, step, device=device, progress="off")
    return result.batch_size, result.budget_bytes


@pytest.mark.parametrize(
    ("make", "card", "memory"),
    [(mlp, A100, "4GiB"), (lambda: mlp(amp=torch.bfloat16), RTX_4090, "1GiB"), (language_model, RTX_3090, "1GiB"), (conv_net, T4, "600MiB")],
)  # fmt: skip
def test_answers_match_fresh_processes(make, card, memory):
    bed = {"memory": memory, "card": card}
    size, cap_bytes = forked(simulated_answer, make, card, memory, **bed)

    def passes(share):
        return forked(lambda: runs(make, int(size * share), steps=10, cap_bytes=cap_bytes), **bed)

    assert [passes(share) for share in (0.99, 1, 1.011)] == [True, True, False]
