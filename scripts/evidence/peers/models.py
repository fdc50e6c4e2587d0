"""Small models whose ``forward`` returns the loss, so that every tool can train them.

No step reads a value back from the device, because kernels on the test bed compute nothing. Each workload is also a
function of this module that builds ``(model, step)``, as `oomprobe.probe_target` requires.
"""

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import oomprobe

LOG_VARIABLE = "PEERS_LOG"  # path of a file that records every batch, including those of processes that a tool starts


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its optimizer and the shape of one example.

    Attributes:
        module: Builds the model.
        sample: Shape of one example.
        optimizer: Takes the parameters.
        tokens: The module takes token ids, as ``input_ids``; otherwise floats.
        clip: Norm to which gradients are clipped.
    """

    module: Callable[[], nn.Module]
    sample: tuple[int, ...]
    optimizer: Callable = AdamW
    tokens: bool = False
    clip: float | None = None

    def build(self):
        model = recorded(self.module().to("cuda"))
        return model, self.optimizer(model.parameters())

    def target(self):
        model, optimizer = self.build()
        return model, self.step(optimizer)

    def varying(self, optimizer):
        """Return the step that gets the length of its tokens, or the side of its images."""

        def step(model, batch_size, length):
            sample = (length,) if self.tokens else (3, length, length)
            replace(self, sample=sample).step(optimizer)(model, batch_size)

        return step

    def inputs(self, batch_size):
        shape = (batch_size, *self.sample)
        return (
            torch.randint(1000, shape, device="cuda")
            if self.tokens
            else torch.randn(shape, device="cuda")
        )

    def step(self, optimizer):
        def step(model, batch_size):
            x = self.inputs(batch_size)
            optimizer.zero_grad()
            model(x).backward()
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()

        return step


def recorded(model):
    """Record every batch size that the model, or a copy of it, receives."""
    getattr(model, "detector", model).register_forward_pre_hook(entered, with_kwargs=True)
    return model


def entered(_, inputs, named):
    entered.last_size = len([*inputs, *named.values()][0])
    record("tried", entered.last_size)


def record(event, batch_size):
    if path := os.environ.get(LOG_VARIABLE):
        with open(path, "a") as log:
            log.write(f"{event} {batch_size}\n")


entered.last_size = None
register_optimizer_step_post_hook(lambda *_: record("stepped", entered.last_size))


def loss_of(logits):
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


class Classifier(nn.Module):
    def __init__(self, *layers, autocast=None, channels_last=False):
        super().__init__()
        self.layers, self.autocast = nn.Sequential(*layers), autocast
        self.format = torch.channels_last if channels_last else torch.preserve_format
        self.to(memory_format=self.format)

    def forward(self, x):
        with torch.autocast("cuda", self.autocast, enabled=self.autocast is not None):
            return loss_of(self.layers(x.to(memory_format=self.format)))


def mlp(width=1024, **options):
    return Classifier(
        nn.Linear(256, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.1),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10), **options,
    )  # fmt: skip


def conv(width=32, stages=3, **options):
    widths = [width * 2**stage for stage in range(stages + 1)]
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for entering, leaving in itertools.pairwise(widths):
        layers += [
            nn.Conv2d(entering, leaving, 3, 2, 1, bias=False),
            nn.BatchNorm2d(leaving),
            nn.ReLU(inplace=True),
        ]
    return Classifier(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10), **options
    )


class GPT(nn.Module):
    def __init__(
        self, layers=2, width=128, vocabulary=2000, context=128, bf16=False, checkpointed=False
    ):
        super().__init__()
        self.bf16, self.checkpointed = bf16, checkpointed
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        block = partial(
            nn.TransformerEncoderLayer, width, 4, 4 * width, batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
            length = input_ids.shape[1]
            x = self.tokens(input_ids) + self.positions(
                torch.arange(length, device=input_ids.device)
            )
            mask = nn.Transformer.generate_square_subsequent_mask(
                length, device=x.device, dtype=x.dtype
            )
            for block in self.blocks:
                run = (
                    partial(checkpoint, block, use_reentrant=False) if self.checkpointed else block
                )
                x = run(x, src_mask=mask, is_causal=True)
            return F.cross_entropy(self.head(x).flatten(0, 1).float(), input_ids.flatten())


class Yolo11n(nn.Module):
    """Ultralytics' smallest detector; its own loss reads values back, so this one is the mean square of its outputs."""

    def __init__(self):
        from ultralytics.nn.tasks import DetectionModel

        super().__init__()
        self.detector = DetectionModel("yolo11n.yaml", verbose=False)

    def forward(self, x):
        outputs, _ = torch.utils._pytree.tree_flatten(self.detector(x))
        return sum(output.square().mean() for output in outputs)


WORKLOADS = {
    "mlp_adamw": Workload(module=mlp, sample=(256,), optimizer=partial(AdamW, foreach=True)),
    "mlp_fused": Workload(module=mlp, sample=(256,), optimizer=partial(AdamW, fused=True)),
    "mlp_sgd": Workload(module=mlp, sample=(256,), optimizer=partial(SGD, lr=0.1, momentum=0.9)),
    "mlp_bf16_clipped": Workload(
        module=partial(mlp, autocast=torch.bfloat16), sample=(256,), clip=1.0
    ),
    "gpt": Workload(module=GPT, sample=(128,), tokens=True),
    "gpt_bf16": Workload(module=partial(GPT, bf16=True), sample=(128,), tokens=True),
    "gpt_checkpointed": Workload(
        module=partial(GPT, layers=4, checkpointed=True), sample=(128,), tokens=True
    ),
    "conv": Workload(module=conv, sample=(3, 64, 64), optimizer=partial(SGD, lr=0.1, momentum=0.9)),
    "conv_channels_last_fp16": Workload(
        module=partial(conv, autocast=torch.float16, channels_last=True),
        sample=(3, 64, 64),
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
    ),
    "yolo11n_320": Workload(module=Yolo11n, sample=(3, 320, 320)),
    "yolo11n_640": Workload(module=Yolo11n, sample=(3, 640, 640)),
}

# What training meets where shapes vary; tools that know one shape get the largest.
LONGEST, LARGEST = 512, 352
LENGTHS = [
    min(LONGEST, max(8, round(90 * random.Random(n).lognormvariate(0, 0.6)))) for n in range(3000)
]


def sides(drawn, batch_size):
    """Yield the side of each batch of images, as training at several scales does."""
    while True:
        yield {"length": drawn.randrange(96, LARGEST + 1, 32)}


VARYING = {
    "gpt_padded": Workload(module=partial(GPT, context=LONGEST), sample=(LONGEST,), tokens=True),
    "conv_scales": replace(WORKLOADS["conv"], sample=(3, LARGEST, LARGEST)),
}
CALLS = {"calls": 100, "orders": 40}
EPOCHS = {
    "gpt_padded": oomprobe.Epoch({"length": LENGTHS}, **CALLS),
    "conv_scales": oomprobe.Epoch(draw=sides, **CALLS),
}
ALL = WORKLOADS | VARYING
globals().update({name: workload.target for name, workload in ALL.items()})
