"""The named steps of docs/recipes.md that save, evaluate and resume by the frameworks' own means, as they stand there."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bed import forked

import oomprobe
from oomprobe.records.patience import Patience

RECIPES = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
QUICK = {
    "progress": "off",
    "patience": Patience(look_s=0.0),
}  # no more calls than a confirmation needs
CARD = {"memory": "1GiB", "limit_s": 120, "CUDASTUB_ASSERT": 0}
pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own, about torch and short runs


def recipe(framework):
    """Return the code of a framework's recipe."""
    [code] = re.findall(
        rf"^\*\*{framework}\*\*.*?^```py\n(.*?)^```", RECIPES, re.MULTILINE | re.DOTALL
    )
    return code


class Found:
    batch_size = 4


def run(framework, names):
    """Run a recipe and return the result of its check."""
    checked = []

    class Probe:
        @staticmethod
        def check(*args, **options):
            checked.append(oomprobe.check(*args, **options, **QUICK))

    exec(recipe(framework), {"oomprobe": Probe, "result": Found, "torch": torch} | names)
    [result] = checked
    return result


def with_transformers(folder):
    transformers = pytest.importorskip("transformers")
    from .test_transformers import padded, trainer

    made = trainer(folder)
    transformers.logging.set_verbosity_error()

    def arguments(folder, **settings):
        return transformers.TrainingArguments(
            folder, report_to=[], disable_tqdm=True, logging_strategy="no", **settings
        )

    kind = transformers.Trainer
    return {
        "Trainer": kind, "TrainingArguments": arguments, "model": made.model, "data": made.eval_dataset, "collate": padded,
        "folder": folder,
    }  # fmt: skip


def with_lightning(folder):
    pl = pytest.importorskip("lightning.pytorch")
    from torch.utils.data import DataLoader, TensorDataset

    class Data(pl.LightningDataModule):
        def __init__(self, batch_size):
            super().__init__()
            self.batch_size = batch_size

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.zeros(64, 256)), batch_size=self.batch_size)

        val_dataloader = train_dataloader

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])

        def training_step(self, batch, batch_idx):
            return self.layers(batch[0]).square().mean()

        validation_step = training_step

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    made = SimpleNamespace(Trainer=partial(pl.Trainer, **quiet))
    return {"pl": made, "Module": Module, "Data": Data, "folder": folder}


def with_accelerate(folder):
    accelerate = pytest.importorskip("accelerate")
    from oomprobe.integrations.accelerate import unchanged

    accelerator = accelerate.Accelerator()
    model = torch.nn.Linear(256, 256)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def train(model, batch_size):
        accelerator.backward(model(torch.zeros(batch_size, 256, device="cuda")).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(model, batch_size):
        accelerator.gather_for_metrics(model(torch.zeros(batch_size, 256, device="cuda")))

    train.result = Found
    return {
        "accelerator": accelerator, "model": model, "train": train, "evaluate": evaluate, "unchanged": unchanged,
        "folder": folder,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "names", "files"),
    [
        ("transformers", with_transformers, {"checkpoint-2", "checkpoint-4"}),
        ("Lightning", with_lightning, {"2.ckpt", "4.ckpt"}),
        ("accelerate", with_accelerate, {"model.safetensors", "optimizer.bin"}),
    ],
)
def test_it_saves_evaluates_and_resumes(tmp_path, framework, names, files):
    result = forked(lambda: run(framework, names(str(tmp_path))), **CARD)
    assert {path.name for path in tmp_path.iterdir()} >= files
    assert result.batch_size == 4
    assert not [item for item in result.not_covered if re.search("sav|resum|last evaluation", item)]
