"""What a card has not been asked yet: `scripts/gpu-check --plan`, twelve minutes at most.

Each part has a limit of its own, and the file of evidence is written before each process of it starts, so that nothing is lost when the
card goes. Each trial and each training has a process of its own, which has done nothing else.
"""

import json
import os
import random
import tempfile
import time
from itertools import islice

TARGET = f"{os.path.abspath(__file__)}:"
GIB = 2**30
LIMIT_BYTES = 4 * GIB  # of the small card
CALLS = 4  # of each recording
# Two sizes to learn from, and one to predict.
SIZES = {
    "readme": (4, 8, 24),
    "conv_net": (64, 128, 512),
    "conv_net, benchmark": (64, 128, 512),
    "bottlenecks": (4, 8, 24),
    "bottlenecks, benchmark": (4, 8, 24),
    "gpt_bfloat16": (64, 128, 384),
}
DRAWN = {"calls": 60, "orders": 8}
TRAINED = {"longest_only_ends": 5, "ends": 2}  # orders that train
ROWS = ("expandable_segments", "bf16_autocast", "checkpoint", "fused_optimizer", "no_foreach")
ROWS += ("offload_activations", "checkpoint_attention_saved")
SAVED_SIZE, BLOCKS = 8, 12  # of GPT-2 small
PINNED = (1, 512, 4097, 2**20, 2**20 + 1, 3 * 2**20, 12_582_912, 5 * 2**20 + 3)
LONG = {"conv_net": 500, "small_gpt": 500, "gpt_bfloat16": 500}  # steps
EXPANDABLE = "expandable_segments:True"


def carry_out(evidence, write, in_child, parts=None):
    """Add what each part finds to the evidence.

    Args:
        evidence: The findings by part, and what the card is.
        write: Writes the evidence.
        in_child: As `check.in_child`.
        parts: The parts with their limits in seconds, by name; None: all.
    """
    for name, (part, limit_s) in (parts or PARTS).items():
        started = time.monotonic()
        found = evidence[name] = {}

        def run(function, *args, ends=started + limit_s):
            write()
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return {"error": "the time of its part was over"}
            return in_child(function, *args, limit_s=left_s)

        try:
            part(run, found)
        except Exception as error:  # the other parts go on
            found["error"] = f"{type(error).__name__}: {error}"[:2000]
        found["seconds"] = round(time.monotonic() - started, 1)
        write()
        print(f"{name}: {json.dumps(found.get('in short', found))[:300]}", flush=True)


# --- does prediction hold where cuDNN chooses ---


def prediction(run, found):
    for name, sizes in SIZES.items():
        tapes = [run(tape, name, size) for size in sizes]
        [*said] = (one["error"] for one in tapes if "error" in one)
        found[name] = {"error": said[0]} if said else compare(sizes, tapes)
        found[name]["tapes"] = tapes
    found["in short"] = {
        name: one.get("error") or f"{one['as predicted']} of {one['requests']}"
        for name, one in found.items()
    }


def tape(name, batch_size):
    """Record the first calls of a training."""
    import torch

    from gpu_check.models import MODELS
    from gpu_check.recording import loop_of
    from oomprobe.devices.accelerator import AcceleratorDevice

    name, _, benchmark = name.partition(", ")
    torch.backends.cudnn.benchmark = bool(benchmark)
    recorder = AcceleratorDevice(torch.device("cuda")).call_recorder()
    model, step = {**MODELS, "bottlenecks": bottlenecks}[name]()
    loop = loop_of(step)
    with recorder.recording(CALLS):
        recorder.start_trial()
        for _ in range(CALLS):
            with loop.keeping():
                step(model, batch_size)
            torch.cuda.synchronize()
            recorder.end_call()
    taped = recorder.taped_trial()
    return {"error": recorder.reason} if taped is None else {"tape": taped.plain()}


def compare(sizes, tapes):
    """Return how many requests of the last size came as the others predict, and both peaks."""
    from oomprobe.tape.fit import Predictor
    from oomprobe.tape.record import TapedTrial
    from oomprobe.tape.shapes import share_alike

    *learned, ran = (TapedTrial.read(one["tape"]) for one in tapes)
    predictor, names = Predictor(processors=ran.processors), ["step"] * CALLS
    for size, one in zip(sizes, learned, strict=False):
        predictor.learn(size, names, one.calls)
    predicted = predictor.calls(sizes[-1], names)
    if predicted is None:
        return {"error": f"no prediction: {predictor.reason}"}
    shares = [share_alike(*calls) for calls in zip(ran.calls, predicted, strict=True)]
    return {
        "sizes": sizes,
        "as predicted": sum(alike for alike, _ in shares),
        "requests": sum(made for _, made in shares),
        "reserved_bytes": ran.replay(ran.calls, None, 0).peak_reserved_bytes,
        "predicted_reserved_bytes": ran.replay(predicted, None, 0).peak_reserved_bytes,
    }


def bottlenecks():
    """Sixteen bottlenecks as a ResNet has them, in channels_last under autocast, on images of 224 x 224."""
    import torch
    from torch import nn

    def convolution(inner, outer, kernel, stride=1):
        layer = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outer), nn.ReLU(inplace=True))

    layers, width = [convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for outer, count in ((256, 3), (512, 4), (1024, 6), (2048, 3)):
        for number in range(count):
            stride = 2 if number == 0 and outer > 256 else 1
            layers += [
                convolution(width, outer // 4, 1),
                convolution(outer // 4, outer // 4, 3, stride),
                convolution(outer // 4, outer, 1),
            ]
            width = outer
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))
    model = nn.Sequential(*layers, *head).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model, batch_size):
        images = torch.randn(batch_size, 3, 224, 224, device="cuda")
        images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (batch_size,), device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return model, step


# --- do trainings of varying lengths end in the call that was predicted ---


def attention():
    from gpu_check.table import model_and_step

    return model_and_step()


def epoch():
    import oomprobe

    drawn = random.Random(0)
    lengths = [min(512, max(8, round(90 * drawn.lognormvariate(0, 0.6)))) for _ in range(3000)]
    return oomprobe.Epoch({"length": lengths}, **DRAWN)


def epochs(run, found):
    found.update(run(epoch_on_card))
    if "error" in found:
        return
    size = found["epoch"]["longest_only_batch_size"]
    found["simulated"] = run(epoch_simulated, size, found["available_bytes"])
    found["trained"] = {}
    for ends, orders in TRAINED.items():
        size = found["epoch"]["batch_size" if ends == "ends" else "longest_only_batch_size"]
        found["trained"][ends] = [
            run(train_order, order, size, found["budget_bytes"]) for order in range(orders)
        ]
    found["in short"] = {
        "trained": found["trained"],
        "replayed": {ends: found["epoch"][ends] for ends in TRAINED},
        "simulated": found["simulated"],
    }


def epoch_on_card():
    import oomprobe
    from gpu_check.check import hold_to

    hold_to(LIMIT_BYTES)
    options = {"isolate": False, "epoch": epoch(), "time_limit_s": 90, "progress": "off"}
    return oomprobe.probe_target(f"{TARGET}attention", **options).to_dict()


def epoch_simulated(batch_size, available_bytes):
    import oomprobe
    from gpu_check.recording import this_card

    device = oomprobe.SimulatedDevice(this_card(), available_bytes=available_bytes)
    options = {"device": device, "isolate": False, "epoch": epoch(), "progress": "off"}
    record = oomprobe.check_target(f"{TARGET}attention", batch_size, **options).epoch
    return {"ends": record.ends, "reason": record.reason}


def train_order(order, batch_size, cap_bytes):
    """Return in which call a training runs out of memory, from 1; None if it does not."""
    import torch

    from gpu_check.check import hold_to
    from gpu_check.recording import loop_of

    hold_to(cap_bytes)
    model, step = attention()
    loop = loop_of(step)
    for number, arguments in enumerate(epoch().batches(order, batch_size), 1):
        try:
            with loop.keeping():
                step(model, **arguments)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return {"ended": number}
    return {"ended": None}


# --- what savings cost, and whether their peaks are those of the simulated card ---


def gpt2_small():
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(50_257, 768), nn.Embedding(256, 768)
            layer = {"batch_first": True, "norm_first": True, "activation": "gelu", "dropout": 0.0}
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(768, 12, 3072, **layer) for _ in range(BLOCKS)
            )
            self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 50_257, bias=False)

        def forward(self, tokens):
            x = self.tokens(tokens) + self.places.weight
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        tokens = torch.randint(50_257, (batch_size, 256), device="cuda")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()

    return model, step


def savings(run, found):
    for row in ROWS:
        found[row] = run(saved, row)
    found["in short"] = {row: one.get("error") or one["peaks"] for row, one in found.items()}


def saved(row):
    """Return what a saving takes on the card and on the simulated one: peaks, the time of a step, pinned memory."""
    import oomprobe
    from gpu_check.recording import this_card

    measured = ("peak_allocated_bytes", "peak_reserved_bytes", "step_s", "pinned_bytes")
    found = {"peaks": []}
    for name, device in (("card", None), ("simulated", oomprobe.SimulatedDevice(this_card()))):
        options = {"isolate": False, "max_batch": SAVED_SIZE, "progress": "off", "device": device}
        table = oomprobe.probe_target(f"{TARGET}gpt2_small", savings=[row], **options)
        found[name] = {
            row: {figure: getattr(result.confirmation, figure) for figure in measured}
            for row, result in table.fitting()
        }
        found["peaks"].append(found[name].get(row, {}).get("peak_allocated_bytes"))
        found["not run"] = table.savings.not_run
    return found


# --- is pinned memory what the model of its allocator says ---


def pinned(run, found):
    found.update(run(pin))
    found["in short"] = found.get("error") or {"equal": found["card"] == found["model"]}


def pin():
    """Pin, free half, and pin again; return both allocators' figures after each."""
    import torch

    from oomprobe.allocator import PinnedAllocator

    model, live, on_card, in_model = PinnedAllocator(), [], [], []
    torch.zeros(1, device="cuda")
    for _ in range(2):
        for nbytes in PINNED:
            tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            live.append((tensor, model.malloc(nbytes)))
            stats, expected = torch.cuda.host_memory_stats(), model.stats()
            on_card.append({name: stats.get(name) for name in expected})
            in_model.append(expected)
        del tensor
        freed, live = live[::2], live[1::2]
        while freed:
            model.free(freed.pop()[1])
    return {"card": on_card, "model": in_model}


# --- does the replay of a recording say what the card did ---


def explained(run, found):
    for name, settings in (("segments", ""), ("expandable segments", EXPANDABLE)):
        found[name] = run(fragment, settings)
    found["in short"] = {
        name: one.get("error") or [one["cause"], one["least_bytes"], one["least_bytes_expandable"]]
        for name, one in found.items()
    }


def fragment(settings):
    """Train with varying lengths until memory runs out, and explain the snapshot."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = settings
    import torch

    import oomprobe
    from gpu_check.check import hold_to
    from gpu_check.recording import MOST_EVENTS, loop_of

    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
    hold_to(LIMIT_BYTES // 2)
    model, step = attention()
    loop, size = loop_of(step), 8
    try:
        while True:
            for arguments in islice(epoch().batches(0, size), 12):
                with loop.keeping():
                    step(model, **arguments)
            size += size // 4
    except torch.OutOfMemoryError:
        pass
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.memory._dump_snapshot(f"{folder}/snapshot.pickle")
        told = oomprobe.explain(f"{folder}/snapshot.pickle").to_dict()
    del told["timeline"]
    return {**told, "size": size, "limit_bytes": LIMIT_BYTES // 2}


# --- is a confirmation that ended early a proof ---


def long_runs(run, found):
    from gpu_check.check import SMALL, probe, train

    for name, steps in LONG.items():
        told = run(probe, {"model": name, **SMALL})
        found[name] = told if "error" in told else {"answer": told["answer"], "steps": steps}
        if "error" not in told:
            budget_bytes = told["result"]["budget_bytes"]
            ended = run(train, name, told["answer"], steps, budget_bytes)
            found[name]["ended"] = ended.get("error", "ran")
    found["in short"] = {name: one.get("error") or one["ended"] for name, one in found.items()}


PARTS = {
    "prediction": (prediction, 200),
    "epochs": (epochs, 170),
    "savings": (savings, 150),
    "pinned memory": (pinned, 20),
    "explained": (explained, 60),
    "long runs": (long_runs, 110),
}
