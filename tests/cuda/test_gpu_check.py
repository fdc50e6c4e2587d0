"""The checks for a real card, run on the bed: the tests marked gpu, and scripts/gpu-check."""

import json
import subprocess
import sys
from pathlib import Path

from .bed import forked

ROOT = Path(__file__).parents[2]
CARD = {"memory": "80GiB", "context": "500MiB", "lazy": "250MiB"}
H100 = "9.0,132,2048"


def output_of(*arguments, limit_s=300, **options):
    def run():
        done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
        return done.returncode, done.stdout

    return forked(run, limit_s=limit_s, **CARD, **options)


def test_tests_marked_gpu(tmp_path):
    # Without the slow test of children, which tests/cuda/test_faults.py covers on the bed.
    which = ["-m", "gpu and not needs_kernels", "-k", "not children_are_replaced", "tests/test_gpu.py"]
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", *which]
    status, said = output_of("-m", "pytest", *options, card=H100, shared=tmp_path / "device")
    assert status == 0, said
    assert "skipped" not in said.splitlines()[-1]


def test_gpu_check(tmp_path):
    status, said = output_of("scripts/gpu_check.py", "--without-tests", str(tmp_path / "evidence.json"), card=H100)
    evidence = json.loads((tmp_path / "evidence.json").read_text())
    assert (status, evidence["wrong"], evidence["card"]) == (0, [], "Stub GPU"), said
    assert evidence["children"] == "fork"
    for part in evidence["parts"]:
        assert part["result"]["device"] == "Stub GPU"
        assert part["cold_runs_capped"][str(part["answer"])] == "ran"
        assert part["cold_runs_whole_card"] == {str(part["answer"]): "ran"}
        assert part["answer_share_of_frontier"] > 0.97


def test_ranks_on_two_cards(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import gpu_ranks, json\n"
    code += "print(json.dumps(gpu_ranks.check_ranks('fsdp', 2)))"
    (tmp_path / "cards").mkdir()
    options = {"memory": "1GiB,1GiB", "nccl": "64MiB", "shared": tmp_path / "cards/card"}
    done = forked(lambda: subprocess.check_output([sys.executable, "-c", code], text=True), limit_s=150, **options)
    found = json.loads(done.splitlines()[-1])
    assert found["whole_card"] == "ran", found
    assert found["result"]["world_size"] == 2


def test_gpu_traces(tmp_path):
    # As an A100: on an H100 torch's attention in low precision is cuDNN's, which is not on the bed.
    status, said = output_of("scripts/gpu_traces.py", str(tmp_path))
    assert status == 0
    assert said.count("simulated / true peak 1.0000") == 3, said
