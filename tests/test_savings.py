"""Savings on a simulated card: which are run, what the table says, and that nothing of the user's changes."""

import contextlib
import functools
import io
import json
import os

import pytest
import torch
from example_results import gpu_oom, gpu_trial
from helpers import a_result, bits, same_as_golden
from savings_by_hand import ByHand, Mixer, Pyramid
from torch import nn
from zoo import training_step

import oomprobe
from oomprobe.cli import main
from oomprobe.devices.host import HostDevice
from oomprobe.records.patience import Patience
from oomprobe.records.savings import (
    ATTENTION_SAVED,
    OFFLOAD,
    ORDER,
    SAME,
    Comparison,
    chosen,
    numbers_of,
)
from oomprobe.records.trials import Phase
from oomprobe.results.blocks import as_text
from oomprobe.runners.savings import Savings, repeated_blocks

QUICK = Patience(look_calls=8)
QUIET = {
    "progress": "off",
    "multiple_of": 64,
    "resolution": 0.1,
    "confirm_steps": 2,
    "patience": QUICK,
}
WIDTH, LAYERS = 192, 3


def mixer():
    return Mixer(ByHand(""), layers=LAYERS)


def encoder(attention_dropout=0.0):
    """Blocks with attention; the rest of a block drops out."""
    block = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH)
    block.self_attn.dropout = attention_dropout
    return nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)


def step_of(optimizer):
    return training_step(optimizer, lambda batch_size: torch.randn(batch_size, WIDTH))


def found(model, step, savings="all", batch_size=None, **options):
    return oomprobe.find_savings(
        model, step, batch_size, savings, **{"device": "sim:1GiB", **QUIET, **options}
    )


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **options)


# --- what is run ---


def test_all_savings_and_the_best_two_together_are_run_and_compared_at_the_answer_without():
    model = mixer()
    table = found(model, step_of(adamw(model)))
    answers = table.batch_sizes()
    assert [*answers][:7] == [
        "as is", "expandable_segments", "bf16_autocast", "fused_optimizer", "no_foreach", "checkpoint",
        "checkpoint+offload_activations",
    ]  # fmt: skip
    assert [*answers][7:] == ["offload_activations"]  # copies more than with it
    assert answers["checkpoint"] > 2 * answers["as is"]
    size = table.savings.batch_size
    assert size == answers["as is"]
    peaks = table.at(size)
    assert set(peaks) == set(answers)
    assert peaks["checkpoint"][0] < 0.6 * peaks["as is"][0]
    assert all(result.state_verified for result in table.rows.values())
    assert not [name for name in os.environ if name.startswith("PYTORCH_") and "ALLOC" in name]
    with pytest.raises(oomprobe.InvalidArgumentError, match="batch 3 was not run in row as is"):
        table.at(3)
    assert table.cheapest(size) == "as is"
    assert table.cheapest(2 * size) == table.cheapest(2 * size, same_numbers=True) == "checkpoint"
    assert table.cheapest(10**9) is None
    assert oomprobe.ProbeTable.from_dict(json.loads(table.to_json())) == table
    assert 0.5 < table.savings.recomputed["checkpoint"] < 1
    assert not table.savings.recomputed["no_foreach"]
    assert not any(trial.step_s for trial in table.rows["checkpoint"].trials)


def test_a_size_that_grew_over_the_margin_does_not_run():
    model, size = mixer(), 32 * 1024
    table = found(model, step_of(adamw(model)), "checkpoint", size, memory_fraction=0.5)
    assert any(trial.passed for trial in table.rows["as is"].trials if trial.batch_size == size)
    assert table.rows["as is"].batch_size < size
    assert table.at(size)["as is"] is None
    assert table.cheapest(size) == "checkpoint first 2 of 3"


@pytest.mark.parametrize(("host_memory", "answers"), [("64KiB", 1), ("64MiB", 2)])
def test_a_row_that_needs_more_host_memory_than_allowed_says_so(host_memory, answers):
    model, size = mixer(), 32 * 1024
    table = found(model, step_of(adamw(model)), OFFLOAD, size, host_memory=host_memory)
    assert len(table.batch_sizes()) == answers
    row = next(line for line in str(table).splitlines() if line.startswith(f"  {OFFLOAD} "))
    assert "out of host memory" in row
    assert oomprobe.ProbeTable.from_dict(json.loads(table.to_json())) == table


class Flagged(Mixer):
    def __init__(self, hand, **options):
        super().__init__(hand, **options)
        self.gradient_checkpointing = True


class Own(torch.optim.SGD):
    """An optimizer of the user's own."""


@pytest.mark.parametrize(
    ("model", "optimizer", "around", "saving", "reason"),
    [
        (Mixer, {}, lambda: torch.autocast("cuda", torch.bfloat16), "bf16_autocast", "already on"),
        (
            lambda hand, layers: Mixer(hand, layers=layers).bfloat16(),
            {},
            None,
            "bf16_autocast",
            "its parameters are bfloat16 already",
        ),
        (Mixer, {}, torch.autograd.graph.save_on_cpu, "offload_activations", "already on"),
        (
            lambda _, layers: Mixer(ByHand("checkpoint"), layers=layers),
            {},
            None,
            "checkpoint",
            "already on",
        ),
        (Flagged, {}, None, "checkpoint", "already on"),
        (Mixer, {}, None, ATTENTION_SAVED, "it had nothing to act on"),
        (lambda *_, layers: encoder(0.1), {}, None, ATTENTION_SAVED, "attention drops out"),
        (
            lambda _, layers: nn.Sequential(nn.Linear(WIDTH, 8)),
            {},
            None,
            "checkpoint",
            "no repeated blocks",
        ),
        (Mixer, {"fused": True}, None, "fused_optimizer", "already on"),
        (Mixer, {"fused": True}, None, "no_foreach", "a fused AdamW makes no lists of tensors"),
        (Mixer, {"foreach": False}, None, "no_foreach", "already on"),
        (Mixer, None, None, "fused_optimizer", "Own has no fused version here"),
        (Mixer, "by hand", None, "no_foreach", "it had nothing to act on"),
    ],
)
def test_what_does_not_apply_is_named_and_not_run(model, optimizer, around, saving, reason):
    model = model(ByHand(""), layers=LAYERS)
    dtype = next(model.parameters()).dtype
    if optimizer is None:
        optimizer = Own(model.parameters(), lr=0.1)
    elif optimizer != "by hand":
        optimizer = adamw(model, **optimizer)

    def step(model, batch_size):
        with around() if around else contextlib.nullcontext():
            loss = model(torch.randn(batch_size, WIDTH, dtype=dtype)).square().mean()
        loss.backward()
        if optimizer == "by hand":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)
            model.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()

    table = found(model, step, saving, min_batch=128, max_batch=128)
    assert [*table.rows] == ["as is"]
    assert table.savings.not_run[saving].startswith(reason)
    assert f"{saving}: {reason}" in str(table)


def test_a_card_without_bfloat16_attention_gets_fp16():
    model = nn.Linear(WIDTH, WIDTH)
    names = [*found(model, step_of(adamw(model)), device="sim:T4", max_batch=64).rows]
    assert "fp16_autocast" in names
    assert "bf16_autocast" not in names


def test_what_raises_the_peak_is_called_no_saving():
    """Copies of the weights in 16 bits take more than inference saves."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).eval()

    @torch.no_grad()
    def step(model, batch_size):
        model(torch.randn(batch_size, 2048))

    table = found(model, step, "bf16_autocast", max_batch=64)
    without, with_it = (peaks[1] for peaks in table.at(64).values())
    assert with_it > without
    assert "raises the peak, so it saves nothing here" in str(table)


# --- where each acts ---


def test_autocast_is_around_forward_and_loss_and_not_around_backward():
    seen, model = [], mixer()
    optimizer = adamw(model)

    def is_on():
        return torch.is_autocast_enabled("cpu")

    def step(model, batch_size):
        x = torch.randn(batch_size, WIDTH)
        seen.append(("batch", is_on()))
        output = model(x)
        output.register_hook(lambda gradient: seen.append(("backward", is_on())))
        loss = output.square().mean()
        seen.append(("loss", is_on()))
        loss.backward()
        seen.append(("optimizer", is_on()))
        optimizer.step()

    with Savings(("bf16_autocast",), HostDevice()).on(model):
        step(model, 4)
    assert seen == [("batch", False), ("loss", True), ("backward", False), ("optimizer", False)]
    assert not is_on()


SOME_BLOCKS = [
    f"{name} {end} {count} of {LAYERS}"
    for name in ("checkpoint", "offload_activations")
    for end, count in (("first", 2), ("last", 1))
]


@pytest.mark.parametrize(
    "saving", [*(name for name in ORDER[2:] if name != "fp16_autocast"), *SOME_BLOCKS]
)
def test_numbers_change_as_said(saving):
    def trained(*names):
        torch.manual_seed(0)
        model = encoder() if saving == ATTENTION_SAVED else mixer()
        savings = Savings(names, HostDevice())
        step = step_of(adamw(model))
        for _ in range(3):
            with savings.on(model):
                step(model, 16)
        assert {*savings.typed} == {*names}
        return [bits(parameter) for parameter in model.parameters()]

    assert (trained(saving) == trained()) == (numbers_of((saving,)) == SAME)


@pytest.mark.parametrize("saving", ["bf16_autocast", "checkpoint", "fused_optimizer"])
def test_a_model_that_has_trained_comes_back_bit_for_bit(saving):
    model = mixer()
    optimizer = adamw(model)
    step = step_of(optimizer)
    step(model, 2)

    def state():
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        values = [bits(value) for held in optimizer.state.values() for value in held.values()]
        devices = [value.device for held in optimizer.state.values() for value in held.values()]
        attributes = [sorted(vars(module)) for module in model.modules()]
        return (
            [bits(p) for p in model.parameters()],
            values,
            devices,
            groups,
            attributes,
            sorted(vars(optimizer)),
        )

    before = state()
    table = found(model, step, saving, min_batch=128, max_batch=128)
    assert [*table.rows] == ["as is", saving]
    assert state() == before
    assert torch.autocast.__enter__.__qualname__ == "autocast.__enter__"
    assert torch.autograd.backward.__module__ == "torch.autograd"


@pytest.mark.parametrize(("saving", "fused"), [("fused_optimizer", True), ("no_foreach", False)])
def test_flags_hold_for_the_call_alone(saving, fused):
    model, seen = mixer(), []
    optimizer = adamw(model)

    def flags():
        return [(group["fused"], group["foreach"]) for group in optimizer.param_groups]

    optimizer.register_step_pre_hook(lambda *_: seen.append(flags()))
    before = flags()
    with Savings((saving,), HostDevice()).on(model):
        step_of(optimizer)(model, 2)
    assert seen == [[(fused, False)]]
    assert flags() == before == [(None, None)]


def test_blocks_of_stages_are_the_blocks_that_are_recomputed():
    assert [type(block).__name__ for block in repeated_blocks(Pyramid(ByHand("")))] == [
        "Bottleneck"
    ] * 4
    stages = nn.Sequential(
        *(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))) for _ in range(2))
    )
    assert len(repeated_blocks(stages)) == 6
    assert not repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))


# --- arguments, the report and the command line ---


@pytest.mark.parametrize(
    ("savings", "said"),
    [
        ("chekpoint", "there is no saving 'chekpoint'; did you mean checkpoint?"),
        ("fused_optimizer+no_foreach", "cannot act together"),
        (["as is", "quantize"], "there is no saving 'quantize'"),
    ],
)
def test_names_are_checked_before_anything_runs(savings, said):
    with pytest.raises(
        oomprobe.InvalidArgumentError, match=said.replace("+", r"\+").replace("?", r"\?")
    ):
        found(nn.Linear(2, 2), print, savings)


def test_pairs_may_be_named():
    assert chosen("expandable_segments") == [("expandable_segments",)]
    assert chosen("checkpoint+bf16_autocast,no_foreach") == [
        ("no_foreach",),
        ("bf16_autocast", "checkpoint"),
    ]
    model = mixer()
    table = found(model, step_of(adamw(model)), "checkpoint+bf16_autocast", max_batch=64)
    assert [*table.rows] == ["as is", "bf16_autocast+checkpoint"]


def a_table():
    def result(answer):
        sizes = sorted({answer, 64})
        trials = [
            gpu_trial(size, Phase.CONFIRM) if size <= answer else gpu_oom(size) for size in sizes
        ]
        return a_result(batch_size=answer, limit_batch_size=answer, trials=tuple(trials))

    rows = {
        "as is": 48,
        "bf16_autocast": 64,
        "checkpoint": 96,
        "no_foreach": 40,
        "bf16_autocast+checkpoint": 128,
    }
    return oomprobe.ProbeTable(
        axis="saving",
        rows={name: result(answer) for name, answer in rows.items()},
        elapsed_s=64.0,
        savings=Comparison(
            batch_size=64,
            required=True,
            typed={
                "bf16_autocast": 'with torch.autocast("cuda", torch.bfloat16): loss = ...',
                "checkpoint": "model.set_grad_checkpointing()",
                "no_foreach": "SGD(..., foreach=False)",
            },
            not_run={"fused_optimizer": "already on"},
        ),
    )


def test_a_report_equals_its_golden_file():
    same_as_golden(as_text(a_table().report()), "savings.txt")
    assert a_table().cheapest(64) == "bf16_autocast"
    assert a_table().cheapest(64, same_numbers=True) == "checkpoint"


def build():
    model = mixer()
    return model, step_of(adamw(model))


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--require", "1024", "--quiet"], 0, "as is\n"),
        (["--quiet"], 0, "\ncheckpoint "),
        (["--require", "999936"], 5, "none that was run runs batch 999936"),
    ],
)
def test_the_command_line(capsys, options, status, said):
    words = [
        "run",
        f"{__file__}:build",
        "--savings",
        "checkpoint",
        "--multiple-of",
        "64",
        "--device",
        "sim:256MiB",
    ]
    assert main([*words, "--progress", "off", "--resolution", "0.1", *options]) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    if status == 5:
        assert "global_batch=999936 (--global-batch 999936) plans and runs it" in " ".join(
            printed.out.split()
        )


def test_a_compiled_model_is_compiled_once():
    torch._dynamo.reset()
    graphs, model = [], mixer()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled, optimizer = torch.compile(model, backend=backend), adamw(model)
    savings = Savings(("bf16_autocast",), HostDevice())
    for _ in range(3):
        with savings.on(compiled):
            loss = compiled(torch.randn(4, WIDTH)).square().mean()
            assert loss.dtype is torch.bfloat16
        loss.backward()
        optimizer.step()
    assert len(graphs) == 1
    torch._dynamo.reset()


# --- some of the model's blocks ---

SIZE, BLOCKS = 16 * 1024, 4


def residuals():
    return nn.Sequential(nn.Linear(8, WIDTH), Mixer(ByHand(""), layers=BLOCKS))


def step_of_residuals(model):
    optimizer = adamw(model)
    return training_step(optimizer, lambda batch_size: torch.randn(batch_size, 8))


def with_blocks(model, name, **options):
    """Return the table of a search with one row, at one size."""
    only = {"min_batch": SIZE, "max_batch": SIZE}
    return found(model, step_of_residuals(model), name, SIZE, **only, **options)


@pytest.mark.parametrize(
    ("name", "places"),
    [("checkpoint last 3", "[-3:]"), ("offload_activations first 1", "[:1]")],
)
def test_blocks_take_what_they_take_with_the_code_that_is_to_be_typed(name, places):
    name = f"{name} of {BLOCKS}"
    table = with_blocks(residuals(), name)
    assert f"for block in [*model[1].layers]{places}:" in table.savings.typed[name]
    model = residuals()
    known = {"checkpoint": torch.utils.checkpoint.checkpoint, "functools": functools}
    exec(table.savings.typed[name], {"model": model, "torch": torch, **known})
    options = {"progress": "off", "confirm_steps": 2, "patience": QUICK}
    step = step_of_residuals(model)
    with pytest.raises(oomprobe.NothingFitsError):  # in a block, of which nothing stays on
        oomprobe.check(model, step, SIZE, device="sim:96MiB", **options)
    by_hand = oomprobe.check(model, step, SIZE, device="sim:1GiB", **options)
    trial = by_hand.trials[-1]
    assert table.at(SIZE)[name] == (trial.peak_allocated_bytes, trial.peak_reserved_bytes)
    assert table.rows[name].pinned_bytes == by_hand.pinned_bytes
    assert bool(by_hand.pinned_bytes) == name.startswith("offload")


def stacks():
    """Two lists of blocks of one class, as an encoder and a decoder have."""
    return nn.Sequential(
        nn.Linear(8, WIDTH), *(Mixer(ByHand(""), layers=2).layers for _ in range(2))
    )


@pytest.mark.parametrize(
    ("build", "sample", "name", "size", "card"),
    [
        (stacks, (8,), "checkpoint", SIZE, "sim:320MiB"),
        (lambda: Pyramid(ByHand("")), (3, 16, 16), OFFLOAD, 512, "sim:128MiB"),
    ],
)
def test_the_fewest_blocks_are_those_of_an_exhaustive_search(build, sample, name, size, card):
    model, options = build(), {"device": card, "memory_fraction": 1.0}
    options |= {"min_batch": size, "max_batch": size}
    step = training_step(adamw(model), lambda batch_size: torch.randn(batch_size, *sample))
    table = found(model, step, name, size, **options)
    for end in ("first", "last"):
        names = [f"{name} {end} {count} of {BLOCKS}" for count in range(1, BLOCKS)]
        peaks = found(model, step, names, size, **options).at(size)
        running = [name for name in names if peaks.get(name) is not None]
        assert running
        assert [name for name in table.rows if name in names] == running[:1], end


def test_what_a_row_has_shown_need_not_run_for_the_next():
    """From which size calls differ in size alone, and that calls repeat: a plan that fails runs once."""
    model, made = encoder(), io.BytesIO()  # a file, which no trial takes back
    train = training_step(adamw(model), lambda batch_size: torch.randn(32, batch_size, WIDTH))

    def step(model, batch_size):
        made.write(b".")
        train(model, batch_size)

    table = found(model, step, "checkpoint", 150, device="sim:128MiB", multiple_of=1)
    ran = {
        name: [trial.batch_size for trial in result.trials if not trial.replayed]
        for name, result in table.rows.items()
        if result is not None
    }
    assert ran["as is"] == [1, 2, 4, 80, 150]
    assert ran["checkpoint"] == [2, 4, 160, 150]
    assert made.tell() == 35
