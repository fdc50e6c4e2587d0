"""The tools, each called as its documentation shows.

A tool takes a `Call` and returns its answer. Tools that shrink a size start at the first power of two above the truth,
closer than a user's guess; those that wrap a training function get one of ten steps.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from zoo import run_loop

import oomprobe
from peers.models import EPOCHS

TRAINING_STEPS = 10
WITH_EPOCH = ("oomprobe, epoch", "oomprobe, epoch, all memory")


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of a tool; `model` and `optimizer` are None for tools that build their own."""

    name: str
    workload: Any
    model: Any = None
    optimizer: Any = None
    start: int

    @property
    def step(self):
        return self.workload.step(self.optimizer)

    @property
    def argument(self):
        return "input_ids" if self.workload.tokens else "x"

    def train(self, batch_size):
        run_loop(self.step, TRAINING_STEPS, self.model, batch_size)
        return batch_size


def in_one_process(memory_fraction, call):
    found = oomprobe.find_max_batch(
        call.model, call.step, memory_fraction=memory_fraction, progress="off"
    )
    return found.batch_size


def with_epoch(memory_fraction, call):
    step = call.workload.varying(call.optimizer)
    epoch = EPOCHS[call.name]
    options = {"memory_fraction": memory_fraction, "progress": "off"}
    return oomprobe.find_max_batch(call.model, step, epoch=epoch, **options).batch_size


def isolated(call):
    return oomprobe.probe_target(f"peers.models:{call.name}", progress="off").batch_size


def accelerate(call):
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=call.start)
    def train(batch_size):
        model, optimizer = call.workload.build()
        return replace(call, model=model, optimizer=optimizer).train(batch_size)

    return train()


def lightning(mode, call, devices=1, strategy="auto"):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.tuner import Tuner

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.batch_size = call.model, 2

        def training_step(self, batch, index):
            return self.model(batch)

        def configure_optimizers(self):
            return call.optimizer

        def train_dataloader(self):
            batch = lambda examples: call.workload.inputs(len(examples))  # noqa: E731
            return DataLoader(range(10**7), batch_size=self.batch_size, collate_fn=batch)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_epochs=1,
        accelerator="cuda",
        devices=devices,
        strategy=strategy,
        gradient_clip_val=call.workload.clip,
        **quiet,
    )
    module = Module()
    Tuner(trainer).scale_batch_size(module, mode=mode)
    return module.batch_size


def toma(call):
    from toma import toma

    return toma.batch(call.train, initial_batchsize=call.start)()


def torch_max_mem(call):
    from torch_max_mem import maximize_memory_utilization

    @maximize_memory_utilization()
    def train(batch_size):
        return call.train(batch_size)

    return train(batch_size=call.start)


def batch_probe_model(call):
    from batch_probe import probe_batch_size

    return probe_batch_size(
        call.model, lambda size: {call.argument: call.workload.inputs(size)}, verbose=False
    )


def batch_probe_step(call):
    from batch_probe import probe

    return probe(partial(call.step, call.model), backend="torch", verbose=False)


def batch_finder(call):
    """Runs in this process: "spawn" cannot pickle its workers, which are local functions."""
    from batch_finder import find_max_minibatch

    options = {"forward_params": [call.argument], "use_subprocess": False, "delay": 0}
    found = find_max_minibatch(
        lambda: call.workload.build()[0], input_shapes=(-1, *call.workload.sample), **options
    )
    return found and found[0]


def ultralytics(call):
    from ultralytics.utils.autobatch import check_train_batch_size

    return check_train_batch_size(call.model.detector, imgsz=call.workload.sample[-1], amp=False)


@dataclass(frozen=True, kw_only=True)
class Tool:
    call: Any
    imports: str
    builds_its_own: bool = False


lightning_tool = partial(Tool, imports="lightning.pytorch.tuner")
TOOLS = {
    "oomprobe": Tool(call=partial(in_one_process, 0.9), imports="oomprobe"),
    "oomprobe, all memory": Tool(call=partial(in_one_process, 1.0), imports="oomprobe"),
    "oomprobe isolated": Tool(call=isolated, imports="oomprobe", builds_its_own=True),
    WITH_EPOCH[0]: Tool(call=partial(with_epoch, 0.9), imports="oomprobe"),
    WITH_EPOCH[1]: Tool(call=partial(with_epoch, 1.0), imports="oomprobe"),
    "accelerate": Tool(call=accelerate, imports="accelerate.utils", builds_its_own=True),
    "Lightning power": lightning_tool(call=partial(lightning, "power")),
    "Lightning binsearch": lightning_tool(call=partial(lightning, "binsearch")),
    "batch-probe (model)": Tool(call=batch_probe_model, imports="batch_probe"),
    "batch-probe (step)": Tool(call=batch_probe_step, imports="batch_probe"),
    "batch-finder": Tool(call=batch_finder, imports="batch_finder", builds_its_own=True),
    "toma": Tool(call=toma, imports="toma"),
    "torch-max-mem": Tool(call=torch_max_mem, imports="torch_max_mem"),
    "Ultralytics autobatch": Tool(call=ultralytics, imports="ultralytics.utils.autobatch"),
}
