import asyncio
import errno
import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oomprobe
from oomprobe.records.trials import Verdict
from oomprobe.runners.signals import TimeUp
from oomprobe.verdicts import Evidence, classify_error, facts_of_error
from oomprobe.verdicts.classify import MAX_LINKS, MAX_TEXT
from oomprobe.verdicts.texts import ERROR_TEXTS, OOM_WORDS

DATA = Path(__file__).parent / "data"
BUILTIN_CLASSES = {
    "ValueError": ValueError,
    "OSError": OSError,
    "ImportError": ImportError,
    "MemoryError": MemoryError,
}

OOM_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"
HOST_TEXT = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
ENGINE_TEXT = "GET was unable to find an engine to execute this computation"
TEGRA_TEXT = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/c10/cuda/CUDACachingAllocator.cpp":995, please'
ADVICE = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
EXECUTION_TEXT = "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"

CORROBORATED = Evidence(smaller_size_passed=True, memory_pressure=True)
UNCORROBORATED = Evidence(smaller_size_passed=False, memory_pressure=False)
UNHEALTHY = Evidence(smaller_size_passed=True, memory_pressure=True, healthy=False)
ON_HOST = Evidence(smaller_size_passed=True, memory_pressure=True, on_host=True)
ALL_EVIDENCE = [
    Evidence(smaller_size_passed=a, memory_pressure=b, healthy=c, on_host=d, integrated=e)
    for a, b, c, d, e in product((False, True), repeat=5)
]


def every_message():
    for name in ("error_messages.json", "more_error_messages.json"):
        for number, row in enumerate(json.loads((DATA / name).read_text(encoding="utf-8"))):
            words = re.sub(r"[^A-Za-z0-9]+", "-", row["message"])[:48].strip("-")
            yield pytest.param(row, id=f"{name[:4]}{number}-{row['verdict']}-{words}")


def as_raised(row):
    kind = row["exception"]
    if kind.startswith("torch.OutOfMemoryError") or kind == "torch.cuda.OutOfMemoryError":
        return torch.OutOfMemoryError(row["message"])
    if kind == "torch.AcceleratorError":
        return torch.AcceleratorError(row["message"])
    if kind.endswith("(MemoryError)"):
        return MemoryError(row["message"])
    return BUILTIN_CLASSES.get(kind, RuntimeError)(row["message"])


def may_be_quoted(row):
    """Return whether the text is recognised inside another: its class does not matter, and it need not be the whole text."""
    return row["exception"] not in BUILTIN_CLASSES and row["message"] != "integer out of range"


def caused(outer, inner):
    outer.__cause__ = inner
    return outer


def numbered(code):
    error = torch.AcceleratorError("a text that says nothing")
    error.error_code = code
    return error


def test_no_pattern_reads_far():
    """A text may be one line of megabytes: what is read from each place in it has a limit."""
    longest = {}
    for row in ERROR_TEXTS:
        longest[row.pattern.pattern] = re._parser.parse(row.pattern.pattern).getwidth()[1]
    assert {pattern: width for pattern, width in longest.items() if width > 700} == {}


OF_A_DEVICE = [row for row in ERROR_TEXTS if row.verdict is Verdict.OOM and not row.of_host]


@pytest.mark.parametrize("row", OF_A_DEVICE, ids=lambda row: row.pattern.pattern[:40])
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[*HealthCheck], deadline=None)
def test_a_text_about_a_devices_memory_has_one_of_the_words(row, data):
    pattern = row.pattern.pattern.replace("(?>", "(?:")  # hypothesis knows no atomic group
    match = re.search(pattern, data.draw(st.from_regex(pattern)))
    assert any(word in match[0] for word in OOM_WORDS), match[0]


@pytest.mark.parametrize("row", [*every_message()])
def test_each_message_gets_its_verdict(row):
    error = as_raised(row)
    assert classify_error(error).name == row["verdict"]
    if row["ambiguous"] and row["verdict"] == "OOM":
        assert classify_error(error, UNCORROBORATED) is Verdict.BUG
    if may_be_quoted(row):
        text = "Caught RuntimeError in replica 0 on device 0.\nOriginal Traceback (most recent call last):\n"
        wrapped = RuntimeError(f'{text}  File "train.py", line 26\nRuntimeError: {row["message"]}')
        assert classify_error(wrapped).name == row["verdict"]


def test_rows_have_a_source_and_match_something_specific():
    for row in ERROR_TEXTS:
        assert len(row.source) > 5
        assert not row.pattern.search("mat1 and mat2 shapes cannot be multiplied (3x4 and 3x4)")
        assert not row.pattern.search("")


@pytest.mark.parametrize(
    "error",
    [
        ValueError(OOM_TEXT),
        RuntimeError("the replay memory is full; out of memory slots"),
        KeyError("CUDA error: an illegal memory access was encountered"),
        OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"),
    ],
    ids=repr,
)
def test_a_users_own_wording_is_a_bug(error):
    assert classify_error(error) is Verdict.BUG
    assert classify_error(error, CORROBORATED) is Verdict.BUG


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("CUDA error: out of memory" + ADVICE, Verdict.OOM),
        (f"{HOST_TEXT} to allocate 2147483648 bytes.", Verdict.OOM),
        (TEGRA_TEXT, Verdict.OOM),
        (TEGRA_TEXT.replace("NVML_SUCCESS == r", "block"), Verdict.POISONED),
        (OOM_TEXT + "x" * 10 * MAX_TEXT, Verdict.OOM),
        ("x" * 10 * MAX_TEXT + "\n" + OOM_TEXT, Verdict.OOM),
        ("Unexpected bus error encountered in worker. Perhaps insufficient shared memory (shm).", Verdict.BUG),
        ("unable to allocate shared memory(shm) for file </torch_1>: Cannot allocate memory (12)", Verdict.BUG),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_text_that_misleads(text, verdict):
    assert classify_error(RuntimeError(text)) is verdict
    assert len(facts_of_error(RuntimeError(text))[0].text) < 3 * MAX_TEXT


# Errors of cudaError_t after which the context is lost.
POISONING = (4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911)


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        *((code, Verdict.POISONED) for code in POISONING),
        (2, Verdict.OOM),
        *((code, Verdict.BUG) for code in (0, 209, 701, True, None, "700", 700.0)),
    ],
)
def test_device_codes(code, verdict):
    assert classify_error(numbered(code)) is verdict
    assert classify_error(numbered(code), CORROBORATED) is verdict


def test_codes_of_other_libraries_do_not_count():
    class RequestFailed(RuntimeError):
        error_code = 2

    assert classify_error(RequestFailed("no such bucket")) is Verdict.BUG


@pytest.mark.parametrize("evidence", ALL_EVIDENCE)
def test_only_ambiguous_rows_need_evidence_of_memory_and_an_unhealthy_process_is_poisoned(evidence):
    if not evidence.healthy:
        for text in (OOM_TEXT, ENGINE_TEXT, "invalid configuration argument", "a bug"):
            assert classify_error(RuntimeError(text), evidence) is Verdict.POISONED
        return
    both = evidence.smaller_size_passed and evidence.memory_pressure
    for text, expected in {
        OOM_TEXT: Verdict.OOM,
        "quantile() input tensor is too large": Verdict.SIZE_LIMIT,
        "CUDA error: misaligned address": Verdict.POISONED,
        ENGINE_TEXT: Verdict.OOM if both else Verdict.BUG,
        EXECUTION_TEXT: Verdict.OOM if both else Verdict.BUG,
        "CUDA driver error: device not ready": Verdict.OOM if both else Verdict.BUG,
        TEGRA_TEXT: Verdict.OOM if both and evidence.integrated else Verdict.BUG,
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.": (
            Verdict.SIZE_LIMIT if evidence.smaller_size_passed else Verdict.BUG
        ),
    }.items():
        assert classify_error(RuntimeError(text), evidence) is expected
    assert classify_error(torch.OutOfMemoryError("?"), evidence) is Verdict.OOM


@pytest.mark.parametrize(
    ("error", "off_host", "evidence"),
    [
        (RuntimeError(HOST_TEXT), Verdict.HOST_OOM, UNCORROBORATED),
        (MemoryError(), Verdict.HOST_OOM, UNCORROBORATED),
        (RuntimeError("std::bad_alloc"), Verdict.HOST_OOM, UNCORROBORATED),
        (OSError(12, "Cannot allocate memory"), Verdict.HOST_OOM, UNCORROBORATED),
        (
            RuntimeError("could not create a primitive"),
            Verdict.HOST_OOM,
            CORROBORATED,
        ),  # an ambiguous text
        (
            MemoryError("out_of_memory: CUDA error: cudaErrorMemoryAllocation"),
            Verdict.OOM,
            UNCORROBORATED,
        ),  # rmm
    ],
    ids=lambda value: repr(value)[:40],
)
def test_host_memory_is_told_from_the_devices(error, off_host, evidence):
    assert classify_error(error, evidence) is off_host
    assert classify_error(error, ON_HOST) is Verdict.OOM


class Hostile(RuntimeError):
    """An exception whose every attribute raises."""

    def __str__(self):
        raise ValueError("no text for you")

    def __getattribute__(self, name):
        raise ValueError(f"no {name} for you")


@pytest.mark.parametrize(
    ("outer", "inner", "verdict"),
    [
        (ValueError("step failed"), torch.OutOfMemoryError("?"), Verdict.OOM),
        (RuntimeError("step failed"), KeyError("labels"), Verdict.BUG),
        (torch.OutOfMemoryError(OOM_TEXT), RuntimeError("CUDA error: misaligned address"), Verdict.POISONED),
        (RuntimeError(ENGINE_TEXT), RuntimeError(OOM_TEXT), Verdict.OOM),
        (torch.OutOfMemoryError(OOM_TEXT), numbered(719), Verdict.POISONED),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_the_strongest_link_decides(outer, inner, verdict):
    assert classify_error(caused(outer, inner), UNCORROBORATED) is verdict
    assert classify_error(caused(outer, inner), CORROBORATED) is verdict


def test_the_context_is_not_read():
    error = KeyError("labels")
    error.__context__ = torch.OutOfMemoryError(OOM_TEXT)
    assert classify_error(error) is Verdict.BUG


def test_groups():
    group = ExceptionGroup("ranks", [Hostile(), ExceptionGroup("inner", [RuntimeError(OOM_TEXT)])])
    assert classify_error(group) is Verdict.OOM
    assert classify_error(Hostile()) is Verdict.BUG


def test_cycles_and_depth_are_limited():
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, first
    assert len(facts_of_error(first)) == 2
    error = RuntimeError(OOM_TEXT)
    for _ in range(10 * MAX_LINKS):
        error = caused(RuntimeError("wrapped"), error)
    assert len(facts_of_error(error)) == MAX_LINKS


@pytest.mark.parametrize(
    ("act", "verdict"),
    [
        pytest.param(lambda: torch.empty(2**50, dtype=torch.uint8), Verdict.OOM, id="torch.empty"),
        pytest.param(lambda: np.zeros(2**45), Verdict.OOM, id="numpy"),
        pytest.param(lambda: torch.empty(2**40, 2**40), Verdict.SIZE_LIMIT, id="storage"),
        pytest.param(lambda: torch.empty(2**63), Verdict.SIZE_LIMIT, id="unpack"),
        pytest.param(lambda: torch.zeros(3, 4) @ torch.zeros(3, 4), Verdict.BUG, id="mat1-mat2"),
    ],
)
def test_provoked_errors(act, verdict):
    with pytest.raises(BaseException) as caught:  # noqa: PT011  any exception may come
        act()
    assert classify_error(caught.value) is verdict


class Silent(Exception):
    def __str__(self):
        raise self.args[0]


class Unreadable(Silent):
    error_code = property(Silent.__str__)


@pytest.mark.parametrize("error", [Silent, Unreadable])
def test_a_signal_that_comes_while_an_error_is_read_is_passed_on(error):
    assert classify_error(error(asyncio.CancelledError())) is Verdict.BUG
    for raised in (KeyboardInterrupt, SystemExit, TimeUp):
        with pytest.raises(raised):
            classify_error(error(raised()))


# --- a probe inside a step: its errors are exceptions of the step, not verdicts for the outer probe ---


@pytest.mark.parametrize(
    "error",
    [
        oomprobe.NothingFitsError(f"batch 1: out of memory\n  OutOfMemoryError: {OOM_TEXT}"),
        oomprobe.UnreliableError("RuntimeError: CUDA error: out of memory"),
    ],
)
def test_an_error_of_a_probe_is_a_bug(error):
    from_memory = caused(
        type(error)("failed"), torch.OutOfMemoryError(OOM_TEXT)
    )  # the inner probe has handled this
    for raised in (error, caused(KeyError("cache"), error), from_memory):
        assert classify_error(raised, CORROBORATED) is Verdict.BUG
    assert classify_error(error, UNHEALTHY) is Verdict.POISONED
    # Another error in the same group counts.
    both = ExceptionGroup("both", [from_memory, torch.OutOfMemoryError(OOM_TEXT)])
    assert classify_error(both, CORROBORATED) is Verdict.OOM


def test_a_lost_device_is_lost_to_the_outer_probe():
    lost = oomprobe.DeviceLostError(
        "a sticky error (CUDA error: an illegal memory access was encountered)"
    )
    assert classify_error(lost) is Verdict.POISONED
