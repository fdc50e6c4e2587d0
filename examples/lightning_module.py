"""A LightningModule and its data module: the size is set where Lightning's own batch size finder would set it.

python examples/lightning_module.py                      # on a GPU: find the size, then fit with it
python examples/lightning_module.py --device sim:24GiB   # on any machine: find the size for a simulated card
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from oomprobe.integrations.lightning import find_max_batch

parser = argparse.ArgumentParser()
parser.add_argument("--device", help="a simulated card to probe, instead of the one that trains: sim:24GiB, sim:T4")
args = parser.parse_args()


class Data(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size  # what oomprobe sets

    def setup(self, stage):
        self.train, self.val = torch.randint(1000, (2000, 512)), torch.randint(1000, (200, 512))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class Encoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
        self.layers = nn.Sequential(nn.Embedding(1000, 512), nn.TransformerEncoder(layer, 2), nn.Linear(512, 1000))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layers(batch).flatten(0, 1), batch.flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer, module, data = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False), Encoder(), Data()
result = find_max_batch(trainer, module, data, device=args.device, multiple_of=8)  # sets data.batch_size
print(result)

if args.device is None:
    trainer.fit(module, datamodule=data)
