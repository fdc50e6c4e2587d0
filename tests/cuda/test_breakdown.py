"""The memory breakdown, from the history of torch's CUDA allocator."""

import contextlib
import io
import json

import pytest
import torch
from bed import forked
from zoo import MODELS, target, training_step

import oomprobe
from oomprobe.cli import main
from oomprobe.records.breakdown import ACTIVATIONS, BACKWARD, GRADIENTS, PARAMETERS, STATE

from .ranks import forking

MIB = 2**20


def nbytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def broken_down(name):
    model, step = MODELS[name]()
    result = oomprobe.find_max_batch(model, step, progress="off", breakdown=True, resolution=0.2)
    return result, nbytes([*model.parameters(), *model.buffers()]), torch.cuda.memory_reserved()


@pytest.mark.parametrize("name", ["gpt checkpointed", "conv", "mlp accumulating"])
def test_a_breakdown_adds_up_to_the_measured_peak(name):
    result, model_bytes, left_bytes = forked(broken_down, name, memory="1GiB", limit_s=120)
    found, answer = result.breakdown, result.trials[-1]
    assert found.batch_size == result.batch_size
    assert sum(found.parts.values()) == found.peak_reserved_bytes
    # The sum of requests in the history must agree with the allocator's statistics of another trial.
    assert found.live_bytes == pytest.approx(answer.peak_allocated_bytes, rel=0.01)
    assert found.peak_reserved_bytes == pytest.approx(answer.peak_reserved_bytes, rel=0.01)
    assert found.parts[PARAMETERS] == model_bytes
    assert left_bytes <= model_bytes + 20 * MIB


def of_one_layer():
    """Break down a step whose tensors at the peak, in tanh's backward, are known to the byte."""
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False), torch.nn.Tanh()).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    step = training_step(optimizer, lambda n: torch.ones(n, 1024, device="cuda"), torch.sum)
    found = [
        oomprobe.check(model, step, size, progress="off", breakdown=True).breakdown
        for size in (4096, 1)
    ]
    return *found, not torch.cuda.memory._snapshot()["device_traces"][0]


def test_each_part_has_the_size_that_the_model_implies():
    # With a small workspace, which since torch 2.15 exists only during backward.
    found, small, history_is_off = forked(
        of_one_layer, memory="1GiB", CUBLAS_WORKSPACE_CONFIG=":16:8"
    )
    mib = {kind: nbytes / MIB for kind, nbytes in found.parts.items()}
    assert (mib[PARAMETERS], mib[STATE], round(mib[BACKWARD])) == (4, 8, 16)
    assert mib[ACTIVATIONS] == pytest.approx(32)  # the batch and tanh's output; the loss is small
    modules = {m.name: (m.activation_bytes // MIB, m.parameter_bytes // MIB) for m in found.modules}
    assert modules == {"(outside the model)": (16, 0), "1": (16, 0), "0": (0, 4)}
    assert found.peak_in == "backward"
    assert (small.peak_in, small.parts[GRADIENTS]) == ("optimizer", 4 * MIB)  # the batch is tiny
    assert history_is_off


def test_a_report_shows_the_breakdown_of_a_worker(tmp_path):
    at = tmp_path / "result.json"
    words = [
        "run",
        target(tmp_path, name="gpt"),
        "--start-batch=64",
        "--resolution=0.2",
        f"--json={at}",
        "--breakdown",
    ]

    def run():
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            return main(words), stdout.getvalue()

    status, stdout = forked(forking, run, limit_s=120)
    result = json.loads(at.read_text())
    assert status == 0
    assert f"batch {result['batch_size']} fits" in stdout
    assert (result["limited_by"], result["environment"]["isolated"]) == ("memory", True)
    assert "where the memory went" in stdout
    assert result["breakdown"]["peak_reserved_bytes"] == result["trials"][-1]["peak_reserved_bytes"]


@pytest.mark.skipif(
    not hasattr(torch._C, "_cuda_isHistoryEnabled"), reason="older torch does not say"
)
def test_the_users_own_recording_goes_on():
    def probe():
        torch.cuda.memory._record_memory_history(max_entries=100)
        model, step = MODELS["mlp"]()
        result = oomprobe.check(model, step, 8, progress="off", breakdown=True)
        return result.breakdown, result.notes, torch._C._cuda_isHistoryEnabled()

    breakdown, notes, is_on = forked(probe, memory="1GiB")
    assert breakdown is None
    assert is_on
    assert any("or you record torch's memory history" in note for note in notes)
