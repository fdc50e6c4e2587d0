"""A training script that knows nothing of oomprobe. oomprobe runs its command as it is, with one size after another.

oomprobe run --start-batch 8 -- torchrun --nproc-per-node gpu examples/train_torchrun.py --batch-size {batch} --output-dir {dir}
Without a GPU, on two simulated cards:
oomprobe run --device sim:24GiB -- torchrun --nproc-per-node 2 examples/train_torchrun.py --batch-size {batch} --output-dir {dir}
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, required=True, help="sequences for each GPU")
parser.add_argument("--output-dir", type=Path, default=Path("out"), help="where checkpoints go")
parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
args = parser.parse_args()


class Sequences(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.randint(1000, (512,))


device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
torch.distributed.init_process_group("nccl")
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 3)
model = nn.Sequential(nn.Embedding(1000, 512), encoder, nn.Linear(512, 1000)).to(device)
model = DistributedDataParallel(model, device_ids=[device])
optimizer = torch.optim.AdamW(model.parameters())

loader = DataLoader(Sequences(), args.batch_size, sampler=DistributedSampler(Sequences()))
for step, tokens in enumerate(loader, 1):
    tokens = tokens.to(device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    if step % args.save_every == 0 and torch.distributed.get_rank() == 0:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), args.output_dir / f"step-{step}.pt")
        print(f"step {step}: loss {loss.item():.4f}")
torch.distributed.destroy_process_group()
