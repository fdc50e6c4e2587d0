import signal

import pytest
import torch

from oomprobe.isolation.exit_status import ExitStatus, classify_exit
from oomprobe.verdicts import Evidence, Verdict

MIB = 2**20


def death(**fields):
    plain = {"signal": None, "code": None, "why": None, "stderr": "", "peak_resident_bytes": 0, "oom_kills": 0}
    return ExitStatus(**{**plain, **fields})


def judged(one, *, used_mib=0, cap_mib=100, smaller=True, on_host=True):
    evidence = Evidence(smaller_size_passed=smaller, memory_pressure=True, on_host=on_host)
    return classify_exit(one, evidence, used_bytes=used_mib * MIB, cap_bytes=cap_mib * MIB)


def test_the_oom_killer_is_told_from_anybody_elses_kill():
    assert judged(death(signal=signal.SIGKILL, oom_kills=1)) is Verdict.HOST_OOM
    assert judged(death(signal=signal.SIGKILL), used_mib=99) is Verdict.CRASHED


@pytest.mark.parametrize("why", ["timed out", "stuck"])
def test_a_hang_is_a_hang_whatever_signal_ended_it(why):
    one = death(signal=signal.SIGKILL, why=why, oom_kills=1, stderr="CUDA error: out of memory")
    assert judged(one, used_mib=99) is Verdict.TIMED_OUT


@pytest.mark.parametrize("ended", [{"signal": signal.SIGSEGV}, {"signal": signal.SIGABRT}, {"code": 1}, {"code": 0}])
def test_a_crash_counts_as_memory_only_under_pressure(ended):
    assert judged(death(**ended), used_mib=50) is Verdict.OOM
    assert judged(death(**ended), used_mib=49) is Verdict.CRASHED
    assert judged(death(**ended), used_mib=99, smaller=False) is Verdict.CRASHED
    assert judged(death(**ended), used_mib=99, on_host=False) is Verdict.CRASHED


@pytest.mark.parametrize(
    "words",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
        "libgomp: Out of memory allocating 1048576 bytes",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 64: Resource temporarily unavailable",
        "Error out of memory at line 380 in file /src/csrc/ops.cu",
        "CUDA error: out of memory",
    ],
)
def test_libraries_that_leave_the_process_say_why(words):
    assert judged(death(code=1, stderr=f"warming up\n{words}\n")) is Verdict.OOM
    of_device = "line 380" in words or "CUDA" in words
    wanted = Verdict.OOM if of_device else Verdict.HOST_OOM
    assert judged(death(signal=signal.SIGABRT, stderr=words), on_host=False) is wanted


def test_other_last_words():
    assert judged(death(signal=signal.SIGABRT, stderr="CUDA error: device-side assert triggered")) is Verdict.POISONED
    assert judged(death(code=1, stderr="no such file")) is Verdict.CRASHED
    loader = death(code=1, stderr="loader: 0 of 12 shards failed to allocate")
    assert judged(loader) is Verdict.OOM
    assert judged(loader, smaller=False) is Verdict.CRASHED
    old = "CUDA error: out of memory" + "\nand on" * 6
    assert judged(death(code=1, stderr=old)) is Verdict.CRASHED  # long before the end: handled


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_somebodys_will_is_no_word_about_memory(number):
    assert judged(death(signal=number, stderr="CUDA error: out of memory"), used_mib=99) is Verdict.CRASHED


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (death(signal=signal.SIGSEGV, stderr="ouch"), "ended by SIGSEGV\nthe end of its stderr:\nouch"),
        (death(signal=signal.SIGKILL), "ended by SIGKILL (not by the system's OOM killer)"),
        (death(signal=signal.SIGKILL, oom_kills=2), "ended by SIGKILL (the OOM killer of the system was at work)"),
        (death(code=3), "left with exit code 3 before it answered"),
        (death(signal=15, why="timed out"), "the process of the trial timed out and was ended"),
        (death(signal=63), "ended by signal 63"),
    ],
)
def test_the_text_of_a_death(one, text):
    assert one.text().endswith(text)


def test_of_a_trace_the_innermost_calls_are_kept():
    frames = "\n".join(f'  File "f{n}.py", line {n}' for n in range(50))
    text = death(signal=11, stderr=f"Fatal Python error\n\nCurrent thread (most recent call first):\n{frames}").text()
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


def test_a_hang_is_placed_at_the_users_innermost_line():
    assert death(why="timed out", stderr=TRACE.format(torch=torch.__file__)).where() == "train.py:12"
    assert death(why="timed out", stderr="File x, line 3 in no trace").where() is None
