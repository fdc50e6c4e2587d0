"""torchtitan's Llama-3.1-8B under FSDP2 on H100s of 96 GB: the most memory reserved, ``max_memory_reserved``, in GiB.

Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (torch of 2024-12-23, torchtitan 9dec370), the rows of tables 1
and 3 without torch.compile: 8 and 128 GPUs, 2 samples of 8,192 tokens each, selective activation checkpointing. Its configuration of
then saves the results of attention, of reductions and of every other matrix product, computes in bf16, reduces in fp32, clips
gradients and steps AdamW by lists. Neither the model nor the loop is torchtitan's code. Norms are made of single operators, as torch
made them then.
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import oomprobe
from calibration.rows import GIB, Figure

ABOUT = {
    "source": "pytorch/torchtitan: benchmarks/llama3_h100_202412_torchtitan.md",
    "card": "H100-96GB",
    "torch": "2.6 nightly",
    "how": "peak reserved of one rank under FSDP2, rounded to 0.1 GiB",
}
PUBLISHED_GIB = {8: 82.4, 128: 67.0}  # by GPUs
CARD = "sim:96GiB"
BATCH, TOKENS, VOCABULARY, LAYERS = 2, 8192, 128_256, 32
WIDTH, HIDDEN, HEADS, GROUPS = 4096, 14_336, 32, 8
HEAD = WIDTH // HEADS
_aten = torch.ops.aten
_SAVED = {
    _aten.mm.default, _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
}  # fmt: skip


def compare(names=None):
    """Yield a row for each number of GPUs, or for those named."""
    for ranks, published_gib in PUBLISHED_GIB.items():
        name = f"Llama-3.1-8B, {ranks} GPUs"
        if names is None or name in names:
            result = oomprobe.check_target(
                f"{__file__}:build", BATCH, nproc_per_node=ranks, device=CARD, memory_fraction=1.0, progress="off"
            )
            yield Figure(
                name=name,
                published_bytes=published_gib * GIB,
                simulated_bytes=result.trials[-1].peak_reserved_bytes,
                rounding_bytes=0.05 * GIB,
            )


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, GROUPS * HEAD, bias=False) for _ in range(2))

    def forward(self, x, rotations):
        query, key, value = (layer(x).view(*x.shape[:2], -1, HEAD) for layer in (self.query, self.key, self.value))
        query, key = rotated(query, rotations), rotated(key, rotations)
        key, value = repeated(key), repeated(value)
        heads = (one.transpose(1, 2) for one in (query, key, value))
        result = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(result.transpose(1, 2).contiguous().flatten(2))


def rotated(x, rotations):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations[None, :, None]).flatten(3).type_as(x)


def repeated(x):
    batch, tokens, groups, width = x.shape
    return x[:, :, :, None].expand(batch, tokens, groups, HEADS // GROUPS, width).flatten(2, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norms = Attention(), nn.ModuleList(Norm() for _ in range(2))
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, rotations):
        before, after = self.norms
        x = x + self.attention(before(x), rotations)
        inner = after(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), Norm()
        self.layers = nn.ModuleList(
            checkpoint_wrapper(Block(), context_fn=saving, preserve_rng_state=False) for _ in range(LAYERS)
        )
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("rotations", torch.empty(TOKENS, HEAD // 2, dtype=torch.complex64))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotations)
        return self.output(self.norm(x))


def saving():
    """Return the contexts of a block whose checkpoint keeps what `_SAVED` names, and of matrix products the first of each two."""
    products = defaultdict(int)  # by whether they are computed again

    def choose(context, func, *_, **__):
        if func is _aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def build():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = Llama()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=layer is not model.layers[-1])
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step(model, batch_size):
        tokens, targets = (torch.randint(VOCABULARY, (batch_size, TOKENS), device="cuda") for _ in range(2))
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return model, step
