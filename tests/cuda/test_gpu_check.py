"""The checks for a real card, run on the bed: the tests marked gpu, and scripts/gpu-check."""

import contextlib
import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bed import forked
from gpu_check import check as gpu_check
from gpu_check import plan
from recordings import Recording, replay

from oomprobe.allocator.caching import CachingAllocator

ROOT = Path(__file__).parents[2]
CARD = {"memory": "80GiB", "context": "500MiB", "lazy": "250MiB"}
A100, H100 = "8.0,108,2048", "9.0,132,2048"


@pytest.mark.usefixtures("warm_python")
def test_tests_marked_gpu(tmp_path):
    """What they say is kept without colours, which kernels of notebooks force."""
    # Without the slow test of children, which tests/cuda/test_faults.py covers, and one that needs kernels that compute.
    which = '-k "not a_scaler and not children_are_replaced"'
    options = {
        "PYTEST_ADDOPTS": which,
        "FORCE_COLOR": "1",
        "card": H100,
        "shared": tmp_path / "device",
        **CARD,
    }
    said = forked(gpu_check.run_tests, 200, tmp_path / "tests.txt", limit_s=300, **options)
    assert said["exit_code"] == 0, (tmp_path / "tests.txt").read_text()
    assert re.fullmatch(r"=+ 4 passed, 2 deselected in .* =+", said["summary"])
    assert said["not_passed"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_gpu_check(tmp_path):
    def check():
        card = {**gpu_check.find_card(), **gpu_check.surroundings()}
        # Two models of four, and one recording of two.
        options = {
            "parts": [gpu_check.PARTS[1], gpu_check.PARTS[-1]],
            "recorded": {"gpt_bfloat16": 256},
        }
        with contextlib.redirect_stdout(io.StringIO()) as said:
            path = tmp_path / "evidence.json"
            return gpu_check.check(
                card, path, time.monotonic(), with_tests=False, **options
            ), said.getvalue()

    # As an A100: on an H100, torch's attention in low precision is cuDNN's, which is not on the bed.
    status, said = forked(check, limit_s=300, card=A100, **CARD)
    evidence = json.loads((tmp_path / "evidence.json").read_text())
    assert (status, evidence["wrong"], evidence["card"]) == (0, [], "Stub GPU"), said
    assert evidence["children"] == "fork"
    for part in evidence["parts"]:
        assert part["result"]["device"] == "Stub GPU"
        assert part["cold_runs_capped"][str(part["answer"])] == "ran"
        assert part["cold_runs_whole_card"] == {str(part["answer"]): "ran"}
        assert part["answer_share_of_frontier"] > 0.97
        on_card, simulated = part["peaks_on_the_card"], part["peaks_simulated"]
        assert simulated["peak_allocated_bytes"] == pytest.approx(
            on_card["peak_allocated_bytes"], rel=0.001
        )
    for recording in evidence["recordings"]:
        assert (
            recording["simulated"]["same_in_order"]
            >= 0.95 * recording["simulated"]["requests_on_the_card"]
        )
        check_replay(recording)
    context, *_, training = evidence["outside_bytes"].values()
    assert (context, training) == (500 * 2**20, 750 * 2**20)
    assert evidence["errors"]["out_of_memory"]["verdict"] == "OOM"
    assert (
        evidence["isolation"]["isolated"]["answer"]
        == evidence["isolation"]["in this process"]["answer"]
        == 256
    )
    assert "to send it: open an issue" in said
    assert evidence["table"]["alone"].keys() == evidence["table"]["mixed"].keys()
    assert set(evidence["table"]["trained mixed"]) == {"ran"}


@pytest.mark.slow
def test_the_plan_of_a_card():
    """Of each part a little; kernels are stubs, so that only requests and peaks mean something."""

    def carry_out():
        gpu_check.find_card()  # sets how children start
        plan.SIZES = {name: plan.SIZES[name] for name in ("conv_net", "bottlenecks")}
        plan.ROWS, plan.BLOCKS, plan.SAVED_SIZE = ("checkpoint",), 2, 2
        plan.TRAINED = {"longest_only_ends": 2, "ends": 1}
        kept = ("prediction", "epochs", "savings", "pinned memory")
        parts, evidence = {name: (plan.PARTS[name][0], 120) for name in kept}, {}
        with contextlib.redirect_stdout(io.StringIO()):
            plan.carry_out(evidence, lambda: None, gpu_check.in_child, parts)
        return json.loads(json.dumps(evidence))

    found = forked(carry_out, limit_s=300, card=A100, **CARD)
    for name in ("conv_net", "bottlenecks"):
        predicted = found["prediction"][name]
        assert predicted["as predicted"] == predicted["requests"] > 200
        assert predicted["reserved_bytes"] == predicted["predicted_reserved_bytes"]
    epochs = found["epochs"]
    ends = epochs["epoch"]["longest_only_ends"]
    trained = [one["ended"] for one in epochs["trained"]["longest_only_ends"]]
    assert (epochs["simulated"]["ends"], trained) == (ends, ends[:2])
    assert trained[1] > 1
    assert epochs["trained"]["ends"] == [{"ended": None}]
    card, simulated = found["savings"]["checkpoint"]["peaks"]
    assert card == pytest.approx(simulated, rel=0.001)
    assert found["pinned memory"]["in short"] == {"equal": True}


def check_replay(found):
    """The simulated allocator reserves what the recording says, after each request."""
    recording = Recording(found["model"], {}, False, found["begins"], found["events"])
    simulated = CachingAllocator(2**62)
    assert all(
        simulated.reserved_bytes == reserved_bytes
        for *_, reserved_bytes in replay(recording, simulated)
    )


@pytest.mark.slow
def test_ranks_on_two_cards(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import json; from gpu_check import ranks\n"
    code += "print(json.dumps(ranks.check_ranks('fsdp', 2)))"
    (tmp_path / "cards").mkdir()
    options = {"memory": "1GiB,1GiB", "nccl": "64MiB", "shared": tmp_path / "cards/card"}
    done = forked(
        lambda: subprocess.check_output([sys.executable, "-c", code], text=True),
        limit_s=150,
        **options,
    )
    found = json.loads(done.splitlines()[-1])
    assert found["whole_card"] == "ran", found
    assert found["result"]["world_size"] == 2
