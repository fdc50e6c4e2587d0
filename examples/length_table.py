"""A batch size for every length: a table over buckets, and a sampler that trains with it.

python examples/length_table.py                      # on a GPU: make the table, then train with it
python examples/length_table.py --device sim:24GiB   # on any machine: make the table for a simulated card
"""

import argparse
from functools import partial

import torch
from torch import nn

import oomprobe

parser = argparse.ArgumentParser()
parser.add_argument("--device", help="a simulated card to probe, instead of the one that trains: sim:24GiB, sim:T4")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() and args.device is None else "cpu"
lengths = torch.randint(16, 513, (4000,)).tolist()
dataset = [torch.randint(1000, (length,)) for length in lengths]  # yours
collate = partial(nn.utils.rnn.pad_sequence, batch_first=True)
encoder = nn.TransformerEncoderLayer(512, 8, batch_first=True)
model = nn.Sequential(nn.Embedding(1000, 512), encoder, nn.Linear(512, 1000)).to(device)
optimizer = torch.optim.AdamW(model.parameters())


class BucketSampler(torch.utils.data.Sampler):  # random batches, each of sequences that fit into the same bucket
    def __init__(self, lengths, batch_sizes):
        members = {limit: [] for limit in batch_sizes}
        for index in torch.randperm(len(lengths)).tolist():
            members[min(limit for limit in members if lengths[index] <= limit)].append(index)
        self.batches = []
        for limit, size in batch_sizes.items():
            self.batches += [members[limit][start : start + size] for start in range(0, len(members[limit]), size)]

    def __iter__(self):
        return (self.batches[at] for at in torch.randperm(len(self.batches)).tolist())


def train(tokens):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def step(model, batch_size, length):  # the longest batch of this bucket
    train(torch.randint(1000, (batch_size, length)).to(device))


epoch = oomprobe.Epoch({"length": lengths}, calls=200)
table = oomprobe.find_max_batches(model, step, {"length": [128, 256, 512]}, epoch=epoch, device=args.device)
print(table)

if args.device is None:  # set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before; docs/tables.md says why
    sampler = BucketSampler(lengths, table.batch_sizes())
    for tokens in torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate):
        train(tokens.to(device))
        print(f"trained on {len(tokens)} sequences of up to {len(tokens[0])} tokens")
