"""Sequences of many lengths: the batch size with which training runs in many orders of them.

python examples/varying_lengths.py                     # on a GPU: find the size, then train with it
python examples/varying_lengths.py --device sim:2GiB   # on any machine, in seconds: find it on a simulated card
"""

import argparse
import random

import torch
from torch import nn

import oomprobe

parser = argparse.ArgumentParser()
parser.add_argument("--device", help="a simulated card to probe, instead of the one that trains: sim:2GiB, sim:T4")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() and args.device is None else "cpu"
lengths = [min(512, max(8, int(random.lognormvariate(4.5, 0.6)))) for _ in range(4000)]
dataset = [torch.randint(1000, (length,)) for length in lengths]  # yours
encoder = nn.TransformerEncoderLayer(256, 4, batch_first=True)
model = nn.Sequential(nn.Embedding(1000, 256), encoder, nn.Linear(256, 1000)).to(device)
optimizer = torch.optim.AdamW(model.parameters())


def train(tokens):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def step(model, batch_size, length):  # a batch whose longest sequence has this length
    train(torch.randint(1000, (batch_size, length)).to(device))


epoch = oomprobe.Epoch({"length": lengths}, calls=30, orders=4)  # more of both on a GPU: 1000 and 40
result = oomprobe.find_max_batch(model, step, epoch=epoch, device=args.device)
print(result)

if args.device is None:
    batches = torch.utils.data.DataLoader(
        dataset, result.batch_size, shuffle=True, collate_fn=nn.utils.rnn.pad_sequence
    )
    for tokens in batches:
        train(tokens.T.to(device))
        print(f"trained on {len(tokens[0])} sequences of up to {len(tokens)} tokens")
