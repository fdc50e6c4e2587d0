"""The simulated card compared with torch's own allocator: requests, cold steps and answers; test_sequences.py has the operators."""

import itertools
import random
import sys
import textwrap
from functools import partial

import pytest
import torch
from allocations import Modelled, Torchs, outcomes
from bed import forked
from processes import in_child
from sequences import A100, simulated
from torch import nn
from zoo import conv_net, gpt, mlp, peaks, runs

import oomprobe
from oomprobe.ground.torch_versions import VERSION

from . import habits, windows

MIB = 2**20

RTX_3090, RTX_4090, T4 = "8.6,82,1536", "8.9,128,1536", "7.5,40,1024"


# --- request by request ---

LEAST_SPLIT = 20 if VERSION >= (2, 10) else 21  # MiB
SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "split": "max_split_size_mb:24",
    "rounding": f"max_split_size_mb:{LEAST_SPLIT},max_non_split_rounding_mb:40",
    "divisions": "roundup_power2_divisions:4",
    "divisions by size": "roundup_power2_divisions:[1:8,4:2,32:4,>:1]",
    "garbage": "garbage_collection_threshold:0.6",
    "fraction": "per_process_memory_fraction:0.08",
    "large": "large_segment_size_mb:12",
}
SINCE = {"per_process_memory_fraction": (2, 10), "large_segment_size_mb": (2, 13)}
PAIRS = [f"{one},{two}" for one, two in itertools.combinations(list(SETTINGS.values())[1:], 2)]
OFTEN = [(text, 1500) for text in SETTINGS.values()]
OFTEN += [
    (f"max_split_size_mb:24,{text}", 1500) for text in (SETTINGS["expandable"], SETTINGS["large"])
]
PAIRS = [text for text in PAIRS if text.count("divisions") < 2]
ON_REQUEST = [pytest.param(text, 20_000, marks=pytest.mark.slow) for text in SETTINGS.values()]
ON_REQUEST += [pytest.param(text, 20_000, marks=pytest.mark.slow) for text in PAIRS]


def operations(count, streams):
    """Yield random operations in phases of growing and shrinking memory, half of them of large blocks only."""
    draw = random.Random(count + streams).random
    sizes = [int(2 ** (draw() * 27)) for _ in range(30)]
    sizes += [1, 512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 8_519_680, 21 * MIB, 24 * MIB + 512]
    live, grows, is_coarse = [], 0.6, False
    for number in range(count):
        if number % 150 == 0:
            grows, is_coarse = 0.4 + draw() * 0.25, draw() < 0.5
        kind = draw()
        if kind < 0.004:
            yield "empty", None, None
        elif kind < 0.007:
            yield "limit", 0.05 + int(draw() * 4) / 80, None
        elif kind < 0.007 + 0.06 * (streams > 1):
            yield "stream", int(draw() * streams), None
        elif not live or draw() < grows:
            live.append(number)
            nbytes = sizes[int(draw() * len(sizes))]
            if is_coarse:
                nbytes = 9 * MIB + int(draw() * 12) * 3 * MIB
            yield "malloc", number, nbytes + int(draw() * 2) * 5000
        else:
            yield "free", live.pop(-1 - int(draw() ** 3 * len(live))), None


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize(("text", "count"), [*OFTEN, *ON_REQUEST])
def test_requests_have_the_same_outcome_as_in_torch(text, count, streams):
    if any(name in text and version > VERSION for name, version in SINCE.items()):
        pytest.skip("this torch has no such setting")
    bed = {"memory": "3000MiB", "context": "2710MiB", "limit_s": 300}
    expected = forked(lambda: outcomes(operations(count, streams), Torchs(text)), **bed)
    found = outcomes(operations(count, streams), Modelled(text))
    for number, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert here == there, number


# --- on several streams ---


class Prefetching:
    """Batches of a loader that copies and scales the next one on a stream of its own, as timm's does."""

    def __init__(self, batch_size):
        self.batch_size = batch_size

    def __iter__(self):
        side, ready = torch.cuda.Stream(), None
        for _ in range(4):
            with torch.cuda.stream(side):
                following = torch.zeros(self.batch_size, 3, 32, 32, dtype=torch.uint8).to(
                    "cuda", non_blocking=True
                )
                following = following.float().sub_(127).div_(64)
            if ready is not None:
                yield ready
            torch.cuda.current_stream().wait_stream(side)
            ready = following
        yield ready


def prefetched(device, batch_size):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10)).to(
        device or "cpu"
    )
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


def test_a_loader_with_a_stream_of_its_own_takes_what_it_takes_of_torch():
    assert forked(prefetched, None, 777) == forked(prefetched, "cuda", 777)


# --- step by step ---


# Sorted gradients of an embedding, attention, a loss over a vocabulary.
language_model = partial(gpt, vocabulary=8000, context=64)


def evaluated():
    """Weights that autocast casts: since torch 2.11 it does not keep them in inference mode."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()

    @torch.inference_mode()
    def step(model, batch_size):
        with torch.autocast("cuda", torch.float16):
            model(torch.randn(batch_size, 2048, device="cuda"))

    return model, step


@pytest.mark.parametrize(
    ("make", "size", "card"),
    [
        (mlp, 100, A100),  # few weights, much data: bias gradients take the most memory
        (mlp, 20_000, T4),
        (lambda: mlp(amp=torch.bfloat16), 20_000, RTX_4090),
        (lambda: mlp(make=lambda p: torch.optim.AdamW(p, foreach=False)), 30_000, RTX_3090),
        (language_model, 100, A100),
        (lambda: language_model(bf16=True), 100, RTX_3090),
        (conv_net, 400, RTX_4090),
        (evaluated, 100, A100),
        (lambda: conv_net(amp=torch.float16, layout=torch.channels_last), 400, A100),
    ],
)
def test_peaks_match_torchs_allocator(make, size, card):
    *_, (allocated, reserved) = forked(peaks, make, size, windows.CALLS, memory="40GiB", card=card)
    found = forked(lambda: windows.simulated_cell(make, size, None, simulated(card, "40GiB")))
    assert found == (True, pytest.approx(allocated, rel=0.001), pytest.approx(reserved, rel=0.01))


def test_threads_take_what_they_take_of_torch():
    """A thread that evaluates has a workspace of cuBLAS of its own."""
    build = habits.in_thread
    limit, cap_bytes = forked(windows.simulated_answer, build, "1GiB", limit_s=120)
    _, simulated, on_torchs = windows.window(build, limit, cap_bytes, each_side=1, memory="1GiB")
    assert simulated == on_torchs


@pytest.mark.parametrize("make", [lambda: mlp(amp=torch.bfloat16), language_model])
def test_answers_match_fresh_processes(make):
    bed = {"memory": "1GiB", "card": A100}
    size, cap_bytes = forked(windows.simulated_answer, make, "1GiB")

    def passes(share):
        return forked(lambda: runs(make, int(size * share), steps=10, cap_bytes=cap_bytes), **bed)

    assert [passes(share) for share in (0.99, 1, 1.011)] == [True, True, False]


# --- a whole program ---

PROGRAM = """
    import sys, torch
    from torch import nn
    from torch.nn import functional as F
    rows, device = int(sys.argv[1]), torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Dropout(0.1), nn.Linear(1024, 1000))
    model = model.to(device)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
    for epoch in range(6):
        x, y = torch.randn(rows, 256).to(device), torch.randint(1000, (rows,)).to(device, non_blocking=True)
        with torch.autocast("cuda", torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(loss.item(), (logits.argmax(1) == y).sum().item() / rows, logits[:, :5].cpu())
"""


@pytest.mark.usefixtures("warm_python")
def test_a_program_peaks_where_it_does_on_torchs_allocator(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(script), "{batch}"]
    answer = oomprobe.check_command(command, 700, device="sim:1GiB", progress="off").trials[-1]

    def trained():
        in_child(script, "700")
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), retries

    assert (
        answer.peak_allocated_bytes,
        answer.peak_reserved_bytes,
        answer.alloc_retries,
    ) == forked(trained)
