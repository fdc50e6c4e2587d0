"""The work on a card: models as they are trained in earnest, in float16 with a scaler, within a few GiB."""

import torch
from torch import nn
from torch.nn import functional as F

from peers.workloads import HOST, Trained, Workload, Yolo


class Bottleneck(nn.Module):
    EXPANSION = 4

    def __init__(self, entering, width, stride):
        super().__init__()
        leaving = width * self.EXPANSION
        self.body = nn.Sequential(
            nn.Conv2d(entering, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, leaving, 1, bias=False), nn.BatchNorm2d(leaving),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if stride > 1 or entering != leaving:
            self.shortcut = nn.Sequential(nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving))

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet50(Trained):
    """Source: He et al., Deep Residual Learning, table 1; the stride stands in the 3x3 convolution."""

    def __init__(self, blocks=(3, 4, 6, 3), width=64, classes=1000):
        super().__init__()
        self.first = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        stages, entering = [], width
        for number, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if number > 0 and block == 0 else 1
                stages.append(Bottleneck(entering, width * 2**number, stride))
                entering = width * 2**number * Bottleneck.EXPANSION
        self.rest = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1), *stages,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, classes),
        )  # fmt: skip

    def loss(self, x):
        labels = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return F.cross_entropy(self.rest(self.watched(self.first(x))), labels)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x):
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT2(Trained):
    """Source: Radford et al., Language Models are Unsupervised Multitask Learners; the smallest, without dropout."""

    def __init__(self, layers=12, width=768, heads=12, context=1024, vocabulary=50257):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids):
        return super().forward(input_ids)

    def loss(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        logits = self.head(self.blocks(self.watched(self.tokens(x) + self.positions(places))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def on_card(name, says, build, gib, **data):
    """Ten steps show what fits: the scaler skips the first ones, and AdamW's state comes with the first it lets through."""
    return Workload(name, says, build, device="cuda", mixed=torch.float16, budget_mib=gib * 1024, scan_steps=10, **data)


CUDA = {
    workload.name: workload
    for workload in (
        on_card("resnet50", "ResNet-50 at 224 pixels, AMP", ResNet50, 8, sample=(3, 224, 224)),
        on_card("gpt2-small", "GPT-2 small, 1024 tokens, AMP", GPT2, 24, sample=(1024,), tokens=True),
        on_card("yolo-640", "yolo11n at 640 pixels, AMP", Yolo, 8, sample=(3, 640, 640), needs="ultralytics"),
    )
}
BY_DEVICE = {"host": HOST, "cuda": CUDA}
ALL = {**HOST, **CUDA}
