"""What the text of an out-of-memory error says, in numbers."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import parse_bytes
from oomprobe.records.trials import Verdict
from oomprobe.simulation.allocator import LARGE_SEGMENT
from oomprobe.verdicts.texts import ERROR_TEXTS, OOM_WORDS

ALMOST_FULL = 0.98  # of the memory that there is: that so little is in pieces is no reason
_SIZE = r"([0-9]{1,20}(?:\.[0-9]{1,9})? (?:[KkMGT]i?B|bytes))"
_BEFORE, _AFTER = 300, 2000  # characters of a message around what was asked for
_CONTEXT_BYTES = (
    2**30
)  # at most, of a process outside of torch's allocator, with kernels and libraries
_ROUNDING_BYTES = 2**26  # of five figures in GiB with two decimals
_NAMED_SHARE = 0.05  # of a card: others that hold less are not why it is full
_ASKED = re.compile(rf"Tried to allocate {_SIZE}|Requested {{1,40}}: {_SIZE}")
_BEGINS = re.compile(r"(?:CUDA|HIP|XPU|MPS backend)\s+out\s+of\s+memory|Allocation\s+on\s+device")
_HINT = re.compile("|".join(map(re.escape, OOM_WORDS)))
MOST_JUDGED = 20_000  # lines, from the end: what was before does not matter
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
# Of new torch, of old torch, of cudaMallocAsync, of Metal. Sources: c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp,
# aten/src/ATen/mps/MPSAllocator.mm of PyTorch.
_FIELDS = {
    "total": re.compile(
        rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity|Device limit +: {_SIZE}"
    ),
    "free": re.compile(
        rf"of which {_SIZE} is free|; {_SIZE} free|Free \(according to CUDA\) *: {_SIZE}"
    ),
    "own": re.compile(rf"this process has {_SIZE} memory in use"),
    "allowed": re.compile(rf"{_SIZE} allowed;"),
    "live": re.compile(
        rf"memory {_SIZE} is allocated|{_SIZE} already allocated|MPS allocated: {_SIZE}|Currently allocated +: {_SIZE}"
    ),
    "unused": re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated"),
    "reserved": re.compile(rf"{_SIZE} reserved in total"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OomText:
    """An out-of-memory error in bytes; None where the text does not say.

    Attributes:
        line: The first line of the error.
        count: How many such errors the log has; this is the last.
        requested: Bytes that were asked for.
        total: The device's memory.
        free: What was free on the device.
        allowed: The cap that was set for this process.
        live: What tensors held.
        reserved: What torch's allocator held.
        own: What this process held, with what torch does not count.
        others: What other processes held; where `own` is not known, all that torch's allocator did not.
    """

    line: str
    count: int = 1
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    live: int | None = None
    reserved: int | None = None
    own: int | None = None
    others: int | None = None

    def cause(self) -> str:
        """Return the likely cause: "live", "fragmentation", "cap", "others" or "unknown"."""
        if (
            self.requested is None
            or self.live is None
            or self.reserved is None
            or self.free is None
        ):
            return "unknown"
        available, needed = self.reserved + self.free, self.live + self.requested
        allowed = self.allowed or available
        is_capped = allowed < available
        if is_capped:
            available = allowed
        elif self.free >= self.requested + LARGE_SEGMENT:
            return "unknown"  # there was room, and no cap that torch knows of
        if needed <= ALMOST_FULL * available:
            return "fragmentation"
        if is_capped:
            return "cap"
        others = self.others or 0
        if self.own is None:
            others -= _CONTEXT_BYTES
        is_much = others > max(_ROUNDING_BYTES, _NAMED_SHARE * (self.total or 0))
        if is_much and needed <= available + others:
            return "others"
        return "live"


def read_log(text: str) -> OomText:
    """Return the last out-of-memory error of a log.

    Raises:
        InvalidArgumentError: it has none.
    """
    messages = list(_ASKED.finditer(text))
    if not messages:
        return _without_numbers(text)
    asked = messages[-1]
    begins = asked.start()  # figures of the message before would be taken for its own
    for begin in _BEGINS.finditer(text, max(0, begins - _BEFORE), begins):
        begins = begin.start()
    message = " ".join(text[begins : asked.end() + _AFTER].split())  # terminals wrap lines
    sizes = {"requested": _stated(asked)}
    for name, pattern in _FIELDS.items():
        if match := pattern.search(message):
            sizes[name] = _stated(match)
    if "live" in sizes:
        sizes.setdefault("reserved", sizes["live"] + sizes.pop("unused", 0))
    processes = sorted(map(_bytes_of, _PROCESS.findall(message)))
    if processes and "own" not in sizes:
        # In a container, torch does not know its own number: the first process that is large enough.
        sizes["own"] = next(
            (nbytes for nbytes in processes if nbytes >= sizes.get("reserved", 0)), processes[-1]
        )
        processes.remove(sizes["own"])
    if {"total", "reserved"} <= sizes.keys():
        sizes.setdefault("free", max(0, sizes["total"] - sizes["reserved"]))
        sizes["others"] = max(
            0, sizes["total"] - sizes["free"] - sizes.get("own", sizes["reserved"])
        )
    if processes:
        sizes["others"] = sum(processes)
    sizes.pop("unused", None)
    return OomText(line=message[message.find(asked[0]) :], count=len(messages), **sizes)


def _without_numbers(text: str) -> OomText:
    """Return an error of a kind that gives no numbers, such as "CUDA error: out of memory"."""
    judged = deque[str](maxlen=MOST_JUDGED)
    for line in text.splitlines():
        if hint := _HINT.search(line.lower()):
            judged.append(line[max(0, hint.start() - _BEFORE) : hint.end() + _AFTER].strip())
    lines = []
    for line in judged:
        lowered = line.lower()
        row = next((row for row in ERROR_TEXTS if row.pattern.search(lowered)), None)
        if row is not None and row.verdict is Verdict.OOM and not row.of_host:
            lines.append(line)
    if not lines:
        raise InvalidArgumentError("it holds no out-of-memory error of a device")
    return OomText(line=lines[-1], count=len(lines))


def _stated(match: re.Match[str]) -> int:
    return _bytes_of(next(filter(None, match.groups())))


def _bytes_of(size: str) -> int:
    number, unit = size.split()
    if float(number) == 0:
        return 0
    return parse_bytes(number if unit == "bytes" else size)
