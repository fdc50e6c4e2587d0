"""The kinds of messages that say that memory ran out: of torch, of the host, of other engines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

SIZE = r"([0-9]{1,20}(?:\.[0-9]{1,9})? ?(?:[KkMGTP]i?B|[KMGT]|bytes|B)\b)"
_NUMBER = r"([0-9]{1,20}(?:\.[0-9]{1,9})?)"
_WORDS = r"[^\n]{0,200}?"  # of the same line


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageKind:
    """One kind of message.

    Attributes:
        engine: Whose it is: "torch", "host" for the host's memory, or the name of another engine.
        words: In lower case; a line without any of them holds no such message.
        pattern: What the message must match, from the line of its word on.
        cause: What the kind itself says; None: the figures say it, or nothing does.
        figures: Where the message states a figure, by name.
        unit: The unit of a number without one.
    """

    engine: str
    words: tuple[bytes, ...]
    pattern: re.Pattern[str]
    cause: str | None = None
    figures: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    unit: str = "B"


# Of new torch, of old torch, of cudaMallocAsync, of Metal. Sources in pytorch/pytorch:
# c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp, aten/.../MPSAllocator.mm.
# Torch 1.0 to 1.3 wrote what is cached beyond the allocated; "capacty" is torch 2.1's and 2.2's.
_OF_TORCH = {
    "requested": re.compile(rf"Tried to\s+allocate {SIZE}|Requested {{1,40}}: {SIZE}"),
    "total": re.compile(
        rf"total capaci?ty of {SIZE}|{SIZE} total capacity|Device limit {{1,40}}: {SIZE}"
    ),
    "free": re.compile(
        rf"of which {SIZE} is free|; {SIZE} free|Free \(according to \w{{1,9}}\) {{0,40}}: {SIZE}"
    ),
    "own": re.compile(rf"this process has {SIZE} memory in use"),
    "allowed": re.compile(
        rf"{SIZE} allowed;|max allowed: {SIZE}"
        rf"|PyTorch limit \(set by user-supplied memory fraction\) {{0,40}}: {SIZE}"
    ),
    "live": re.compile(
        rf"memory {SIZE} is allocated|{SIZE} already allocated|MPS allocated: {SIZE}"
        rf"|Currently allocated {{1,40}}: {SIZE}"
    ),
    "unused": re.compile(rf"and {SIZE} is reserved by \w{{1,20}} but unallocated|{SIZE} cached\b"),
    "reserved": re.compile(rf"{SIZE} reserved in total"),
    "beside": re.compile(rf"other allocations: {SIZE}"),
}
_ASKED_OF_HOST = re.compile(
    rf"you tried to allocate {SIZE}|Unable to allocate {SIZE} for an array", re.IGNORECASE
)
# Of XLA, of TensorFlow, of ggml and of vLLM.
_ASKED_ELSEWHERE = re.compile(
    rf"(?:trying to allocate|memory allocating|allocate request for|failed to allocate) {SIZE}"
    rf"|allocating {SIZE} on device|buffer of size {_NUMBER}|\({SIZE} KV cache is needed"
    rf"|memory utilization \([0-9.]{{1,9}}, {SIZE}\)"
)
_JAX = re.compile(rf"RESOURCE_EXHAUSTED:{_WORDS}|Ran out of memory in memory space", re.IGNORECASE)
_TENSOR = re.compile(r"OOM when allocating tensor with shape ?\[(?P<shape>[0-9, ]{0,200})\]")
_KERNEL = (
    r"invoked oom-killer|oom-kill:constraint=|out of memory: Kill(?:ed)? process \d"
    r"|killed by the (?:kernel's )?OOM[- ]killer"
)
_SLURM = (
    rf"(?:slurm|srun: ){_WORDS}"
    r"(?:oom[-_ ]kill|: Out Of Memory|exceeded (?:\w{1,4} )?memory limit)"
    r"|(?:job|step) \d[^\n]{0,60}exceeded memory limit|State {0,20}:? {0,20}OUT_OF_ME"
)

# The first that matches is taken.
KINDS: tuple[MessageKind, ...] = (
    MessageKind(
        engine="host",
        words=(b"you tried to allocate", b"unable to allocate"),
        pattern=_ASKED_OF_HOST,
        cause="host",
        figures={"requested": _ASKED_OF_HOST},
    ),
    MessageKind(
        engine="torch",
        words=(b"tried to allocate", b"tried to\nallocate"),
        pattern=re.compile(r"Tried to\s+allocate more than 1EB"),
        cause="request",
    ),
    MessageKind(
        engine="torch",
        words=(
            *(b"tried to allocate", b"tried to\nallocate", b"would exceed allowed memory"),
            *(b"out of memory", b"outofmemory"),
        ),
        pattern=re.compile(rf"Tried to\s+allocate {SIZE}|would exceed allowed memory"),
        figures=_OF_TORCH,
    ),
    # Of a data loader: torch/utils/data/_utils/signal_handling.py; /dev/shm is host memory, too.
    MessageKind(
        engine="host",
        words=(b"dataloader worker",),
        pattern=re.compile(
            rf"DataLoader worker {_WORDS}killed by signal: (?:Killed|Bus error|Unknown signal: 9)"
        ),
        cause="host",
    ),
    MessageKind(
        engine="host",
        words=(
            *(b"oom-kill", b"oom_kill", b"oom kill", b"memory limit", b"out of memory"),
            b"out_of_me",
        ),
        pattern=re.compile(f"{_KERNEL}|{_SLURM}", re.IGNORECASE),
        cause="host",
    ),
    MessageKind(
        engine="host",
        words=(b"oomkilled", b"running low on memory", b"oom-killer", b"oom killer"),
        pattern=re.compile(
            rf"\bOOMKilled\b|node {_WORDS}running low on memory|{_KERNEL}", re.IGNORECASE
        ),
        cause="host",
    ),
    MessageKind(
        engine="host",
        words=(b"memoryerror",),
        pattern=re.compile(r"(?<![A-Za-z])(?:_Array)?MemoryError\b(?!['\"),])"),
        cause="host",
    ),
    MessageKind(
        engine="tensorflow",
        words=(b"oom when allocating tensor",),
        pattern=re.compile(rf"{_TENSOR.pattern}{_WORDS}by allocator (?:mkl_?)?cpu"),
        cause="host",
    ),
    MessageKind(
        engine="tensorflow",
        words=(b"oom when allocating tensor",),
        pattern=_TENSOR,
    ),
    MessageKind(
        engine="jax",
        words=(b"resource_exhausted", b"in memory space"),
        pattern=_JAX,
        figures={
            "requested": _ASKED_ELSEWHERE,
            "total": re.compile(rf"Used [0-9.]{{1,20}}[KMGT] of {SIZE}"),
        },
    ),
    MessageKind(
        engine="tensorflow",
        words=(b"_bfc) ran out of memory",),
        pattern=re.compile(r"_bfc\) ran out of memory"),
        figures={"requested": _ASKED_ELSEWHERE},
    ),
    MessageKind(  # cupy/cuda/memory.pyx
        engine="cupy",
        words=(b"out of memory allocating",),
        pattern=re.compile(r"Out of memory allocating [0-9,]{1,30} bytes \(allocated so far"),
        figures={
            "requested": re.compile(r"allocating ([0-9,]{1,30} bytes)"),
            "live": re.compile(r"allocated so far: ([0-9,]{1,30} bytes)"),
        },
    ),
    MessageKind(
        engine="llama.cpp",
        words=(b"failed to allocate cpu buffer",),
        pattern=re.compile(r"failed to allocate CPU buffer"),
        cause="host",
        figures={"requested": _ASKED_ELSEWHERE},
    ),
    MessageKind(
        engine="llama.cpp",
        words=(b"malloc failed: out of memory", b"buffer of size"),
        pattern=re.compile(
            rf"allocating {SIZE} on device|failed to allocate \S{{1,40}} buffer of size \d"
        ),
        figures={"requested": _ASKED_ELSEWHERE},
    ),
    MessageKind(
        engine="vllm",
        words=(b"is less than desired gpu memory utilization",),
        pattern=re.compile(r"Free memory on device|is less than desired GPU memory utilization"),
        cause="others",
        figures={
            "requested": _ASKED_ELSEWHERE,
            "free": re.compile(rf"\({_NUMBER}/[0-9.]{{1,9}} GiB\)"),
            "total": re.compile(rf"\([0-9.]{{1,9}}/{_NUMBER} GiB\)"),
        },
        unit="GiB",
    ),
    MessageKind(
        engine="vllm",
        words=(
            *(b"no available memory for the cache blocks", b"kv cache is needed"),
            b"tokens that can be stored in kv cache",
        ),
        pattern=re.compile(
            r"No available memory for the cache blocks|KV cache is needed|stored in KV cache"
        ),
        figures={
            "requested": _ASKED_ELSEWHERE,
            "free": re.compile(rf"available KV cache memory \({SIZE}\)"),
        },
    ),
)

# How a text without figures names the engine that it is from; otherwise it is torch's.
ENGINES = {
    "tensorflow": re.compile(r"tensorflow|tf_|ResourceExhaustedError"),
    "jax": re.compile(r"\bxla|jax|XlaRuntimeError"),
    "llama.cpp": re.compile(r"ggml|llama_"),
    "cupy": re.compile(r"\bcupy"),
}
TENSOR_BYTES = {
    "double": 8, "int64": 8, "complex64": 8, "half": 2, "bfloat16": 2,
    "bool": 1, "int8": 1, "uint8": 1,
}  # fmt: skip


def tensor_bytes(message: str) -> int | None:
    """Return the size of the tensor that TensorFlow describes by shape and type."""
    described = _TENSOR.search(message)
    if described is None:
        return None
    kind = re.search(r"\] and type (\w{1,20})", message)
    nbytes = TENSOR_BYTES.get(kind[1], 4) if kind else 4
    lengths = map(int, re.findall(r"\d{1,18}", described["shape"]))
    return min(math.prod(lengths, start=nbytes), 2**63 - 1)
