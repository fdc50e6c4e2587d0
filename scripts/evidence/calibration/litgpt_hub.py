"""litgpt's table of fine-tuning configurations on an A10G: full, LoRA and QLoRA in bf16-true.

Source: Lightning-AI/litgpt, config_hub/finetune/README.md of 2024-07-24: ``torch.cuda.max_memory_allocated() / 1e9``.
Micro-batch, rank and places of LoRA are those of the configurations beside it; the sizes are those of litgpt's models.
The loop does what litgpt's did in April 2024, when most rows were measured, with lightning 2.3 and bitsandbytes 0.42:

- The head and its loss run in chunks of 128 tokens with LoRA; in full training only the loss does.
- The logits of a micro-batch live until the next one has its own. With weights of 4 bits, so do the inputs of its
  layers, because bitsandbytes keeps them with the graph, and the graph lives as long as the logits.
- Weights of 4 bits are made anew in fp16 and then copied to bf16, the head's too. PagedAdamW keeps the states of
  parameters of 100,000 elements and more outside torch's memory.

Examples are cut at 512 tokens, and each micro-batch here is as long. That two such follow one another is the worst
case; only QLoRA's peak depends on it. Gemma's QLoRA comes out 1 % too high: its tokenizer makes fewer tokens of a text,
so perhaps no two of 512 met. Validation and generation take less and are left out.

Phi-3's full training is said to have taken 17.01 GB of one A10G. As configured it cannot: weights, gradients and
AdamW's states take 30.6 GB, and with 512 tokens the first forward and backward, before there are states, already
18.8 GB. It does not fit here, and its orders do not come out.

Left out are the rows of more than one card (FSDP1), those for which four cards are said to run a configuration of one
device, those of Llama 3.1 and of Mistral v0.2 with the sizes and figures of their predecessors, and Gemma 2.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import torch

from calibration import running
from calibration.litgpt import CHUNK, loss_of
from calibration.litgpt_model import GPT, Sizes, Tuning
from calibration.rows import GB, Figure
from oomprobe.devices.simulated import SimulatedDevice

ABOUT = {
    "source": "Lightning-AI/litgpt: config_hub/finetune/README.md of 2024-07-24",
    "card": "A10G",
    "torch": "2.2 or 2.3",
    "how": "peak allocated of fine-tuning in 16 bits, full, LoRA and QLoRA (nf4), rounded to 0.01 GB; assumed: all "
    "examples as long as the longest",
}
TOKENS = 512
PAGED_ELEMENTS = 100_000
ALIKE = 0.02  # published figures that differ by less say nothing about their order
FULL = Tuning(rank=0)
QUERY_VALUE = ("query", "value")
ALL = ("query", "key", "value", "projection", "mlp", "head")
ANOTHER_RUN = "not counted: as configured, weights, gradients and AdamW's states take 30.6 GB"

FALCON = Sizes(
    layers=32,
    width=4544,
    hidden=18176,
    heads=71,
    groups=1,
    vocabulary=65024,
    rotary=64,
    shared_norm=True,
    biases=False,
)
STABLE = Sizes(layers=16, width=4096, hidden=16384, heads=32, vocabulary=50688, rotary=32)
PHI_2 = Sizes(
    layers=32,
    width=2560,
    hidden=10240,
    heads=32,
    vocabulary=51200,
    rotary=32,
    shared_norm=True,
    head_bias=True,
)
LLAMA_2 = Sizes(
    layers=32,
    width=4096,
    hidden=11008,
    heads=32,
    vocabulary=32000,
    rotary=128,
    llama=True,
    norm_in_float32=True,
)
MISTRAL = replace(LLAMA_2, hidden=14336, groups=8)
LLAMA_3 = replace(MISTRAL, vocabulary=128_256)
PHI_3 = replace(LLAMA_2, width=3072, hidden=8192, vocabulary=32064, rotary=96)
TINY = replace(LLAMA_2, layers=22, width=2048, hidden=5632, groups=4, rotary=64)
GEMMA_2B = replace(
    LLAMA_2,
    layers=18,
    width=2048,
    hidden=16384,
    heads=8,
    groups=1,
    vocabulary=256_000,
    rotary=256,
    gemma=True,
)
GEMMA_7B = replace(
    GEMMA_2B, layers=28, width=3072, hidden=24576, heads=16, groups=16, head_size=256
)


@dataclass(frozen=True, slots=True)
class Run:
    """One configuration.

    Attributes:
        name: Model and kind, as in the table.
        sizes: Of the model.
        tuning: What is trained.
        micro_batch: Examples in a micro-batch.
        accumulated: Micro-batches in an optimizer step.
        published_gb: None if it ran out of memory.
        remark: Why the row is not counted.
    """

    name: str
    sizes: Sizes
    tuning: Tuning
    micro_batch: int
    accumulated: int
    published_gb: float | None
    remark: str = ""


def lora(rank, places, *, nf4=False):
    """Return LoRA's tuning."""
    return Tuning(rank=rank, places=places, nf4=nf4)


RUNS = (
    Run("falcon-7b lora", FALCON, lora(32, QUERY_VALUE), 1, 8, 16.69),
    Run("falcon-7b qlora", FALCON, lora(32, QUERY_VALUE, nf4=True), 1, 8, 9.44),
    Run("gemma-2b lora", GEMMA_2B, lora(8, ALL), 2, 3, 12.62),
    Run("gemma-2b qlora", GEMMA_2B, lora(16, ALL, nf4=True), 2, 3, 11.58),
    Run("gemma-7b lora", GEMMA_7B, lora(16, ALL), 1, 6, None),
    Run("gemma-7b qlora", GEMMA_7B, lora(16, ALL, nf4=True), 1, 6, 17.18),
    Run("llama-2-7b lora", LLAMA_2, lora(32, QUERY_VALUE), 2, 4, 19.77),
    Run("llama-2-7b qlora", LLAMA_2, lora(32, QUERY_VALUE, nf4=True), 2, 4, 13.68),
    Run("llama-3-8b lora", LLAMA_3, lora(32, QUERY_VALUE), 1, 8, 19.73),
    Run("llama-3-8b qlora", LLAMA_3, lora(32, QUERY_VALUE, nf4=True), 2, 4, 17.41),
    Run("llama-3.1-8b full", LLAMA_3, FULL, 4, 16, None),
    Run("mistral-7b lora", MISTRAL, lora(32, QUERY_VALUE), 2, 4, 20.66),
    Run("mistral-7b qlora", MISTRAL, lora(32, QUERY_VALUE, nf4=True), 2, 4, 14.29),
    Run("phi-2 lora", PHI_2, lora(8, ALL), 4, 2, 13.98),
    Run("phi-2 qlora", PHI_2, lora(8, ALL, nf4=True), 4, 2, 14.27),
    Run("phi-3 full", PHI_3, FULL, 4, 2, 17.01, ANOTHER_RUN),
    Run("phi-3 lora", PHI_3, lora(8, ALL), 4, 2, 19.75),
    Run("phi-3 qlora", PHI_3, lora(8, ALL, nf4=True), 4, 2, 19.13),
    Run("stablelm-base-alpha-3b lora", STABLE, lora(32, QUERY_VALUE), 1, 8, 8.58),
    Run("stablelm-base-alpha-3b qlora", STABLE, lora(32, QUERY_VALUE, nf4=True), 1, 8, 5.24),
    Run("tiny-llama full", TINY, FULL, 4, 8, 14.10),
    Run("tiny-llama lora", TINY, lora(32, ALL), 8, 1, 13.50),
    Run("tiny-llama qlora", TINY, lora(32, ALL, nf4=True), 8, 1, 16.24),
)


def compare(names=None):
    """Yield a row for each configuration, or for those named."""
    for run in RUNS:
        if names is None or run.name in names:
            usage = measure(run)
            yield Figure(
                name=run.name,
                published_bytes=None if run.published_gb is None else run.published_gb * GB,
                simulated_bytes=None if usage is None else usage.peak_allocated_bytes,
                rounding_bytes=0.005 * GB,
                remark=run.remark,
                counted=not run.remark,
            )


def orders(rows):
    """Yield pairs of names of the evidence whose published peaks differ, and whether the simulated ones do so too.

    A row that ran out of memory is the largest; two such have no order.
    """

    def peak(row, which):
        return float("inf") if row[which] is None else row[which]

    for one, other in combinations(rows, 2):
        low, high = sorted((one, other), key=lambda row: peak(row, "published"))
        if peak(low, "published") < peak(high, "published") * (1 - ALIKE):
            yield low["name"], high["name"], peak(low, "simulated") < peak(high, "simulated")


def measure(run):
    """Return the usage of a run, or None if it does not fit."""
    model = build(run)
    device = SimulatedDevice("A10G")
    running.place(device, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = (
        PagedAdamW(trained)
        if run.tuning.nf4
        else torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0)
    )
    return running.call(device, partial(train, run, model, optimizer), 1)


def build(run):
    """Build a model in bf16, or with frozen weights in 4 bits."""
    model = running.without_values(partial(GPT, run.sizes, run.tuning)).to_bfloat16()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not run.tuning.rank or "lora" in name
    return model.train()


def train(run, model, optimizer):
    """Run micro-batches until all is there that lives long: states, logits and, if they are accumulated, gradients."""
    accumulates = run.accumulated > 1
    for number in range(3 if accumulates else 2):
        ids = torch.randint(0, 32000, (run.micro_batch, TOKENS), device="cuda")
        if run.tuning.rank:
            logits = [part.float() for part in model(ids, CHUNK)]
            logits[-1] = logits[-1][:, :-1]
            loss = loss_of(logits, ids[:, 1:])
        else:
            logits = model(ids, TOKENS)[0].float()
            loss = loss_of_all(logits[:, :-1], ids[:, 1:])
        (loss / run.accumulated).backward()
        del loss
        if number == 0 or not accumulates:
            optimizer.step()
            optimizer.zero_grad()


def loss_of_all(logits, targets):
    """Return the mean of the cross-entropies of all chunks of logits that came in one tensor."""
    logits = logits.reshape(-1, logits.shape[-1])
    chunks = zip(logits.split(CHUNK), targets.reshape(-1).split(CHUNK), strict=True)
    losses = [
        torch.nn.functional.cross_entropy(chunk, target, reduction="none")
        for chunk, target in chunks
    ]
    return torch.cat(losses).mean()


class PagedAdamW:
    """bitsandbytes' AdamW: states in 32 bits, in torch's memory for small parameters only; it makes no temporaries."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.states = None

    def step(self):
        if self.states is None:
            small = [
                parameter for parameter in self.parameters if parameter.numel() < PAGED_ELEMENTS
            ]
            self.states = [
                torch.zeros_like(parameter, dtype=torch.float32)
                for parameter in small
                for _ in range(2)
            ]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None
