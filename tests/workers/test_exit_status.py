import signal

import pytest
import torch

from oomprobe.records.trials import Verdict
from oomprobe.runners.workers.exit_status import ExitStatus, classify_exit

MIB = 2**20


def exited(**fields):
    plain = {
        "signal": None,
        "code": None,
        "why": None,
        "stderr": "",
        "peak_resident_bytes": 0,
        "oom_kills": 0,
    }
    return ExitStatus(**{**plain, **fields})


def verdict_on(status, *, used_mib=0, smaller=True, on_host=True):
    return classify_exit(
        status,
        smaller_passed=smaller,
        on_host=on_host,
        used_bytes=used_mib * MIB,
        cap_bytes=100 * MIB,
    )


@pytest.mark.parametrize(
    "ended", [{"signal": signal.SIGSEGV}, {"signal": signal.SIGABRT}, {"code": 1}, {"code": 0}]
)
def test_a_crash_counts_as_memory_only_under_pressure(ended):
    assert verdict_on(exited(**ended), used_mib=50) is Verdict.OOM
    assert verdict_on(exited(**ended), used_mib=49) is Verdict.CRASHED
    assert verdict_on(exited(**ended), used_mib=99, smaller=False) is Verdict.CRASHED
    assert verdict_on(exited(**ended), used_mib=99, on_host=False) is Verdict.CRASHED


@pytest.mark.parametrize(
    "words",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 64: Resource temporarily unavailable",
        "Error out of memory at line 380 in file /src/csrc/ops.cu",
        "CUDA error: out of memory",
    ],
)
def test_the_last_words_of_a_library_that_ran_out_of_memory(words):
    assert verdict_on(exited(code=1, stderr=f"warming up\n{words}\n")) is Verdict.OOM
    of_device = "line 380" in words or "CUDA" in words
    wanted = Verdict.OOM if of_device else Verdict.HOST_OOM
    assert verdict_on(exited(signal=signal.SIGABRT, stderr=words), on_host=False) is wanted


FRAMES = "\nCurrent thread 0x1 (most recent call first):" + '\n  File "f.py", line 1 in f' * 50
SHARDS = "loader: 0 of 12 shards failed to allocate"


@pytest.mark.parametrize(
    ("ended", "smaller", "verdict"),
    [
        ({"signal": signal.SIGKILL, "oom_kills": 1}, True, Verdict.HOST_OOM),
        ({"signal": signal.SIGABRT, "stderr": "CUDA error: device-side assert triggered"}, True, Verdict.POISONED),
        ({"code": 1, "stderr": "no such file"}, True, Verdict.CRASHED),
        ({"code": 1, "stderr": SHARDS}, True, Verdict.OOM),
        ({"code": 1, "stderr": SHARDS}, False, Verdict.CRASHED),
        # What Python prints after a library's last words is not read.
        ({"signal": signal.SIGABRT, "stderr": "std::bad_alloc\nFatal Python error: Aborted\n" + FRAMES}, True, Verdict.OOM),
        # Long before the end, so the process handled it.
        ({"code": 1, "stderr": "CUDA error: out of memory" + "\nand on" * 6}, True, Verdict.CRASHED),
    ],
)  # fmt: skip
def test_without_pressure_signal_and_last_words_decide(ended, smaller, verdict):
    assert verdict_on(exited(**ended), smaller=smaller) is verdict


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [
        ({"signal": signal.SIGTERM}, Verdict.CRASHED),
        ({"signal": signal.SIGKILL, "oom_kills": 0}, Verdict.CRASHED),
        *(({"signal": signal.SIGKILL, "why": why}, Verdict.TIMED_OUT) for why in ("timed out", "stuck")),
    ],
)  # fmt: skip
def test_a_process_ended_on_purpose_tells_nothing_about_memory(ended, verdict):
    status = exited(**{"oom_kills": 1, "stderr": "CUDA error: out of memory", **ended})
    assert verdict_on(status, used_mib=99) is verdict


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (exited(signal=signal.SIGSEGV, stderr="ouch"), "killed by SIGSEGV\nthe end of its stderr:\nouch"),
        (exited(signal=signal.SIGKILL), "killed by SIGKILL (not by the system's OOM killer)"),
        (exited(signal=signal.SIGKILL, oom_kills=2), "killed by SIGKILL (the system's OOM killer was active)"),
        (exited(code=3), "exited with code 3 before it answered"),
        (exited(signal=15, why="timed out"), "the trial's process timed out and was terminated"),
    ],
)  # fmt: skip
def test_the_text_of_an_exit_status(status, text):
    assert status.text().endswith(text)


def test_the_text_keeps_the_innermost_frames_of_a_trace():
    frames = "\n".join(f'  File "f{n}.py", line {n}' for n in range(50))
    text = exited(
        signal=11,
        stderr=f"Fatal Python error\n\nCurrent thread (most recent call first):\n{frames}",
    ).text()
    assert "f0.py" in text
    assert "f40.py" not in text


TRACE = """warming up
Thread 0x02 (most recent call first):
  File "/home/me/loader.py", line 3 in wait

Current thread 0x01 (most recent call first):
  File "{torch}", line 7 in call
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line 90 in main
Thread 0x03 (most recent call first):
  File "/home/me/other.py", line 4 in wait
"""


def test_a_hang_is_placed_at_the_innermost_line_of_the_users_code():
    assert (
        exited(why="timed out", stderr=TRACE.format(torch=torch.__file__)).where() == "train.py:12"
    )
    assert exited(why="timed out", stderr="File x, line 3 in no trace").where() is None
