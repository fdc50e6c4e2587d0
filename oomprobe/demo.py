"""Targets that build small models with real training steps, for ``oomprobe demo``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from oomprobe.devices import current_accelerator
from oomprobe.records.options import StepFn

CLASSES, HIDDEN = 10, 65_536
VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 512, 64, 128, 4, 3


def wide_mlp() -> tuple[nn.Module, StepFn]:
    """One wide hidden layer, trained with SGD: 1 MiB per sample for little arithmetic."""
    device = demo_device()
    model = nn.Sequential(
        nn.Linear(16, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(model: nn.Module, batch_size: int) -> None:
        inputs = torch.randn(batch_size, 16, device=device)
        labels = torch.randint(CLASSES, (batch_size,), device=device)
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    return model, step


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
