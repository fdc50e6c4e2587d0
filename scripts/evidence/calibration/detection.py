"""Training of detectors on a V100 with worst-case batches, against the peak that detectron2 publishes.

Source: tests/data/detectron2_v100.json, and the configurations of the same repository. The published figure is the largest
`max_memory_allocated` of a training over all its shapes, so a worst-case batch should need as much: two images of 800 x
1333, 512 sampled boxes each of which a quarter are objects, and 63 objects in an image, the most in COCO's training images
(arXiv:2005.12872, section 4).

The networks here are written anew, with random weights. Frozen batch norms scale and shift; the stem and the first stage
are frozen too. Boxes of the proposals are spread evenly over the levels of a pyramid. Small tensors, such as the boxes
themselves, are left out. Autograd is that of 2019. DDP's buckets count as one more set of gradients, and SGD loops over parameters. `cudnn.benchmark`
is off; the upper end adds the largest workspace of a convolution.
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

DATA = Path(__file__).resolve().parents[3] / "tests" / "data" / "detectron2_v100.json"
ABOUT = {
    "source": "facebookresearch/detectron2: MODEL_ZOO.md and configs",
    "card": "V100-32GB",
    "torch": "1.3 (September 2019)",
    "how": "largest peak allocated of a whole training, rounded to 0.1 GiB; simulated: a worst-case batch of two images of "
    "800 x 1333 with 63 objects each; assumed: DDP's buckets as large as the gradients, autograd of then",
}
CALLS, IMAGES, CLASSES = 2, 2, 80
OBJECTS, SAMPLED, POSITIVE = 63, 512, 128
BLOCKS = {"R50": (3, 4, 6, 3), "R101": (3, 4, 23, 3), "X101": (3, 4, 23, 3)}


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure: kind of detector, backbone such as "R50-FPN", and GB."""

    kind: str
    backbone: str
    published_gb: float

    @property
    def name(self):
        return f"{self.kind} {self.backbone}"

    @property
    def depth(self):
        return self.backbone.split("-")[0]

    @property
    def features(self):
        return self.backbone.split("-")[1]

    @property
    def size(self):
        """Height and width of the batch; a pyramid pads to multiples of 32."""
        return (800, 1344) if self.features == "FPN" else (800, 1333)


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
                explained_bytes=max(usage.peak_allocated_bytes, *winograd),
                rounding_bytes=0.05 * GIB,
            )


def measure(row):
    """Return the usage of a worst-case batch."""
    model = running.without_values(partial(Detector, row)).train()
    for frozen in model.backbone[:2]:
        frozen.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9, weight_decay=1e-4, foreach=False)
    device = SimulatedDevice("V100-32GB")
    buckets = [torch.empty_like(p) for p in trained]
    device.place([*model.parameters(), *model.buffers(), *buckets])
    device.start_trial()
    return running.call(device, partial(step, row, model, optimizer), CALLS)


def step(row, model, optimizer):
    """Take one step."""
    losses = model(torch.randn(IMAGES, 3, *row.size, device="cuda"))
    optimizer.zero_grad(set_to_none=False)
    sum(losses).backward()
    optimizer.step()


# --- backbone ---


class FrozenNorm(nn.Module):
    """Batch norm with constants: scale and shift, of which backward needs the scale alone."""

    def __init__(self, channels):
        super().__init__()
        for name in ("weight", "bias", "mean", "variance"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x):
        if not x.requires_grad:
            return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias)
        scale = self.weight * self.variance.rsqrt()
        shift = self.bias - self.mean * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


def unit(inputs, outputs, kernel=1, **options):
    """Return a convolution with frozen norm."""
    padding = options.get("dilation", 1) * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=False, **options), FrozenNorm(outputs)
    )


class Block(nn.Module):
    """A bottleneck; the first 1x1 convolution has the stride, except in an X101."""

    def __init__(self, inputs, width, outputs, stride, dilation, groups):
        super().__init__()
        first, second = (stride, 1) if groups == 1 else (1, stride)
        self.first = unit(inputs, width, stride=first)
        self.second = unit(width, width, 3, stride=second, dilation=dilation, groups=groups)
        self.third = unit(width, outputs)
        self.shortcut = unit(inputs, outputs, stride=stride) if inputs != outputs else nn.Identity()

    def forward(self, x):
        out = F.relu_(self.first(x))
        out = F.relu_(self.second(out))
        out = self.third(out)
        out += self.shortcut(x)
        return F.relu_(out)


def stages(row):
    """Return the stem and four stages."""
    groups, width = (32, 256) if row.depth == "X101" else (1, 64)
    stem = nn.Sequential(unit(3, 64, 7, stride=2)[0], FrozenNorm(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    found, inputs = [stem], 64
    for index, count in enumerate(BLOCKS[row.depth]):
        outputs, dilated = 256 * 2**index, row.features == "DC5" and index == 3
        stage = []
        for number in range(count):
            stride = 2 if number == 0 and index and not dilated else 1
            stage.append(Block(inputs, width * 2**index, outputs, stride, 2 if dilated else 1, groups))
            inputs = outputs
        found.append(nn.Sequential(*stage))
    return nn.ModuleList(found)


class Pyramid(nn.Module):
    """Features of all levels in 256 channels."""

    def __init__(self, channels, convolved):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(c, 256, 1) for c in channels)
        self.out = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in channels)
        inputs = ((channels[-1], 256), (256, 256)) if convolved else ()
        self.more = nn.ModuleList(nn.Conv2d(*pair, 3, stride=2, padding=1) for pair in inputs)

    def forward(self, features):
        top, found = None, []
        for feature, lateral, out in reversed(list(zip(features, self.lateral, self.out, strict=True))):
            side = lateral(feature)
            top = side if top is None else side + F.interpolate(top, scale_factor=2, mode="nearest")
            found.insert(0, out(top))
        if not self.more:
            return [*found, F.max_pool2d(found[-1], 1, 2)]
        sixth = self.more[0](features[-1])
        return [*found, sixth, self.more[1](F.relu(sixth))]


# --- heads ---


@torch.no_grad()
def match(anchors):
    """Compare an image's objects with all anchors."""
    objects, boxes = torch.rand(OBJECTS, 4, device="cuda"), torch.rand(anchors, 4, device="cuda")
    sides = torch.min(objects[:, None, 2:], boxes[:, 2:]) - torch.max(objects[:, None, :2], boxes[:, :2])
    sides.clamp_(min=0)
    inter = sides.prod(dim=2)
    del sides
    areas = (objects[:, 2:] - objects[:, :2]).prod(dim=1), (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    overlap = torch.where(inter > 0, inter / (areas[0][:, None] + areas[1] - inter), torch.zeros(1, device="cuda"))
    del inter
    overlap.max(dim=0)
    _ = overlap == overlap.max(dim=1)[0][:, None]


class ROIAlign(torch.autograd.Function):
    """Features of boxes: the memory of the operator, which needs its input's shape alone for backward."""

    @staticmethod
    def forward(ctx, features, boxes, size):
        ctx.shape = features.shape
        return features.new_empty(boxes, features.shape[1], size, size)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous().new_zeros(ctx.shape), None, None


def pool(features, boxes, size):
    """Return the features of boxes, which are spread evenly over the levels."""
    if len(features) == 1:
        return ROIAlign.apply(features[0], boxes, size)
    out = torch.zeros(boxes, features[0].shape[1], size, size, device="cuda")
    for level, feature in enumerate(features):
        rows = torch.arange(boxes * level // len(features), boxes * (level + 1) // len(features), device="cuda")
        out.index_put_((rows,), ROIAlign.apply(feature, len(rows), size))
    return out


class RPN(nn.Module):
    """Proposals: a convolution, an objectness and a box for each anchor."""

    def __init__(self, channels, anchors):
        super().__init__()
        self.body = nn.Conv2d(channels, channels, 3, padding=1)
        self.scores, self.boxes = nn.Conv2d(channels, anchors, 1), nn.Conv2d(channels, 4 * anchors, 1)

    def forward(self, features):
        hidden = [F.relu(self.body(feature)) for feature in features]
        scores = [self.scores(one).permute(0, 2, 3, 1).flatten(1) for one in hidden]
        boxes = [self.boxes(one).permute(0, 2, 3, 1).flatten(1) for one in hidden]
        del hidden
        for _ in range(IMAGES):
            match(sum(one.shape[1] for one in scores))
        sampled = torch.arange(256 * IMAGES, device="cuda")
        chosen = torch.cat(scores, dim=1).flatten()[sampled]
        places = torch.cat(boxes, dim=1).reshape(-1, 4)[sampled]
        return F.binary_cross_entropy_with_logits(chosen, torch.ones_like(chosen)), places.abs().sum()


class BoxHead(nn.Module):
    """Two linear layers, or the last stage of the backbone, and the predictions of class and box."""

    def __init__(self, row, channels):
        super().__init__()
        self.last = stages(row)[4] if row.features == "C4" else None
        width = 2048 if self.last else 1024
        self.body = None if self.last else nn.Sequential(nn.Linear(channels * 49, width), nn.ReLU())
        self.second = None if self.last else nn.Sequential(nn.Linear(width, width), nn.ReLU())
        classes = 1 if row.kind == "keypoint" else CLASSES
        self.scores, self.boxes = nn.Linear(width, classes + 1), nn.Linear(width, 4 * classes)

    def forward(self, features):
        """Return the losses, and the features of all boxes if the other heads share them."""
        boxes = IMAGES * SAMPLED
        if self.last:
            shared = self.last(pool(features, boxes, 14))
            x = shared.mean(dim=[2, 3])
        else:
            shared = None
            x = self.second(self.body(pool(features, boxes, 7).flatten(1)))
        scores, places = self.scores(x), self.boxes(x)
        labels = torch.zeros(boxes, dtype=torch.long, device="cuda")
        return [F.cross_entropy(scores, labels), places.abs().sum()], shared


class MaskHead(nn.Module):
    """Convolutions on the features of objects, and a mask for each class."""

    def __init__(self, row, channels):
        super().__init__()
        count = 0 if row.features == "C4" else 4
        self.body = nn.ModuleList(nn.Conv2d(channels if i == 0 else 256, 256, 3, padding=1) for i in range(count))
        self.up = nn.ConvTranspose2d(256 if count else channels, 256, 2, stride=2)
        self.masks = nn.Conv2d(256, CLASSES, 1)

    def forward(self, features, shared):
        objects = torch.arange(IMAGES * POSITIVE, device="cuda")
        x = pool(features, IMAGES * POSITIVE, 14) if shared is None else shared[objects]
        for convolution in self.body:
            x = F.relu(convolution(x))
        chosen = self.masks(F.relu(self.up(x)))[objects, torch.zeros_like(objects)]
        return F.binary_cross_entropy_with_logits(chosen, torch.ones_like(chosen))


class KeypointHead(nn.Module):
    """Eight convolutions on the features of people, and a map for each of 17 keypoints."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.Conv2d(256 if i == 0 else 512, 512, 3, padding=1) for i in range(8))
        self.up = nn.ConvTranspose2d(512, 17, 4, stride=2, padding=1)

    def forward(self, features):
        people = IMAGES * POSITIVE
        x = pool(features, people, 14)
        for convolution in self.body:
            x = F.relu(convolution(x))
        maps = F.interpolate(self.up(x), scale_factor=2, mode="bilinear", align_corners=False)
        visible = torch.arange(17 * people, device="cuda")
        return F.cross_entropy(maps.view(17 * people, -1)[visible], torch.zeros_like(visible))


class RetinaHead(nn.Module):
    """Four convolutions for classes and four for boxes, at nine anchors for each position; focal loss."""

    def __init__(self):
        super().__init__()
        self.classes, self.boxes = (
            nn.Sequential(*(part for _ in range(4) for part in (nn.Conv2d(256, 256, 3, padding=1), nn.ReLU())))
            for _ in range(2)
        )
        self.scores, self.places = nn.Conv2d(256, 9 * CLASSES, 3, padding=1), nn.Conv2d(256, 36, 3, padding=1)

    def forward(self, features):
        scores = [self.scores(self.classes(feature)) for feature in features]
        places = [self.places(self.boxes(feature)) for feature in features]
        scores = [one.permute(0, 2, 3, 1).reshape(IMAGES, -1, CLASSES) for one in scores]
        places = [one.permute(0, 2, 3, 1).reshape(IMAGES, -1, 4) for one in places]
        anchors = sum(one.shape[1] for one in scores)
        for _ in range(IMAGES):
            match(anchors)
        valid = torch.arange(IMAGES * anchors, device="cuda")
        logits = torch.cat(scores, dim=1).flatten(0, 1)[valid]
        one_hot = F.one_hot(torch.zeros_like(valid), CLASSES + 1)[:, :-1]
        targets = one_hot.float()  # both are alive while the loss runs
        chances = torch.sigmoid(logits)
        loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        right = chances * targets + (1 - chances) * (1 - targets)
        loss = loss * (1 - right) ** 2
        loss = (0.25 * targets + 0.75 * (1 - targets)) * loss
        return loss.sum(), torch.cat(places, dim=1).abs().sum()


class Detector(nn.Module):
    """A backbone and the heads of one kind of detector."""

    def __init__(self, row):
        super().__init__()
        self.kind, self.features = row.kind, row.features
        count = 4 if row.features == "C4" else 5
        self.backbone = stages(row)[:count]
        channels = {"C4": 1024, "DC5": 2048, "FPN": 256}[row.features]
        levels = (512, 1024, 2048) if row.kind == "retinanet" else (256, 512, 1024, 2048)
        self.pyramid = Pyramid(levels, row.kind == "retinanet") if row.features == "FPN" else None
        self.retina = RetinaHead() if row.kind == "retinanet" else None
        self.rpn = None if row.kind in ("fast", "retinanet") else RPN(channels, 3 if self.pyramid else 15)
        self.box = None if row.kind in ("rpn", "retinanet") else BoxHead(row, channels)
        self.mask = MaskHead(row, 2048 if row.features != "FPN" else 256) if row.kind == "mask" else None
        self.keypoint = KeypointHead() if row.kind == "keypoint" else None

    def forward(self, images):
        found, x = [], images
        for stage in self.backbone:
            x = stage(x)
            found.append(x)
        features = self.pyramid(found[-len(self.pyramid.lateral) :]) if self.pyramid else found[-1:]
        del found, x
        if self.retina:
            return self.retina(features)
        losses = list(self.rpn(features)) if self.rpn else []
        if self.box:
            levels = features[:4]
            more, shared = self.box(levels)
            losses += more
            if self.mask:
                losses.append(self.mask(levels, shared))
            if self.keypoint:
                losses.append(self.keypoint(levels))
        return losses
