"""Commands that are probed, run for real on the bed: plain Python and what its programs do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import oomprobe
from oomprobe.cli import main
from oomprobe.ground.torch_versions import VERSION
from oomprobe.probing import opening

SCRIPT = Path(__file__).with_name("script.py")
NOT_WARM = sys.executable
MIB = 2**20
OOM = oomprobe.Verdict.OOM
FAILED, UNRELIABLE = oomprobe.StepFailedError, oomprobe.UnreliableError


@pytest.fixture(autouse=True)
def bed(warm_python, monkeypatch, tmp_path):
    settings = {
        "MEMORY": "1GiB",
        "CONTEXT": "100MiB",
        "LAZY": "50MiB",
        "SHARED": str(tmp_path / "card"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"CUDASTUB_{name}", value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def python(*words, program="python", options=()):
    return [program, *options, str(SCRIPT), "--batch-size", "{batch}", *words]


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
    assert all(
        trial.steps >= 10 and trial.peak_reserved_bytes <= result.budget_bytes
        for trial in confirmations
    )
    assert all(trial.cap_bytes == result.budget_bytes for trial in result.trials[1:])
    fraction = f"per_process_memory_fraction:{result.budget_bytes / 2**30:.9f}"
    words = [sys.executable, SCRIPT, "--batch-size", str(answer), "--steps", "100"]
    assert (
        subprocess.run(
            words, env={**os.environ, "PYTORCH_ALLOC_CONF": fraction}, check=False
        ).returncode
        == 0
    )
    report = str(result)
    assert "command" in report
    assert "script.py" in report
    assert "to start and end the command" in report
    assert oomprobe.ProbeResult.from_dict(json.loads(result.to_json())) == result


def test_a_script_that_resets_the_peaks_or_prints_an_error_shows_the_same():
    shown = []
    for words in ([], ["--fault", "resets,quotes"]):
        last = oomprobe.check_command(python(*words), 32, progress="off").trials[-1]
        assert last.passed
        assert 10 <= last.steps < 10_000
        shown.append((last.peak_allocated_bytes, last.peak_reserved_bytes, last.alloc_retries))
    assert shown[0] == shown[1]


def without_predictions(monkeypatch):
    monkeypatch.setattr(opening, "open_predicting", lambda runner: runner)


def test_a_search_replays_half_of_the_sizes(monkeypatch):
    """It answers no less, and what a replay of the answer took was taken when that ran."""
    predicting = probe(python("--fault", "resets"))
    without_predictions(monkeypatch)
    running = probe(python("--fault", "resets"))
    assert predicting.environment["predicted"] is True
    assert predicting.batch_size >= running.batch_size
    ran = [trial for trial in predicting.trials if not trial.replayed]
    assert len(ran) <= 7
    assert len(running.trials) >= 14
    answer = predicting.batch_size
    ended = [(trial.batch_size, trial.phase, trial.passed) for trial in ran]
    assert ended[-3:] == [(answer + 1, "recheck", False), *[(answer, "confirm", True)] * 2]
    replayed = next(t for t in predicting.trials if t.replayed and t.batch_size == answer)
    assert replayed.peak_reserved_bytes == ran[-1].peak_reserved_bytes
    assert replayed.peak_allocated_bytes == ran[-1].peak_allocated_bytes
    replays = len(predicting.trials) - len(ran)
    assert f"for {len(ran)} trials and {replays} replays" in str(predicting)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("records-at-once", "the command records the allocator itself"),
        ("records-later", "the command records the allocator itself"),
        ("older-torch", "the command recorded nothing: that takes torch 2.14 or later"),
    ],
)
def test_where_nothing_is_predicted_each_size_runs(fault, why):
    result = probe(python("--fault", fault), max_batch=2)
    assert result.environment["predicted"].startswith(why)
    assert {trial.batch_size for trial in result.trials} == {1, 2}
    assert not any(trial.replayed for trial in result.trials)


def test_a_command_that_ends_by_itself_is_predicted_from_all_its_steps():
    result = probe(python("--steps", "3"), max_batch=16)
    assert result.environment["predicted"] is True
    assert any(trial.replayed for trial in result.trials)


ALL = {"memory_fraction": 1.0}


@pytest.mark.parametrize(
    ("command", "variables", "options", "error"),
    [
        (python("--fault", "backward"), {}, {}, "^torch.OutOfMemoryError: CUDA out of memory"),
        # Swallowed by the script. Of errors beside convolutions, torch itself catches some. The other steps pass.
        (python("--fault", "skips-once"), {}, {}, ""),
        (python("--fault", "skips-once-beside-convolutions"), {}, {}, ""),
        # An allocator that tells no observer, which torch chooses as it is loaded.
        (python("--fault", "skips-once", program=NOT_WARM), {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, ALL, ""),
        # Where no process reports, the line that decides is quoted.
        (python("--fault", "quotes", "--steps", "4", options=["-I"]), {}, ALL, "tip: .* 20.00 MiB' lower the batch size$"),
    ],
    ids=["out of memory", "swallowed", "swallowed beside convolutions", "no observer", "quoted"],
)  # fmt: skip
def test_memory_runs_out(monkeypatch, command, variables, options, error):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trial = one_trial(command, **options)
    assert trial.verdict is OOM
    assert re.search(error, trial.error)
    if error.startswith("^"):
        # Until a run has passed, nothing is known of what is not torch's.
        assert (trial.steps, trial.cap_bytes) == (1, int(0.9 * 1024 * MIB))


@pytest.mark.parametrize(
    ("command", "error", "said", "trials"),
    [
        (python("--fault", "bug"), FAILED, r"at batch size 8 \(script.py:\d+\): KeyError: 'input_ids'(?s:.*)KeyError: 'input_ids'$", 0),
        (python("--fault", "killed"), FAILED, r"the command was killed by SIGKILL\nRun the command with 8 in place of {batch}", 2),
        (python("--fault", "ignores"), UNRELIABLE, "exactly as many bytes in each step as batch 8", None),
        (python("--samples", "12"), UNRELIABLE, "ended without an error at batch 8 after 1 optimizer step, and a trial needs 2", None),
        (python("--fault", "sets-fraction"), UNRELIABLE, "process .* set its allocator's cap to 0.95 of the GPU itself", None),
    ],
    ids=["bug", "killed", "ignores", "ends early", "sets its cap"],
)  # fmt: skip
def test_refused(command, error, said, trials):
    with pytest.raises(error, match=said) as caught:
        probe(command, start_batch=8)
    if trials is not None:
        assert caught.value.batch_size == 8
        assert len(caught.value.trials) == trials


def test_what_passes(tmp_path, monkeypatch):
    """A script sets allocator settings, fails after the steps of a trial; the user has a sitecustomize."""
    notes = tmp_path / "notes"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nopen({str(notes)!r}, 'a').write(os.environ['PYTORCH_ALLOC_CONF'] + '\\n')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.9")
    faults = "sets-conf,fails-at-the-end"
    result = oomprobe.check_command(
        python("--fault", faults, "--steps", "7"), 8, keep_writes=True, progress="off"
    )
    assert [(trial.passed, trial.steps) for trial in result.trials] == [(True, 7)] * 3
    # Torch's own cap, for processes that ignore PYTHONPATH, once a run has shown that this torch knows it.
    own = "garbage_collection_threshold:0.9"
    later = (
        own if VERSION < (2, 10) else f"{own},per_process_memory_fraction:{0.9 * 874 / 1024:.9f}"
    )
    assert notes.read_text().split() == [own, later, later]


SAVES = """
import subprocess, sys, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(60):
    model(torch.ones(int(sys.argv[1]), 64, device="cuda")).sum().backward()
    optimizer.step()
    if step % 2 == 0:
        torch.save({"step": step, **model.state_dict()}, "last.pt")
        with open("log.txt", "a") as log:
            log.write(f"{torch.load('last.pt')['step']}\\n")
    if step == 2:
        subprocess.run(["cp", "data", "copied"], check=True)
"""


def test_what_a_script_saves_is_not_kept(tmp_path, monkeypatch):
    """But for what another program writes, which is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "save.py").write_text(SAVES)
    kept = {name: tmp_path / name for name in ("last.pt", "log.txt", "data")}
    for name, path in kept.items():
        path.write_text(name)
    times = {name: path.stat().st_ctime_ns for name, path in kept.items()}
    result = probe([sys.executable, "save.py", "{batch}"], max_batch=2)
    assert {name: path.read_text() for name, path in kept.items()} == {name: name for name in kept}
    assert {name: path.stat().st_ctime_ns for name, path in kept.items()} == times
    assert any(note.endswith("took the place of last.pt, log.txt") for note in result.notes)
    assert any("copied changed while a trial ran" in note for note in result.notes)


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
    command = [
        "sh",
        "-c",
        f"exec {sys.executable} {SCRIPT} > {{dir}}/log",
    ]  # it reads OOMPROBE_BATCH
    words = f"run --progress off --min-batch 8 --max-batch 8 --global-batch 64 --json {where} -- env OOMPROBE_BATCH={{batch}}"
    assert main([*words.split(), *command]) == 0
    printed = capfd.readouterr().out
    assert "verdict: batch 8 fits in 786.60 MiB" in printed
    assert "64 = 8 x 8, exact" in printed
    assert "the plan for global_batch was not run" in printed
    assert json.loads(where.read_text())["batch_size"] == 8
