"""The peak memory of three training steps by tools that predict or measure it, each called as its documentation shows.

A tool takes a `Case` and returns the figures that it claims: bytes allocated by tensors, or bytes reserved by the allocator.
A step that a simulated card refuses has no figure: "refused" is True.
"""

import contextlib
import io
import itertools
import json
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from calibration import card, fms, timm_loop, timm_training, torchvision_names
from calibration.running import without_values
from zoo import peaks

import oomprobe
from peers.measuring import ChildError, forked
from peers.models import WORKLOADS

torchvision_names.declare()
import timm  # noqa: E402 - which needs these names

STEPS = card.CALLS  # as often as the H200 was measured
CARD, BED = "H200-141GB", "141GiB"
LONGEST_S = 900
BRACKETED = 12  # rows of timm's table, evenly spaced


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step.

    Attributes:
        name: What is trained; that of a row of tests/data/measured_h200.json, if the H200 was measured.
        build: Returns the model and its step; the model may lie in host memory.
        module: Builds the model alone, on the default device.
        size: Examples of a batch.
        sample: Shape of one example; of one number, they are token ids.
        precision: "fp32", "amp" for autocast, or "pure-bf16" for weights in 16 bits.
        optimizer: "adamw" or "sgd-momentum".
        architecture: The name by which torch-preflight knows the model, with its checkpoints.
        base: Builds the model without LoRA's matrices, if it has some.
        card: The card that oomprobe simulates.
    """

    name: str
    build: Callable
    module: Callable
    size: int
    sample: tuple[int, ...]
    precision: str
    optimizer: str = "adamw"
    architecture: str | None = None
    base: Callable | None = None
    card: object = CARD

    def on_card(self):
        model, step = self.build()
        return model.cuda(), step

    @property
    def measured(self):
        """What the H200 did, or None."""
        return card.MEASURED["rows"].get(self.name)


def network(name, kind):
    def module():
        return timm.create_model(name)

    return Case(
        name=f"{name} {kind}, batch {card.IMAGES}",
        build=card.Net(name=name, kind=kind).build,
        module=module,
        size=card.IMAGES,
        sample=(3, 224, 224),
        precision=kind,
        optimizer="sgd-momentum" if kind == "fp32" else "adamw",
    )


def fine_tuning(name, family, size, *, architecture=None):
    lora = name.endswith("LoRA")
    base = partial(fms.build, family, lora=False)
    return Case(
        name=f"{name}, batch {size}",
        build=card.Tuned(family=family, lora=lora, size=size).build,
        module=partial(fms.build, family, lora=lora),
        size=size,
        sample=(family.length,),
        precision="pure-bf16",
        architecture=architecture,
        base=base if lora else None,
    )


def small(name, size, precision):
    workload = WORKLOADS[name]
    return Case(
        name=f"{name}, batch {size}",
        build=workload.target,
        module=workload.module,
        size=size,
        sample=workload.sample,
        precision=precision,
        card=BED,
    )


def cases():
    """Return all cases by name."""
    found = [
        network("resnet50", "fp32"),
        network("resnet50", "amp"),
        network("vgg16_bn", "fp32"),
        network("convnext_tiny", "fp32"),
        network("efficientnet_b0", "amp"),
        network("vit_base_patch16_224", "fp32"),
        network("vit_base_patch16_224", "amp"),
        network("swin_tiny_patch4_window7_224", "amp"),
        small("gpt_bf16", 512, "amp"),
        small("gpt_checkpointed", 512, "fp32"),
        fine_tuning("santacoder full", fms.SANTACODER, 4),
        fine_tuning("PowerLM-3b LoRA", fms.POWER_LM, 4),
        fine_tuning("Mistral-7B full", fms.MISTRAL, 4, architecture="mistral-7b"),
    ]
    return {case.name: case for case in found}


def bracketed(row, size):
    """Return a step of timm's benchmark on an RTX 3090, as it was then."""

    def prepare():
        timm.layers.set_fused_attn(False)
        torch.backends.cudnn.benchmark = True

    def module():
        prepare()
        return timm.create_model(row["model"])

    def build():
        prepare()
        model, steps = timm_loop.build(row["model"]), []

        def step(model, size):
            if not steps:
                steps.append(timm_training.begin(model, size, row["image_size"]))
            with patch.object(torch.nn.Upsample, "forward", timm_training.upsample):
                steps[0]()

        return model, step

    return Case(
        name=f"{row['model']} {row['image_size']}, batch {size}",
        build=build,
        module=module,
        size=size,
        sample=(3, row["image_size"], row["image_size"]),
        precision="amp",
        optimizer="sgd-momentum",
        card=timm_loop.card_of(timm_training.ABOUT["card"], timm_training.CAPACITY_MIB),
    )


def brackets():
    """Return two steps each by the name of the model: of the size that ran, and of the next one, which failed."""
    found = {}
    for row in timm_loop.rows(timm_training.FILE, BRACKETED):
        found[f"{row['model']} {row['image_size']}"] = (
            bracketed(row, row["ran"]),
            bracketed(row, row["failed"]),
        )
    return found


CASES, BRACKETS = cases(), brackets()
BY_NAME = {
    case.name: case for case in [*CASES.values(), *itertools.chain.from_iterable(BRACKETS.values())]
}


def module(name):
    """Build the model of a case: the entry point for torch-preflight."""
    return BY_NAME[name].module()


# --- what the card did ---


def measured(case):
    """Return the peaks on the H200, or of torch's allocator on the bed, and where they were measured."""
    if case.measured:
        return {"where": "H200", **case.measured}
    allocated, reserved = forked(peaks, case.on_card, case.size, STEPS)[-1]
    return {"where": "bed", "allocated": allocated, "reserved": reserved}


# --- the tools ---


def ask_oomprobe(case):
    device = oomprobe.SimulatedDevice(case.card)
    with device.building():
        model, step = case.build()
    options = {"device": device, "memory_fraction": 1.0, "confirm_steps": STEPS, "progress": "off"}
    try:
        [trial] = oomprobe.check(model, step, case.size, **options).trials
    except oomprobe.NothingFitsError:
        return {"refused": True}
    return {"allocated": trial.peak_allocated_bytes, "reserved": trial.peak_reserved_bytes}


def ask_mem_tracker(case):
    """Needs a card, here the bed: moving a module to it fails with fake tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model, step = case.on_card()
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        for _ in range(STEPS):
            tracker.reset_mod_stats()
            step(model, case.size)
    by_device = tracker.get_tracker_snapshot("peak")
    return {"allocated": by_device[torch.device("cuda", 0)]["Total"]}


def ask_preflight(case):
    """Its total without the CUDA context, which is outside torch's allocator."""
    from torch_preflight import cli

    words = [
        "estimate",
        "--gpu-memory",
        "141GiB",
        "--format",
        "json",
        "--batch-size",
        str(case.size),
    ]
    words += ["--dtype", case.precision, "--optimizer", case.optimizer]
    words += ["--seq-len" if len(case.sample) == 1 else "--image-size", str(case.sample[-1])]
    if case.architecture:
        words += ["--model", case.architecture, "--checkpointing", "--flash"]
    else:  # checkpoints are in the model, which torch-preflight runs without values
        words += ["--model", f"{__name__}:module", "--model-args", f"name={case.name}"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(words)
    told = json.loads(printed.getvalue())
    if not told["resolved"]:
        raise ValueError(told["model"]["reason"])
    return {"reserved": told["total_bytes"] - told["breakdown"]["CUDA_context"]}


def ask_kitsune(case):
    """Returns the peak with the 15 % that it adds for the allocator."""
    from kitsune.predict import LoRAConfig, estimate_lora_memory, predict_memory

    dtype = {"fp32": "float32", "amp": "float16", "pure-bf16": "bfloat16"}[case.precision]
    about = {"input_shape": case.sample, "batch_size": case.size, "dtype": dtype}
    if case.base:
        config = LoRAConfig(rank=fms.RANK, target_modules=fms.ADAPTED)
        return {
            "reserved": estimate_lora_memory(
                without_values(case.base), **about, config=config
            ).total_bytes
        }
    model = without_values(case.module) if case.precision == "pure-bf16" else case.module()
    optimizer = case.optimizer.replace("-", "_")
    return {
        "reserved": predict_memory(model, **about, optimizer=optimizer, training=True).total_bytes
    }


def ask_accelerate(case):
    """Calls the two functions that `accelerate estimate-memory` prints the results of, because it takes models of the Hub only."""
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with init_empty_weights():
        model = (case.base or case.module)()
    total_bytes, _ = calculate_maximum_sizes(
        model.float()
    )  # as the command builds it: in 32 bits, without LoRA
    usage = estimate_training_usage(
        total_bytes, "float32" if case.precision == "fp32" else "float16"
    )
    return {"allocated": round(max(usage.values()))}


@dataclass(frozen=True, kw_only=True)
class Tool:
    """How a tool is asked, and the package that has it."""

    ask: Callable
    package: str


TOOLS = {
    "oomprobe": Tool(ask=ask_oomprobe, package="oomprobe"),
    "MemTracker": Tool(ask=ask_mem_tracker, package="torch"),
    "torch-preflight": Tool(ask=ask_preflight, package="torch-preflight"),
    "torch-kitsune": Tool(ask=ask_kitsune, package="torch-kitsune"),
    "accelerate estimate-memory": Tool(ask=ask_accelerate, package="accelerate"),
}


def row(tool_name, case):
    """Return what a tool says of a case in a fresh process, and its processor time; with "error" if it says nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        told = forked(TOOLS[tool_name].ask, case, limit_s=LONGEST_S)
    except ChildError as error:
        told = {"error": str(error)}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**told, "seconds": round(seconds, 1)}
