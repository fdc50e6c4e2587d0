"""Training of segmentation networks on a V100: peak allocated, in GiB, as mmsegmentation publishes it.

Source: tests/data/mmsegmentation_v100.json, and docs/model_zoo.md of the same repository: torch 1.5, cuDNN 7.6,
`cudnn.benchmark` off, the largest `max_memory_allocated` of four GPUs. The networks here are written anew from their
configurations, with random weights. Each step resizes the logits of two heads to the crop for their loss and accuracy; SGD
loops over parameters, and gradients are zeroed, not freed. DDP's buckets count as one more set of gradients, synchronised
batch norms as plain ones. Log-softmax and autograd are those of then. Rows with "amp" predate autocast: the model is
in 16 bits with norms in 32, and the optimizer has 32-bit copies of weights and gradients.

A workspace of cuDNN adds to the simulated peak, so the published figure should lie between it and its upper end. With the
workspace of Winograd's algorithm for each plain convolution of 3x3, it is explained.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from calibration import old, running
from calibration.rows import GIB, Figure
from oomprobe.devices.simulated import SimulatedDevice

DATA = Path(__file__).resolve().parents[3] / "tests" / "data" / "mmsegmentation_v100.json"
CALLS = 2
ABOUT = {
    "source": "open-mmlab/mmsegmentation: metafiles of fcn, pspnet and deeplabv3plus; docs/model_zoo.md",
    "card": "V100-32GB",
    "torch": "1.5",
    "how": "peak allocated of a training on four GPUs, rounded to 0.1 GiB; the interval ends with the largest workspace; "
    "assumed: DDP's buckets as large as the gradients, plain batch norms, log-softmax and autograd of then",
}
REMARKS = {
    "amp": "16-bit model, before autocast; the excess is about the size of its gradients",
    "mg124 80k": "the same network is published with 5.8 GB for half as many steps",
    "mg124": "without the sampler of hard pixels",
    "adamw": "the optimizer loops over parameters",
    "512x512": "four images, 150 classes: the loss is the peak, so no workspace matters",
}
BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure: ``head``, backbone such as "r50b-d8 amp", crop and GB."""

    head: str
    backbone: str
    crop: str
    published_gb: float
    images: int = 2
    classes: int = 19

    @property
    def name(self):
        return f"{self.head} {self.backbone} {self.crop}"

    @property
    def depth(self):
        return int(self.backbone.split("-")[0].strip("rb"))

    @property
    def amp(self):
        return self.backbone.endswith("amp")

    @property
    def size(self):
        return tuple(map(int, self.crop.split("x")))


def rows():
    return [Row(*row) for row in json.loads(DATA.read_text())["rows"]]


def compare(names=None):
    """Yield a row for each figure, or for those named."""
    for row in rows():
        if names is None or row.name in names:
            with old.autograd(), running.winograd_peak() as winograd:
                usage = measure(row)
            yield Figure(
                name=row.name,
                published_bytes=row.published_gb * GIB,
                simulated_bytes=usage.peak_allocated_bytes,
                interval_bytes=(usage.peak_allocated_bytes, usage.peak_upper_bytes),
                explained_bytes=None if row.amp else max(usage.peak_allocated_bytes, *winograd),
                rounding_bytes=(0.005 if row.amp else 0.05) * GIB,
                remark=next((text for part, text in REMARKS.items() if part in row.name), ""),
            )


def measure(row):
    """Return the usage of a row on a V100."""
    model = running.without_values(partial(Network, row)).train()
    masters = (
        [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        if row.amp
        else list(model.parameters())
    )
    if row.amp:
        model.half()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.float()
    kind = torch.optim.AdamW if "adamw" in row.backbone else partial(torch.optim.SGD, momentum=0.9)
    optimizer = kind(masters, lr=0.01, weight_decay=5e-4, foreach=False)
    device = SimulatedDevice("V100-32GB")
    buckets = [torch.empty_like(p) for p in masters]
    device.place([*model.parameters(), *model.buffers(), *buckets, *(masters if row.amp else ())])
    device.start_trial()
    return running.call(device, partial(step, row, model, masters, optimizer), CALLS)


def step(row, model, masters, optimizer):
    """Take one step."""
    images = torch.randn(row.images, 3, *row.size, device="cuda")
    labels = torch.randint(0, row.classes, (row.images, *row.size), device="cuda")
    corners = row.size == (769, 769)
    losses = [
        weight * loss_of(logits.float(), labels, corners)
        for weight, logits in zip(
            (1.0, 0.4), model(images.half() if row.amp else images), strict=True
        )
    ]
    model.zero_grad(set_to_none=False)
    sum(losses).backward()
    if row.amp:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
    optimizer.step()
    if row.amp:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master.data)


def loss_of(logits, labels, align_corners):
    """Return the loss at the crop's resolution; the accuracy is also computed."""
    logits = F.interpolate(logits, labels.shape[1:], mode="bilinear", align_corners=align_corners)
    logs = old.SoftmaxKeepingInput.apply(logits, 1, True)
    loss = F.nll_loss(logs, labels, reduction="none", ignore_index=255).mean()
    logits.topk(1, dim=1)[1].transpose(0, 1).eq(labels[None]).float().sum()
    return loss


def unit(inputs, outputs, kernel=1, **options):
    """Return a convolution with batch norm and ReLU in place."""
    padding = options.get("dilation", 1) * (kernel // 2)
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=False, **options)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def separable(inputs, outputs, dilation=1):
    return nn.Sequential(
        unit(inputs, inputs, 3, dilation=dilation, groups=inputs), unit(inputs, outputs)
    )


class Block(nn.Module):
    """A residual block: two convolutions, or a bottleneck of three."""

    def __init__(self, inputs, width, stride, dilation, bottleneck):
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        if bottleneck:
            parts = (
                unit(inputs, width),
                unit(width, width, 3, stride=stride, dilation=dilation),
                unit(width, outputs),
            )
        else:
            parts = (
                unit(inputs, width, 3, stride=stride, dilation=dilation),
                unit(width, width, 3),
            )
        self.body = nn.Sequential(*parts[:-1], parts[-1][:2])
        changes = stride != 1 or inputs != outputs
        self.shortcut = unit(inputs, outputs, stride=stride)[:2] if changes else nn.Identity()

    def forward(self, x):
        out = self.body(x)
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


class Backbone(nn.ModuleList):
    """A ResNet whose last stages are dilated instead of strided; the stem is three convolutions, or one ("b")."""

    def __init__(self, row):
        kind = row.backbone.split()[0]
        strides, dilations = {
            "d8": ((1, 2, 1, 1), (1, 1, 2, 4)),
            "d16": ((1, 2, 2, 1), (1, 1, 1, 2)),
        }[kind.split("-")[1]]
        deep = not kind.split("-")[0].endswith("b")
        plain = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        )
        stem = (
            nn.Sequential(unit(3, 32, 3, stride=2), unit(32, 32, 3), unit(32, 64, 3))
            if deep
            else plain
        )
        stages, inputs, bottleneck = [], 64, row.depth > 18
        for index, blocks in enumerate(BLOCKS[row.depth]):
            width, dilation, stage = 64 * 2**index, dilations[index], []
            for number in range(blocks):
                own = dilation if number or dilation == 1 else dilation // 2  # the first contracts
                if "mg124" in kind and index == 3:
                    own = dilation * (1, 2, 4)[number]
                stage.append(Block(inputs, width, 1 if number else strides[index], own, bottleneck))
                inputs = width * (4 if bottleneck else 1)
            stages.append(nn.Sequential(*stage))
        super().__init__([nn.Sequential(stem, nn.MaxPool2d(3, 2, 1)), *stages])

    def forward(self, x):
        features = []
        for stage in self:
            x = stage(x)
            features.append(x)
        return features[1:]


class FCN(nn.Module):
    """Convolutions, then the input beside their output, then one more."""

    def __init__(self, inputs, width, classes, convolutions, concatenates):
        super().__init__()
        self.body = nn.Sequential(
            unit(inputs, width, 3), *(unit(width, width, 3) for _ in range(convolutions - 1))
        )
        self.join = unit(inputs + width, width, 3) if concatenates else None
        self.out = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, classes, 1))

    def forward(self, features, x):
        out = self.body(x)
        return self.out(out if self.join is None else self.join(torch.cat([x, out], dim=1)))


class PSP(nn.Module):
    """A pyramid of pooled features beside the input."""

    def __init__(self, inputs, width, classes, corners):
        super().__init__()
        self.corners = corners
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(scale), unit(inputs, width))
            for scale in (1, 2, 3, 6)
        )
        self.join = unit(inputs + 4 * width, width, 3)
        self.out = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, classes, 1))

    def forward(self, features, x):
        parts = [x]
        for pool in self.pools:
            parts.append(resized(pool(x), x, self.corners))
        return self.out(self.join(torch.cat(parts, dim=1)))


class DeepLabV3Plus(nn.Module):
    """Dilated separable convolutions, joined with the first stage's features."""

    def __init__(self, inputs, width, classes, corners, low, low_width, dilations):
        super().__init__()
        self.corners = corners
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), unit(inputs, width))
        self.branches = nn.ModuleList(
            [unit(inputs, width), *(separable(inputs, width, d) for d in dilations)]
        )
        self.join = unit(5 * width, width, 3)
        self.low = unit(low, low_width)
        self.separable = nn.Sequential(separable(width + low_width, width), separable(width, width))
        self.out = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, classes, 1))

    def forward(self, features, x):
        parts = [resized(self.pool(x), x, self.corners)]
        parts.extend(branch(x) for branch in self.branches)
        out = self.join(torch.cat(parts, dim=1))
        low = self.low(features[0])
        return self.out(self.separable(torch.cat([resized(out, low, self.corners), low], dim=1)))


def resized(x, like, align_corners):
    return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=align_corners)


class Network(nn.Module):
    """Backbone, decoding head and auxiliary head."""

    def __init__(self, row):
        super().__init__()
        small = row.depth == 18
        inputs, width = (512, 128) if small else (2048, 512)
        sizes = (inputs, width, row.classes)
        corners = row.size == (769, 769)
        self.backbone = Backbone(row)
        if row.head == "fcn":
            self.head = FCN(*sizes, 2, True)
        elif row.head == "pspnet":
            self.head = PSP(*sizes, corners)
        else:
            dilations = (6, 12, 18) if "d16" in row.backbone else (12, 24, 36)
            low = (64, 12) if small else (256, 48)
            self.head = DeepLabV3Plus(*sizes, corners, *low, dilations)
        self.auxiliary = FCN(inputs // 2, width // 2, row.classes, 1, False)

    def forward(self, images):
        features = self.backbone(images)
        return self.head(features, features[3]), self.auxiliary(features, features[2])
