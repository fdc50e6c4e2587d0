"""The monitor of a real run on counters that a test moves: what it compares, keeps and writes, and that nothing makes it raise."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from example_results import GIB, MIB, gpu
from helpers import a_trial
from test_progress import Terminal

from oomprobe import EpochRecord, InvalidArgumentError, PeakMonitor, Phase, ProbeTable

HERE = str(torch.__version__)
PROBE = replace(gpu(), environment={"torch": HERE, "date": "2026-11-01T08:00:00+00:00"})
PROBED = PROBE.confirmation.peak_allocated_bytes


class Card:
    """What `torch.cuda` reports of the probe's card: each block is freed at once, and stays in the cache."""

    def __init__(self):
        self.properties, self.peak_bytes, self.is_poisoned = (
            SimpleNamespace(name=PROBE.device),
            0,
            False,
        )

    def alloc(self, size_bytes):
        self.peak_bytes = max(self.peak_bytes, size_bytes)

    def poison(self):
        self.is_poisoned = True

    def is_initialized(self):
        return True

    def current_device(self):
        return 0

    def get_device_properties(self, index):
        return self.properties

    def reset_peak_memory_stats(self):
        self.peak_bytes = 0

    def memory_stats_as_nested_dict(self, index=0):
        if self.is_poisoned:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {
            name: {"all": {"peak": self.peak_bytes}}
            for name in ("allocated_bytes", "reserved_bytes")
        }


@pytest.fixture
def card(monkeypatch):
    """The card of the probe, in this process."""
    fake = Card()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.delenv("RANK", raising=False)
    return fake


def train(card, monitor, steps=1, size_bytes=PROBED, phase=""):
    for _ in range(steps):
        card.alloc(size_bytes)
        monitor.step(phase)


def lines(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


# --- what it compares with ---


def peak(size):
    return GIB + 200 * MIB * size  # of the example's trials


def ran(*sizes_and_peaks, **last):
    """Return a result with trials of those sizes and peaks; `last` is about the last of them."""
    trials = [
        a_trial(size, peak_allocated_bytes=one, peak_reserved_bytes=2 * one)
        for size, one in sizes_and_peaks
    ]
    return replace(PROBE, trials=(*trials[:-1], replace(trials[-1], **last)))


@pytest.mark.parametrize(
    ("probe", "size", "expected", "between"),
    [
        (PROBE, None, peak(98), ""),
        (PROBE, 64, peak(64), ""),
        (PROBE, 80, peak(80), "64 and 96"),
        (PROBE, 97, peak(97), "96 and 98"),
        (PROBE, 99, None, ""),
        (ran((8, 100), (16, 260), (64, 270)), 10, 140, "8 and 16"),  # the nearest of those that ran
        (
            ran((8, 100), (8, 110), phase=Phase.CONFIRM, accumulation_steps=4),
            8,
            110,
            "",
        ),  # the last
    ],
)
def test_the_probed_peak_of_a_size(probe, size, expected, between):
    monitor = PeakMonitor(probe, size)
    said = monitor.to_dict()
    assert monitor.probed_bytes == said["probed_allocated_bytes"] == expected
    if probe is not PROBE:
        assert said["probed_reserved_bytes"] == 2 * expected
    assert bool(between) == ("on the line between" in str(said["notes"]))
    assert f"between those of batch {between}" in str(said["notes"]) or not between


def test_an_epoch_is_compared_with_the_peak_of_all_its_orders(card):
    drawn = {"draw": "longest", "values": {"length": {"most": 512}}}
    size = PROBE.batch_size
    epoch = EpochRecord(
        batch_size=size, ends=(None,), deaths=0, peak_allocated_bytes=2 * PROBED, drawn=drawn
    )
    monitor = PeakMonitor(replace(PROBE, epoch=epoch), warn=False)
    card.alloc(int(1.9 * PROBED))
    monitor.step(length=512)
    assert (monitor.probed_bytes, monitor.ok) == (2 * PROBED, True)
    assert not any("length" in note for note in monitor.to_dict()["notes"])
    monitor.step("training", length=700)
    monitor.step(length=3, width=9000)
    assert "length 700 came, and the epoch that was probed has at most 512" in str(
        monitor.to_dict()["notes"]
    )
    summed = replace(epoch, drawn={**drawn, "draw": "sum"})
    assert summed.longest == {}
    assert PeakMonitor(replace(PROBE, epoch=summed), size - 1).probed_bytes != 2 * PROBED


def test_a_command_that_reported_no_memory_has_no_peak(card, capsys):
    monitor = PeakMonitor(replace(PROBE, trials=(a_trial(98),), budget_bytes=0))
    train(card, monitor, 60)
    assert (monitor.probed_bytes, monitor.ok, monitor.peak_bytes) == (None, True, PROBED)
    [line] = lines(capsys)
    assert (
        line
        == "oomprobe: peak 20.14 GiB; the probe has no peak at batch 98; it has those of batch none"
    )


def test_a_file_and_a_result_are_the_same(tmp_path):
    path = tmp_path / "probe.json"
    PROBE.to_json(path)
    one, other, third = (PeakMonitor(probe).to_dict() for probe in (PROBE, path, str(path)))
    assert one == other == third


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read as a result"),
        ("[1]", "schema_version None"),
        ('{"schema_version": 1}', "not a result that oomprobe wrote"),
        (ProbeTable(axis="length", rows={8: PROBE}).to_json(), "not with a ProbeTable: of a table pass"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_refused(tmp_path, text, said):
    path = tmp_path / "probe.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=said):
        PeakMonitor(path)


@pytest.mark.parametrize(
    "arguments",
    [
        (None,),
        (3,),
        (ProbeTable(axis="length", rows={}),),
        (PROBE, 0),
        (PROBE, "98"),
        (PROBE, True),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments):
    with pytest.raises(InvalidArgumentError):
        PeakMonitor(*arguments)


# --- what it writes ---


def test_a_line_at_the_50th_step_and_no_other(card, capsys):
    monitor = PeakMonitor(PROBE)
    assert monitor.peak_bytes is None
    train(card, monitor, 49)
    assert lines(capsys) == []
    train(card, monitor)
    monitor.seen("evaluation")
    train(card, monitor, 100)
    assert lines(capsys) == [
        "oomprobe: peak 20.14 GiB, probed 20.14 GiB (+0.0 %), reserved 1.46 GiB below the cap"
    ]
    assert (monitor.peak_bytes, monitor.ok, monitor.steps) == (PROBED, True, 150)


def test_a_line_when_the_peak_exceeds_the_probes_and_no_second(card, capsys):
    monitor = PeakMonitor(PROBE)
    train(card, monitor, 20)
    card.alloc(PROBED + PROBED // 10)
    monitor.seen("evaluation")
    train(card, monitor, 3, 2 * MIB + PROBED + PROBED // 10)
    assert lines(capsys) == [
        "oomprobe: peak 22.15 GiB at step 20, in evaluation: 10.0 % above the 20.14 GiB probed at batch 98; not covered by the "
        "probe: the longest sequence of your data; the evaluation step; checkpoint saving. To probe with it: "
        "oomprobe.check(model, {'train': step_fn, 'eval': eval_fn}, 98)"
    ]
    assert not monitor.ok
    said = monitor.to_dict()
    assert (said["first_step_above"], said["phase_above"]) == (20, "evaluation")


def test_training_that_exceeds_is_told_to_probe_its_largest_batches(card, capsys):
    train(card, PeakMonitor(PROBE, 80), 1, peak(90), "training")
    [line] = lines(capsys)
    assert "at step 1, in training: 11.7 % above the ~16.62 GiB probed at batch 80" in line
    assert line.endswith(
        "oomprobe.check(model, step_fn, 80), on the largest batches of your data (oomprobe.worst_case_batches)"
    )


@pytest.mark.parametrize(("share", "ok"), [(0.5, True), (1.0099, True), (1.0101, False)])
def test_one_percent_more_is_still_the_same(card, capsys, share, ok):
    monitor = PeakMonitor(PROBE, warn=False)
    train(card, monitor, 60, int(share * PROBED))
    assert monitor.ok == ok
    assert lines(capsys) == []  # without warnings nothing is written


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("", "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before training, or train with"),
        ("expandable_segments:True", "may end the run: train with a smaller batch"),
    ],
)
def test_reserved_memory_above_the_cap_is_told_with_what_to_do(
    card, capsys, monkeypatch, setting, advice
):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    monitor = PeakMonitor(replace(PROBE, budget_bytes=20 * GIB))
    train(card, monitor, 50)
    said = lines(capsys)[0]
    assert "(+0.0 %), reserved 144.00 MiB above the cap: the margin above it is in use" in said
    assert advice in said
    assert advice in str(monitor.to_dict()["notes"])
    below = PeakMonitor(PROBE)
    train(card, below, 50)
    assert "smaller batch" not in str([lines(capsys), below.to_dict()["notes"]])


@pytest.mark.parametrize(
    ("rank", "expected"),
    [("0", ["rank 0: peak 20.14", "rank 0: peak 22.00"]), ("3", ["rank 3: peak 22.00"])],
)
def test_rank_0_speaks_for_all_until_one_exceeds(card, capsys, monkeypatch, rank, expected):
    monkeypatch.setenv("RANK", rank)
    monitor = PeakMonitor(PROBE)
    train(card, monitor, 55)
    train(card, monitor, 1, 22 * GIB)
    assert [line.partition(" GiB")[0] for line in lines(capsys)] == [
        f"oomprobe: {said}" for said in expected
    ]
    assert monitor.to_dict()["rank"] == int(rank)


def test_the_rank_is_the_process_groups_if_there_is_one(card, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert PeakMonitor(PROBE).to_dict()["rank"] == 5


def test_on_a_terminal_a_line_takes_the_place_of_a_progress_bar(card, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    train(card, PeakMonitor(PROBE), 50)
    assert sys.stderr.getvalue().startswith("\r\x1b[Koomprobe: peak 20.14 GiB")


# --- what others do with the counters ---


def test_a_peak_from_before_the_run_is_not_the_runs(card, capsys):
    card.alloc(23 * GIB)
    monitor = PeakMonitor(PROBE)
    train(card, monitor, 50)
    assert (monitor.peak_bytes, monitor.ok) == (23 * GIB, True)
    assert lines(capsys)[0].startswith(
        "oomprobe: peak at most 23.00 GiB, probed 20.14 GiB (+14.2 %)"
    )
    assert "from before the run" in monitor.to_dict()["notes"][0]
    card.reset_peak_memory_stats()
    train(card, monitor)
    assert (monitor.peak_bytes, monitor.to_dict()["resets"]) == (PROBED, 0)
    for resets in (1, 2):
        card.reset_peak_memory_stats()
        train(card, monitor, 1, PROBED // 2)
        said = monitor.to_dict()
        assert (monitor.peak_bytes, said["peak_reserved_bytes"]) == (PROBED, PROBED)
        assert said["resets"] == resets
        assert f"peaks that were noticed: {resets};" in str(said["notes"])
        train(card, monitor)


# --- what it says as data ---


def test_its_data_are_json_and_name_what_differs(card):
    card.properties.name = "NVIDIA L40"
    monitor = PeakMonitor(replace(PROBE, environment={"torch": "2.6.0", "allocator_settings": {}}))
    train(card, monitor, 7)
    said = monitor.to_dict()
    assert json.loads(json.dumps(said)) == said
    assert (
        card.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"] == PROBED
    )  # it resets nothing
    assert said["notes"] == [
        "the probe was of NVIDIA GeForce RTX 4090, and this run is on NVIDIA L40",
        f"the probe ran with torch 2.6.0, and this run has {HERE}",
    ]
    assert said | {"notes": [], "probe": {}} == {
        "batch_size": 98, "steps": 7, "peak_allocated_bytes": PROBED, "peak_reserved_bytes": PROBED,
        "probed_allocated_bytes": PROBED, "probed_reserved_bytes": PROBED + PROBED // 50, "difference_percent": 0.0,
        "ok": True, "first_step_above": None, "phase_above": "", "cap_bytes": PROBE.budget_bytes, "resets": 0,
        "rank": None, "device": "NVIDIA L40", "torch": HERE, "notes": [], "probe": {},
    }  # fmt: skip
    assert said["probe"]["environment"] == {"torch": "2.6.0", "allocator_settings": {}}
    assert said["probe"]["batch_size"] == 98


def test_the_same_card_simulated_or_in_ranks_does_not_differ(card):
    for name in ("simulated NVIDIA GeForce RTX 4090", "2 x NVIDIA GeForce RTX 4090"):
        card.reset_peak_memory_stats()
        monitor = PeakMonitor(replace(PROBE, device=name))
        train(card, monitor)
        assert monitor.to_dict()["notes"] == []


# --- what is broken or not there ---


def test_without_an_accelerator_it_does_nothing_and_says_so(capsys):
    monitor = PeakMonitor(PROBE)
    for _ in range(60):
        monitor.step()
    assert (monitor.peak_bytes, monitor.ok, monitor.steps) == (None, True, 60)
    assert monitor.to_dict()["notes"] == ["nothing was seen: torch counts no peaks on the host"]
    assert lines(capsys) == []


def no_such(*_, **__):
    raise RuntimeError("CUDA driver version is insufficient")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda fake, patch: fake.poison(), "an illegal memory access"),
        (lambda fake, patch: patch.setattr(torch, "get_device_module", no_such), "driver version is insufficient"),
        (lambda fake, patch: patch.setattr(torch, "get_device_module", lambda device: torch.mps), "no peaks on cuda"),
        (lambda fake, patch: patch.setattr(fake, "is_initialized", lambda: False), "has not used its accelerator"),
        (lambda fake, patch: patch.setattr(torch.distributed, "is_initialized", no_such), "insufficient"),
        (lambda fake, patch: patch.setattr(sys, "stderr", None), ""),
    ],
)  # fmt: skip
def test_a_step_never_raises(card, monkeypatch, fault, said):
    before, after = PeakMonitor(PROBE), None
    train(card, before)
    with monkeypatch.context() as patch:
        fault(card, patch)
        after = PeakMonitor(PROBE)
        for _ in range(55):
            before.step()
            after.step()
    for monitor in (before, after):
        assert monitor.ok
        assert json.dumps(monitor.to_dict())
    assert said in str(after.to_dict()["notes"])


def test_it_works_again_once_the_card_does(card):
    monitor = PeakMonitor(PROBE)
    card.is_initialized = lambda: False
    monitor.step()
    assert "has not used" in monitor.to_dict()["notes"][-1]
    del card.is_initialized
    train(card, monitor)
    assert (monitor.peak_bytes, monitor.to_dict()["notes"]) == (PROBED, [])
