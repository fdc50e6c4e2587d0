"""A decoder with the sizes of the models in litgpt's tables. Used by `litgpt.py` and `litgpt_hub.py`.

It saves for backward what litgpt's models save: one projection for queries, keys and values; LoRA on a dropped-out copy
of its input, for queries, keys and values by a convolution, padded with zeros if one of them has none; rotary embedding
in 32 bits; attention by torch's kernels, with keys and values repeated for their group of queries; a residual that is
parallel (GPT-NeoX, phi, Falcon) or sequential (Llama, Gemma). Weights of 4 bits are those of bitsandbytes 0.42.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

ALPHA, DROPOUT = 16, 0.05
NF4_BLOCK = 64  # elements with a scale of their own


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
        groups: Groups of heads which share keys and values; None: each head has its own.
        head_size: Elements of a head; None: the width, divided among the heads.
        shared_norm: Attention and MLP share one norm, as in phi.
        biases: The layers of GPT-NeoX's kind have biases.
        head_bias: The layer that computes logits has a bias.
        llama: Llama's norms and MLP, no biases, and a sequential residual.
        gemma: With `llama`: scaled embeddings, an MLP with GELU, and norms that add 1 to their weight.
        norm_in_float32: Llama's norms run in 32 bits.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    rotary: int
    groups: int | None = None
    head_size: int | None = None
    shared_norm: bool = False
    biases: bool = True
    head_bias: bool = False
    llama: bool = False
    gemma: bool = False
    norm_in_float32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is trained, and how the frozen weights are kept.

    Attributes:
        rank: Of LoRA's matrices; 0: no LoRA, all weights are trained.
        places: Where LoRA is: of "query", "key", "value", "projection", "mlp" and "head".
        nf4: The frozen weights have 4 bits.
    """

    rank: int = 8
    places: tuple[str, ...] = ("query", "value")
    nf4: bool = False

    def frozen(self, inputs, outputs, *, bias):
        """Build a layer without LoRA."""
        return (NF4Linear if self.nf4 else nn.Linear)(inputs, outputs, bias=bias)

    def linear(self, place, inputs, outputs, *, bias):
        """Build a layer with LoRA, if it has some at this place."""
        layer = self.frozen(inputs, outputs, bias=bias)
        return (
            LoRALinear(layer, inputs, outputs, self.rank)
            if self.rank and place in self.places
            else layer
        )


class GPT(nn.Module):
    """Maps tokens of shape ``(batch, length)`` to a list of logits of shape ``(batch, chunk, vocabulary)``."""

    def __init__(self, sizes, tuning=Tuning()):
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, tuning) for _ in range(sizes.layers))
        self.norm = norm(sizes)
        self.head = tuning.linear("head", sizes.width, sizes.vocabulary, bias=sizes.head_bias)

    def to_bfloat16(self):
        """Convert in place without writing to the weights, for which there may be no memory."""
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(
                    module, name, nn.Parameter(torch.empty(parameter.shape, dtype=torch.bfloat16))
                )
        return self

    def forward(self, ids, chunk):
        angles = torch.outer(
            torch.arange(ids.shape[1], device=ids.device).float(),
            torch.ones(self.sizes.rotary, device=ids.device),
        )
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(ids)
        if self.sizes.gemma:
            x = x * self.sizes.width**0.5
        for block in self.blocks:
            x = block(x, cos, sin)
        return [self.head(part) for part in self.norm(x).split(chunk, dim=1)]


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, sizes, tuning):
        super().__init__()
        self.parallel = not sizes.llama
        self.attention = Attention(sizes, tuning)
        self.norm_1 = norm(sizes)
        self.norm_2 = None if sizes.shared_norm else norm(sizes)
        self.mlp = LlamaMLP(sizes, tuning) if sizes.llama else MLP(sizes, tuning)

    def forward(self, x, cos, sin):
        normed = self.norm_1(x)
        attended = self.attention(normed, cos, sin)
        if self.parallel:
            return x + attended + self.mlp(normed if self.norm_2 is None else self.norm_2(x))
        x = x + attended
        return x + self.mlp(self.norm_2(x))


class Attention(nn.Module):
    """Attention of grouped heads with rotary embedding of a part of each head."""

    def __init__(self, sizes, tuning):
        super().__init__()
        self.heads, self.rotary = sizes.heads, sizes.rotary
        self.groups = sizes.groups or sizes.heads
        self.head_size = sizes.head_size or sizes.width // sizes.heads
        bias = sizes.biases and not sizes.llama
        outputs = (self.heads + 2 * self.groups) * self.head_size
        self.qkv = tuning.frozen(sizes.width, outputs, bias=bias)
        if tuning.rank:
            sizes_of_parts = [self.heads * self.head_size] + 2 * [self.groups * self.head_size]
            self.qkv = LoRAQKV(self.qkv, sizes.width, sizes_of_parts, tuning)
        self.out = tuning.linear("projection", self.heads * self.head_size, sizes.width, bias=bias)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        each = self.heads // self.groups
        qkv = self.qkv(x).view(batch, length, self.groups, each + 2, -1).permute(0, 2, 3, 1, 4)
        query, key, value = qkv.split((each, 1, 1), dim=2)
        if each > 1:
            key, value = (part.expand(-1, -1, each, -1, -1) for part in (key, value))
        query, key, value = (
            part.reshape(batch, self.heads, length, -1) for part in (query, key, value)
        )
        query, key = (self._rotated(part, cos, sin) for part in (query, key))
        result = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(result.transpose(1, 2).reshape(batch, length, -1))

    def _rotated(self, part, cos, sin):
        turned, rest = part[..., : self.rotary], part[..., self.rotary :]
        first, second = turned.chunk(2, dim=-1)
        turned = ((turned * cos) + (torch.cat((-second, first), dim=-1) * sin)).type_as(part)
        return torch.cat((turned, rest), dim=-1)


class LoRAQKV(nn.Module):
    """Queries, keys and values in one product, with low-rank additions to some of them."""

    def __init__(self, linear, inputs, sizes_of_parts, tuning):
        super().__init__()
        self.linear = linear
        parts = dict(zip(("query", "key", "value"), sizes_of_parts, strict=True))
        self.outputs = sum(sizes_of_parts)
        self.added = [size for part, size in parts.items() if part in tuning.places]
        self.even = len(set(sizes_of_parts)) == 1
        self.lora_a = nn.Parameter(torch.empty(len(self.added) * tuning.rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(sum(self.added), tuning.rank))
        self.scale = ALPHA / tuning.rank

    def forward(self, x):
        low = functional.linear(
            functional.dropout(x, DROPOUT, self.training), self.lora_a
        ).transpose(1, 2)
        added = self._raised(low).transpose(1, 2)
        padded = self._padded(added)
        return self.linear(x) + padded * self.scale

    def _raised(self, low):
        """Multiply by the second matrix: in one convolution if all parts have one size."""
        weight = self.lora_b.unsqueeze(-1)
        if self.even:
            return functional.conv1d(low, weight, groups=len(self.added))
        parts = zip(low.chunk(len(self.added), dim=1), weight.split(self.added), strict=True)
        return torch.cat(
            [functional.conv1d(part, part_weight) for part, part_weight in parts], dim=1
        )

    def _padded(self, added):
        """Insert zeros for keys without an addition, in as many columns as litgpt does, but in another order."""
        if sum(self.added) == self.outputs:
            return added
        columns = torch.arange(self.outputs, device=added.device)
        columns = torch.cat((columns[: self.added[0]], columns[self.outputs - self.added[1] :]))
        padded = added.new_zeros(added.shape[0] * added.shape[1], self.outputs)
        padded = padded.index_copy(1, columns, added.reshape(-1, sum(self.added)))
        return padded.view(*added.shape[:2], -1)


class LoRALinear(nn.Module):
    """A frozen layer with a low-rank addition."""

    def __init__(self, linear, inputs, outputs, rank):
        super().__init__()
        self.linear = linear
        self.lora_a, self.lora_b = (
            nn.Parameter(torch.empty(shape)) for shape in ((rank, inputs), (outputs, rank))
        )
        self.scale = ALPHA / rank

    def forward(self, x):
        result = self.linear(x)
        low = functional.dropout(x, DROPOUT, self.training) @ self.lora_a.t()
        return result + low @ self.lora_b.t() * self.scale


class NF4Linear(nn.Module):
    """A frozen layer with weights of 4 bits and a scale in 32 bits for each block of them."""

    def __init__(self, inputs, outputs, *, bias):
        super().__init__()
        elements = inputs * outputs
        self.shape = outputs, inputs
        self.register_buffer("packed", torch.empty((elements + 1) // 2, 1, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(-(-elements // NF4_BLOCK)))
        self.register_buffer("code", torch.empty(16))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x):
        return NF4Product.apply(x, self.shape, self.bias)


class NF4Product(torch.autograd.Function):
    """A product with weights that are made anew, in forward and again in backward.

    Its input lives as long as the graph, which is longer than until backward, though no gradient needs it: bitsandbytes
    0.42 keeps it as an attribute, which backward does not clear.
    """

    @staticmethod
    def forward(ctx, x, shape, bias):
        ctx.shape = shape
        ctx.kept = x if ctx.needs_input_grad[0] else None
        return functional.linear(x, weight_anew(shape, x), bias)

    @staticmethod
    def backward(ctx, gradient):
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return gradient @ weight_anew(ctx.shape, gradient), None, None


def weight_anew(shape, x):
    """Return a weight in the dtype of `x`, made by way of fp16: as such, Lightning's Fabric gave it to bitsandbytes."""
    return torch.empty(shape, dtype=torch.float16, device=x.device).to(x.dtype)


class MLP(nn.Module):
    """The MLP of GPT-NeoX, phi and Falcon."""

    def __init__(self, sizes, tuning):
        super().__init__()
        self.up = tuning.linear("mlp", sizes.width, sizes.hidden, bias=sizes.biases)
        self.down = tuning.linear("mlp", sizes.hidden, sizes.width, bias=sizes.biases)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class LlamaMLP(nn.Module):
    """The MLP of Llama, and that of Gemma."""

    def __init__(self, sizes, tuning):
        super().__init__()
        self.gate, self.up = (
            tuning.linear("mlp", sizes.width, sizes.hidden, bias=False) for _ in range(2)
        )
        self.down = tuning.linear("mlp", sizes.hidden, sizes.width, bias=False)
        self.activation = functional.gelu if sizes.gemma else functional.silu

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class RMSNorm(nn.Module):
    """The norm of Llama, in the dtype of its input, as first in litgpt, or in 32 bits."""

    def __init__(self, width, *, in_float32, offset):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.in_float32 = in_float32
        self.offset = offset

    def forward(self, x):
        wide = x.float() if self.in_float32 else x
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return (1 + self.weight if self.offset else self.weight) * normed.to(x.dtype)


def norm(sizes):
    """Return the norm of a model."""
    if not sizes.llama:
        return nn.LayerNorm(sizes.width)
    return RMSNorm(sizes.width, in_float32=sizes.norm_in_float32, offset=sizes.gemma)
