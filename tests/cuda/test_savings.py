"""A saving on a simulated card, and on torch's own allocator, takes what the same saving takes when it is written by hand."""

from functools import partial

import pytest
import savings_by_hand
import sharded
import torch
from bed import forked
from ledger import Log
from savings_by_hand import LOOPS
from zoo import peaks

import oomprobe
from oomprobe.ground.allocator_settings import to_expand
from oomprobe.ground.torch_versions import VERSION

from .ranks import on_ranks

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
    limits = {"min_batch": size, "max_batch": size, **QUIET}
    table = oomprobe.probe_target(target, savings=savings, require=size, device=device, **limits, **options)
    assert not table.savings.not_run
    return table.at(size)


def by_hand(loop, saving):
    build, size = LOOPS[loop]
    settings = dict([to_expand({}, torch.__version__).split("=")] if saving == "expandable_segments" else [])
    return forked(lambda: peaks(lambda: build(saving), size, 4), memory="40GiB", card=CARD, **settings)[-1]


@pytest.mark.parametrize(
    "loop",
    [name if name in ("decoder", "transformers") else pytest.param(name, marks=pytest.mark.slow) for name in LOOPS],
)
def test_each_saving_takes_what_it_takes_by_hand(loop):
    found = forked(in_a_table, loop, "sim:A100-40GB", limit_s=300)
    for saving in ("as is", *SAVINGS):
        share = 0 if VERSION == (2, 14) else OTHER_VERSIONS
        assert found[saving] == pytest.approx(by_hand(loop, saving), rel=share, abs=0), saving


@pytest.mark.parametrize("isolate", [True, False])
def test_on_a_card_the_same_is_run(isolate):
    savings = [name for name in SAVINGS if isolate or name != "expandable_segments"]
    bed = {"memory": "40GiB", "card": CARD, "limit_s": 300}
    found = forked(lambda: in_a_table("decoder", None, savings, isolate=isolate), **bed)
    for saving in ("as is", *savings):
        allocated, reserved = by_hand("decoder", saving)
        assert found[saving][0] == allocated, saving
        assert found[saving][1] == pytest.approx(reserved, rel=0.02), saving  # another trial may have left its layout


@pytest.mark.slow
def test_two_ranks_take_what_a_simulated_rank_takes(tmp_path):
    savings = ["checkpoint", "bf16_autocast", "no_foreach", "offload_activations", "expandable_segments"]

    def compared(device):
        limits = {"min_batch": 32, "max_batch": 32, "memory_fraction": 1.0, **QUIET}
        target = f"{sharded.__file__}:plain"
        table = oomprobe.probe_target(target, nproc_per_node=2, savings=savings, require=32, device=device, **limits)
        return table.at(32)

    with_two = on_ranks(tmp_path, lambda: compared(None), count=2, limit_s=300, CUDASTUB_ASSERT="0")
    assert len(with_two) == 6
    assert with_two == forked(compared, "sim:1GiB", limit_s=300)


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
        optimizer = next(cell.cell_contents for cell in step.__closure__ if hasattr(cell.cell_contents, "param_groups"))
        seen = Log()
        optimizer.register_step_pre_hook(lambda *_: seen.extend(steps()))
        steps = partial(map, lambda held: held["step"].device.type, optimizer.state.values())
        table = oomprobe.find_savings(model, step, 8, "fused_optimizer", max_batch=8, **QUIET)
        return str(table), {*seen}, {*steps()}, [result.state_verified for result in table.rows.values()]

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
