"""A saving on a simulated card, and on torch's own allocator, takes what the same saving takes when it is written by hand."""

from functools import partial

import pytest
import savings_by_hand
import torch
import zoo
from bed import forked
from ledger import Log
from savings_by_hand import ATTENTION_SAVED, LAST_BLOCK, LOOPS
from transformers import GPT2LMHeadModel as GPT2LMHeadModel  # else each child imports it, in 1 s
from zoo import peaks

import oomprobe
from oomprobe.ground.allocator_settings import to_expand
from oomprobe.ground.torch_versions import VERSION
from oomprobe.records.patience import Patience

from .ranks import forking

CARD = "8.0,108,2048"  # an A100's
SAVINGS = (
    "expandable_segments", "bf16_autocast", "fp16_autocast", "checkpoint", "fused_optimizer", "no_foreach",
    "offload_activations",
)  # fmt: skip
OTHER_VERSIONS = 0.01  # their order of requests differs
QUIET = {"progress": "off"}


def in_a_table(loop, device, savings=SAVINGS, **options):
    """Return the peaks of each row at one size."""
    size = LOOPS[loop][1]
    target = f"{savings_by_hand.__file__}:{loop}_as_is"
    limits = {
        "min_batch": size,
        "max_batch": size,
        "confirm_steps": 4,
        "patience": Patience(look_calls=4),
        **QUIET,
    }
    table = oomprobe.probe_target(
        target, savings=savings, require=size, device=device, **limits, **options
    )
    assert not table.savings.not_run
    return table.at(size)


def by_hand(loop, saving):
    build, size = LOOPS[loop]
    settings = dict(
        [to_expand({}, torch.__version__).split("=")] if saving == "expandable_segments" else []
    )
    return forked(
        lambda: peaks(lambda: build(saving), size, 4),
        memory="40GiB",
        card=CARD,
        CUDASTUB_ASSERT=0,  # no kernel writes the tokens
        **settings,
    )[-1]


@pytest.mark.parametrize(
    ("loop", "savings"),
    [
        ("accumulating", SAVINGS),
        ("transformers", ("checkpoint", "offload_activations")),
        ("attending", (ATTENTION_SAVED,)),
    ],
)
def test_each_saving_takes_what_it_takes_by_hand(loop, savings):
    found = forked(in_a_table, loop, "sim:A100-40GB", savings, limit_s=300)
    for saving in ("as is", *savings):
        share = 0 if VERSION == (2, 14) else OTHER_VERSIONS
        assert found[saving] == pytest.approx(by_hand(loop, saving), rel=share, abs=0), saving


@pytest.mark.parametrize(
    ("loop", "isolate", "savings"),
    [
        ("decoder", True, SAVINGS[:1]),
        ("decoder", False, SAVINGS[1:]),
        ("transformers", True, (LAST_BLOCK,)),  # a worker
        ("transformers", False, (LAST_BLOCK, ATTENTION_SAVED)),  # by the library's own method
        ("attending", False, (ATTENTION_SAVED,)),
    ],
)
def test_on_a_card_the_same_is_run(loop, isolate, savings):
    bed = {"memory": "40GiB", "card": CARD, "limit_s": 300, "CUDASTUB_ASSERT": 0}
    # A setting of the allocator takes a new interpreter.
    start = () if "expandable_segments" in savings else (forking,)
    found = forked(*start, lambda: in_a_table(loop, None, savings, isolate=isolate), **bed)
    for saving in ("as is", *savings):
        allocated, reserved = by_hand(loop, saving)
        assert found[saving][0] == allocated, saving
        assert found[saving][1] == pytest.approx(reserved, rel=0.02), (
            saving
        )  # another trial may have left its layout


def trials_by_row(savings, required=None):
    """Return the trials that ran in each row."""
    target = f"{zoo.__file__}:gpt"
    table = oomprobe.probe_target(target, savings=savings, require=required, **QUIET)
    rows = table.rows.items()
    return {name: [trial for trial in row.trials if not trial.replayed] for name, row in rows}


def test_calls_with_some_blocks_checkpointed_repeat_like_those_with_all():
    rows = forked(forking, lambda: trials_by_row("checkpoint", 170), limit_s=150)
    (confirmed,) = rows["checkpoint last 1 of 2"]
    assert confirmed.settled_after <= 16


def test_a_setting_of_the_allocator_needs_no_look():
    as_is, expandable = forked(trials_by_row, "expandable_segments", limit_s=100).values()
    assert [trial.steps == 50 for trial in as_is].count(True) == 1
    assert len(expandable) <= 8  # the last runs the size at which rows are compared
    assert not [trial for trial in expandable if trial.steps > 16]
    assert any(trial.phase == "confirm" and trial.settled_after for trial in expandable)


def test_a_process_that_runs_cannot_get_expandable_segments():
    def probed():
        model, step = savings_by_hand.decoder("as is")
        table = oomprobe.find_savings(model, step, 8, "expandable_segments", max_batch=8, **QUIET)
        return dict(table.savings.not_run), table.rows["as is"].state_verified

    not_run, verified = forked(probed)
    assert verified
    assert "a process must start with it" in not_run["expandable_segments"]


def test_steps_are_timed_and_optimizer_state_that_exists_comes_back():
    def probed():
        model, step = savings_by_hand.accumulating("as is")
        step(model, 2)
        torch.cuda.synchronize()
        optimizer = next(
            cell.cell_contents
            for cell in step.__closure__
            if hasattr(cell.cell_contents, "param_groups")
        )
        seen = Log()
        optimizer.register_step_pre_hook(lambda *_: seen.extend(steps()))
        steps = partial(map, lambda held: held["step"].device.type, optimizer.state.values())
        table = oomprobe.find_savings(model, step, 8, "fused_optimizer", max_batch=8, **QUIET)
        return (
            str(table),
            {*seen},
            {*steps()},
            [result.state_verified for result in table.rows.values()],
        )

    printed, seen, devices, verified = forked(probed)
    assert seen == {"cpu", "cuda"}  # a fused step counts on the card
    assert devices == {"cpu"}
    assert verified == [True, True]
    assert "samples/s" in printed


def test_pinned_memory_is_given_back():
    def probed():
        model, step = savings_by_hand.decoder("as is")
        oomprobe.find_savings(model, step, 64, "offload_activations", max_batch=64, **QUIET)
        return torch.cuda.host_memory_stats()["allocated_bytes.current"]

    if VERSION >= (2, 10):
        assert forked(probed) == 0
