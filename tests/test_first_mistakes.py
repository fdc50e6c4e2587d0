"""The mistakes that people make first, typed as they would be, and the sentences that answer them (golden/first_*.txt)."""

import functools
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from helpers import same_as_golden
from torch import nn
from torch.utils.data import DataLoader

import oomprobe
from oomprobe.cli import main

QUIET = {"device": "sim:1GiB", "progress": "off"}


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    return model, torch.optim.AdamW(model.parameters())


MODEL, OPTIMIZER = model_and_optimizer()


def train(model, batch):
    OPTIMIZER.zero_grad()
    model(batch).square().mean().backward()
    OPTIMIZER.step()


def step(model, batch_size):
    train(model, torch.randn(batch_size, 256))


def swapped_parameters(batch_size, model):
    train(model, torch.randn(batch_size, 256))


def ignores_its_size(model, batch_size):
    train(model, torch.randn(8, 256))


def misspells(model, batch_size):
    train(model, torch.rand(batch_sise, 256))  # noqa: F821


def reads_a_slice(model, batch_size, data=torch.zeros(100, 256)):  # noqa: B008
    train(model, data[:batch_size])


def fails_above_16(model, batch_size):
    if batch_size > 16:
        raise ValueError("batch too large for my buffer")
    step(model, batch_size)


def carries_all_its_data(model, batch_size):
    raise ValueError("bad batch: ", [*range(100_000)])


def wrong_shape(model, batch_size):
    train(model, torch.randn(batch_size, 128))


def batch_on_the_card(model, batch_size):
    train(model, torch.randn(batch_size, 256, device="cuda"))


def takes_a_batch(model, batch):
    train(model, batch)


def unpacks_a_batch(model, batch):
    inputs, _ = batch
    train(model, inputs)


def takes_64_at_most(model, batch_size):
    step(model, min(batch_size, 64))


def drops_the_last(model, batch_size, data=torch.zeros(100, 256)):  # noqa: B008
    train(model, next(iter(DataLoader(data, batch_size, drop_last=True))))


async def awaits(model, batch_size):
    step(model, batch_size)


def in_double(model, batch_size):
    train(model, torch.randn(batch_size, 256, dtype=torch.float64))


find = functools.partial(oomprobe.find_max_batch, **QUIET)
MISTAKES = {
    "model and step swapped": lambda: find(step, MODEL),
    "the step's parameters swapped": lambda: find(MODEL, swapped_parameters),
    "an option misspelt": lambda: find(MODEL, step, mutliple_of=8),
    "a percentage for a fraction": lambda: find(MODEL, step, memory_fraction=90),
    "limits swapped": lambda: find(MODEL, step, min_batch=64, max_batch=8),
    "a card without a GPU": lambda: find(MODEL, step, device="cuda"),
    "a card's name misspelt": lambda: find(MODEL, step, device="sim:RTX-4099"),
    "the size ignored": lambda: find(MODEL, ignores_its_size),
    "the size ignored by a check": lambda: oomprobe.check(MODEL, ignores_its_size, 64, **QUIET),
    "the size ignored up to max_batch": lambda: find(MODEL, ignores_its_size, max_batch=64),
    "a data set that ends before max_batch": lambda: find(MODEL, reads_a_slice, max_batch=150),
    "a name misspelt in the step": lambda: find(MODEL, misspells),
    "a data set that ends": lambda: find(MODEL, reads_a_slice),
    "a bug above a size": lambda: find(MODEL, fails_above_16),
    "an exception with all its data": lambda: find(MODEL, carries_all_its_data),
    "a wrong shape": lambda: find(MODEL, wrong_shape),
    "a batch on a card that is not there": lambda: find(
        MODEL, batch_on_the_card, device="cpu:1GiB"
    ),
    "the class for the model": lambda: find(nn.Linear, step),
    "the step called": lambda: find(MODEL, step(MODEL, 8)),
    "a list of steps": lambda: find(MODEL, [step]),
    "an asynchronous step": lambda: find(MODEL, awaits),
    "a batch in place of its size": lambda: find(MODEL, takes_a_batch),
    "a batch in place of its size, unpacked": lambda: find(MODEL, unpacks_a_batch),
    "the size limited by the step": lambda: find(MODEL, takes_64_at_most),
    "the size limited by the step, and checked": lambda: oomprobe.check(
        MODEL, takes_64_at_most, 512, **QUIET
    ),
    "a loader that drops the last batch": lambda: find(MODEL, drops_the_last),
    "a batch in double precision": lambda: find(MODEL, in_double),
    "a text for a number": lambda: find(MODEL, step, max_batch="64"),
    "another card than there is": lambda: find(MODEL, step, device=torch.device("cuda", 3)),
    "an epoch for a step without its argument": lambda: find(
        MODEL, step, epoch=oomprobe.Epoch({"length": [1, 2, 3]})
    ),
    "tokens for a step without lengths": lambda: oomprobe.find_max_tokens(
        MODEL, step, [10, 20], **QUIET
    ),
    "a name to preserve": lambda: find(MODEL, step, preserve="model"),
    "nothing fits": lambda: find(MODEL, step, min_batch=10_000_000),
}


SCRIPT = """
import argparse
import torch
from torch import nn

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bs", type=int)
    parser.add_argument("--micro", type=int, default=8)
    if parser.parse_args().micro // 8 == 0:
        raise ValueError("batch_size should be a positive integer value, but got batch_size=0")

def make(name, lr=0.1):
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=lr), lambda model, batch_size: None

def triple():
    return make("linear")

def swapped():
    model, optimizer, step = make("linear")
    return step, model

def alone():
    return make("linear")[0]

def on_meta():
    with torch.device("meta"):
        model, optimizer, step = make("linear")
    return model, step

if __name__ == "__main__":
    main()
"""
CARD = "--device sim:1GiB"
TYPED = [
    "train.py --lr 3",
    f"run train.py:main {CARD}",
    f"run train.py:make {CARD}",
    f"run train.py:triple {CARD}",
    f"run train.py:swapped {CARD}",
    f"run train.py:alone {CARD}",
    f"run train.py:on_meta {CARD}",
    "run train.py:alone --batch-size 64",
    "run train.py:alone --gpu RTX-4090",
    "run train.py:alone --gpus 2",
    "run train.py:alone --device sim:MI300X",
    "run train.py:alone --device sim:A100-80",
    "run train.py:alone --device sim:0GiB",
    f"run {CARD} -- python missing.py {{batch}}",
    f"run {CARD} -- python train.py --batch-size {{batch}}",
    f"run {CARD} train.py:alone --epoch length=lengths.csv",
    f"run {CARD} -- train.py --bs {{batch}}",
    f"run {CARD} -- python train.py --bs 64",
    f"run {CARD} -- 'python train.py --bs {{batch}}'",
    f"run {CARD} -- python train.py --micro {{batch}}",
    f"run {CARD} --require 64 --max-batch 32 -- python train.py --bs {{batch}}",
    "run train.py:alone --memory-fraction 1.5",
    "show train.log",
    "explain empty.log",
    "compare empty.log empty.log",
    "run --device RTX-4090 -- python train.py --bs {batch}",
    "run --device sim:all -- python train.py --bs {batch}",
]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch names its build")
@pytest.mark.usefixtures("warm_python")
def test_each_command_line_is_answered_by_what_to_type(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    Path("train.py").write_text(SCRIPT)
    Path("lengths.csv").write_text("length\n12\n30\n")
    Path("train.log").write_text("step 1: loss 2.3\n")
    Path("empty.log").touch()
    answers = []
    for typed in TYPED:
        words = shlex.split(typed)
        monkeypatch.setattr(sys, "argv", ["oomprobe", *words])
        try:
            status = main(words)
        except SystemExit as error:
            status = error.code
        told = capsys.readouterr().err.replace(str(tmp_path.resolve()), "/home/me")
        told = re.sub(r"\S+/argparse\.py:\d+", "argparse.py:1", told)
        told = re.sub(r"\S+/python\S*: can't", "python: can't", told)
        lines = [line for line in told.splitlines() if not line.startswith(("usage:", "       "))]
        answers.append("\n".join([f"--- oomprobe {typed}", *lines, f"exit status {status}", ""]))
        assert status in (2, 3, 4)
    same_as_golden("\n".join(answers), "first_commands.txt")


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch names its build")
def test_each_is_answered_by_what_to_type():
    answers = []
    for mistake, make in MISTAKES.items():
        with pytest.raises(oomprobe.OomProbeError) as error:
            make()
        answers.append(f"--- {mistake}\n{type(error.value).__name__}: {error.value}\n")
    assert max(map(len, answers)) < 3000
    same_as_golden("\n".join(answers), "first_mistakes.txt")
