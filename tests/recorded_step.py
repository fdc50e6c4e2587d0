"""The step of the recording Wedsonlin-77da8f, written anew: inference of a GPT in float32, 4 sequences of 128 tokens.

What it allocates was read from the recording: nothing of torch's fused kernels, and each intermediate result in its place.
"""

import torch
from torch import nn

RECORDING = "Wedsonlin-77da8f"
BATCH, LENGTH = 4, 128
VOCABULARY, LAYERS, HEADS, WIDTH, INNER = 10_000, 24, 16, 1024, 4096


class Linear(nn.Module):
    """A linear layer without bias, as an einsum."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def forward(self, tokens):
        return self.weight[tokens]


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x):
        root = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        return x / root * self.weight


class Rotary(nn.Module):
    """Rotary positions on interleaved pairs; one module for all layers."""

    def __init__(self):
        super().__init__()
        angles = torch.empty(2, LENGTH, WIDTH // HEADS // 2)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, x):
        cos, sin = self.angles
        even, odd = x[..., ::2], x[..., 1::2]
        first = cos * even - sin * odd
        second = sin * even + cos * odd
        return torch.stack((first, second), dim=-1).flatten(-2)


def softmax(scores):
    shifted = scores - torch.max(scores, dim=-1, keepdim=True).values
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(query, key, value, mask):
    scores = torch.einsum("...qd,...kd->...qk", query, key) / query.shape[-1] ** 0.5
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.query, self.key, self.value, self.out = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.rotary = rotary

    def forward(self, x):
        query, key, value = (
            projection(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
            for projection in (self.query, self.key, self.value)
        )
        query = self.rotary(query)
        key = self.rotary(key)
        positions = torch.arange(x.shape[-2], device=x.device)
        mask = positions[:, None] >= positions
        attended = attend(query, key, value, mask).transpose(-2, -3).flatten(-2)
        return self.out(attended)


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = Linear(WIDTH, INNER), Linear(WIDTH, INNER), Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x):
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.before_attention, self.before_inner = RMSNorm(), RMSNorm()
        self.attention, self.inner = Attention(rotary), SwiGLU()

    def forward(self, x):
        attended = self.attention(self.before_attention(x))
        between = x + attended
        inner = self.inner(self.before_inner(between))
        return between + inner


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        rotary = Rotary()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block(rotary) for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        embedded = self.embedding(tokens)
        x = embedded
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        x = self.head(x)
        return x  # noqa: RET504  frees the embedded tokens after what the norm returned


def build():
    """Return the model on the GPU, and the step, which takes no arguments."""
    model = GPT().cuda()
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="cuda")

    def step():
        with torch.inference_mode():
            model(tokens)

    return model, step
