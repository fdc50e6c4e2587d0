"""litgpt's resource table: LoRA fine-tuning in bf16-true on an A100-40GB, ``torch.cuda.max_memory_allocated() / 1e9``.

Source: Lightning-AI/litgpt, tutorials/resource-tables.md of 2023-10-20 (torch 2.1, commit 8641822), first table. Its
count of trainable parameters shows where LoRA was applied: 1,572,864 for phi-1.5 are queries and values of rank 8,
without keys. The models of `calibration.litgpt_model` have the sizes of litgpt's and, as far as is known, save the same
tensors; neither they nor this loop are litgpt's code. The longest example is in the first micro-batch, and so is the
peak: one call.

Llama runs a second time with norms in 32 bits, as in litgpt since 6178c7c of 2023-10-24, three days before the table
was merged. That its figures were made after that commit is inferred from the figures: those rows are not counted.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from calibration import running
from calibration.litgpt_model import GPT, Sizes
from calibration.rows import GB, Figure
from oomprobe.devices.simulated import SimulatedDevice

ABOUT = {
    "source": "Lightning-AI/litgpt: tutorials/resource-tables.md of 2023-10-20",
    "card": "A100-40GB",
    "torch": "2.1",
    "how": "peak allocated of LoRA in 16 bits, rounded to 0.01 GB",
}
CHUNK = 128  # tokens per chunk of logits


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one model: published GB by micro-batch (None: out of memory), and the number of LoRA parameters."""

    name: str
    sizes: Sizes
    tokens: int
    trainable: int
    published_gb: dict[int, float | None]
    remark: str = ""  # why these rows are not counted


_PHI = Sizes(layers=24, width=2048, hidden=8192, heads=32, vocabulary=51200, rotary=32)
_STABLE = Sizes(layers=16, width=4096, hidden=16384, heads=32, vocabulary=50688, rotary=32)
_LLAMA = Sizes(
    layers=32, width=4096, hidden=11008, heads=32, vocabulary=32000, rotary=128, llama=True
)
_LLAMA_GB = {1: 21.30, 2: 29.07, 4: None}
TABLES = (
    Table(
        "phi-1.5",
        replace(_PHI, shared_norm=True, head_bias=True),
        1044,
        1_572_864,
        {1: 4.82, 2: 6.76, 4: 10.68},
    ),
    Table("StableLM Alpha 3B", _STABLE, 1034, 2_097_152, {1: 9.69, 2: 12.10, 4: 16.92}),
    Table("Llama 2 7B", _LLAMA, 1304, 4_194_304, _LLAMA_GB),
    Table(
        "Llama 2 7B, 32 bit norms",
        replace(_LLAMA, norm_in_float32=True),
        1304,
        4_194_304,
        _LLAMA_GB,
        remark="explained, not counted",
    ),
)


def compare(names=None):
    """Yield a row for each model and micro-batch, or for those named."""
    for table in TABLES:
        model = build(table.sizes)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trainable == table.trainable, (table.name, trainable)
        for micro_batch, published_gb in table.published_gb.items():
            name = f"{table.name}, {micro_batch}"
            if names is None or name in names:
                usage = measure(model, table.tokens, micro_batch)
                yield Figure(
                    name=name,
                    published_bytes=None if published_gb is None else published_gb * GB,
                    simulated_bytes=None if usage is None else usage.peak_allocated_bytes,
                    rounding_bytes=0.005 * GB,
                    remark=table.remark,
                    counted=not table.remark,
                )


def build(sizes):
    """Build a model in bf16 of which only LoRA's matrices are trained."""
    model = running.without_values(partial(GPT, sizes)).to_bfloat16()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora" in name
    return model.train()


def measure(model, tokens, micro_batch):
    """Return the usage of one micro-batch of the longest example, or None if it does not fit."""
    model.zero_grad()
    device = SimulatedDevice("A100-40GB")
    running.place(device, model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=3e-4, weight_decay=0.01
    )
    return running.call(device, partial(step, model, optimizer, tokens, micro_batch), 1)


def step(model, optimizer, tokens, micro_batch):
    """Run one micro-batch and one optimizer step, with the loss of chunks of logits."""
    ids = torch.randint(0, 32000, (micro_batch, tokens), device="cuda")
    logits = [
        part.float() for part in model(ids, CHUNK)
    ]  # Fabric's bf16-true returns module outputs in 32 bits
    logits[-1] = logits[-1][:, :-1]
    loss = loss_of(logits, ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_of(logits, targets):
    """Return the mean of the cross-entropies of all chunks."""
    chunks = zip(logits, targets.split(CHUNK, dim=1), strict=True)
    losses = [
        torch.nn.functional.cross_entropy(
            chunk.reshape(-1, chunk.shape[-1]), target.reshape(-1), reduction="none"
        )
        for chunk, target in chunks
    ]
    return torch.cat(losses).mean()
