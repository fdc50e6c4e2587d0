"""A target for several ranks, as a user would write it, with a fault on one of them.

FAULT=KIND:RANK:SIZE makes that rank misbehave at that size and above; KIND alone makes each rank do so while building. SHARD=1 shards
by FSDP2 instead of DDP, BACKEND=gloo needs no NCCL, EVERY=48 steps the optimizer at every 48th call. FAULT=counts:RANK lets only that
rank count its calls. RECOMPUTES=2 recomputes the first two blocks. HELD=300 keeps 300 MiB on the card, and LEFT=300 leaves so much
in the cache.
"""

import functools
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

KIND, FAULTY, FROM_SIZE = [*os.environ.get("FAULT", "none").split(":"), "0", "0"][:3]
WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def burst(*_):
    if "FAILED" in os.environ:
        open(os.environ["FAILED"], "w").close()
    torch.empty(2**40, dtype=torch.uint8, device="cuda")


FAULTS = {
    "bug": lambda: {}["missing"],
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleeps": lambda: time.sleep(600),
    "extra": lambda: dist.all_reduce(torch.ones(1, device="cuda")),
    "runs_out": lambda: next(iter(())),
}


def build():
    rank = int(os.environ["LOCAL_RANK"])
    is_faulty = rank == int(FAULTY)
    if "PIDS" in os.environ:
        open(f"{os.environ['PIDS']}/{os.getpid()}", "w").close()
    if "SAYS" in os.environ:
        sys.stderr.write(f"{os.environ['SAYS']} from {rank}\n")
    torch.cuda.set_device(0 if KIND == "same_card" else rank)
    if KIND == "building" and is_faulty:
        raise KeyError("weights")
    if KIND == "building_killed" and is_faulty:
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND != "late_group":
        dist.init_process_group(os.environ.get("BACKEND", "nccl"))
    if KIND == "host":
        return nn.Linear(1, 1), lambda model, batch_size: None
    model = nn.Sequential(*[Block() for _ in range(3)]).cuda()
    blocks = [*model]
    second = model[1]
    if "SHARD" in os.environ:
        for block in [*model, model]:
            fully_shard(block)
    elif dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    for block in blocks[: int(os.environ.get("RECOMPUTES", 0))]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters())
    held = torch.empty(int(os.environ.get("HELD", 0)) * 2**20, dtype=torch.uint8, device="cuda")
    torch.empty(int(os.environ.get("LEFT", 0)) * 2**20, dtype=torch.uint8, device="cuda")
    armed = [False]
    hooks = {
        "forward": lambda: second.register_forward_pre_hook(burst),
        "backward": lambda: second.register_full_backward_hook(burst),
        "optimizer": lambda: optimizer.register_step_pre_hook(burst),
    }
    calls = [0]
    counts = "EVERY" in os.environ or (is_faulty if KIND == "counts" else KIND != "none")

    def step(model, batch_size):
        calls[0] += counts
        if KIND == "tires":
            os.environ["MADE"] = str(int(os.environ.get("MADE", 0)) + 1)
            if os.environ["MADE"] == "6":
                raise ValueError("six calls are too many for a process")
        assert held.is_cuda
        if is_faulty and int(FROM_SIZE) and batch_size >= int(FROM_SIZE):
            if KIND in hooks and not armed[0]:
                hooks[KIND]()
                armed[0] = True
            elif KIND in FAULTS and (KIND != "runs_out" or calls[0] > 6):
                FAULTS[KIND]()
        if KIND == "late_group" and not dist.is_initialized():
            dist.init_process_group("nccl")
        length = 64 * (2 if KIND == "longer" and is_faulty else 1)
        x = torch.randn(batch_size, length, WIDTH, device="cuda")
        every = int(os.environ.get("EVERY", 1))
        if (calls[0] - 1) % every == 0:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        if calls[0] % every == 0:
            optimizer.step()
        if KIND == "saves" and rank == 0:
            time.sleep(0.2)

    return model, step
