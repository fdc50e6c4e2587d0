"""Epochs on a simulated card: the answer trains, and the record says what does not."""

import json
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oomprobe
from oomprobe import Epoch, NothingFitsError, ProbeResult, cli
from oomprobe.allocator.caching import AllocatorOutOfMemory
from oomprobe.probing.epochs import EpochSearch
from oomprobe.records.patience import Clock

LENGTHS = [int(8 + 56 * (number * 37 % 101) / 100) ** 2 // 32 for number in range(400)]
QUIET = {"progress": "off", "device": "sim:128MiB", "confirm_steps": 2}
SHORT = {"calls": 20, "orders": 4}


def build():
    """Return a small model over tokens, and a step that takes a length."""
    blocks = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)] * 2
    model = nn.Sequential(nn.Embedding(512, 64), *blocks, nn.Linear(64, 512))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size, length):
        tokens = torch.randint(512, (batch_size, int(length)), device="cuda")
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return model, step


def dies(batches, cap_bytes):
    """Return the call in which training with these batches runs out of memory, on a card of its own; None if it does not."""
    card = oomprobe.SimulatedDevice("128MiB")
    with card.building():
        model, step = build()
    card.place([*model.parameters()])
    card.start_trial()
    with card.cap(cap_bytes):
        for number, batch in enumerate(batches, start=1):
            try:
                with card.session():
                    step(model, **batch)
            except (torch.OutOfMemoryError, AllocatorOutOfMemory):
                return number
    return None


@pytest.fixture(scope="module")
def found():
    epoch = Epoch({"length": LENGTHS}, **SHORT)
    return epoch, oomprobe.find_max_batch(*build(), epoch=epoch, **QUIET)


def test_the_answer_trains_and_the_longest_alone_does_not(found):
    epoch, result = found
    record = result.epoch
    assert record.deaths == 0
    assert record.batch_size == result.batch_size < record.longest_only_batch_size
    assert record.matched_fraction == 1.0
    assert record.drawn["values"]["length"]["most"] == max(LENGTHS)
    for size, ends in (
        (record.longest_only_batch_size, record.longest_only_ends),
        (record.batch_size, record.ends),
    ):
        trained = [dies(epoch.batches(order, size), result.budget_bytes) for order in range(3)]
        assert trained == [*ends[:3]]
    assert any(record.longest_only_ends)
    confirmed = result.confirmation
    assert confirmed.cap_bytes == result.budget_bytes >= confirmed.peak_reserved_bytes
    assert abs(confirmed.peak_reserved_bytes - record.peak_reserved_bytes) <= 2 * 2**20
    assert "0 of 4 orders run out of memory" in str(result)
    assert ProbeResult.from_dict(json.loads(result.to_json())) == ProbeResult.from_dict(
        result.to_dict()
    )


def test_a_check_says_what_dies(found):
    epoch, result = found
    size = result.epoch.longest_only_batch_size
    checked = oomprobe.check(*build(), size, epoch=epoch, **QUIET)
    assert (checked.batch_size, checked.trains) == (size, False)
    assert checked.epoch.ends == result.epoch.longest_only_ends
    assert checked.epoch.settings["expandable_segments:False"] == checked.epoch.deaths
    assert f"batch {size} runs out of memory in " in str(checked).splitlines()[0]
    far = oomprobe.check(*build(), 4 * size, epoch=epoch, **QUIET)  # its longest does not fit
    assert far.epoch.deaths == 4
    assert oomprobe.check(*build(), result.batch_size, epoch=epoch, **QUIET).trains


def test_tokens_are_counted():
    result = oomprobe.find_max_tokens(*build(), LENGTHS, **SHORT, **QUIET)
    assert (result.unit, result.epoch.deaths) == ("tokens", 0)
    assert result.batch_size > max(LENGTHS)
    with pytest.raises(oomprobe.InvalidArgumentError, match="tokens"):
        result.plan(64)


def test_steps_take_turns_in_an_epoch():
    model, train = build()

    def evaluate(model, batch_size, length):
        with torch.no_grad():
            model(torch.randint(64, (2 * batch_size, int(length)), device="cuda"))

    epoch = Epoch({"length": LENGTHS}, **SHORT)
    steps = {"train": train, "eval": evaluate}
    result = oomprobe.find_max_batch(model, steps, epoch={"train": epoch, "eval": epoch}, **QUIET)
    assert result.epoch.deaths == 0
    assert result.epoch.drawn.keys() == {"train", "eval"}


def test_rows_of_a_table_train_together():
    epoch = Epoch({"length": LENGTHS}, **SHORT)
    over = {"length": [16, 64, 128]}
    table = oomprobe.find_max_batches(*build(), over, epoch=epoch, multiple_of=4, **QUIET)
    records = [row.epoch for row in table.rows.values()]
    assert {record.deaths for record in records} == {0}
    for row in table.rows.values():
        assert row.batch_size <= row.epoch.longest_only_batch_size
        assert row.batch_size % 4 == 0
        assert row.confirmation is not None


def test_values_that_decide_sizes_are_not_replayed():
    model, train = build()
    drawn = random.Random(5)

    def step(model, batch_size, length):
        train(model, batch_size, length)
        at_once = [
            torch.zeros(drawn.randrange(1, 12), batch_size, 2**16, device="cuda")
            for _ in range(drawn.randrange(7))
        ]
        at_once.clear()

    epoch = Epoch({"length": LENGTHS}, calls=60, orders=2)
    result = oomprobe.find_max_batch(model, step, epoch=epoch, max_batch=16, **QUIET)
    record = result.epoch
    assert (record.ends, record.deaths) == ((), None)
    assert "came as predicted" in record.reason
    assert "no epoch could be replayed" in str(result).splitlines()[0]


def test_the_first_call_of_a_trial_may_make_other_requests_than_the_one_recorded():
    """The calls that run after it teach what the others ask for."""
    model = nn.Linear(64, 1000)

    def step(model, batch_size, tokens):
        cache = torch.zeros(batch_size, 8, 64, device="cuda")
        for _ in range(int(tokens)):
            cache = torch.cat([cache, torch.zeros(batch_size, 1, 64, device="cuda")], 1)
        model(cache).logsumexp(-1).mean().backward()
        model.zero_grad()

    epoch = Epoch(draw=drawn_tokens, calls=30, orders=2)
    result = oomprobe.find_max_batch(model, step, epoch=epoch, resolution=0.1, **QUIET)
    assert (result.epoch.reason, result.epoch.deaths) == ("", 0)


def drawn_tokens(drawn, batch_size):
    while True:
        yield {"tokens": 4 * drawn.randint(1, 4)}


def test_a_size_whose_hardest_calls_die_alone_is_no_answer(monkeypatch):
    replayed, epoch = EpochSearch._replay, Epoch({"length": LENGTHS}, **SHORT)

    def replay(search, calls, start=None):
        end = replayed(search, calls, start)
        is_stretch = isinstance(calls, list) and calls[0].batch_size > 40
        return replace(end, died=1) if is_stretch else end

    monkeypatch.setattr(EpochSearch, "_replay", replay)
    result = oomprobe.find_max_batch(*build(), epoch=epoch, **QUIET)
    assert (result.batch_size, result.epoch.deaths) == (40, 0)


def test_a_bound_that_no_memory_set_is_lowered_too():
    epoch = Epoch({"length": LENGTHS}, **SHORT)
    result = oomprobe.find_max_batch(*build(), epoch=epoch, max_batch=62, **QUIET)
    assert result.batch_size < result.epoch.longest_only_batch_size == 62
    assert (result.limited_by, result.epoch.deaths) == ("memory", 0)
    assert "nothing larger was tried" not in str(result)
    assert result.confirmation.samples_per_s is None


def test_after_the_time_limit_the_answer_stands_without_the_epoch(monkeypatch):
    monkeypatch.setattr(Clock, "is_over", True)
    epoch = Epoch({"length": LENGTHS}, **SHORT)
    result = oomprobe.find_max_batch(*build(), epoch=epoch, max_batch=2, **QUIET)
    assert result.batch_size == 2
    assert "the time limit passed while 4 orders of 20 calls" in result.epoch.reason


def test_where_no_size_trains_it_says_so(monkeypatch):
    monkeypatch.setattr(EpochSearch, "largest", lambda self, bound: (None, self.ends(4 * bound)))
    epoch = Epoch({"length": LENGTHS}, **SHORT)
    with pytest.raises(NothingFitsError, match=r"of 4 orders of 20 calls, 4 run out of memory"):
        oomprobe.find_max_batch(*build(), epoch=epoch, **QUIET)


def test_the_command_line_takes_files_and_judges(tmp_path, capsys):
    file = tmp_path / "lengths.txt"
    file.write_text("16\n32\n64\n128\n" * 80)
    common = ["run", f"{__file__}:build", "--device", "sim:128MiB", "--orders", "2", "--calls", "9"]
    shapes = ["--epoch", f"length={file}", "--quiet"]
    assert cli.main([*common, *shapes, "--max-batch", "2"]) == 0
    assert capsys.readouterr().out == "2\n"
    assert cli.main([*common, *shapes, "--require", "256"]) == 5
    tokens = ["--tokens", str(file), "--packed", "--max-batch", "128", "--json", "-"]
    assert cli.main([*common, *tokens]) == 0
    found = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    assert (found["unit"], found["batch_size"], found["epoch"]["deaths"]) == ("tokens", 128, 0)
    assert cli.main([*common, *tokens[:3], "--require", "64"]) == 2
    assert "an example has 128 tokens" in capsys.readouterr().err
    assert cli.main([*common, *tokens[:3], "--require", "128"]) == 0
    assert cli.main([*common, "--draw", "sum"]) == 2
