"""Time a simulated search in traced steps, and a traced step against torch's MemTracker, on a ResNet-50.

python scripts/benchmark_simulation.py

All ratios are measured in one run, on one thread. Targets: a search takes less than 8 traced steps, and a traced step less
than a fifth of a step under MemTracker in the same fake mode. The network is ResNet-50 (He et al., arXiv:1512.03385, table 1),
with the stride in the 3 x 3 convolution.
"""

import statistics
import time

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import MemTracker
from torch.nn import functional as F

import oomprobe

BATCH, SIDE, CLASSES = 8, 224, 1000


class Bottleneck(nn.Module):
    def __init__(self, wide_in, narrow, stride):
        super().__init__()
        wide = 4 * narrow
        self.body = nn.Sequential(
            *unit(wide_in, narrow, 1, 1), nn.ReLU(inplace=True),
            *unit(narrow, narrow, 3, stride), nn.ReLU(inplace=True),
            *unit(narrow, wide, 1, 1),
        )  # fmt: skip
        changes = stride > 1 or wide_in != wide
        self.shortcut = nn.Sequential(*unit(wide_in, wide, 1, stride)) if changes else nn.Identity()

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def unit(channels_in, channels_out, kernel, stride):
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels_out)


def resnet50():
    layers = [*unit(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    wide = 64
    for narrow, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(blocks):
            layers.append(Bottleneck(wide, narrow, stride if index == 0 else 1))
            wide = 4 * narrow
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, CLASSES))


def stepper(model, optimizer):
    def step(model, batch_size):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(batch_size, 3, SIDE, SIDE)), torch.zeros(batch_size, dtype=torch.long))
        loss.backward()
        optimizer.step()

    return step


def seconds(call):
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def traced_steps_s(batch_sizes):
    """Return median seconds of a steady step at a new size and at a size seen before."""
    model = resnet50()
    step = stepper(model, torch.optim.AdamW(model.parameters()))
    card = oomprobe.SimulatedDevice("A100-80GB")
    card.place([*model.parameters(), *model.buffers()])
    card.start_trial()

    def call(batch_size):
        with card.session():
            step(model, batch_size)

    call(batch_sizes[0])
    first = [seconds(lambda size=size: call(size)) for size in batch_sizes[1:]]
    again = [seconds(lambda: call(batch_sizes[-1])) for _ in range(3)]
    return statistics.median(first), statistics.median(again)


def mem_tracker_step_s():
    """Return median seconds of a steady step under MemTracker."""
    with FakeTensorMode():
        model = resnet50()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        step = stepper(model, optimizer)
        times = []
        for _ in range(3):
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                times.append(seconds(lambda: step(model, BATCH)))
        return statistics.median(times[1:])


def main():
    torch.set_num_threads(1)
    first_s, again_s = traced_steps_s([BATCH, 16, 32, 64])
    model = resnet50()
    step = stepper(model, torch.optim.AdamW(model.parameters()))
    started_s = time.perf_counter()
    result = oomprobe.find_max_batch(model, step, device="sim:A100-80GB", min_batch=2, progress="off")
    search_s = time.perf_counter() - started_s
    tracker_s = mem_tracker_step_s()
    replayed = sum(trial.replayed for trial in result.trials)
    print(f"traced step           {first_s:7.2f} s at a new size, {again_s:.2f} s at a size seen before")
    print(
        f"search, batch {result.batch_size:6}  {search_s:7.2f} s, {len(result.trials)} trials, {replayed} of them replayed"
    )
    print(f"MemTracker step       {tracker_s:7.2f} s")
    print(f"search / traced step  {search_s / first_s:7.1f}    (target: under 8)")
    print(
        f"traced / MemTracker   {again_s / tracker_s:7.2f}    (target: under 0.2; at a new size {first_s / tracker_s:.2f})"
    )


if __name__ == "__main__":
    main()
