"""One limit for all tools, and a real one: of the host's memory, or of a card's.

On the host: the address space of this process, from where it stands once it is warm. glibc is told to give each block
of 128 KiB and more its own pages and to keep one arena, so that what a process may use does not hang on what its heap has
been through; oneDNN and NNPACK are off, whose failures speak in words that most tools were not written for. Both make the
host more like a card, for every tool alike.

On a card: what a neighbour leaves free of it (see ballast.py), context and libraries of the process included. Nothing is
set, and nothing is warmed: what a tool's process takes, it takes from that.
"""

import ctypes
import gc
import os
import resource
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from peers import ballast

MIB = 2**20
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_TOP_PAD_": "0",
    "PYTHONHASHSEED": "0",
}


def settle():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def address_space_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def malloced():
    """What malloc has handed out."""
    from oomprobe.devices import heap

    settle()
    return {"left_bytes": heap.malloced_bytes()}


def plain_kernels():
    torch.backends.mkldnn.enabled = False
    torch.backends.nnpack.set_flags(False)


def warm(workload):
    """One step of another instance, so that threads, kernels and caches are there; it is gone afterwards."""
    plain_kernels()
    torch.manual_seed(0)
    kept = os.environ.pop("PEERS_LOG", None)
    model = workload.build()
    workload.step(workload.optimizer(model))(model, workload.smallest)
    del model
    settle()
    if kept:
        os.environ["PEERS_LOG"] = kept


@contextmanager
def held(budget_mib):
    """Meanwhile this process and its children may add so much address space, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + budget_mib * MIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def allocated():
    """What tensors hold of the card, and what the allocator does; nothing where this process has not come to it."""
    gc.collect()
    return {"left_bytes": torch.cuda.memory_allocated(), "left_reserved_bytes": torch.cuda.memory_reserved()}


def reserved():
    """The most that the allocator has held of the card."""
    return {"peak_reserved_bytes": torch.cuda.max_memory_reserved()}


@dataclass(frozen=True)
class Limit:
    """How memory is limited on a kind of device.

    Attributes:
        environment: Of the processes that work under it.
        beside: Holds it from outside, while processes work; takes MiB, gives the bytes left free where it knows.
        warm: What a process does first.
        held: Holds it from inside; takes MiB.
        in_use: Bytes in use by this process, by name.
        peak: The most that were, by name; nothing where that is not measured.
        forks: Whether a warm process may fork, so that all sizes can be scanned.
    """

    environment: Mapping[str, str]
    beside: Callable[[int], AbstractContextManager]
    warm: Callable
    held: Callable[[int], AbstractContextManager]
    in_use: Callable[[], dict[str, int]]
    peak: Callable[[], dict[str, int]]
    forks: bool


def nothing(*_):
    return {}


LIMITS = {
    "cpu": Limit(
        environment=ENVIRONMENT,
        beside=lambda mib: nullcontext(),
        warm=warm,
        held=held,
        in_use=malloced,
        peak=nothing,
        forks=True,
    ),
    "cuda": Limit(
        environment={"PYTHONHASHSEED": "0"},
        beside=ballast.beside,
        warm=nothing,
        held=lambda mib: nullcontext(),
        in_use=allocated,
        peak=reserved,
        forks=False,
    ),
}


def of(workload):
    return LIMITS[workload.device]
