"""Peaks of fine-tuning on an A100-80GB, published in bytes.

Source: foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv and a100_80gb_granite.csv
(Apache-2.0): all rows on one GPU without fused kernels and quantization. torch 2.4.1, transformers 4.48.1 (PowerLM:
4.45.2), Trainer, weights in 16 bits, no autocast, AdamW, reentrant checkpoints, clipping at 1.0, packed examples, attention
of flash-attn. Trainer's own metrics give the peak allocated and what is allocated when training ends.

Trainer's loop is written by hand, and so is LoRA, as peft does it on 16-bit weights: matrices and a copy of the input in
32 bits. The models are those of the installed transformers, but their losses are those of the old versions, which copy the
logits to shift them. What santacoder keeps of its keys, and PowerLM's biases, were inferred from other figures than those
compared: from its rows with fused kernels, and from what is allocated after training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from calibration import running, torchvision_names
from calibration.rows import Figure
from oomprobe.devices.simulated import SimulatedDevice

ABOUT = {
    "source": "foundation-model-stack/fms-acceleration: scripts/benchmarks/refs/a100_80gb.csv, a100_80gb_granite.csv",
    "card": "A100-80GB",
    "torch": "2.4.1",
    "how": "memory allocated in a Trainer's fine-tuning, in bytes: the peak, and after training",
}
CALLS = 2
RANK, ALPHA, DROPOUT = 16, 16, 0.1
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


def mistral():
    from transformers import MistralConfig

    return MistralConfig()


def power_lm():
    from transformers import GraniteConfig

    sizes = {
        "vocab_size": 49152,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 40,
    }
    biases = {"attention_bias": True, "mlp_bias": True}
    return GraniteConfig(
        **sizes, **biases, num_attention_heads=36, num_key_value_heads=36, tie_word_embeddings=True
    )


def santacoder():
    from transformers import GPTBigCodeConfig

    return GPTBigCodeConfig(
        vocab_size=49280, n_positions=2048, n_embd=2048, n_layer=24, n_head=16, n_inner=8192
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model as the old transformers had it.

    Attributes:
        config: Makes its configuration.
        length: Tokens of each packed example.
        wide_loss: The loss converts the logits to 32 bits.
        keeps_logits: The logits in 16 bits live while the loss is computed.
        keeps_keys: So does what the projections to queries, keys and values return: a cache is on in spite of checkpoints.
        decays_norms: Trainer does not know the model's norms, so AdamW has one group of parameters, not two.
    """

    config: Callable
    length: int = 4096
    wide_loss: bool = True
    keeps_logits: bool = True
    decays_norms: bool = False
    keeps_keys: bool = False


MISTRAL = Family(config=mistral, decays_norms=True)
POWER_LM = Family(config=power_lm, keeps_logits=False)
SANTACODER = Family(config=santacoder, length=2048, wide_loss=False, keeps_keys=True)
# Name, family, examples in a batch, whether LoRA; peak, and allocated after training, in bytes.
ROWS = (
    ("Mistral-7B full", MISTRAL, 4, False, 72_434_837_504, 43_467_876_352),
    ("Mistral-7B full", MISTRAL, 8, False, 72_435_230_720, 43_468_269_568),
    ("Mistral-7B LoRA", MISTRAL, 4, True, 26_704_571_904, 14_664_493_056),
    ("Mistral-7B LoRA", MISTRAL, 8, True, 38_742_912_512, 14_664_886_272),
    ("PowerLM-3b full", POWER_LM, 4, False, 35_134_836_736, 21_089_537_536),
    ("PowerLM-3b full", POWER_LM, 8, False, 47_059_390_976, 21_089_930_752),
    ("PowerLM-3b LoRA", POWER_LM, 4, True, 20_169_870_848, 7_183_026_688),
    ("PowerLM-3b LoRA", POWER_LM, 8, True, 33_152_880_128, 7_183_419_904),
    ("santacoder full", SANTACODER, 4, False, 11_267_745_280, 6_770_300_416),
    ("santacoder full", SANTACODER, 8, False, 15_193_274_880, 6_769_448_448),
)


def compare(names=None):
    """Yield two rows for each run, its peak and what is left after it, or for the runs named."""
    for name, family, examples, lora, peak_bytes, after_bytes in ROWS:
        run = f"{name}, batch {examples}"
        if names is None or run in names:
            found = measure(family, examples, lora=lora)
            remark = (
                f"loss of transformers {'4.48' if family.keeps_logits else '4.45'}"
                + ", LoRA by hand" * lora
            )
            for what, published, simulated in zip(
                ("peak", "after"), (peak_bytes, after_bytes), found, strict=True
            ):
                yield Figure(
                    name=f"{run}: {what}",
                    published_bytes=published,
                    simulated_bytes=simulated,
                    remark=remark,
                )


def measure(family, examples, *, lora):
    """Return the peak allocated and what is allocated after training."""
    model, step = training(family, examples, lora=lora)
    device = SimulatedDevice("A100-80GB")
    running.place(device, model)
    usage = running.call(device, step, CALLS)
    return usage.peak_allocated_bytes, device._memory.allocator.allocated_bytes


def training(family, examples, *, lora):
    """Return the model, in host memory without values, and its step on the card."""
    model = running.without_values(partial(build, family, lora=lora))
    model.tie_weights()
    keys = keys_kept(model) if family.keeps_keys else []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trained if p.dim() > 1 or family.decays_norms]
    rest = [p for p in trained if p.dim() == 1 and not family.decays_norms]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-5, eps=1e-4, weight_decay=0.01)
    shape, batch = (examples, family.length), {}

    def step():
        for name in (
            "input_ids",
            "attention_mask",
            "labels",
        ):  # Trainer holds a batch until the next one
            batch[name] = torch.ones(shape, dtype=torch.long, device="cuda")
        loss_of(family, model, batch["input_ids"], batch["labels"], keys).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def build(family, *, lora):
    """Build a model in 16 bits for training."""
    torchvision_names.declare()
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("unmasked", sdpa_attention_forward)
    AttentionMaskInterface.register("unmasked", lambda **_: None)
    config = family.config()
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="unmasked"
    ).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if lora:
        model.requires_grad_(False)
        model.enable_input_require_grads()
        for layer in model.base_model.layers:
            for name in ADAPTED:
                setattr(layer.self_attn, name, LoRALinear(getattr(layer.self_attn, name)))
    return model


class LoRALinear(nn.Module):
    """A frozen layer with a trained product of two small matrices in 32 bits."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, RANK, bias=False, dtype=torch.float32)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False, dtype=torch.float32)

    def forward(self, x):
        result = self.frozen(x)
        low = self.down(F.dropout(x.to(torch.float32), DROPOUT, self.training))
        return (result + self.up(low) * (ALPHA / RANK)).to(result.dtype)


def keys_kept(model):
    """Return a list to which each projection adds its result, when it does not run anew for backward."""
    keys = []

    def keep(module, inputs, result):
        if not torch.is_grad_enabled():
            keys.append(result)

    for block in model.base_model.h:
        block.attn.c_attn.register_forward_hook(keep)
    return keys


def loss_of(family, model, ids, labels, keys):
    """Return the loss, with the copies of the logits, and the variables, that `forward` of the old version had."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    logits = kept = model.lm_head(hidden)
    if not family.keeps_logits:
        kept = None
    if family.wide_loss:
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    loss = F.cross_entropy(
        shifted.view(-1, shifted.shape[-1]), labels[..., 1:].contiguous().view(-1)
    )
    del kept
    keys.clear()
    return loss
