"""The work: small models that train for real, and the ways in which training sets traps for a prober.

Each model's ``forward(x)`` gives its loss, so that every tool can run it: those that are handed a step, those that want
a model and its inputs, those that make the model anew.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from peers import seen

MIB = 2**20


class Trained(nn.Module):
    """Says what it was given, and which batches came through backward."""

    def forward(self, x):
        seen.forward(len(x))
        return self.loss(x)

    def watched(self, entry):
        """Notes when backward reaches this, an activation near the input; of a batch in parts, each part says it of all."""
        size = seen.last_size()
        if entry.requires_grad:
            entry.register_hook(lambda gradient: seen.backward(size))
        return entry


class ConvNet(Trained):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.rest = nn.Sequential(
            nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    def loss(self, x):
        return self.rest(self.watched(self.first(x))).square().mean()


class SmallGPT(Trained):
    WIDTH, VOCABULARY = 128, 1000

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        layer = nn.TransformerEncoderLayer(self.WIDTH, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY)

    def forward(self, input_ids):
        return super().forward(input_ids)

    def loss(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        logits = self.head(self.blocks(self.watched(self.tokens(x)), mask=mask, is_causal=True))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Plain(Trained):
    """Half a MiB of activations a sample, used twice, and `table_mib` of parameters, a cost that is fixed."""

    WIDTH, REPEATS = 1024, 128

    def __init__(self, table_mib=0):
        super().__init__()
        self.first = nn.Linear(64, self.WIDTH)
        self.table = nn.Parameter(torch.zeros(table_mib * MIB // 4)) if table_mib else None

    def loss(self, x):
        loss = self.watched(self.first(x)).repeat(1, self.REPEATS).sin().mean()
        return loss if self.table is None else loss + self.table.mean()


class OneIsTooFew(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def loss(self, x):
        return super().loss(self.norm(x))


class Buggy(Plain):
    def loss(self, x):
        if len(x) > 24:
            raise ValueError(f"could not broadcast 24 labels to {len(x)}")
        return super().loss(x)


class SizeLimited(Plain):
    """torch draws from at most 2**24 categories, however much memory there is; here each sample brings 2**19."""

    def loss(self, x):
        torch.multinomial(torch.ones(len(x) * 2**19), 1)
        return super().loss(x)


class Leaking(Plain):
    def __init__(self, kept_kib=1024):
        super().__init__()
        self.history, self.kept_kib = [], kept_kib

    def loss(self, x):
        self.history.append(torch.ones(self.kept_kib * 256))
        return super().loss(x)


def leaking_slowly():
    return Leaking(kept_kib=64)


class Poisoned(Plain):
    """Above a size it says what CUDA says, and from then on says it to everything, as a CUDA context does."""

    broken = False

    def loss(self, x):
        Poisoned.broken = Poisoned.broken or len(x) > 24
        if Poisoned.broken:
            raise RuntimeError(
                "CUDA error: an illegal memory access was encountered\n"
                "CUDA kernel errors might be asynchronously reported at some other API call"
            )
        return super().loss(x)


class NotMonotone(Plain):
    """From 97 on it works in two halves, as libraries do that change their algorithm with the size."""

    def loss(self, x):
        if len(x) < 97:
            return super().loss(x) + super().loss(x)
        half = len(x) // 2
        first = checkpoint(super().loss, x[:half], use_reentrant=False)
        return first + super().loss(x[half:])


class Yolo(Trained):
    """Ultralytics' smallest detector, with its own loss for eight objects in each image."""

    OBJECTS = 8

    def __init__(self):
        from ultralytics import YOLO
        from ultralytics.cfg import get_cfg

        super().__init__()
        self.detector = YOLO("yolo11n.yaml", verbose=False).model
        self.detector.args = get_cfg()

    def loss(self, x):
        count = len(x) * self.OBJECTS
        boxes = torch.rand(count, 4, device=x.device) / 4 + 0.25
        images = torch.arange(len(x), device=x.device).repeat_interleave(self.OBJECTS)
        labels = torch.zeros(count, 1, device=x.device)
        batch = {"img": self.watched(x.requires_grad_()), "cls": labels, "bboxes": boxes, "batch_idx": images}
        return self.detector.loss(batch)[0].sum()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer and its data.

    Attributes:
        says: What is hard about it.
        sample: Shape of one example; of floats, or of token ids.
        examples: How many there are, where that is the point.
        right_words: What an error, or a note beside a number, has to say so that it is right. None: no error is.
        a_number_hides: What no number tells, a bug or a leak: one that nothing is said of is wrong.
        scan_steps: Steps that a size has to survive to count as fitting.
        scan_beyond: Failures in a row that end a scan.
        device: Where it trains.
        mixed: What autocast computes in; with float16 the loss is scaled. None: without autocast.
        needs: A package without which it cannot be built.
    """

    name: str
    says: str
    build: Callable[[], nn.Module]
    sample: tuple[int, ...] = (64,)
    tokens: bool = False
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    budget_mib: int = 128
    examples: int | None = None
    smallest: int = 1
    right_words: str | None = None
    a_number_hides: bool = False
    scan_steps: int = 3
    scan_beyond: int = 12
    device: str = "cpu"
    mixed: torch.dtype | None = None
    needs: str | None = None

    def placed(self):
        """The model where it trains."""
        return self.build().to(self.device)

    def inputs(self, size):
        size = size if self.examples is None else min(size, self.examples)
        shape = (size, *self.sample)
        return torch.randint(1000, shape, device=self.device) if self.tokens else torch.randn(shape, device=self.device)

    def step(self, optimizer):
        """The loop's body, as one writes it."""
        if self.mixed is not None:
            return self._mixed_step(optimizer)

        def step(model, batch_size):
            x = self.inputs(batch_size)
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

        return step

    def _mixed_step(self, optimizer):
        scaler = torch.amp.GradScaler(self.device, enabled=self.mixed is torch.float16)

        def step(model, batch_size):
            x = self.inputs(batch_size)
            optimizer.zero_grad()
            with torch.autocast(self.device, dtype=self.mixed):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step


def wide():
    """Most of the memory is parameters, gradients and AdamW's state, whatever the batch."""
    return Plain(table_mib=32)


LEAK = r"(?i)\bleak(s|ed|ing)?\b|did not come back|keeps \d|memory (grows|grew|is growing)"

HOST = {
    workload.name: workload
    for workload in (
        Workload("conv", "a convolutional net", ConvNet, sample=(3, 32, 32), budget_mib=32),
        Workload("gpt", "a small GPT", SmallGPT, sample=(64,), tokens=True, budget_mib=80),
        Workload("mlp", "a big fixed cost", wide, optimizer=sgd, budget_mib=128),
        Workload("second-step", "AdamW's state comes with step 1, step 2 needs more", wide, budget_mib=256),
        Workload("one-is-too-few", "BatchNorm refuses a batch of 1", OneIsTooFew, smallest=2),
        Workload(
            "nothing-fits",
            "not even a batch of 1",
            wide,
            budget_mib=40,
            right_words=r"memory|does not fit|batch size found",
        ),
        Workload("100-examples", "memory for more than the data set has", Plain, budget_mib=512, examples=100),
        Workload("bug", "a bug above 24", Buggy, right_words="could not broadcast", a_number_hides=True),
        Workload("size-limit", "torch refuses sizes above 32", SizeLimited, budget_mib=512),
        Workload(
            "leak",
            "each step keeps 1 MiB",
            Leaking,
            budget_mib=192,
            scan_steps=50,
            right_words=LEAK,
            a_number_hides=True,
        ),
        Workload(
            "slow-leak",
            "each step keeps 64 KiB",
            leaking_slowly,
            budget_mib=192,
            scan_steps=50,
            right_words=LEAK,
            a_number_hides=True,
        ),
        Workload(
            "poisoned",
            "above 24 the process is lost (CUDA's words for it)",
            Poisoned,
            right_words="illegal memory access",
        ),
        Workload("not-monotone", "from 97 on less memory is needed", NotMonotone, budget_mib=192, scan_beyond=130),
        Workload(
            "yolo",
            "Ultralytics' yolo11n at 160 pixels",
            Yolo,
            sample=(3, 160, 160),
            budget_mib=192,
            needs="ultralytics",
        ),
    )
}
