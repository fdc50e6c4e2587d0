"""Tables of simulated cards: each row equals a search on that card, whether it ran or was replayed."""

from dataclasses import replace

import pytest
import torch
from helpers import find_hastily
from torch import nn
from zoo import numbered, training_step

import oomprobe
from oomprobe.records.patience import Patience

CARDS = [f"sim:{name}" for name in ("RTX-3060-12GB", "A40", "T4", "RTX-2080Ti")]
QUIET = {
    "progress": "off",
    "patience": Patience(look_calls=8),
    "confirm_steps": 2,
    "resolution": 0.1,
}


def trained(model, sample):
    inner = training_step(
        torch.optim.AdamW(model.parameters()), lambda batch_size: torch.randn(batch_size, *sample)
    )

    def step(model, batch_size):
        with torch.autocast("cuda", torch.bfloat16, enabled=len(sample) == 2):
            inner(model, batch_size)

    return model, step


def attention():
    """Return a layer of attention and a head, whose bias gradients are large reductions, and a step."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return trained(nn.Sequential(layer, nn.Linear(256, 4096)), (512, 256))


def told(trial):
    return trial.batch_size, trial.phase, trial.cap_bytes, trial.verdict, trial.peak_reserved_bytes


def test_each_row_equals_a_search_on_its_card():
    model, step = attention()
    table = oomprobe.find_max_batches(model, step, device=CARDS, **QUIET)
    assert [*table.rows] == CARDS
    assert all(result.state_verified for result in table.rows.values())
    replayed = {card: result for card, result in table.rows.items() if result.was_replayed}
    assert {*CARDS} - {*replayed} == {"sim:A40", "sim:T4"}  # the largest of each kind
    for card, result in replayed.items():
        own = find_hastily(model=model, step=step, device=card, **QUIET)
        assert [told(trial) for trial in result.trials] == [told(trial) for trial in own.trials]
        assert (result.available_bytes, result.device) == (own.available_bytes, own.device)


def test_the_number_of_multiprocessors_decides_a_replay():
    """The partial results of a reduction are as many as fit the card."""

    def step(model, batch_size):
        model(torch.randn(256 * batch_size, 256, device="cuda")).sum(0)

    sizes = {"max_batch": 512, **QUIET}
    own = {
        card: find_hastily(model=nn.Identity(), step=step, device=card, **sizes)
        for card in ("sim:RTX-3060-12GB", "sim:RTX-3090")
    }
    table = oomprobe.find_max_batches(nn.Identity(), step, device=[*own], **sizes)
    peaks = [
        {card: one.trials[-1].peak_allocated_bytes for card, one in every.items()}
        for every in (own, table.rows)
    ]
    assert peaks[0] == peaks[1]
    assert len({*peaks[0].values()}) == 2


def test_the_smallest_card_for_a_size_is_run_with_its_plan():
    table = oomprobe.find_max_batches(
        *attention(),
        device=["sim:8GiB", "sim:2GiB", "sim:4GiB", "sim:1GiB"],
        require=60,
        global_batch=240,
        **QUIET,
    )
    assert [result.batch_size >= 60 for _, result in table.fitting()] == [True, False, True, False]
    assert table.smallest() == "sim:4GiB"
    assert [card for card, result in table.rows.items() if not result.was_replayed] == [
        "sim:8GiB",
        "sim:4GiB",
    ]
    assert table.rows["sim:4GiB"].plan(240)[0].ran
    replayed = [trial for card in ("sim:2GiB", "sim:1GiB") for trial in table.rows[card].trials]
    assert {trial.accumulation_steps for trial in replayed} == {1}
    assert "batch 60 runs on 2 of 4 cards; the smallest is sim:4GiB" in str(table)
    assert table == oomprobe.ProbeTable.from_dict(table.to_dict())
    none = oomprobe.find_max_batches(*attention(), device=["sim:2GiB"], require=10**6, **QUIET)
    assert "batch 1000000 runs on 0 of 1 card\n" in str(none)
    least = min(table.batch_sizes().values())
    shown = [line.lstrip("* ").split() for line in str(replace(table, required=least)).splitlines()]
    runs = {cells[0]: cells[-2] for cells in shown if cells[:1] in ([name] for name in table.rows)}
    assert runs == {name: "yes" if result else "no" for name, result in table.rows.items()}


def test_cards_are_drawn_below_one_another():
    pytest.importorskip("matplotlib")
    model, step = trained(nn.Linear(256, 256), (256,))
    devices = ["sim:256MiB", "sim:64MiB", "sim:128MiB"]
    [axes] = (
        oomprobe.find_max_batches(model, step, device=devices, require=10_000, **QUIET).plot().axes
    )
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["64MiB", "* 128MiB", "256MiB"]  # by memory, the smallest that runs it marked
    light, *others = [bar.get_facecolor() for bar in axes.patches]  # that does not run it
    assert {*others} == {others[0]} != {light}


def test_a_step_that_knows_its_call_runs_on_every_card():
    model, step = trained(nn.Linear(256, 256), (256,))

    @numbered
    def evaluating(number, model, size):
        step(model, size * (1 + (number % 7 == 0)))

    table = oomprobe.find_max_batches(
        model, evaluating, device=["sim:128MiB", "sim:64MiB"], **QUIET
    )
    assert [result.was_replayed for _, result in table.fitting()] == [False, False]


def test_cards_on_which_nothing_fits():
    model, step = trained(nn.Linear(8192, 8192), (8192,))
    table = oomprobe.find_max_batches(
        model, step, device=["sim:256MiB", "sim:2GiB", "sim:1GiB", "sim:T4"], **QUIET
    )
    assert [*table.batch_sizes()] == ["sim:2GiB", "sim:T4"]
    assert "too little" in table.unfit["sim:256MiB"]
    assert "even the smallest" in table.unfit["sim:1GiB"] or "batch 1" in table.unfit["sim:1GiB"]
    table = oomprobe.find_max_batches(model, step, device=["sim:1GiB", "sim:512MiB"], **QUIET)
    assert table.unfit["sim:512MiB"] == "not tried: nothing fits sim:1GiB, which has more memory"


@pytest.mark.parametrize(
    ("devices", "error", "text"),
    [
        (["sim:24GiB", "cuda"], oomprobe.InvalidArgumentError, "can only be simulated cards, and one of them is 'cuda'"),
        (["sim:24GiB", "sim:RTX-9999X"], oomprobe.NoDeviceError, "RTX-9999X"),
        (["sim:24GiB", "sim:24GiB"], oomprobe.InvalidArgumentError, "each only once"),
        ([], oomprobe.InvalidArgumentError, "device must have at least one value"),
    ],
)  # fmt: skip
def test_wrong_cards_are_refused_before_anything_runs(devices, error, text):
    def step(model, batch_size):
        raise AssertionError

    with pytest.raises(error, match=text):
        oomprobe.find_max_batches(nn.Linear(1, 1), step, device=devices, **QUIET)


def test_all_cards_have_a_name():
    def step(model, batch_size):
        torch.empty(batch_size, device="cuda")

    table = oomprobe.find_max_batches(
        nn.Identity(), step, device="sim:all", max_batch=1, steps=1, **QUIET
    )
    assert len(table.rows) > 30
    assert {*table.batch_sizes().values()} == {1}


def test_a_bug_names_its_card_and_keeps_the_rows():
    model, inner = attention()

    def step(model, batch_size):
        if torch.cuda.get_device_capability() == (7, 5):
            raise KeyError("bf16")
        inner(model, batch_size)

    with pytest.raises(oomprobe.StepFailedError, match=r"^sim:T4: ") as caught:
        oomprobe.find_max_batches(model, step, device=["sim:T4", "sim:24GiB"], **QUIET)
    assert [*caught.value.table.batch_sizes()] == ["sim:24GiB"]


def test_a_time_limit_keeps_the_rows_that_are_finished():
    def step(model, batch_size):
        while torch.cuda.get_device_capability() == (7, 5):
            torch.empty(1, device="cuda")

    devices = ["sim:T4", "sim:24GiB"]
    table = oomprobe.find_max_batches(
        nn.Identity(), step, device=devices, max_batch=1, time_limit_s=3, **QUIET
    )
    assert [*table.rows] == ["sim:24GiB"]
    assert table.notes == (
        "time limit: there are no rows for device sim:T4. Allow more time, or make another table for them",
    )


def test_a_time_limit_is_for_all_cards():
    model, step = attention()
    with pytest.raises(oomprobe.TimeLimitError):
        oomprobe.find_max_batches(
            model, step, device=["sim:T4", "sim:24GiB"], time_limit_s=1e-3, **QUIET
        )
