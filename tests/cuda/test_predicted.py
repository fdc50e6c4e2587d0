"""Searches on torch's own allocator that replay most sizes: what is recorded, what is replayed, and what must run."""

import statistics
from itertools import pairwise

import pytest
import torch
from bed import forked
from torch import nn
from zoo import MODELS, mlp, numbered, runs, training_step

import oomprobe
from oomprobe.devices.accelerator import AcceleratorDevice

MIB = 2**20
BED = {"memory": "1324MiB", "context": "300MiB"}
# Each of these repeats from its second call on, or from its second full step on.
STEADY = ("mlp", "conv", "gpt bf16 deep", "frozen base, adapters")


def found(build, predicts=True):
    """Return the result of a search as a dict, with the trials that ran as (size, phase, passed, calls)."""
    if not predicts:
        AcceleratorDevice.call_recorder = lambda self: None
    result = oomprobe.find_max_batch(*build(), progress="off")
    ran = [trial for trial in result.trials if not trial.replayed]
    return {
        "answer": result.batch_size,
        "budget_bytes": result.budget_bytes,
        "predicted": result.environment.get("predicted"),
        "replays": len(result.trials) - len(ran),
        "ran": [(t.batch_size, t.phase.value, t.passed, t.steps) for t in ran],
        "steps": sum((t.steps + (not t.passed)) * t.batch_size for t in ran) / result.batch_size,
    }


def runs_long(build, batch_size, cap_bytes):
    return runs(build, batch_size, steps=60, cap_bytes=cap_bytes)


@pytest.fixture(scope="module")
def searches():
    """What searches of steady models find, with and without predictions."""
    return {
        name: [forked(found, MODELS[name], predicts, **BED) for predicts in (True, False)]
        for name in STEADY
    }


@pytest.mark.parametrize("name", STEADY)
def test_a_predicted_search_answers_no_less(searches, name):
    predicting, running = searches[name]
    assert predicting["predicted"] is True
    assert predicting["answer"] >= running["answer"]
    cap_bytes = predicting["budget_bytes"]
    assert forked(runs_long, MODELS[name], predicting["answer"], cap_bytes, **BED)


@pytest.mark.parametrize("name", STEADY)
def test_what_decides_has_run(searches, name):
    ran, answer = searches[name][0]["ran"], searches[name][0]["answer"]
    assert ran[-1][:3] == (answer, "confirm", True)
    failed = [size for size, phase, passed, _ in ran if phase == "recheck" and not passed]
    assert failed
    assert answer < min(failed) <= answer + max(1, answer // 64)


@pytest.mark.parametrize("name", STEADY)
def test_no_prediction_reaches_far_beyond_what_ran(searches, name):
    """One of 64 times the last size runs, so that time is known; one at an eighth of the limit, so that kernels are."""
    ran, answer = searches[name][0]["ran"], searches[name][0]["answer"]
    grown = sorted(size for size, phase, *_ in ran if phase == "grow")
    assert grown[-1] >= answer / 8
    assert all(after <= 2 * 64 * before for before, after in pairwise(grown))


def test_a_predicted_search_takes_few_trials(searches):
    counts = [len(predicting["ran"]) for predicting, _ in searches.values()]
    steps = [predicting["steps"] for predicting, _ in searches.values()]
    assert statistics.median(counts) <= 7
    assert statistics.median(steps) <= 12
    assert statistics.median(running["steps"] for _, running in searches.values()) >= 20


def evaluating():
    """A loop that evaluates at each tenth call, by batches four times as large."""
    model, step = mlp()

    @numbered
    def with_evaluation(number, model, batch_size):
        step(model, batch_size)
        if number % 10 == 0:
            with torch.no_grad():
                model(torch.randn(4 * batch_size, 256, device="cuda"))

    return model, with_evaluation


def test_a_call_that_only_the_look_meets_is_predicted_from_longer_trials():
    predicting, running = (forked(found, evaluating, predicts, **BED) for predicts in (True, False))
    assert predicting["predicted"] is True
    assert predicting["answer"] >= running["answer"]
    cap_bytes = predicting["budget_bytes"]
    assert forked(runs_long, evaluating, predicting["answer"], cap_bytes, **BED)
    confirmed = [passed for _, phase, passed, _ in predicting["ran"] if phase == "confirm"]
    assert confirmed == [True]
    # 50 calls of the answer, for the step counts them, and 10 of the size above.
    assert predicting["steps"] <= 75
    assert running["steps"] >= 2.5 * predicting["steps"]


def replays_as_it_ran(build, sizes):
    """Return, for each size, the peaks of a recorded trial and of its replay, and whether the trial met a retry."""
    model, step = build()
    device = AcceleratorDevice(torch.device("cuda"))
    recorder = device.call_recorder()
    rows = []
    for size in sizes:
        model.zero_grad(set_to_none=True)
        device.release()
        with recorder.recording(4):
            device.start_trial()
            for _ in range(4):
                with device.session():
                    step(model, size)
        usage, taped = device.usage(), recorder.taped_trial()
        replay = taped.replay(taped.calls, None, 0)
        rows.append(
            [
                (usage.peak_allocated_bytes, usage.peak_reserved_bytes, usage.alloc_retries),
                (replay.peak_allocated_bytes, replay.peak_reserved_bytes, replay.alloc_retries),
            ]
        )
    return rows


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, "") for name in ("mlp", "mlp accumulating", "conv", "gpt")),
        ("gpt", "expandable_segments:True"),
        ("conv", "max_split_size_mb:20"),
        ("conv", "roundup_power2_divisions:4"),
    ],
)
def test_a_replay_takes_what_the_trial_took(name, settings):
    sizes = (1, 2, 16, 64)
    rows = forked(replays_as_it_ran, MODELS[name], sizes, PYTORCH_CUDA_ALLOC_CONF=settings, **BED)
    for ran, replayed in rows:
        assert ran == replayed


class Scratch(nn.Module):
    """A layer that takes scratch memory by a rule of its own, which no line gives."""

    def __init__(self, scratch_bytes):
        super().__init__()
        self.inner, self._scratch_bytes = nn.Linear(1024, 1024), scratch_bytes

    def forward(self, x):
        scratch = torch.empty(self._scratch_bytes(len(x)), dtype=torch.uint8, device="cuda")
        del scratch
        return self.inner(x)


def in_steps(batch_size):
    return 64 * MIB * (1 + batch_size // 4096)


def by_free_memory(batch_size):
    """Take a quarter of what is free, as plans of cuDNN do that try large workspaces first."""
    free_bytes, _ = torch.cuda.mem_get_info()
    return free_bytes // 4


def only_when_large(batch_size):
    return 400 * MIB if batch_size > 20_000 else 4 * MIB


def with_scratch(rule):
    def build():
        layers = (nn.Linear(1024, 1024), Scratch(rule), nn.Linear(1024, 1024))
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return model, training_step(optimizer, lambda n: torch.randn(n, 1024, device="cuda"))

    return build


@pytest.mark.parametrize("rule", [in_steps, by_free_memory, only_when_large])
def test_lines_that_break_cost_trials_and_not_the_answer(rule):
    build = with_scratch(rule)
    predicting, running = (forked(found, build, p, **BED) for p in (True, False))
    assert predicting["answer"] >= running["answer"] * (1 - 1 / 128)
    cap_bytes = predicting["budget_bytes"]
    assert forked(runs_long, build, predicting["answer"], cap_bytes, **BED)
    assert predicting["ran"][-1][:3] == (predicting["answer"], "confirm", True)


def recorded_by_the_user():
    torch.cuda.memory._record_memory_history(max_entries=1000)
    return found(mlp)


def recorded_beside_an_older_torch():
    """Which does not tell; but what was recorded is there."""
    del torch._C._cuda_isHistoryEnabled
    found(mlp)
    kept = torch.cuda.memory._snapshot()["device_traces"]
    assert not any(kept)  # nothing of the probe's own
    return recorded_by_the_user()


def on_two_streams():
    model, step = mlp()
    side = torch.cuda.Stream()

    def step_with_copy(model, batch_size):
        step(model, batch_size)
        with torch.cuda.stream(side):
            batches = [torch.empty(batch_size, 1024, device="cuda") for _ in range(2)]
        for batch in batches:
            batch.record_stream(torch.cuda.current_stream())

    return found(lambda: (model, step_with_copy))


@pytest.mark.parametrize(
    ("search", "why"),
    [
        (recorded_by_the_user, "the process records the allocator itself"),
        (recorded_beside_an_older_torch, "the process records the allocator itself"),
        (on_two_streams, "blocks wait for other streams"),
    ],
)
def test_where_nothing_is_predicted_each_size_runs(search, why):
    result = forked(search, **BED)
    assert (result["predicted"], result["replays"]) == (why, 0)
    assert len(result["ran"]) > 12
