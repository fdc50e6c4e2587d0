"""The models that gpu-check trains: the README's and three more."""

import torch
from torch import nn
from torch.nn import functional

from oomprobe.demo import CONTEXT, VOCABULARY, SmallGPT, small_gpt


def readme():
    """The README's transformer: 12 layers, 256 vectors of 512, float32."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 12).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        tokens = torch.randn(batch_size, 256, 512, device="cuda")
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    return model, step


def conv_net():
    """A convolutional net with batch norm on images of 32 x 32, trained with AdamW."""
    layers = []
    for channels, following in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(channels, following, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(following),
            nn.ReLU(),
        ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    model = nn.Sequential(*layers, *head).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model, batch_size):
        images = torch.randn(batch_size, 3, 32, 32, device="cuda")
        labels = torch.randint(10, (batch_size,), device="cuda")
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return model, step


def gpt_bfloat16():
    """A small GPT under autocast, with a fused optimizer and clipped gradients."""
    model = SmallGPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(model, batch_size):
        tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = functional.cross_entropy(
                model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


MODELS = {
    "readme": readme,
    "conv_net": conv_net,
    "small_gpt": small_gpt,
    "gpt_bfloat16": gpt_bfloat16,
}
