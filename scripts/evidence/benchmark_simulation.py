"""Time a simulated search in traced steps, and a traced step against torch's MemTracker, on a ResNet-50; and searches of real loops.

python scripts/evidence/benchmark_simulation.py

All ratios are measured in one run, on one thread. Targets: a search takes less than 8 traced steps, and a traced step less
than a fifth of a step under MemTracker in the same fake mode. The network is ResNet-50 (He et al., arXiv:1512.03385, table 1),
with the stride in the 3 x 3 convolution. Each search of a real loop is given in CPU seconds, and as a multiple of a search without
predictions. The loops need transformers.
"""

import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import MemTracker
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from calibration import torchvision_names  # noqa: E402

import oomprobe  # noqa: E402
from oomprobe.runners.predicting import Replays  # noqa: E402

torchvision_names.declare()  # its operators do not load with a torch without CUDA, and then transformers does not import

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
    convolution = nn.Conv2d(
        channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False
    )
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
        loss = F.cross_entropy(
            model(torch.randn(batch_size, 3, SIDE, SIDE)), torch.zeros(batch_size, dtype=torch.long)
        )
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


# --- real loops ---


def gpt2(layers=12):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))


def tokens(batch_size):
    return torch.randint(50257, (batch_size, 256), device="cuda")


def evaluate(model, batch_size):
    model.eval()
    with torch.no_grad():
        model(tokens(batch_size), labels=tokens(batch_size))
    model.train()


def accumulating(*, counts):
    """Return steps that train over four micro-batches, in one call or in four, and evaluate."""
    model = gpt2()
    optimizer, seen = torch.optim.AdamW(model.parameters()), {"calls": 0}

    def backward(model, batch_size):
        (model(tokens(batch_size), labels=tokens(batch_size)).loss / 4).backward()

    def update():
        optimizer.step()
        optimizer.zero_grad()

    def train(model, batch_size):
        for _ in range(4):
            backward(model, batch_size)
        update()

    def micro_batch(model, batch_size):
        backward(model, batch_size)
        seen["calls"] += 1
        if seen["calls"] % 4 == 0:
            update()

    return lambda: oomprobe.find_max_batch(
        model,
        {"train": micro_batch if counts else train, "eval": evaluate},
        device="sim:24GiB",
        progress="off",
    )


def trainer():
    """Return the search of a Trainer that accumulates over four micro-batches and evaluates."""
    from transformers import Trainer, TrainingArguments

    from oomprobe.integrations.transformers import find_max_batch

    example = dict.fromkeys(("input_ids", "labels"), torch.zeros(256, dtype=torch.long))
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=8, gradient_accumulation_steps=4, eval_strategy="steps", eval_steps=100,
        use_cpu=True, report_to=[],
    )  # fmt: skip
    made = Trainer(
        gpt2(6), arguments, train_dataset=[example] * 4096, eval_dataset=[example] * 4096
    )
    return lambda: find_max_batch(made, write_back=False, device="sim:24GiB", progress="off")


def generating():
    """Return the search of a generation of 128 tokens with a cache, as docs/inference.md has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()

    page, names = (ROOT / "docs" / "inference.md").read_text(), {"torch": torch}
    loop = r"^@torch.inference_mode\(\)\ndef generate\(.*?\n\n"
    exec(re.search(loop, page, re.MULTILINE | re.DOTALL)[0], names)

    def step(model, batch_size):
        names["generate"](model, batch_size, new_tokens=128)

    return lambda: oomprobe.find_max_batch(model, step, device="sim:24GiB", progress="off")


LOOPS = {
    "GPT-2 small that accumulates and evaluates": lambda: accumulating(counts=False),
    "the same, counting its micro-batches": lambda: accumulating(counts=True),
    "a Trainer of 6 layers that does both": trainer,
    "128 tokens of 8 layers with a cache": generating,
}


def searched(make):
    """Return the result and the CPU seconds of a search."""
    search = make()
    started_s = time.process_time()
    return search(), time.process_time() - started_s


def time_loops():
    for name, make in LOOPS.items():
        result, cpu_s = searched(make)
        with mock.patch.object(Replays, "predict", return_value=None):
            truth, unpredicted_s = searched(make)
        same = "the same answer"
        if result.batch_size != truth.batch_size:
            same = f"{truth.batch_size} without predictions"
        ran = sum(not trial.replayed for trial in result.trials)
        print(
            f"{name:43} {cpu_s:5.1f} CPU s, {cpu_s / unpredicted_s:.2f} of running all: batch {result.batch_size}, {same}; {ran} "
            f"of {len(result.trials)} trials ran",
            flush=True,
        )


def main():
    torch.set_num_threads(1)
    first_s, again_s = traced_steps_s([BATCH, 16, 32, 64])
    model = resnet50()
    step = stepper(model, torch.optim.AdamW(model.parameters()))
    started_s = time.perf_counter()
    result = oomprobe.find_max_batch(
        model, step, device="sim:A100-80GB", min_batch=2, progress="off"
    )
    search_s = time.perf_counter() - started_s
    tracker_s = mem_tracker_step_s()
    replayed = sum(trial.replayed for trial in result.trials)
    print(
        f"traced step           {first_s:7.2f} s at a new size, {again_s:.2f} s at a size seen before"
    )
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
    time_loops()
