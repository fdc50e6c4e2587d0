"""Probes on the bed run the recorded trials, so a change cannot alter an answer unnoticed.

After an intended change, look at the difference and record again: RECORD=1 scripts/test tests/cuda/test_recorded.py
"""

import json
import os
from pathlib import Path

import pytest
import torch
from bed import forked
from zoo import MODELS

import oomprobe

RECORD = Path(__file__).parents[1] / "golden" / "bed_probes.json"
TARGETS = Path(__file__).parents[1] / "zoo.py"
RECORDED_WITH = "2.14.1"


def in_one_process(name, **options):
    return lambda: oomprobe.find_max_batch(*MODELS[name](), progress="off", **options)


def simulated(name, **options):
    return lambda: oomprobe.probe_target(
        f"{TARGETS}:{name}", device="sim:1GiB", progress="off", **options
    )


PROBES = {
    "mlp": in_one_process("mlp"),
    "conv, for a global batch": in_one_process("conv", global_batch=10_000),
    "gpt, simulated": simulated("gpt"),
}


def record_of(result):
    trials = [
        f"{t.phase} {t.batch_size} {t.verdict}{' replayed' * t.replayed}" for t in result.trials
    ]
    return {"answer": result.batch_size, "limited_by": result.limited_by, "trials": trials}


@pytest.mark.skipif(
    not torch.__version__.startswith(RECORDED_WITH), reason=f"recorded with torch {RECORDED_WITH}"
)
@pytest.mark.parametrize("name", PROBES)
def test_a_probe_runs_the_recorded_trials(name):
    now = forked(lambda: record_of(PROBES[name]()), memory="1GiB", limit_s=120)
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if os.environ.get("RECORD"):
        RECORD.write_text(json.dumps(recorded | {name: now}, indent=1, sort_keys=True) + "\n")
    else:
        assert now == recorded[name]
