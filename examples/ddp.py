"""DDP with a rank on each GPU of a machine: the training, and a build() with which oomprobe runs its step.

oomprobe run examples/ddp.py:build --nproc-per-node gpu                    # find the size for each GPU
oomprobe run examples/ddp.py:build --nproc-per-node 8 --device sim:24GiB   # on any machine: for one of 8 ranks
torchrun --nproc-per-node gpu examples/ddp.py --batch-size 64              # train with it
"""

import argparse
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import oomprobe

dataset = [torch.randint(1000, (512,)) for _ in range(20_000)]  # yours


def setup():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 3)
    model = nn.Sequential(nn.Embedding(1000, 512), encoder, nn.Linear(512, 1000), nn.LogSoftmax(-1))
    model = DistributedDataParallel(model.to(device), device_ids=[device])
    return model, torch.optim.AdamW(model.parameters())


def train(model, optimizer, tokens):
    tokens = tokens.cuda()
    optimizer.zero_grad()
    nn.functional.nll_loss(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def build():  # for oomprobe, which calls it on every rank
    model, optimizer = setup()
    largest = oomprobe.worst_case_batches(dataset)  # as the second argument, your DataLoader's collate_fn
    return model, lambda model, batch_size: train(model, optimizer, largest(batch_size))


def main():  # for torchrun
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True, help="sequences for each GPU")
    args = parser.parse_args()
    model, optimizer = setup()
    for number, tokens in enumerate(DataLoader(dataset, args.batch_size, sampler=DistributedSampler(dataset)), 1):
        train(model, optimizer, tokens)
        if number % 10 == 0:
            print(f"rank {os.environ['RANK']}: step {number}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
