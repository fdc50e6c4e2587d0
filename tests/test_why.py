"""`result.why()` on simulated cards: the explanation of the failure that decided."""

import re
from dataclasses import replace

import pytest
import torch
from helpers import text_of

import oomprobe
from oomprobe.allocator.settings import AllocatorSettings

MIB = 2**20


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def plain(model, x):
    model(x).square().mean().backward()


def emptying(model, x):
    plain(model, x)
    torch.cuda.empty_cache()


def on_a_side_stream(model, x):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x * 2
    y.record_stream(torch.cuda.current_stream())
    plain(model, y)


def catching(model, x):
    try:
        plain(model, x)
    except torch.OutOfMemoryError:
        model.zero_grad()


def probed(use=plain, device="sim:512MiB", **options):
    """Search for the largest size of a step that draws a batch, uses it, and steps an optimizer."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        optimizer.zero_grad()
        use(model, torch.randn(batch_size, 512, device="cpu" if "cpu" in str(device) else "cuda"))
        optimizer.step()

    options = {"multiple_of": 1024, "progress": "off", **options}
    return oomprobe.find_max_batch(model, step, device=device, **options)


def card(text):
    return oomprobe.SimulatedDevice("512MiB", settings=AllocatorSettings.from_text(text))


CASES = {
    "plain": {},
    "the cache is emptied": {"use": emptying},
    "two streams": {"use": on_a_side_stream},
    "the step catches the error": {"use": catching},
    "all memory": {"memory_fraction": 1.0},
    **{
        text: {"device": text}
        for text in (
            "expandable_segments:True",
            "max_split_size_mb:32",
            "roundup_power2_divisions:[1:8,>:2]",
            "garbage_collection_threshold:0.5",
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_next_size_is_explained_by_its_replay(name):
    """Nothing of the recording is missing: replayed, it holds what the card held after each request."""
    options = dict(CASES[name])
    if "device" in options:
        options["device"] = card(options["device"])
    result = probed(**options)
    why = result.why()
    deciding = min(t.batch_size for t in result.trials if not t.passed)
    assert why.source == f"batch {deciding}"
    assert why.cause in ("live", "fragmentation")
    replayed, same = re.match(r"Replayed ([\d,]+) requests: after ([\d,]+) ", why.notes[0]).groups()
    assert replayed == same
    assert why.available_bytes == result.budget_bytes
    assert sum(why.held.values()) == sum(why.kinds.values()) == why.live_bytes
    assert why.live_bytes <= why.reserved_bytes <= result.budget_bytes
    assert result.budget_bytes < min(why.least_bytes, why.least_cap_bytes)
    peaks = [t.peak_allocated_bytes for t in result.trials if t.batch_size == deciding]
    assert why.live_bytes <= max(peaks)


def test_what_held_the_memory():
    why = probed().why()
    largest, *_ = why.held
    assert re.fullmatch(r"test_why\.py:\d+ in forward", largest)
    parameters = 3 * (512 * 512 + 512) * 4
    assert why.kinds["there before the step"] == pytest.approx(parameters, rel=0.01)
    assert why.kinds["forward"] + why.kinds["backward"] > why.live_bytes / 2
    assert not any("oomprobe" in name for name in [why.where, *why.held])


def test_a_cap_counts_as_a_card_of_that_size():
    """The margin is the probe's own: it changes no figure but what is free beside it."""
    capped = probed(memory_fraction=0.5)
    small = oomprobe.SimulatedDevice("512MiB", available_bytes=capped.budget_bytes)
    whole = probed(device=small, memory_fraction=1.0)
    assert whole.batch_size == capped.batch_size
    assert capped.why().free_bytes - whole.why().free_bytes == 256 * MIB
    assert capped.why().cap_bytes == capped.budget_bytes
    # Torch counts pages of expandable segments against a cap in another way than against a card.
    beside = {"cap_bytes": None, "free_bytes": None, "cause": "", "advice": (), "notes": ()}
    assert replace(capped.why(), **beside) == replace(whole.why(), **beside)


def test_it_is_saved_and_shown_with_the_result():
    result = probed()
    read = oomprobe.ProbeResult.from_dict(result.to_dict())
    assert read.why() == result.why()
    brief, verbose = text_of(read), text_of(read, verbose=True)
    assert "\n  why         live tensors fill the memory; largest share: test_why.py:" in brief
    assert f"\n--- why memory ran out: {result.why().source} ---\n{result.why()}" in verbose
    assert "what was live" not in brief


@pytest.mark.parametrize(
    "options", [{"max_batch": 2048}, {"device": "cpu:1GiB", "max_batch": 2048}]
)
def test_where_nothing_ran_out_there_is_nothing_to_explain(options):
    result = probed(**options)
    assert (result.limited_by, result.why()) == ("max_batch", None)
    assert "\n  why " not in text_of(result)


def test_a_failure_that_did_not_run_is_not_explained():
    """In a table of cards, what the step did on the largest is replayed on the others."""
    model = Net()

    def step(model, batch_size):
        plain(model, torch.randn(batch_size, 512, device="cuda"))

    cards = ["sim:1GiB", "sim:512MiB"]
    table = oomprobe.find_max_batches(model, step, device=cards, multiple_of=1024, progress="off")
    largest, smaller = (table.rows[name] for name in cards)
    assert not largest.was_replayed
    assert largest.why().cause == "live"
    assert smaller.was_replayed
    assert smaller.why() is None


def test_the_explained_size_leaves_nothing_behind():
    """It is no trial, and what the step counts with is as it was."""
    calls = []
    model = Net()

    def step(model, batch_size):
        calls.append(batch_size)
        plain(model, torch.randn(batch_size, 512, device="cuda"))

    result = oomprobe.find_max_batch(
        model, step, device="sim:512MiB", multiple_of=1024, progress="off"
    )
    assert result.state_verified
    assert calls == []
    assert result.trials[-1].phase is oomprobe.Phase.CONFIRM
