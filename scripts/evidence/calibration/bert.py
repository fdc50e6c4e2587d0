"""bert-large with sequences of 512 on a V100-16GB: memory of the whole process, MiB.

Source: transformers' documentation of 2022, "Performance and scalability: how to fit a bigger model and train it
faster": NVML after training, of which 1343 MiB are the context before anything was loaded. So the simulated figure is
peak reserved plus those 1343 MiB. No operator here has a cuDNN workspace, so the interval is a point.

The loop is Trainer's, written by hand: dummy token ids and labels, no mask, gradients zeroed and not freed, no scaler,
and the AdamW that was Trainer's default. The documentation does not name the torch version. Two versions differ in ways
that are switches of each row: softmax kept its input up to 1.10, and autocast ran gelu in 32 bits up to 1.9. That the version was 1.9 or older is inferred from these same rows: they are explained by it, not
predicted.
"""

from dataclasses import dataclass
from functools import partial

import torch

from calibration import old, running, torchvision_names
from calibration.rows import MIB, Figure
from oomprobe.devices.simulated import SimulatedDevice

ABOUT = {
    "source": "transformers, documentation of 2022: how to fit a bigger model and train it faster",
    "card": "V100-16GB",
    "torch": "1.9 or older",
    "how": "memory of the process after training, of which 1,343 MiB were its context",
}
CONTEXT_MIB = 1343
LENGTH = 512  # tokens
CALLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row of the documentation."""

    name: str
    published_mib: int
    batch_size: int = 1
    accumulated: int = 1
    fp16: bool = False
    checkpoints: bool = False
    adafactor: bool = False
    softmax_keeps_input: bool = True
    gelu_in_float32: bool = True  # matters under autocast only


RUNS = (
    Run(name="fp32, 4", published_mib=14949, batch_size=4),
    Run(name="fp32, 1 x 4", published_mib=8681, accumulated=4),
    Run(name="fp32, 1 x 4, checkpoints", published_mib=6775, accumulated=4, checkpoints=True),
    Run(name="fp16, 4", published_mib=13939, batch_size=4, fp16=True),
    Run(
        name="fp16, 1 x 4, checkpoints",
        published_mib=7275,
        accumulated=4,
        fp16=True,
        checkpoints=True,
    ),
    Run(name="fp32, 4, Adafactor", published_mib=12295, batch_size=4, adafactor=True),
    Run(
        name="fp16, 1 x 4, checkpoints, Adafactor",
        published_mib=4847,
        accumulated=4,
        fp16=True,
        checkpoints=True,
        adafactor=True,
    ),
)


def compare(names=None):
    """Yield a row for each run, or for those named, with what the old torch saved for backward."""
    torchvision_names.declare()
    for run in RUNS:
        name = f"bert-large {run.name}"
        if names is None or name in names:
            with old.functions(
                softmax_keeps_input=run.softmax_keeps_input, gelu_in_float32=run.gelu_in_float32
            ):
                usage = measure(run)
            yield Figure(
                name=name,
                published_bytes=run.published_mib * MIB,
                simulated_bytes=None
                if usage is None
                else usage.peak_reserved_bytes + CONTEXT_MIB * MIB,
                rounding_bytes=MIB,  # whole MiB, rounded down
            )


def measure(run):
    """Return the usage of a run, or None if it does not fit."""
    model = running.without_values(partial(build, run))
    device = SimulatedDevice("V100-16GB")
    running.place(device, model)
    return running.call(device, partial(step, run, model, optimizer_of(run, model)), CALLS)


def build(run):
    """Build bert-large-uncased for two classes, with eager attention."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
        use_cache=False,
    )
    model = BertForSequenceClassification(config).train()
    if run.checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def optimizer_of(run, model):
    """Return the optimizer of Trainer for ``optim="adamw_hf"`` or ``"adafactor"``."""
    if not run.adafactor:
        return old.AdamW(model.parameters())
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters(), lr=5e-5, scale_parameter=False, relative_step=False)


def step(run, model, optimizer):
    """Take one optimizer step of one or more micro-batches."""
    for _ in range(run.accumulated):
        ids = torch.randint(100, 30000, (run.batch_size, LENGTH), device="cuda")
        labels = torch.zeros(run.batch_size, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", enabled=run.fp16):
            loss = model(input_ids=ids, labels=labels).loss
        (loss / run.accumulated).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
