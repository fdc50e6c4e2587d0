"""One limit for all: the address space of this process, from where it stands once it is warm.

glibc is told to give each block of 128 KiB and more its own pages and to keep one arena, so that what a process may
use does not hang on what its heap has been through; oneDNN and NNPACK are off, whose failures speak in words that
most tools were not written for. Both make the host more like a card, for every tool alike.
"""

import ctypes
import gc
import os
import resource
from contextlib import contextmanager

import torch

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


def in_use_bytes():
    """What malloc has handed out."""
    from oomprobe.devices import linux

    settle()
    return linux.malloced_bytes()


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
