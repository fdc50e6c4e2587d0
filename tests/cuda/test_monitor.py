"""The monitor on torch's own allocator: a real loop peaks where the probe did, and what exceeds it is seen."""

import json
from contextlib import suppress

import pytest
import torch
from bed import fail, forked
from resets import all_of_them
from torch import nn
from zoo import training_step

import oomprobe
from oomprobe.ground.torch_versions import VERSION

SIZE = 256


def loop():
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
    return model, training_step(
        torch.optim.AdamW(model.parameters()), lambda n: torch.randn(n, 256, device="cuda")
    )


def evaluate(model, batch_size=8 * SIZE):
    with torch.no_grad():
        model(torch.randn(batch_size, 256, device="cuda"))


def probed(path, max_batch=SIZE):
    oomprobe.find_max_batch(*loop(), max_batch=max_batch, progress="off").to_json(path)


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    path = tmp_path_factory.mktemp("probe") / "probe.json"
    forked(probed, path)
    return path


def trained(monitor, steps=8, size=SIZE, between=lambda model: None):
    """Train as a script does that has never heard of a probe."""
    model, step = loop()
    for _ in range(steps):
        step(model, size)
        monitor.step("training")
        between(model)
    return monitor.to_dict() | {"counted": torch.cuda.max_memory_allocated()}


def test_a_real_loop_peaks_where_the_probe_did_to_the_byte(probe):
    said = forked(lambda: trained(oomprobe.PeakMonitor(probe)))
    assert said["peak_allocated_bytes"] == said["probed_allocated_bytes"] == said["counted"] > 2**24
    assert (said["ok"], said["difference_percent"], said["notes"], said["device"]) == (
        True,
        0,
        [],
        "Stub GPU",
    )
    assert json.loads(json.dumps(said)) == said


def test_a_size_that_was_not_run_lies_between(tmp_path):
    path = tmp_path / "probe.json"
    forked(probed, path, 8192)
    said = forked(lambda: trained(oomprobe.PeakMonitor(path, 6000), size=6000))
    assert (
        0 < abs(said["difference_percent"]) < 3
    )  # the allocator leaves up to 1 MiB at the end of a block
    assert said["notes"][0].endswith("lie on the line between those of batch 4096 and 8192")


def test_an_evaluation_that_exceeds_is_seen_and_named(probe, capsys):
    def run():
        monitor = oomprobe.PeakMonitor(probe)

        def between(model):
            if monitor.steps == 5:
                evaluate(model)
                monitor.seen("evaluation")

        return trained(monitor, 60, between=between)

    said = forked(run)
    assert not said["ok"]
    assert said["peak_allocated_bytes"] == said["counted"] > 1.1 * said["probed_allocated_bytes"]
    above, first = capsys.readouterr().err.splitlines()
    assert "MiB at step 5, in evaluation: " in above
    assert "evaluation between epochs" in above
    assert first.startswith("oomprobe: peak ")
    assert first.endswith("MiB below the cap")


def test_a_loop_that_resets_its_peaks_hides_none(probe):
    def run():
        monitor = oomprobe.PeakMonitor(probe, warn=False)

        def between(model):
            if monitor.steps == 5:
                evaluate(model)
                monitor.seen("evaluation")
                all_of_them()

        return trained(monitor, between=between)

    said = forked(run)
    assert said["peak_allocated_bytes"] > 1.1 * said["probed_allocated_bytes"]
    assert said["resets"] == 1
    assert said["counted"] < said["peak_allocated_bytes"]


@pytest.mark.skipif(
    VERSION < (2, 10), reason="torch 2.6 starts the device when asked which one there is"
)
def test_it_starts_no_device(probe):
    def run():
        monitor = oomprobe.PeakMonitor(probe)
        monitor.step()
        return torch.cuda.is_initialized(), monitor.peak_bytes, monitor.to_dict()["notes"]

    assert forked(run) == (
        False,
        None,
        ["nothing was seen: this process has not used its accelerator"],
    )


def test_a_lost_card_ends_no_step(probe):
    def run():
        monitor = oomprobe.PeakMonitor(probe)
        trained(monitor)
        fail("launch")
        with suppress(RuntimeError):
            torch.ones(8, device="cuda").add_(1)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            torch.cuda.synchronize()
        monitor.step()
        oomprobe.PeakMonitor(probe).step()
        return monitor.peak_bytes == monitor.probed_bytes

    assert forked(run, CUDASTUB_ASSERT=0)


def test_the_card_that_is_current_at_the_first_step(probe):
    def run():
        monitor = oomprobe.PeakMonitor(probe)
        torch.cuda.set_device(1)
        return trained(monitor)

    said = forked(run, memory="1GiB,1GiB")
    assert said["peak_allocated_bytes"] == said["probed_allocated_bytes"] == said["counted"]
