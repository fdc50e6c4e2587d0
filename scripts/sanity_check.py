"""Check before a long run that the configured batch size fits. Copy this file and put in your own model and data.

python sanity_check.py --batch-size 64 --require    # exit 5 if 64 does not fit, 4 without the device, as `oomprobe run`
"""

import argparse
import sys

import torch
from torch import nn

import oomprobe
from oomprobe.cli import explained
from oomprobe.devices import choose_device

parser = argparse.ArgumentParser(description="Probe the batch size, then train with it.")
parser.add_argument("--batch-size", type=int, default=64, help="the configured batch size")
parser.add_argument("--require", action="store_true", help="exit if it does not fit, instead of training with less")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu:1GiB")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

# --- the training, unchanged by the check ---
with explained():
    device = choose_device(args.device, nn.Identity()).torch_device
mixed = device.type == "cuda"
body = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device.type, enabled=mixed)


data = torch.utils.data.TensorDataset(torch.randn(256, 3, 64, 64), torch.randint(10, (256,)))
largest = oomprobe.worst_case_batches(data).to(device)  # as the second argument, your loader's collate_fn


def step(model, batch_size):
    images, labels = largest(batch_size)
    optimizer.zero_grad()
    with torch.autocast(device.type, enabled=mixed):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


# --- the check, which restores everything above ---
sizes = {"min_batch": min(2, args.batch_size), "max_batch": args.batch_size}
with explained(required=args.require):
    result = oomprobe.find_max_batch(model, step, device=args.device, **sizes)
if result.batch_size < args.batch_size:
    print(result, f"batch {args.batch_size} does not fit, {result.batch_size} does", sep="\n", file=sys.stderr)
    if args.require:
        sys.exit(5)

for number in range(args.steps):
    print(f"step {number}: batch {result.batch_size}, loss {step(model, result.batch_size):.4f}")
