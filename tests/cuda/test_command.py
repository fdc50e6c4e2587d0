"""Commands that are probed, run for real on the bed: plain Python and what its programs do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import oomprobe
from oomprobe.cli import main
from oomprobe.ground.torch_versions import VERSION

SCRIPT = Path(__file__).with_name("script.py")
MIB = 2**20
OOM, CRASHED = oomprobe.Verdict.OOM, oomprobe.Verdict.CRASHED


@pytest.fixture(autouse=True)
def bed(monkeypatch, tmp_path):
    settings = {"MEMORY": "1GiB", "CONTEXT": "100MiB", "LAZY": "50MiB", "SHARED": str(tmp_path / "card")}
    for name, value in settings.items():
        monkeypatch.setenv(f"CUDASTUB_{name}", value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def python(*words, options=()):
    return [sys.executable, *options, str(SCRIPT), "--batch-size", "{batch}", *words]


def probe(command, **options):
    return oomprobe.probe_command(command, progress="off", **options)


def one_trial(command, size=8, **options):
    """Return the only trial of a size that fails."""
    with pytest.raises(oomprobe.NothingFitsError) as caught:
        probe(command, min_batch=size, max_batch=size, **options)
    (trial,) = caught.value.trials
    return trial


def test_the_answer_is_what_fresh_runs_can_do(capfd):
    result = probe(python(), start_batch=32, multiple_of=32)
    answer = result.batch_size
    assert result.limited_by == "memory"
    assert result.first_failing_batch_size is None  # nothing ran without the margin
    # A context, the kernels, and no NCCL: 874 MiB are left of 1024.
    assert (result.available_bytes, result.budget_bytes) == (874 * MIB, int(0.9 * 874 * MIB))
    assert result.device == "Stub GPU"
    assert result.environment["torch"].startswith("2.")
    confirmations = [trial for trial in result.trials if trial.phase == "confirm"]
    assert [(trial.batch_size, trial.passed) for trial in confirmations] == [(answer, True)] * 2
    assert all(trial.steps >= 50 and trial.peak_reserved_bytes <= result.budget_bytes for trial in confirmations)
    assert all(trial.cap_bytes == result.budget_bytes for trial in result.trials[1:])
    fraction = f"per_process_memory_fraction:{result.budget_bytes / 2**30:.9f}"
    words = [sys.executable, SCRIPT, "--batch-size", str(answer), "--steps", "100"]
    assert subprocess.run(words, env={**os.environ, "PYTORCH_ALLOC_CONF": fraction}, check=False).returncode == 0
    report = str(result)
    assert "command" in report
    assert "script.py" in report
    assert "to start and end the command" in report
    assert oomprobe.ProbeResult.from_dict(json.loads(result.to_json())) == result


def test_a_script_that_resets_the_peaks_shows_the_same():
    shown = [
        [
            (trial.steps >= 50, trial.peak_allocated_bytes, trial.peak_reserved_bytes, trial.alloc_retries)
            for trial in probe(python(*words), min_batch=32, max_batch=32).trials
        ]
        for words in ([], ["--fault", "resets"])
    ]
    assert shown[0] == shown[1]


def test_out_of_memory():
    trial = one_trial(python("--fault", "backward"))
    assert (trial.verdict, trial.steps) == (OOM, 1)
    assert trial.error.startswith("torch.OutOfMemoryError: CUDA out of memory")
    assert trial.cap_bytes == int(0.9 * 1024 * MIB)  # until a run has passed, nothing is known of what is not torch's


# Of errors beside convolutions, torch itself catches some. The other steps pass.
@pytest.mark.parametrize("fault", ["skips-once", "skips-once-beside-convolutions"])
def test_an_out_of_memory_error_that_the_script_swallows_is_no_pass(fault):
    assert one_trial(python("--fault", fault)).verdict is OOM


def test_a_skipped_batch_is_seen_without_an_observer(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")  # its allocator tells none
    assert one_trial(python("--fault", "skips-once"), memory_fraction=1.0).verdict is OOM


def test_text_decides_nothing_where_processes_report():
    result = oomprobe.check_command(python("--fault", "quotes"), 8, progress="off")
    assert [(trial.passed, 50 <= trial.steps < 10_000) for trial in result.trials] == [(True, True)] * 2


def test_where_no_process_reports_the_deciding_line_is_quoted():
    trial = one_trial(python("--fault", "quotes", "--steps", "4", options=["-I"]), memory_fraction=1.0)
    assert trial.verdict is OOM
    assert trial.error.endswith("tip: after 'CUDA out of memory. Tried to allocate 20.00 MiB' lower the batch size")


def test_a_bug():
    said = r"at batch size 8 \(script.py:\d+\): KeyError: 'input_ids'"
    with pytest.raises(oomprobe.StepFailedError, match=said) as caught:
        probe(python("--fault", "bug"), start_batch=8)
    assert caught.value.batch_size == 8
    assert "KeyError: 'input_ids'" in str(caught.value).splitlines()[-1]  # the end of its output


def test_a_death_is_tried_twice():
    with pytest.raises(oomprobe.StepFailedError, match="the command was killed by SIGKILL") as caught:
        probe(python("--fault", "killed"), start_batch=8)
    assert [trial.verdict for trial in caught.value.trials] == [CRASHED] * 2
    assert "Run the command with 8 in place of {batch}" in str(caught.value)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (python("--fault", "ignores"), "exactly as many bytes in each step as batch 8"),
        (python("--samples", "40"), "ended without an error at batch 32 after 1 optimizer step, and a trial needs 2"),
        (python("--fault", "sets-fraction"), "process .* set its allocator's cap to 0.95 of the GPU itself"),
    ],
)
def test_refused(command, said):
    with pytest.raises(oomprobe.UnreliableError, match=said):
        probe(command, start_batch=8)


@pytest.mark.slow
def test_a_script_that_splits_its_batch_is_not_limited_by_memory():
    result = probe(python("--fault", "splits"), start_batch=8)
    assert (result.batch_size, result.limited_by) == (64, "step")


def test_what_passes(tmp_path, monkeypatch):
    """A script sets allocator settings, fails after the steps of a trial; the user has a sitecustomize."""
    notes = tmp_path / "notes"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nopen({str(notes)!r}, 'a').write(os.environ['PYTORCH_ALLOC_CONF'] + '\\n')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.9")
    faults = "sets-conf,fails-at-the-end"
    result = oomprobe.check_command(python("--fault", faults, "--steps", "5"), 8, progress="off")
    assert [(trial.passed, trial.steps) for trial in result.trials] == [(True, 5)] * 2
    assert any("ended by itself after 5 steps, and a confirmation makes at least 6" in note for note in result.notes)
    # Torch's own cap, for processes that ignore PYTHONPATH, once a run has shown that this torch knows it.
    own = "garbage_collection_threshold:0.9"
    later = own if VERSION < (2, 10) else f"{own},per_process_memory_fraction:{0.9 * 874 / 1024:.9f}"
    assert notes.read_text().split() == [own, later]


def test_an_inference_script_passes_when_it_ends(tmp_path):
    script = tmp_path / "infer.py"
    script.write_text(
        "import sys, torch\nx = torch.ones(int(sys.argv[1]) * 2**20, device='cuda'); print((x + 1).sum().item())\n"
    )
    command = [sys.executable, str(script), "{batch}"]
    result = oomprobe.check_command(command, 98, progress="off")  # two of 392 MiB in 786
    assert any(note.startswith("weak: ") for note in result.notes)


def test_command_line(capfd, tmp_path):
    where = tmp_path / "result.json"
    command = ["sh", "-c", f"exec {sys.executable} {SCRIPT} > {{dir}}/log"]  # it reads OOMPROBE_BATCH
    words = f"run --progress off --min-batch 8 --max-batch 8 --global-batch 64 --json {where} -- env OOMPROBE_BATCH={{batch}}"
    assert main([*words.split(), *command]) == 0
    printed = capfd.readouterr().out
    assert "verdict: batch 8 fits in 786.60 MiB" in printed
    assert "64 = 8 x 8, exact" in printed
    assert "the plan for global_batch was not run" in printed
    assert json.loads(where.read_text())["batch_size"] == 8
