"""A batch size for every length: a table over buckets, and a sampler that trains with it.

python examples/length_table.py                      # on a GPU: make the table, then train with it
python examples/length_table.py --device sim:24GiB   # on any machine: make the table for a simulated card
"""

import argparse
import functools

import torch
from torch import nn

import oomprobe

parser = argparse.ArgumentParser()
parser.add_argument("--device", help="a simulated card to probe, instead of the one that trains: sim:24GiB, sim:T4")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() and args.device is None else "cpu"
lengths = torch.randint(16, 513, (4000,)).tolist()
dataset = [torch.randint(1000, (length,)) for length in lengths]  # yours
collate = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
encoder = nn.TransformerEncoderLayer(512, 8, batch_first=True)
model = nn.Sequential(nn.Embedding(1000, 512), encoder, nn.Linear(512, 1000)).to(device)
optimizer = torch.optim.AdamW(model.parameters())


class BucketSampler(torch.utils.data.Sampler):  # a bucket's batch whenever it is full, as an epoch draws them
    def __init__(self, lengths, batch_sizes):
        self.lengths, self.batch_sizes = lengths, batch_sizes

    def __iter__(self):
        waiting = {}
        for index in torch.randperm(len(self.lengths)).tolist():
            limit = min(limit for limit in self.batch_sizes if self.lengths[index] <= limit)
            waiting.setdefault(limit, []).append(index)
            if len(waiting[limit]) == self.batch_sizes[limit]:
                yield waiting.pop(limit)
        yield from waiting.values()


def train(tokens):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def step(model, batch_size, length):  # the longest batch of this bucket
    train(torch.randint(1000, (batch_size, length)).to(device))


epoch = oomprobe.Epoch({"length": lengths}, calls=60, orders=300)  # none dies: at most 1 % of all do
table = oomprobe.find_max_batches(model, step, {"length": [128, 256, 512]}, epoch=epoch, device=args.device)
print(table)

if args.device is None:  # PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True gives larger sizes
    sampler = BucketSampler(lengths, table.batch_sizes())
    for tokens in torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate):
        train(tokens.to(device))
        print(f"trained on {len(tokens)} sequences of up to {len(tokens[0])} tokens")
