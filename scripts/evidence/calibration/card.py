"""Trainings and evaluations on a physical card and on a simulation of it: their peaks, and the answers of searches.

Measured on an H200 with this module (tests/data/measured_h200.json). The trainings of `fms` are those whose peaks were
published for another card. The rest are networks of timm: what cuDNN takes for their convolutions, no simulation knows (what
it took is in tests/data/cudnn_workspaces_h200.json, from which no rule has been made). The searches had 6 GiB of the card, and at most a minute.

    scripts/evidence/calibrate --measure FILE.json     measure on this machine's card; needs timm and transformers
"""

import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from gpu_check import check, recording

from calibration import fms, running, torchvision_names
from calibration.rows import Figure
from oomprobe.devices.simulated import SimulatedDevice
from oomprobe.simulation.cards import Card

DATA = Path(__file__).resolve().parents[3] / "tests" / "data" / "measured_h200.json"
MEASURED = json.loads(DATA.read_text()) if DATA.exists() else {}
ABOUT = {
    "source": "measured by this project",
    "card": "H200-141GB",
    "torch": "2.11.0, CUDA 13.0",
    "how": "peak allocated in three steps, in bytes; answers of `find_max_batch` on 6 GiB of the card",
}
IMAGES, CALLS = 64, 3
SEARCHED_BYTES, SEARCH_S, LIMIT_S = 6 * 2**30, 60, 150
AT_ONCE = 4  # processes on the card; each has an allocator of its own
NETS = (
    "resnet50", "resnext50_32x4d", "vgg16_bn", "densenet121", "efficientnet_b0", "convnext_tiny", "hrnet_w18",
    "vit_base_patch16_224", "swin_tiny_patch4_window7_224", "mobilenetv3_large_100", "regnety_032", "maxvit_tiny_rw_224",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A network of timm in a loop that people write.

    Attributes:
        name: The model.
        kind: "fp32": SGD with momentum; "amp": AdamW, fp16 autocast, channels last; "inference": fp16 autocast.
        benchmark: Whether cuDNN chooses its kernels by running them.
    """

    name: str
    kind: str
    benchmark: bool = False

    def __str__(self):
        return f"{self.name} {self.kind}" + ", cudnn.benchmark" * self.benchmark

    def build(self):
        """Return the model, in host memory, and its step on the card."""
        torchvision_names.declare()
        import timm

        torch.backends.cudnn.benchmark = self.benchmark
        model = timm.create_model(self.name)
        if self.kind == "inference":
            return model.eval(), evaluate
        if self.kind == "fp32":
            return model, partial(
                train, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), False
            )
        model.to(memory_format=torch.channels_last)
        return model, partial(train, torch.optim.AdamW(model.parameters()), True)


def train(optimizer, amp, model, size):
    """Take a training step."""
    images = torch.randn(size, 3, 224, 224, device="cuda")
    if amp:
        images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (size,), device="cuda")
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16, enabled=amp):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


@torch.inference_mode()
def evaluate(model, size):
    """Classify images."""
    with torch.autocast("cuda", torch.float16):
        model(torch.randn(size, 3, 224, 224, device="cuda")).argmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A fine-tuning of `fms`."""

    family: fms.Family
    lora: bool
    size: int

    def build(self):
        """Return the model, in host memory, and its step on the card."""
        model, step = fms.training(self.family, self.size, lora=self.lora)
        return model, lambda *_: step()


# --- what is compared, each in a process of its own ---


def peaks(case, card):
    """Return the peaks of the first calls on the simulation `card`, or on the real one if it is None."""
    model, step = case.build()
    size = case.size if isinstance(case, Tuned) else IMAGES
    if card is None:
        model.cuda()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(CALLS):
            step(model, size)
        torch.cuda.synchronize()
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
    device = SimulatedDevice(card)
    running.place(device, model)
    usage = running.call(device, partial(step, model, size), CALLS)
    found = {"allocated": usage.peak_allocated_bytes, "reserved": usage.peak_reserved_bytes}
    return {**found, "upper": usage.peak_upper_bytes}


def answer(net, card):
    """Return what a search finds on a part of the card."""
    import oomprobe

    model, step = net.build()
    started, device = time.monotonic(), None
    if card is None:
        model.cuda()
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(SEARCHED_BYTES / total_bytes)
    else:
        device = SimulatedDevice(replace(card, total_bytes=SEARCHED_BYTES))
    result = oomprobe.find_max_batch(
        model, step, device=device, progress="off", time_limit_s=SEARCH_S
    )
    return {"answer": result.batch_size, "seconds": round(time.monotonic() - started, 1)}


@dataclass(frozen=True, slots=True)
class Job:
    """A comparison: ``found(case, card)``."""

    name: str
    found: Callable
    case: Net | Tuned


def jobs():
    """Return all comparisons, those of large models last."""
    searched = [Net(name=name, kind=kind) for name in NETS[:9] for kind in ("fp32", "amp")]
    nets = [Net(name=name, kind=kind) for name in NETS for kind in ("fp32", "amp", "inference")]
    nets += [Net(name=name, kind="fp32", benchmark=True) for name in NETS[:4]]
    tuned = [
        Job(f"{name}, batch {size}", peaks, Tuned(family=family, lora=lora, size=size))
        for name, family, size, lora, *_ in fms.ROWS
        if (name, size) != ("Mistral-7B full", 8)  # its peak is that of the optimizer, as with 4
    ]
    return [
        *(Job(f"answer for {net}", answer, net) for net in searched),
        *(Job(f"{net}, batch {IMAGES}", peaks, net) for net in nets),
        *tuned,
    ]


def ran(job, card):
    """Return what was found in a fresh process; without an answer, a dict with "error"."""
    return check.in_child(job.found, job.case, card, limit_s=LIMIT_S)


# --- on this machine's card ---


def described():
    """Return the card of this process."""
    return asdict(recording.this_card())


def measure(path):
    """Write what the card does to a file, which is complete after each job."""
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(
        ["torch._dynamo", "timm", "transformers", "oomprobe.demo"]
    )
    found = check.in_child(described, limit_s=LIMIT_S)
    if "error" in found:
        raise SystemExit(f"calibrate: {found['error']}")
    kept = {"card": found, "torch": torch.__version__, "rows": {}}
    small = [job for job in jobs() if isinstance(job.case, Net)]
    with ThreadPoolExecutor(AT_ONCE) as on_card:
        results = on_card.map(partial(ran, card=None), small)
        for job, result in [*zip(small, results, strict=True)] + [
            (job, None) for job in jobs() if job not in small
        ]:
            kept["rows"][job.name] = ran(job, None) if result is None else result
            path.write_text(json.dumps(kept, indent=1))
            print(job.name, kept["rows"][job.name], flush=True)


# --- on its simulation ---


def compare(names=None):
    """Yield a row for each measured peak, or for those named."""
    for job, real, simulated in simulations(peaks, names):
        yield Figure(
            name=job.name,
            published_bytes=real["allocated"],
            simulated_bytes=simulated["allocated"],
            interval_bytes=(simulated["allocated"], simulated["upper"]),
            remark=f"reserved {real['reserved']:,}, simulated {simulated['reserved']:,}",
        )


def answers():
    """Yield a row of the evidence for each answer."""
    for job, real, simulated in simulations(answer):
        share = f"{100 * simulated['answer'] / real['answer']:.0f} % of the card's answer"
        said = {
            "published": f"{real['answer']} in {real['seconds']:.0f} s",
            "simulated": str(simulated["answer"]),
        }
        yield {"name": job.name, **said, "verdict": share, "remark": "6 GiB"}


def simulations(found, names=None):
    """Yield (job, what the card did, what its simulation does)."""
    multiprocessing.set_start_method("fork", force=True)
    card = Card(
        **{**MEASURED["card"], "compute_capability": tuple(MEASURED["card"]["compute_capability"])}
    )
    for job in jobs():
        real = MEASURED["rows"].get(job.name)
        if job.found is found and real is not None and (names is None or job.name in names):
            simulated = ran(job, card)
            if "error" in simulated:
                raise RuntimeError(f"{job.name}: {simulated['error']}")
            yield job, real, simulated
