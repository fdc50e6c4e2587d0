"""Commands that are probed, run for real on the bed: plain Python and what its programs do."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
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
    monkeypatch.setenv("SCRIPT_DAEMON", str(600 + os.getpid() / 1e7))  # seconds that its daemon sleeps: a mark
    yield
    assert not left_over()


def left_over():
    """Return what is left of this test's commands."""
    found, marks = [], (os.environ["CUDASTUB_SHARED"].encode(), os.environ["SCRIPT_DAEMON"].encode())
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            if marks[1] in words.split(b"\0") or (marks[0] in variables and folder.name != str(os.getpid())):
                found.append(words.replace(b"\0", b" "))
    return found


def daemon_lives():
    return any(os.environ["SCRIPT_DAEMON"].encode() in words and b"sleep" in words for words in left_over())


def python(*words, options=()):
    return [sys.executable, *options, str(SCRIPT), "--batch-size", "{batch}", *words]


MEETS = f"MEETING={{dir}} {sys.executable} {SCRIPT} --fault meets --batch-size {{batch}}"


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


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("forward", "torch.OutOfMemoryError: CUDA out of memory"),
        ("backward", "torch.OutOfMemoryError: CUDA out of memory"),
        ("caught-then-hangs", "its allocator ran out of memory, and the program caught that"),
    ],
)
def test_out_of_memory(fault, said):
    trial = one_trial(python("--fault", fault))
    assert (trial.verdict, trial.steps) == (OOM, 1)
    assert trial.error.startswith(said)
    assert trial.cap_bytes == int(0.9 * 1024 * MIB)  # until a run has passed, nothing is known of what is not torch's


@pytest.mark.parametrize(
    ("fault", "size"),
    [
        ("skips-once", 8),  # its other steps pass
        ("skips-once-beside-convolutions", 8),  # of which torch itself catches some errors
        pytest.param("logs-and-skips", 600, marks=pytest.mark.slow),
        pytest.param("skips", 600, marks=pytest.mark.slow),
        pytest.param("halves", 600, marks=pytest.mark.slow),
    ],
)
def test_an_out_of_memory_error_that_the_script_swallows_is_no_pass(fault, size):
    assert one_trial(python("--fault", fault), size=size).verdict is OOM


def test_a_skipped_batch_is_seen_without_an_observer(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")  # its allocator tells none
    assert one_trial(python("--fault", "skips-once"), memory_fraction=1.0).verdict is OOM


def test_text_decides_nothing_where_processes_report():
    result = oomprobe.check_command(python("--fault", "quotes"), 8, progress="off")
    assert [(trial.passed, 50 <= trial.steps < 10_000) for trial in result.trials] == [(True, True)] * 2


@pytest.mark.slow
def test_quotes_change_no_answer():
    silent, quoting = (
        probe(python(*words), start_batch=32, multiple_of=8, resolution=0.1) for words in ((), ("--fault", "quotes"))
    )
    assert [(trial.batch_size, trial.verdict) for trial in quoting.trials] == [
        (trial.batch_size, trial.verdict) for trial in silent.trials
    ]


def test_where_no_process_reports_the_deciding_line_is_quoted():
    trial = one_trial(python("--fault", "quotes", "--steps", "4", options=["-I"]), memory_fraction=1.0)
    assert trial.verdict is OOM
    assert trial.error.endswith("tip: after 'CUDA out of memory. Tried to allocate 20.00 MiB' lower the batch size")


@pytest.mark.parametrize("fault", ["bug", "mentions-limits"])
def test_a_bug(fault):
    said = r"at batch size 8 \(script.py:\d+\): KeyError: 'input_ids'"
    with pytest.raises(oomprobe.StepFailedError, match=said) as caught:
        probe(python("--fault", fault), start_batch=8)
    assert caught.value.batch_size == 8
    assert "KeyError: 'input_ids'" in str(caught.value).splitlines()[-1]  # the end of its output


@pytest.mark.parametrize(
    ("fault", "said"), [("killed", "the command was killed by SIGKILL"), ("leaves", "the command exited with 7")]
)
def test_a_death_is_tried_twice(fault, said):
    with pytest.raises(oomprobe.StepFailedError, match=said) as caught:
        probe(python("--fault", fault), start_batch=8)
    assert [trial.verdict for trial in caught.value.trials] == [CRASHED] * 2
    assert "Run the command with 8 in place of {batch}" in str(caught.value)


def test_a_hang_ends_at_the_limit_and_a_deaf_process_is_killed():
    with pytest.raises(oomprobe.TimeLimitError) as caught:
        probe(python("--fault", "deaf"), start_batch=8, trial_time_limit_s=5)
    assert "had made 1 step" in caught.value.trials[0].error


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (python("--fault", "ignores"), "exactly as many bytes in each step as batch 8"),
        (python("--samples", "40"), "ended without an error at batch 16 after 2 optimizer steps, and a trial needs 3"),
        (python("--fault", "sets-fraction"), "process .* set its allocator's cap to 0.95 of the GPU itself"),
        (python("--steps", "4", options=["-I"]), "no process of the command reported its GPU's memory"),
        (["sh", "-c", f"{MEETS} & {MEETS} & wait"], "process .* hold memory of one GPU"),
    ],
)
def test_refused(command, said):
    with pytest.raises(oomprobe.UnreliableError, match=said):
        probe(command, start_batch=8)


def test_a_script_may_round_the_batch_size():
    result = probe(python("--fault", "rounds"), min_batch=33, max_batch=34)
    assert [trial.batch_size for trial in result.trials] == [33, 34, 34, 34]


@pytest.mark.slow
def test_a_script_that_splits_its_batch_is_not_limited_by_memory():
    result = probe(python("--fault", "splits"), start_batch=8)
    assert (result.batch_size, result.limited_by) == (64, "step")


def test_what_passes(tmp_path, monkeypatch):
    """A script sets allocator settings, leaves a daemon, fails after the steps of a trial; the user has a sitecustomize."""
    notes = tmp_path / "notes"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nopen({str(notes)!r}, 'a').write(os.environ['PYTORCH_ALLOC_CONF'] + '\\n')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.9")
    faults = "sets-conf,daemon,fails-at-the-end"
    result = oomprobe.check_command(python("--fault", faults, "--steps", "5"), 8, progress="off")
    assert [(trial.passed, trial.steps) for trial in result.trials] == [(True, 5)] * 2
    assert any("ended by itself after 5 steps, and a confirmation makes at least 6" in note for note in result.notes)
    # Torch's own cap, for processes that ignore PYTHONPATH, once a run has shown that this torch knows it.
    own = "garbage_collection_threshold:0.9"
    later = own if VERSION < (2, 10) else f"{own},per_process_memory_fraction:{0.9 * 874 / 1024:.9f}"
    assert notes.read_text().split() == [own, later]


def test_without_a_margin_nothing_must_report():
    endless = python(options=["-I"])
    result = oomprobe.check_command(endless, 8, memory_fraction=1.0, passes_after_s=0.5, progress="off")
    assert any(note.startswith("weak: ") and "had run for 500 ms" in note for note in result.notes)


def test_an_inference_script_passes_when_it_ends(tmp_path):
    script = tmp_path / "infer.py"
    script.write_text(
        "import sys, torch\nx = torch.ones(int(sys.argv[1]) * 2**20, device='cuda'); print((x + 1).sum().item())\n"
    )
    command = [sys.executable, str(script), "{batch}"]
    result = oomprobe.check_command(command, 98, progress="off")  # two of 392 MiB in 786
    assert any(note.startswith("weak: ") for note in result.notes)


@pytest.mark.parametrize("how", ["interrupt", "terminate", "kill"])
def test_nothing_is_left_when_oomprobe_ends(how, tmp_path):
    words = [sys.executable, "-m", "oomprobe", "run", "--", *python("--fault", "daemon")]
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not daemon_lives():
        time.sleep(0.05)
        assert running.poll() is None
    running.send_signal({"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}[how])
    stderr = running.communicate()[1]
    assert running.returncode == {"interrupt": 130, "terminate": 143, "kill": -9}[how]
    assert how == "kill" or "the trials so far" in stderr
    until_s = time.monotonic() + 10
    while left_over() and time.monotonic() < until_s:
        time.sleep(0.05)


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
