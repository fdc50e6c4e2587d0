"""Tables over an axis on torch's own CUDA allocator: each row against a probe of its own, and what learning together saves."""

import functools
import json
import random
import statistics
from pathlib import Path

import pytest
import torch
from bed import forked
from zoo import conv_net, numbered, runs, training_step

import oomprobe
from oomprobe.ground.torch_versions import VERSION
from oomprobe.records.patience import Patience

from .ranks import forking, on_ranks
from .tabled import Attention, language_model

LENGTHS = [128, 256, 512, 1024, 2048]
TARGET = f"{Path(__file__).with_name('tabled.py')}:build"


def images():
    model, _ = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, training_step(optimizer, lambda n, size: torch.randn(n, 3, *size, device="cuda"))


def evaluating():
    model, inner = language_model()

    @numbered
    def step(number, model, batch_size, length):
        inner(model, batch_size, length)
        if number % 10 == 0:
            with torch.no_grad():
                model(torch.randint(500, (8 * batch_size, length), device="cuda"))

    return model, step


TABLES = {
    # The last number: the work of a row, in steps of its answer's size, at most on average.
    "fused attention": (language_model, {"length": LENGTHS}, "1GiB", 14),
    "attention, mixed": (
        lambda: language_model(Attention),
        {"length": [512, 128, 1024, 256]},
        "1GiB",
        11,
    ),
    "sizes of images": (
        images,
        {"size": [(64, 64), (64, 96), (128, 128), (224, 224)]},
        "6GiB",
        8,
    ),
}


def table_of(lengths, make=lambda: language_model(Attention), **options):
    return oomprobe.find_max_batches(*make(), {"length": lengths}, progress="off", **options)


def work_of(results):
    """Return the work of probes in steps of their answers' sizes; a call that fails counts whole."""
    return sum(
        (t.steps + (not t.passed)) * t.batch_size / result.batch_size
        for result in results
        for t in result.trials
        if not t.replayed
    )


def with_value(step, axis, value):
    return functools.partial(step, **{axis: value})


@pytest.mark.parametrize(("make", "over", "memory", "most_steps"), TABLES.values(), ids=TABLES)
def test_each_row_is_a_probe_of_its_own(make, over, memory, most_steps):
    ((axis, values),) = over.items()

    def run():
        model, step = make()
        options = {"progress": "off"}
        alone = [
            oomprobe.find_max_batch(model, with_value(step, axis, value), **options)
            for value in values
        ]
        return alone, oomprobe.find_max_batches(model, step, over, **options)

    alone, table = forked(run, memory=memory, limit_s=120)
    assert list(table.rows) == values
    for value, one in zip(values, alone, strict=True):
        row = table.rows[value]
        # Equal, but where the two searches met a failure between: a hole, past which no bracket under 1/128 is closed.
        lower, higher = sorted([one.batch_size, row.batch_size])
        failed = {trial.batch_size for trial in (*one.trials, *row.trials) if not trial.passed}
        assert higher - lower <= lower / 128 or failed & {*range(lower + 1, higher + 1)}, value
        assert higher <= lower * (1 + (1 / 32 if VERSION == (2, 14) else 1 / 8)), (
            value
        )  # holes are a version's own
        assert (row.limited_by, row.budget_bytes, row.state_verified) == (
            "memory",
            one.budget_bytes,
            True,
        )
        assert row.trials[-1].phase == "confirm" or "marginal" in str(row.notes)
        assert not [note for note in row.notes if note.startswith("leak")], row.notes
        assert forked(runs_with, make, axis, value, row.batch_size, memory=memory)
    if VERSION == (2, 14):  # where holes lie is a version's own
        assert work_of(table.rows.values()) <= most_steps * len(values)
        # Two rows tell what others ask for: these run a size near the limit, one above, the answer.
        ran = [[t for t in row.trials if not t.replayed] for row in table.rows.values()]
        assert all(len(trials) <= 4 for trials in ran[2:])
        steps = [work_of([row]) for row in table.rows.values()]
        assert statistics.median(steps[2:]) <= 9.1  # of which 7 confirm, and one fails
        phases = [[trial.phase for trial in trials[-2:]] for trials in ran]
        assert phases == [["recheck", "confirm"]] * len(values)
    assert oomprobe.ProbeTable.from_dict(json.loads(table.to_json())) == table


def runs_with(make, axis, value, batch_size, steps=50):
    def build():
        model, step = make()
        return model, with_value(step, axis, value)

    return runs(build, batch_size, steps=steps)


def test_what_happens_at_every_tenth_call_is_learned_once():
    table = forked(table_of, LENGTHS[:3], evaluating, memory="1GiB")
    trials = [(row, trial) for row in table.rows.values() for trial in row.trials]
    assert (
        sum(trial.steps == 50 and 2 * trial.batch_size < row.batch_size for row, trial in trials)
        == 1
    )  # the look
    # All rows know then how long trials must be, and what an evaluation asks for.
    assert all(trial.passed for _, trial in trials if trial.phase == "confirm")
    ran = [trial for _, trial in trials if trial.passed and not trial.replayed]
    assert all(trial.steps >= 11 for trial in ran if trial.phase != "grow")
    assert work_of(table.rows.values()) <= 70 * len(table.rows)  # of which 25 to 50 confirm
    for length, row in table.rows.items():
        assert forked(runs_with, evaluating, "length", length, row.batch_size, 30, memory="1GiB")


# --- all values in turn ---

LENGTHS_OF_EXAMPLES = random.Random(0).choices(LENGTHS, k=2000)


def trained(sizes, seed):
    """Return the step at which training in buckets runs out of memory, in a process that has done nothing else; 0 if it does not."""
    model, step = language_model(Attention)
    lengths = random.Random(seed).choices([*sizes], k=200)
    for number, length in enumerate(lengths, 1):
        try:
            step(model, sizes[length], length)
        except torch.OutOfMemoryError:
            return number
    return 0


def with_epoch(**options):
    epoch = oomprobe.Epoch({"length": LENGTHS_OF_EXAMPLES}, calls=200, orders=6)
    return table_of(LENGTHS, epoch=epoch, **options)


def test_rows_with_an_epoch_train_in_buckets_where_those_alone_do_not():
    alone = forked(table_of, LENGTHS, memory="1GiB").batch_sizes()
    table = forked(with_epoch, memory="1GiB", limit_s=240)
    sizes = table.batch_sizes()
    assert [forked(trained, sizes, seed) for seed in range(3)] == [0, 0, 0]
    assert any(forked(trained, alone, seed) for seed in range(3))  # in some order
    assert {row.epoch.longest_only_batch_size for row in table.rows.values()} == {*alone.values()}
    assert 0.6 < min(sizes[length] / size for length, size in alone.items()) < 1
    assert {row.epoch.deaths for row in table.rows.values()} == {0}
    for size, row in zip(sizes.values(), table.rows.values(), strict=True):
        assert any(trial.passed and trial.batch_size == size for trial in row.trials)
    assert " alone " in str(table).splitlines()[2]
    assert "0 of 6 orders that mix all values of length run out of memory" in str(table)


def test_expandable_segments_lose_less():
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    table = forked(with_epoch, memory="4GiB", limit_s=240, **settings)
    rows = table.rows.values()
    assert min(row.batch_size / row.epoch.longest_only_batch_size for row in rows) > 0.9
    assert {*table.rows[LENGTHS[0]].epoch.settings} == {"expandable_segments:True"}


# --- in other processes ---


def test_one_worker_runs_all_rows_and_each_answer_is_confirmed_in_a_new_one(tmp_path):
    def run():
        torch.cuda.init = None  # the caller opens no context
        return oomprobe.probe_target(
            TARGET, over={"length": LENGTHS[:3]}, max_batch=64, device="cuda", progress="off"
        )

    table = forked(forking, run, memory="1GiB", PIDS=tmp_path, limit_s=60)
    inside = forked(lambda: table_of(LENGTHS[:3], language_model, max_batch=64), memory="1GiB")
    assert table.batch_sizes() == inside.batch_sizes()
    assert table.rows[512].environment["isolated"]
    # The first worker, and one to confirm each row, which then runs the next row's trials.
    assert len(list(tmp_path.iterdir())) == 1 + len(table.rows)


def test_ranks(tmp_path):
    def run():
        # Forked groups start in 0.05 s, a quarter of which pays for about 3 calls; ordinary groups take seconds to start.
        options = {
            "patience": Patience(cost_share=1000),
            "nproc_per_node": 2,
            "progress": "off",
            "resolution": 0.1,
        }
        return oomprobe.probe_target(TARGET, over={"length": [256, 1024]}, **options)

    table = on_ranks(tmp_path, run, BACKEND="gloo", limit_s=60)
    short, long = table.rows.values()
    assert short.batch_size == pytest.approx(4 * long.batch_size, rel=0.15)
    assert all((row.world_size, len(row.trials[-1].ranks)) == (2, 2) for row in table.rows.values())
    # With few calls, sizes pass here that fail in confirmation, in new groups of processes.
    ran = [trial for trial in long.trials if trial.passed and not trial.replayed]
    assert all(trial.steps > short.trials[0].steps for trial in ran)
    assert "batch per rank" in str(table)
