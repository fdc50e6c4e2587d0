"""An answer is confirmed in a process as building left it, cache included; where that fails, in one that empties the cache."""

from pathlib import Path

import pytest
import torch
from bed import forked
from workers.forks import install
from zoo import converted, mlp, runs

import oomprobe

from .ranks import on_ranks

MODELS = Path(__file__).parents[1] / "zoo.py"
RANKED = f"{Path(__file__).with_name('ranked.py')}:build"
# All the memory, so that a fresh process runs under the cap of the confirmation.
OPTIONS = {"memory_fraction": 1.0, "progress": "off"}
EMPTYING = "after torch.cuda.empty_cache()"


def isolated():
    install()
    return oomprobe.probe_target(f"{MODELS}:converted", start_batch=8192, device="cuda", **OPTIONS)


def emptied():
    model, step = converted()
    torch.cuda.empty_cache()
    return model, step


def confirmations(result):
    return [
        (trial.batch_size, trial.verdict) for trial in result.trials if trial.phase == "confirm"
    ]


def told(result):
    return [note for note in result.notes if "as building left it" in note]


def test_an_answer_that_needs_an_empty_cache_says_so():
    result = forked(isolated, memory="544MiB")
    answer = result.batch_size
    assert confirmations(result) == [(answer, "out of memory"), (answer, "fits")]
    assert not forked(lambda: runs(converted, answer, steps=50), memory="544MiB")
    assert forked(lambda: runs(emptied, answer, steps=50), memory="544MiB")
    assert f"holds for   a fresh process {EMPTYING}; torch" in str(result)
    assert result.environment["after"] == "torch.cuda.empty_cache()"
    (note,) = told(result)
    assert note.startswith(
        f"batch {answer} at memory_fraction=1 ran out of memory in call 2 of a fresh process"
    )
    assert "Call torch.cuda.empty_cache() after building" in note
    assert not [
        note for note in result.notes if "failed its confirmation" in note or "transient" in note
    ]


def test_an_answer_that_runs_as_built_says_nothing():
    result = forked(isolated, memory="640MiB")
    assert confirmations(result) == [(result.batch_size, "fits")]
    assert forked(lambda: runs(converted, result.batch_size, steps=50), memory="640MiB")
    assert not told(result)
    assert "after" not in result.environment
    assert EMPTYING not in str(result)


def test_ranks_are_confirmed_as_built(tmp_path):
    def probe():
        return oomprobe.probe_target(
            RANKED, nproc_per_node=2, start_batch=1024, resolution=0.02, min_batch=1024, **OPTIONS
        )

    result = on_ranks(tmp_path, probe, BACKEND="gloo", LEFT=400)
    assert confirmations(result) == [
        (result.batch_size, verdict) for verdict in ("out of memory", "fits", "fits")
    ]
    assert told(result)
    assert f"2 fresh processes {EMPTYING}, one for each rank" in str(result).replace(
        "\n" + 16 * " ", " "
    )


def in_one_process(build):
    return lambda: oomprobe.find_max_batch(*build(), max_batch=64, progress="off")


def test_memory_that_building_left_in_this_process_is_told():
    result = forked(in_one_process(converted))
    assert f"a fresh process {EMPTYING}, and this one" in str(result)
    (note,) = [note for note in result.notes if "reserved and free" in note]
    assert note.startswith(
        "48.00 MiB were reserved and free when the probe began, and trials start without them: "
    )
    assert "call torch.cuda.empty_cache() after building" in note


@pytest.mark.parametrize("build", [emptied, mlp])
def test_little_memory_that_building_left_is_not_told(build):
    result = forked(in_one_process(build))
    assert not [note for note in result.notes if "reserved and free" in note]
    assert EMPTYING not in str(result)
