"""The models that gpu-check trains: the README's and three more."""

import torch
from torch import nn
from torch.nn import functional

from oomprobe.demo import CONTEXT, VOCABULARY, SmallGPT, conv_net, small_gpt


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
