"""Lightning's fit on two ranks as a target. Over gloo: the bed's NCCL moves no objects, which Lightning broadcasts."""

import os

import pytest
import torch
from bed import forked
from torch.utils.data import DataLoader, TensorDataset

import oomprobe

from .ranks import BRIEF, on_ranks

pl = pytest.importorskip("lightning.pytorch")

MIB = 2**20
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about torch and short runs


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers, self.batch_size = (
            torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]),
            4,
        )

    def prepare_data(self):
        with open(f"{os.environ['FOLDER']}/prepared", "a") as file:
            file.write(f"{os.environ['RANK']}\n")

    def train_dataloader(self):
        return DataLoader(
            TensorDataset(torch.zeros(1, 512, 256).expand(5000, 512, 256)),
            batch_size=self.batch_size,
        )

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def trainer(**settings):
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(
        **{"accelerator": "gpu", "devices": 1, **dict.fromkeys(silent, False), **settings}
    )


def build():
    from oomprobe.integrations.lightning import model_and_step

    strategy = pl.strategies.DDPStrategy(process_group_backend="gloo")
    return model_and_step(trainer(devices=2, strategy=strategy, max_epochs=2), Module())


def test_a_fit_on_two_ranks_is_a_target(tmp_path):
    def probe():
        return oomprobe.probe_target(
            build,
            nproc_per_node=2,
            start_batch=16,
            resolution=0.9,
            confirm_steps=2,
            patience=BRIEF,
            memory_fraction=0.6,
            progress="off",
        )

    # On small cards, as each sample is copied.
    result = on_ranks(tmp_path, probe, limit_s=120, memory="256MiB,256MiB", FOLDER=tmp_path)
    assert (result.limited_by, result.world_size) == ("memory", 2)
    assert set((tmp_path / "prepared").read_text().split()) == {"0"}  # rank 0 alone, as in training
    assert {trial.samples_per_s for trial in result.trials} == {None}


def test_the_weights_exist_once():
    """A second copy of the frozen weights (64 MiB), such as a snapshot's, would take room for samples."""

    class OnCard(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.large = (
                torch.nn.Linear(8, 1),
                torch.nn.Linear(4096, 4096).requires_grad_(False),
            )
            self.batch_size = 4

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.zeros(200, 8)), batch_size=self.batch_size)

        def training_step(self, batch, batch_idx):
            block = torch.empty(len(batch[0]) * 4 * MIB, dtype=torch.uint8, device=self.device)
            return self.layer(batch[0]).square().mean() + block[:1].float().mean() * 0

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def probe():
        from oomprobe.integrations.lightning import find_max_batch

        module = OnCard().to("cuda")
        result = find_max_batch(trainer(), module, min_batch=64, progress="off")
        return result.batch_size, result.limited_by, module.large.weight.device.type

    answer, *rest = forked(probe, memory="512MiB", limit_s=120)
    room = (0.9 * 512 - 64) // 4
    assert room - 10 <= answer <= room
    assert rest == ["memory", "cuda"]
