"""Each tool, called as its own documentation says, on one workload. Imports come first, outside the limit.

A tool is a function that takes a `Job` and gives its answer. The ones that start high are told to start at 512, a guess
as their users make one; those that wrap a training function are given one of ten steps. Mixed precision is part of the
step, or an option where the tool has one; "batch-probe (model)" and "batch-finder" take a model alone and run it without.
"""

import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from peers import seen

FIRST_GUESS, TRAINING_STEPS = 512, 10
PRECISIONS = {None: "32-true", torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}  # as Lightning names them


@dataclass(frozen=True)
class Job:
    workload: Any
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    @cached_property
    def step(self):
        return self.workload.step(self.optimizer)

    def train(self, batch_size):
        for _ in range(TRAINING_STEPS):
            self.step(self.model, batch_size)


def oomprobe(**options):
    import oomprobe

    options = {"progress": "off", **options}

    def call(job):
        return of_result(oomprobe.find_max_batch(job.model, job.step, device=job.workload.device, **options))

    return call


def oomprobe_isolated():
    import oomprobe
    from peers import targets

    def call(job):
        target = f"{targets.__file__}:{targets.function_name(job.workload.name)}"
        return of_result(oomprobe.probe_target(target, device=job.workload.device, progress="off"))

    return call


def of_result(result):
    return Noted(result.batch_size, result.notes)


def lightning(mode):
    let_torchvision_import()
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        def __init__(self, job):
            super().__init__()
            self.model, self.job, self.batch_size = job.model, [job], 2

        def training_step(self, batch, index):
            return self.model(batch)

        def configure_optimizers(self):
            return self.job[0].optimizer

        def train_dataloader(self):
            return DataLoader(Examples(self.job[0].workload), batch_size=self.batch_size)

    def call(job):
        options = {"accelerator": job.workload.device, "precision": PRECISIONS[job.workload.mixed]}
        trainer = Trainer(max_epochs=1, devices=1, logger=False, enable_progress_bar=False, **options)
        module = Module(job)
        Tuner(trainer).scale_batch_size(module, mode=mode)
        return module.batch_size

    return call


class Examples(torch.utils.data.Dataset):
    def __init__(self, workload):
        self.example, self.count = workload.inputs(1)[0].cpu(), workload.examples or 1_000_000

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        return self.example


def accelerate():
    from accelerate.utils import find_executable_batch_size

    def call(job):
        @find_executable_batch_size(starting_batch_size=FIRST_GUESS)
        def train(batch_size):
            model = job.workload.placed()
            Job(job.workload, model, job.workload.optimizer(model)).train(batch_size)
            return batch_size

        return train()

    return call


def toma():
    from toma import toma

    def call(job):
        @toma.batch(initial_batchsize=FIRST_GUESS)
        def train(batchsize, job):
            job.train(batchsize)
            return batchsize

        return train(job)

    return call


def torch_max_mem():
    from torch_max_mem import maximize_memory_utilization

    def call(job):
        @maximize_memory_utilization()
        def train(model, batch_size):
            in_cuda_s_words(job.train)(batch_size)
            return batch_size

        return train(job.model, batch_size=FIRST_GUESS)

    return call


def batch_probe_model():
    from batch_probe import probe_batch_size

    def call(job):
        name = "input_ids" if job.workload.tokens else "x"
        inputs = in_cuda_s_words(job.workload.inputs)
        for owner, name_ in ((type(job.model), "forward"), (torch.Tensor, "backward"), (torch.optim.AdamW, "step")):
            setattr(owner, name_, in_cuda_s_words(getattr(owner, name_)))
        return probe_batch_size(job.model, lambda size: {name: inputs(size)}, verbose=False)

    return call


def batch_probe_work():
    from batch_probe import probe

    def call(job):
        return probe(lambda size: in_cuda_s_words(job.step)(job.model, size), backend="torch", verbose=False)

    return call


def batch_finder():
    from batch_finder import find_max_minibatch

    from peers import targets

    def call(job):
        if job.workload.examples is not None:
            return NotFor("makes its own inputs, and is told of no data set")
        shape = (-1, *job.workload.sample)
        names = ["input_ids" if job.workload.tokens else "x"]
        build = getattr(targets, f"model_{targets.identifier(job.workload.name)}")
        with redirect_stdout(io.StringIO()):
            device = torch.device(job.workload.device)
            found = find_max_minibatch(build, input_shapes=shape, forward_params=names, device=device)
        return None if found is None else found[0]

    return call


def ultralytics():
    let_torchvision_import()
    from ultralytics.utils.autobatch import check_train_batch_size

    def call(job):
        if not hasattr(job.model, "detector"):
            return NotFor("for YOLO models")
        if job.workload.device == "cpu":
            return NotFor("for CUDA: on the CPU it gives its default of 16 and runs nothing")
        options = {"imgsz": job.workload.sample[-1], "amp": job.workload.mixed is not None}
        options["max_num_obj"] = job.model.OBJECTS
        heard(job.model.detector)
        return check_train_batch_size(job.model.detector, batch=-1, **options)

    return call


def heard(part):
    """Take down what a tool gives to a part of the model, or to a copy of it, past the model itself."""

    def given(_, inputs):
        size = len(inputs[0])
        seen.forward(size)
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: seen.backward(size))

    part.register_forward_pre_hook(given)


def let_torchvision_import():
    """Beside a torch without CUDA its operators may not load, which no workload here uses."""
    from calibration import torchvision_names

    torchvision_names.declare()


@dataclass(frozen=True)
class NotFor:
    why: str


@dataclass(frozen=True)
class Noted:
    """An answer, and what was said beside it."""

    answer: int
    notes: tuple[str, ...]


def in_cuda_s_words(function):
    """Two tools know only CUDA's words for it: the failure is real, and told to them as the error they look for."""

    def told(*arguments, **named):
        try:
            return function(*arguments, **named)
        except RuntimeError as error:
            if "DefaultCPUAllocator: can't allocate memory" not in str(error):
                raise
            words = "CUDA out of memory."
        raise torch.cuda.OutOfMemoryError(words)

    return told


TOOLS = {
    "oomprobe": oomprobe,
    "oomprobe, all memory": partial(oomprobe, memory_fraction=1.0),
    "oomprobe run": oomprobe_isolated,
    "Lightning power": partial(lightning, "power"),
    "Lightning binsearch": partial(lightning, "binsearch"),
    "accelerate": accelerate,
    "torch-max-mem": torch_max_mem,
    "toma": toma,
    "batch-probe (model)": batch_probe_model,
    "batch-probe (work)": batch_probe_work,
    "batch-finder": batch_finder,
    "Ultralytics": ultralytics,
}
BUILD_THEIR_OWN = {"oomprobe run", "accelerate", "batch-finder"}  # a model of ours on the card would be one too many
PACKAGES = {
    "Lightning power": "lightning",
    "Lightning binsearch": "lightning",
    "accelerate": "accelerate",
    "torch-max-mem": "torch-max-mem",
    "toma": "toma",
    "batch-probe (model)": "batch-probe",
    "batch-probe (work)": "batch-probe",
    "batch-finder": "batch-finder",
    "Ultralytics": "ultralytics",
}


def missing(package):
    """Whether it is a package, and not installed here."""
    from importlib import metadata

    try:
        return package is not None and not metadata.version(package)
    except metadata.PackageNotFoundError:
        return True
