"""Outputs of launchers, from real runs on the bed (tests/cuda/script.py and the like), and what is read from them."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from oomprobe.records.trials import Verdict
from oomprobe.runners.command import output
from oomprobe.runners.command.output import CONTEXT_LINES, MOST_EXCEPTIONS, Output, cause_of
from oomprobe.runners.command.reports import RunReports
from oomprobe.verdicts import Evidence, Link

from .test_reports import memory, report

OUTPUTS = Path(__file__).parents[1] / "data" / "launchers"
OOM, BUG, CRASHED, POISONED = Verdict.OOM, Verdict.BUG, Verdict.CRASHED, Verdict.POISONED
RAN_OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 MiB."
ENDINGS = {
    **dict.fromkeys(
        ["python-bug", "python-mentions-limits", "gloo-bug", "nccl-bug"],
        (BUG, "KeyError: 'input_ids'"),
    ),
    **dict.fromkeys(["accelerate-bug", "hydra-bug", "spawn-bug"], (BUG, "KeyError: 'input_ids'")),
    **dict.fromkeys(
        ["python-forward", "gloo-forward", "gloo-backward", "nccl-forward", "fsdp-backward"],
        (OOM, RAN_OUT),
    ),
    **dict.fromkeys(["accelerate-forward", "hydra-forward", "spawn-forward"], (OOM, RAN_OUT)),
    **dict.fromkeys(["gloo-killed", "nccl-killed"], (CRASHED, "rank 1 was killed by SIGKILL")),
    "gloo-leaves": (CRASHED, "rank 1 exited with 7"),
    "gloo-segfault": (CRASHED, "rank 1 was killed by SIGSEGV"),
    "python-assert": (POISONED, "RuntimeError: CUDA error: device-side assert triggered"),
    "python-logs-and-skips": (OOM, "its output quotes an out-of-memory error"),
    "lightning-bug": (BUG, "EOFError: Ran out of input"),
    "trainer-forward": (
        OOM,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB.",
    ),
}
MISLEADING = (
    "INFO limits: INT_MAX=2147483647, /dev/shm 64M, INT_MAX elements",
    "note: cuDNN may be out of memory, CUDNN_STATUS_EXECUTION_FAILED, device-side assert triggered",
    "W1125 CUDACachingAllocator.cpp: memory allocation failed with OOM on device 0",
    "Error: nothing of this is an exception",
    "loss 0.1 | KeyError: no, in the middle of a line",
)
PREFIXES = ("", "0: ", "[rank1]: ", "[default1]:", "\x1b[31m")


def text_of(name):
    return (OUTPUTS / f"{name}.txt").read_text()


def read(text, chunks=1):
    output, size = Output(), max(1, len(text) // chunks)
    for start in range(0, len(text), size):
        output.feed(text[start : start + size])
    output.close()
    return output


def cause(output, *, status=1, smaller_passed=True, oom_kills=0, reports=()):
    evidence = Evidence(smaller_size_passed=smaller_passed, memory_pressure=False)
    return cause_of(RunReports(reports), output, status, evidence, oom_kills=oom_kills)


def test_every_output_is_in_the_table():
    assert {path.stem for path in OUTPUTS.glob("*.txt")} == set(ENDINGS)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", ENDINGS)
def test_the_cause(name, prefix):
    lines = text_of(name).splitlines()
    for line in MISLEADING:
        lines.insert(random.Random(line).randrange(len(lines) + 1), line)
    if name.startswith(("gloo-killed", "gloo-leaves", "gloo-segfault", "nccl-killed")) and prefix:
        prefix = ""  # the block that torchrun prints is read as it prints it
    found = cause(read("\n".join(prefix + line for line in lines), chunks=7))
    verdict, error = ENDINGS[name]
    assert (found.verdict, found.error[: len(error)]) == (verdict, error)


@pytest.mark.parametrize("name", [name for name, (verdict, _) in ENDINGS.items() if verdict is BUG])
def test_a_bug_shows_the_lines_up_to_it(name):
    context = cause(read(text_of(name))).context
    assert len(context) <= CONTEXT_LINES
    assert context[-1].endswith(ENDINGS[name][1])
    assert any("Traceback" in line or "File" in line for line in context)


NCCL_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:131, unhandled cuda error\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'\n"
)
WAITED = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined."
LISTENS = "torch.distributed.DistNetworkError: The server socket has failed to listen on any address: EADDRINUSE"


@pytest.mark.parametrize(
    ("text", "verdict", "error"),
    [
        (NCCL_ERROR, OOM, ""),
        ("ValueError: batch must be a multiple of 8\nRuntimeError: CUDA out of memory.\n", OOM, "RuntimeError"),
        ("ValueError: CUDA out of memory\n", BUG, "ValueError: CUDA out of memory"),
        ("RuntimeError: Connection closed by peer\nValueError: too small\n", BUG, "ValueError: too small"),
        ("Epoch 1: 10%\rEpoch 1: 20%\rKeyError: 'x'\n", BUG, "KeyError: 'x'"),
        ("KeyError: 'the line that is cut off", BUG, "KeyError: 'the line that is cut off"),
        ("", CRASHED, "the command exited with 1"),
        ("train.py: error: no\n", CRASHED, "the command exited with 1\nthe end of its output:\ntrain.py: error"),
        (f"{WAITED}\nKeyError: 'x'\n", BUG, "KeyError: 'x'"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 2 GiB\n", Verdict.HOST_OOM, "numpy"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n", Verdict.HOST_OOM, "the system's OOM killer"),
        ("srun: error: node1: task 3: Out Of Memory\n", Verdict.HOST_OOM, "the system's OOM killer"),
        (f"{LISTENS}\n", BUG, "torch.distributed.DistNetworkError"),
    ],
)  # fmt: skip
def test_other_outputs(text, verdict, error):
    found = cause(read(text))
    assert (found.verdict, found.error[: len(error)]) == (verdict, error)


TIP = "tip: after 'CUDA out of memory. Tried to allocate 20.00 MiB' lower the batch size"
REPORTS = report(0, memory())
RAISES = replace(REPORTS, errors=(Link(classes=("builtins.KeyError",), text="x"),))
# NCCL takes memory without torch's allocator, and ends a process that can report no more.
NCCL_ENDS = "  what():  NCCL error: unhandled cuda error\nRuntimeError: CUDA error: out of memory"


@pytest.mark.parametrize(
    ("text", "reports", "verdict", "error"),
    [
        (TIP, [], OOM, "its output quotes an out-of-memory error"),
        (
            TIP,
            [report(0, memory(), world=2)],
            OOM,
            "its output quotes",
        ),  # the other rank does not report
        (TIP, [REPORTS], CRASHED, "the command exited with 1"),
        (RAN_OUT, [REPORTS], CRASHED, "the command exited with 1"),
        (f"{RAN_OUT}\nKeyError: 'x'", [REPORTS], BUG, "KeyError: 'x'"),
        (RAN_OUT, [RAISES], BUG, "rank 0: KeyError: x"),
        (RAN_OUT, [replace(REPORTS, raised_ooms=1)], OOM, RAN_OUT),
        (TIP, [replace(REPORTS, raised_ooms=1)], OOM, "rank 0: its allocator ran out of memory, and the program caught"),
        (NCCL_ENDS, [REPORTS], OOM, "RuntimeE"),
    ],
)  # fmt: skip
def test_text_decides_only_where_processes_do_not_report(text, reports, verdict, error):
    found = cause(read(text), reports=reports)
    assert (found.verdict, found.error[: len(error)]) == (verdict, error)


@pytest.mark.parametrize(("status", "said"), [(7, "exited with 7"), (-9, "was killed by SIGKILL")])
def test_an_exit_without_a_word(status, said):
    assert (
        cause(read("all is well\n"), status=status).error.splitlines()[0] == f"the command {said}"
    )


def test_the_systems_oom_killer():
    text = "RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed.\n"
    assert cause(read(text), oom_kills=1).verdict is Verdict.HOST_OOM
    assert cause(read(text)).verdict is BUG
    assert cause(read("KeyError: 'a'\n"), oom_kills=1).verdict is BUG  # it ended another program
    assert cause(read(""), status=-9, oom_kills=1).verdict is Verdict.HOST_OOM


def test_the_line_that_decides_is_quoted():
    found = cause(read(f"loading\n[rank1]: {TIP}\nCUDA out of memory. Tried to allocate, again\n"))
    assert found.error.endswith(f": [rank1]: {TIP}")


def test_a_flood_of_exceptions_keeps_the_first_and_the_last():
    output = read(
        "ValueError: first\n"
        + "KeyError: noise\n" * 5000
        + "torch.OutOfMemoryError: CUDA out of memory.\n"
    )
    assert len(output.exceptions()) == 2 * MOST_EXCEPTIONS
    assert cause(output).verdict is OOM
    assert output.exceptions()[0].text == "ValueError: first"


def test_no_pattern_reads_far_across_lines():
    """Each line is cut to 4,000 characters; what spans lines must have a limit of its own."""
    assert re._parser.parse(output._ROOT_CAUSE.pattern).getwidth()[1] < 2200


def test_a_rank_that_is_named_far_from_the_cause_is_not_its():
    told = "Root Cause (first observed failure):\n  rank      : 3 (local_rank: 3)\n"
    assert read(f"{told}  exitcode  : -9 (pid: 7)\n").root_cause() == (3, -9)
    assert read(f"{told}{'noise ' * 400}\n  exitcode  : -9 (pid: 7)\n").root_cause() is None
