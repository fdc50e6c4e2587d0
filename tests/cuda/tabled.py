"""A language model whose step takes a length, in this process or, with RANK set, as a rank of DDP; also a target."""

import os

import torch
import torch.distributed as dist
from gpu_check import table as gpu_table
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH = 500, 128


class Attention(gpu_table.Attention):
    def __init__(self):
        super().__init__(WIDTH)


class Rotated(nn.Module):
    """Attention that torch fuses, after positions from a table that grows with the longest sequence so far."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = None

    def forward(self, x):
        length = x.shape[1]
        if self.table is None or len(self.table) < length:
            self.table = torch.randn(length, WIDTH, device=x.device)
        query, key, value = (
            one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.inner(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + self.outer(mixed) * self.table[:length]


def language_model(kind=Rotated):
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), kind(), kind(), nn.Linear(WIDTH, VOCABULARY)
    )
    model = model.cuda()
    if "RANK" in os.environ:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size, length):
        tokens = torch.randint(VOCABULARY, (batch_size, length), device="cuda")
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return model, step


def build(kind=Rotated):
    if "PIDS" in os.environ:
        open(f"{os.environ['PIDS']}/{os.getpid()}", "w").close()
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(os.environ.get("BACKEND", "nccl"))
    return language_model(kind)


def build_attention():
    return build(Attention)
