"""A decoder with LoRA on queries and values, with the sizes of the models in litgpt's table. Used by `litgpt.py`.

It saves for backward what litgpt's models of October 2023 save: one projection for queries, keys and values; LoRA on a
dropped-out copy of its input, by a grouped convolution, padded with zeros for the keys; rotary embedding in 32 bits;
attention by torch's kernels; a residual that is parallel (GPT-NeoX, phi) or sequential (Llama).
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

RANK, ALPHA, DROPOUT = 8, 16, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes and variants of a model.

    Attributes:
        layers: Number of blocks.
        width: Elements of an embedding.
        hidden: Elements of the hidden layer of an MLP.
        heads: Attention heads.
        vocabulary: Tokens, padded as litgpt pads them.
        rotary: Rotated elements of each head.
        shared_norm: Attention and MLP share one norm, as in phi.
        head_bias: The layer that computes logits has a bias.
        llama: Llama's norms and MLP, no biases, and a sequential residual.
        norm_in_float32: Llama's norms run in 32 bits.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    rotary: int
    shared_norm: bool = False
    head_bias: bool = False
    llama: bool = False
    norm_in_float32: bool = False


class GPT(nn.Module):
    """Maps tokens of shape ``(batch, length)`` to a list of logits of shape ``(batch, chunk, vocabulary)``."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = norm(sizes)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=sizes.head_bias)

    def to_bfloat16(self):
        """Convert in place without writing to the weights, for which there may be no memory."""
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=torch.bfloat16)))
        return self

    def forward(self, ids, chunk):
        angles = torch.outer(
            torch.arange(ids.shape[1], device=ids.device).float(), torch.ones(self.sizes.rotary, device=ids.device)
        )
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return [self.head(part) for part in self.norm(x).split(chunk, dim=1)]


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, sizes):
        super().__init__()
        self.parallel = not sizes.llama
        self.attention = Attention(sizes)
        self.norm_1 = norm(sizes)
        self.norm_2 = None if sizes.shared_norm else norm(sizes)
        self.mlp = LlamaMLP(sizes) if sizes.llama else MLP(sizes)

    def forward(self, x, cos, sin):
        normed = self.norm_1(x)
        attended = self.attention(normed, cos, sin)
        if self.parallel:
            return x + attended + self.mlp(normed if self.norm_2 is None else self.norm_2(x))
        x = x + attended
        return x + self.mlp(self.norm_2(x))


class Attention(nn.Module):
    """Multi-head attention with rotary embedding of a part of each head."""

    def __init__(self, sizes):
        super().__init__()
        self.heads, self.rotary = sizes.heads, sizes.rotary
        self.qkv = LoRALinear(sizes.width, bias=not sizes.llama)
        self.out = nn.Linear(sizes.width, sizes.width, bias=not sizes.llama)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, self.heads, 3, -1).permute(0, 2, 3, 1, 4)
        query, key, value = (part.reshape(batch, self.heads, length, -1) for part in qkv.split(1, dim=2))
        query, key = (self._rotated(part, cos, sin) for part in (query, key))
        result = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(result.transpose(1, 2).reshape(batch, length, width))

    def _rotated(self, part, cos, sin):
        turned, rest = part[..., : self.rotary], part[..., self.rotary :]
        first, second = turned.chunk(2, dim=-1)
        turned = ((turned * cos) + (torch.cat((-second, first), dim=-1) * sin)).type_as(part)
        return torch.cat((turned, rest), dim=-1)


class LoRALinear(nn.Module):
    """Queries, keys and values in one product, with low-rank additions to queries and values."""

    def __init__(self, width, *, bias):
        super().__init__()
        self.linear = nn.Linear(width, 3 * width, bias=bias)
        self.lora_a = nn.Parameter(torch.empty(2 * RANK, width))
        self.lora_b = nn.Parameter(torch.empty(2 * width, RANK))

    def forward(self, x):
        width = x.shape[-1]
        low = functional.linear(functional.dropout(x, DROPOUT, self.training), self.lora_a)
        added = functional.conv1d(low.transpose(1, 2), self.lora_b.unsqueeze(-1), groups=2).transpose(1, 2)
        columns = torch.arange(3 * width, device=x.device)
        columns = torch.cat((columns[:width], columns[2 * width :]))
        padded = x.new_zeros(x.shape[0] * x.shape[1], 3 * width).index_copy(1, columns, added.reshape(-1, 2 * width))
        return self.linear(x) + padded.view(*x.shape[:2], -1) * (ALPHA / RANK)


class MLP(nn.Module):
    """The MLP of GPT-NeoX and phi."""

    def __init__(self, sizes):
        super().__init__()
        self.up, self.down = nn.Linear(sizes.width, sizes.hidden), nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class LlamaMLP(nn.Module):
    """The MLP of Llama."""

    def __init__(self, sizes):
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class RMSNorm(nn.Module):
    """The norm of Llama, in the dtype of its input, as first in litgpt, or in 32 bits."""

    def __init__(self, width, *, in_float32):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.in_float32 = in_float32

    def forward(self, x):
        wide = x.float() if self.in_float32 else x
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return self.weight * normed.to(x.dtype)


def norm(sizes):
    """Return the norm of a model."""
    return RMSNorm(sizes.width, in_float32=sizes.norm_in_float32) if sizes.llama else nn.LayerNorm(sizes.width)
