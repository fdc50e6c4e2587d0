"""A plain training loop with a DataLoader that finds its batch size before it trains.

python examples/plain_loop.py                      # on a GPU: find the size, then train with it
python examples/plain_loop.py --device sim:24GiB   # on any machine: find the size for a simulated card
python examples/plain_loop.py --batch-size 64      # an error before training if 64 does not fit
"""

import argparse

import torch
from torch import nn

import oomprobe

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, help="check this size, instead of searching")
parser.add_argument("--device", help="a simulated card to probe, instead of the one that trains: sim:24GiB, sim:T4")
args = parser.parse_args()


class Images(torch.utils.data.Dataset):  # yours
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.randn(3, 224, 224), index % 10


device = "cuda" if torch.cuda.is_available() and args.device is None else "cpu"
dataset = Images()
convolutions = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, stride=2), nn.ReLU()]
model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters())


def train(images, labels):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
    loss.backward()
    optimizer.step()
    return loss.item()


largest = oomprobe.worst_case_batches(dataset)  # as the second argument, your DataLoader's collate_fn


def step(model, batch_size):  # what oomprobe runs: the same training step, on the largest examples
    train(*largest(batch_size))


if args.batch_size:
    result = oomprobe.check(model, step, args.batch_size, device=args.device)
else:
    result = oomprobe.find_max_batch(model, step, device=args.device, multiple_of=8, max_batch=len(dataset))
print(result)

if args.device is None:
    for images, labels in torch.utils.data.DataLoader(dataset, batch_size=result.batch_size, shuffle=True):
        print(f"trained on {len(images)} images: loss {train(images, labels):.4f}")
