"""Exception -> verdict, by a fixed order of rules over a table of error texts.

Two steps, so that nothing of a failed trial stays alive: `facts_of` turns an exception into strings and
numbers, `classify` weighs those against what was seen around the failure. Torch is not imported: classes are
known by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from oomprobe.errors import SIGNALS, text_of
from oomprobe.verdicts import texts as table
from oomprobe.verdicts.texts import ERROR_TEXTS, ErrorText

# What another probe, run inside the step, has judged already: its text quotes an out of memory that it has handled, and
# one class is a MemoryError. A lost device is lost to this probe too.
_OURS, _LOST = "oomprobe.errors.OomProbeError", "oomprobe.errors.DeviceLostError"
_SPEAKERS = frozenset({"builtins.RuntimeError", "builtins.MemoryError"})
MAX_LINKS = 64  # a chain deeper than this was not made by torch
MAX_TEXT = 16_000  # characters kept of each end of a text: the cause stands first, or last below a traceback


class Verdict(StrEnum):
    """How a trial ended."""

    FITS = "fits"
    OOM = "out of memory"
    HOST_OOM = "out of host memory"
    SIZE_LIMIT = "size limit"
    POISONED = "poisoned"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    BUG = "bug"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One exception of a chain: ``module.Name`` of each class, its text, its ``error_code`` if it has one."""

    classes: tuple[str, ...]
    text: str
    error_code: int | None = None


Facts = tuple[Link, ...]  # of an exception and of those it was made from; they outlive it


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen around a failure.

    Attributes:
        smaller_size_passed: A smaller size ran in this probe.
        memory_pressure: The allocator saw failures or retries, or free memory was near zero.
        healthy: The health check after the failure passed.
        on_host: The probed device is host memory.
        integrated: The device shares the host's memory, such as Jetson.
    """

    smaller_size_passed: bool
    memory_pressure: bool
    healthy: bool = True
    on_host: bool = False
    integrated: bool = False


def classify_error(exc: object, evidence: Evidence | None = None) -> Verdict:
    """Say what an exception means for the size that was tried.

    Total: whatever it is given, it answers and does not raise. What it does not know is a BUG.

    Args:
        exc: The exception. The chain of ``inner_exception``, ``__cause__`` and group members is read with it,
            but not ``__context__``: an out of memory that was handled already must not excuse a later bug.
        evidence: What was seen around the failure. Without it, and with what is no `Evidence`, an ambiguous text
            gets the verdict of its row.

    Returns:
        OOM, HOST_OOM (with evidence only), SIZE_LIMIT, POISONED or BUG.

    Example:
        >>> classify_error(RuntimeError("CUDA error: out of memory")).name
        'OOM'
        >>> engine = RuntimeError("GET was unable to find an engine to execute this computation")
        >>> classify_error(engine, Evidence(smaller_size_passed=False, memory_pressure=False)).name
        'BUG'
        >>> classify_error(KeyError("CUDA error: out of memory")).name
        'BUG'
    """
    return classify(facts_of(exc), evidence if isinstance(evidence, Evidence) else None)


def facts_of(exc: object) -> Facts:
    """Read an exception and the chain it carries; keep no reference to any of it."""
    links: list[Link] = []
    waiting: list[object] = [exc]
    seen: set[int] = set()
    while waiting and len(links) < MAX_LINKS:
        error = waiting.pop(0)
        if isinstance(error, BaseException) and id(error) not in seen:
            seen.add(id(error))
            links.append(_link_of(error))
            if not _is_judged(links[-1]):
                waiting += [_attribute(error, "inner_exception"), _attribute(error, "__cause__")]
                if issubclass(type(error), BaseExceptionGroup):  # the class does not run the exception's own code
                    waiting += (_attribute(error, "exceptions") or ())[:MAX_LINKS]
    return tuple(links)


def classify(facts: Facts, evidence: Evidence | None = None) -> Verdict:
    """Weigh facts against evidence; a process that failed its health check is POISONED whatever they say."""
    rows = (row for link in facts if not _is_judged(link) for row in _rows_met(link))
    row = min(rows, key=_weakness, default=None)  # the strongest that any link of the chain meets
    if evidence is not None and not evidence.healthy:
        return Verdict.POISONED
    if row is None:
        return Verdict.BUG
    if evidence is None:
        return Verdict[row.verdict]
    out_of_memory = Verdict.HOST_OOM if row.where == "host" and not evidence.on_host else Verdict.OOM
    corroborated = evidence.smaller_size_passed and evidence.memory_pressure
    if row.only_integrated:
        corroborated = corroborated and evidence.integrated
    if row.redeemable or (row.verdict == "OOM" and row.ambiguous):
        return out_of_memory if corroborated else Verdict.BUG
    if row.verdict == "SIZE_LIMIT" and row.ambiguous and not evidence.smaller_size_passed:
        return Verdict.BUG
    return out_of_memory if row.verdict == "OOM" else Verdict[row.verdict]


_STRONGEST_FIRST = (
    *(("POISONED", False), ("POISONED", True), ("SIZE_LIMIT", False)),
    *(("OOM", False), ("SIZE_LIMIT", True), ("OOM", True)),
)


def _weakness(row: ErrorText) -> int:
    """Rank a row, 0 the strongest. A text outranks a bare MemoryError, since it says whose memory ran out; bugs rank last."""
    if row.verdict == "BUG":
        return len(_STRONGEST_FIRST) + 1
    if row is table.MEMORY_ERROR_CLASS:
        return len(_STRONGEST_FIRST)
    return _STRONGEST_FIRST.index((row.verdict, row.ambiguous))


def _rows_met(link: Link) -> Iterator[ErrorText]:
    code = _device_code(link)
    if code in table.STICKY_CODES:
        yield table.STICKY_CODE
    weakest = len(_STRONGEST_FIRST)
    named = any(_root(name) in table.LIBRARIES and name.endswith(".OutOfMemoryError") for name in link.classes)
    if named or code == table.OUT_OF_MEMORY_CODE:
        yield table.OUT_OF_MEMORY_CLASS
        weakest = _weakness(table.OUT_OF_MEMORY_CLASS)  # searching a long text for each row takes milliseconds
    if "builtins.MemoryError" in link.classes:
        yield table.MEMORY_ERROR_CLASS
    rows = (row for row in ERROR_TEXTS if row.verdict == "BUG" or _weakness(row) < weakest)
    said = [row for row in rows if _may_say(link, row) and row.pattern.search(link.text)]
    is_bug = any(row.verdict == "BUG" for row in said)
    yield from (row for row in said if not is_bug or row.verdict in ("BUG", "POISONED"))


def _is_judged(link: Link) -> bool:
    return _OURS in link.classes and _LOST not in link.classes


def _may_say(link: Link, row: ErrorText) -> bool:
    """Texts count only from what torch and its libraries raise: a user's ValueError may say anything."""
    if not row.also_raised_as.isdisjoint(link.classes) or not _SPEAKERS.isdisjoint(link.classes):
        return True
    return any(_root(name) in table.LIBRARIES for name in link.classes)


def _device_code(link: Link) -> int | None:
    """The ``error_code``, where it is a device's: other libraries count their own errors under that name."""
    plain = link.classes[:1] == ("builtins.RuntimeError",)
    accelerator = any(name.endswith("AcceleratorError") or _root(name) == "torch" for name in link.classes)
    return link.error_code if plain or accelerator else None


def _root(name: str) -> str:
    return name.partition(".")[0]


# Reading an exception. Nothing here may raise but signals, or be kept: each value is copied to a plain str or int.


def _link_of(error: BaseException) -> Link:
    code = _attribute(error, "error_code")
    text = text_of(error)
    return Link(
        classes=tuple(f"{cls.__module__}.{cls.__name__}" for cls in type(error).__mro__),
        text=text if len(text) <= 2 * MAX_TEXT else f"{text[:MAX_TEXT]}\n...\n{text[-MAX_TEXT:]}",
        error_code=int(code) if isinstance(code, int) and not isinstance(code, bool) else None,
    )


def _attribute(thing: object, name: str) -> Any:
    try:
        return getattr(thing, name, None)
    except SIGNALS:
        raise
    except BaseException:
        return None
