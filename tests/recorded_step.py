"""The step of the recording Wedsonlin-77da8f, written anew: inference of a GPT in float32, 4 sequences of 128 tokens.

What it allocates was read from the recording: nothing of torch's fused kernels, and each intermediate result in its place.
"""

import torch
from torch import nn

RECORDING = "Wedsonlin-77da8f"
BATCH, LENGTH = 4, 128
VOCABULARY, LAYERS, HEADS, WIDTH, INNER = 10_000, 24, 16, 1024, 4096
SHAPES = {
    "before_attention": (WIDTH,), "before_inner": (WIDTH,),
    "query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH), "out": (WIDTH, WIDTH),
    "gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER),
}  # fmt: skip


def weights_of(shapes):
    return nn.ParameterDict(
        (name, torch.empty(shape)) for name, shape in shapes.items()
    )  # of a dict, it would sort them


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = weights_of({"embedding": (VOCABULARY, WIDTH)})
        self.blocks = nn.ModuleList(weights_of(SHAPES) for _ in range(LAYERS))
        self.last = weights_of({"norm": (WIDTH,), "head": (VOCABULARY, WIDTH)})
        self.register_buffer("angles", torch.empty(2, LENGTH, WIDTH // HEADS // 2))

    def forward(self, tokens):
        embedded = self.first["embedding"][tokens]
        x = embedded
        for weights in self.blocks:
            x = block(x, weights, self.angles)
        x = rms_norm(x, self.last["norm"])
        x = linear(x, self.last["head"])
        return x  # noqa: RET504  frees the embedded tokens after what the norm returned


def block(x, weights, angles):
    normed = rms_norm(x, weights["before_attention"])
    attended = attention(normed, weights, angles)
    del normed  # after what attention held
    between = x + attended
    inner = swiglu(rms_norm(between, weights["before_inner"]), weights)
    return between + inner


def linear(x, weight):
    return torch.einsum("...i,oi->...o", x, weight)


def rms_norm(x, weight):
    root = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
    return x / root * weight


def swiglu(x, weights):
    return linear(silu(linear(x, weights["gate"])) * linear(x, weights["up"]), weights["down"])


def silu(x):
    return x * torch.sigmoid(x)


def attention(x, weights, angles):
    query, key, value = (
        linear(x, weights[name]).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
        for name in ("query", "key", "value")
    )
    query = rotated(query, angles)
    key = rotated(key, angles)
    positions = torch.arange(x.shape[-2], device=x.device)
    mask = positions[:, None] >= positions
    attended = attend(query, key, value, mask).transpose(-2, -3).flatten(-2)
    return linear(attended, weights["out"])


def rotated(x, angles):
    """Return rotary positions on interleaved pairs."""
    cos, sin = angles
    even, odd = x[..., ::2], x[..., 1::2]
    first = cos * even - sin * odd
    second = sin * even + cos * odd
    return torch.stack((first, second), dim=-1).flatten(-2)


def attend(query, key, value, mask):
    scores = torch.einsum("...qd,...kd->...qk", query, key) / query.shape[-1] ** 0.5
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


def softmax(scores):
    shifted = scores - torch.max(scores, dim=-1, keepdim=True).values
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def build():
    """Return the model on the GPU, and the step, which takes no arguments."""
    model = GPT().cuda()
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="cuda")

    def step():
        with torch.inference_mode():
            model(tokens)

    return model, step
