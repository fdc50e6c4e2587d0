"""Sizes that run under 136 MiB of real memory: found by a probe, and those that accelerate's own decorator tries."""

import json
import multiprocessing
import resource
import sys

import torch
from accelerate.utils import find_executable_batch_size as shrinking

from oomprobe.integrations.accelerate import find_executable_batch_size

BUDGET_BYTES = 136 * 2**20
SAMPLE = 2**15  # elements: 128 KiB, three times: the batch, the product and its gradient


def steps(batch_size, number=3):
    scale = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([scale], lr=0.1)
    for _ in range(number):
        optimizer.zero_grad()
        (torch.ones(batch_size, SAMPLE) * scale).mean().backward()
        optimizer.step()


def probe():
    return find_executable_batch_size(
        lambda batch_size: batch_size if steps(batch_size) is None else None,
        starting_batch_size=512,
        device=f"cpu:{BUDGET_BYTES}",
        memory_fraction=0.97,
        progress="off",
    )()


def shrink(starting):
    tried = []

    def train(batch_size):
        tried.append(batch_size)
        steps(batch_size)

    steps(1)  # what libraries load with the first step is no part of the budget
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BUDGET_BYTES, resource.RLIM_INFINITY))
    shrinking(train, starting_batch_size=starting)()
    return tried


def main():
    torch.set_num_threads(1)  # each thread reserves address space
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as own_process:
        probed = own_process.apply(probe)
        tried = {"tried from the probed size": probed, "tried from 512": 512}
        json.dump(
            {"probed": probed, **{how: own_process.apply(shrink, (one,)) for how, one in tried.items()}}, sys.stdout
        )


if __name__ == "__main__":
    main()
