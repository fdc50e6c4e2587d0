"""What would make batch 64 fit: each saving of memory is run around this loop, and the table says which ones reach it.

python examples/savings.py                      # on a GPU
python examples/savings.py --device sim:24GiB   # on any machine: on a simulated card

oomprobe run examples/savings.py:build --savings all --require 64 --device sim:24GiB   # the same on the command line
"""

import argparse

import torch
from torch import nn

import oomprobe

TOKENS, WORDS, BATCH_SIZE = 2048, 8_000, 64


class Decoder(nn.Module):
    def __init__(self, width=768, layers=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 12, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        tokens = torch.randint(WORDS, (batch_size, TOKENS), device=device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", help="a simulated card instead of the one that is here: sim:24GiB, sim:T4")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    args = parser.parse_args()
    print(oomprobe.find_savings(*build(), args.batch_size, device=args.device, multiple_of=8))
