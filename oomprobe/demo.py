"""Targets that build small models with real training steps, for ``oomprobe demo`` and scripts/gpu-check."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from oomprobe.devices import current_accelerator
from oomprobe.records.options import StepFn

IMAGE_SIDE, CLASSES = 32, 10
HIDDEN = 65_536
VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 512, 64, 128, 4, 3


def conv_net() -> tuple[nn.Module, StepFn]:
    """A convolutional net with batch norm on images of 32 x 32, trained with AdamW."""
    model = nn.Sequential(
        *_conv_block(3, 32), *_conv_block(32, 64), *_conv_block(64, 128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES),
    ).to(demo_device())  # fmt: skip
    return model, _classify(
        torch.optim.AdamW(model.parameters(), lr=1e-3), 3, IMAGE_SIDE, IMAGE_SIDE
    )


def wide_mlp() -> tuple[nn.Module, StepFn]:
    """One wide hidden layer, trained with SGD: 1 MiB per sample for little arithmetic."""
    model = nn.Sequential(
        nn.Linear(16, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)
    )
    model = model.to(demo_device())
    return model, _classify(torch.optim.SGD(model.parameters(), lr=1e-3), 16)


def _classify(optimizer: torch.optim.Optimizer, *sample_shape: int) -> StepFn:
    device = demo_device()

    def step(model: nn.Module, batch_size: int) -> None:
        inputs = torch.randn(batch_size, *sample_shape, device=device)
        labels = torch.randint(CLASSES, (batch_size,), device=device)
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    return step


def small_gpt() -> tuple[nn.Module, StepFn]:
    """A decoder-only transformer on sequences of 64 tokens, trained with AdamW."""
    device = demo_device()
    model = SmallGPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model: nn.Module, batch_size: int) -> None:
        tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1), device=device)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss: Any = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return model, step


def demo_device() -> torch.device:
    """Return the accelerator if there is one, otherwise the host."""
    return current_accelerator() or torch.device("cpu")


def _conv_block(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    ]


class SmallGPT(nn.Module):
    """Token and position embeddings, causal blocks, tied output.

    Input: tokens of shape ``(batch, context)``; output: logits of shape ``(batch, context, vocabulary)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: torch.Tensor = self.blocks(self.tokens(tokens) + self.positions(places))
        return F.linear(self.norm(hidden), self.tokens.weight)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        mixed = self.mix(self.norm_1(hidden)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        fed: torch.Tensor = self.feed(self.norm_2(hidden))
        return hidden + fed
