"""A training script as users write them, for tests that probe commands: python script.py --batch-size 8 --fault bug.

It trains a small MLP; under a launcher with DDP. The fault happens in the second step, on rank `--rank` or on all.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from unittest.mock import MagicMock

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=int(os.environ.get("OOMPROBE_BATCH", "1")))
parser.add_argument("--steps", type=int, default=10_000)
parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
parser.add_argument(
    "--samples", type=int, help="of the data set; the last batch is left out if it is smaller"
)
parser.add_argument("--fault", default="")
parser.add_argument("--rank", type=int)
arguments = parser.parse_args()

if "sets-conf" in arguments.fault:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch  # noqa: E402  (scripts set allocator settings before this line)
from torch import nn  # noqa: E402
from torch.cuda import reset_peak_memory_stats  # noqa: E402

# Optimizers import the compiler only to be left out of it, in half the time of a run.
torch._dynamo = sys.modules["torch._dynamo"] = MagicMock(
    disable=lambda function, *_, **__: function
)

MIB = 2**20
if arguments.fault == "older-torch":  # which does not tell whether a program records
    del torch._C._cuda_isHistoryEnabled
if arguments.fault == "records-at-once":
    torch.cuda.memory._record_memory_history(max_entries=1000)
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
torch.cuda.set_device(device)
fault = arguments.fault if arguments.rank in (None, rank) else ""
if fault == "sets-fraction":
    torch.cuda.set_per_process_memory_fraction(0.95)
TIP = "tip: after 'CUDA out of memory. Tried to allocate 20.00 MiB' lower the batch size"
if "quotes" in fault:
    print(TIP, file=sys.stderr, flush=True)  # noqa: T201
if fault == "skips-once-beside-convolutions":
    convolution = nn.Conv2d(1, 1, 1)
if world_size > 1:
    torch.distributed.init_process_group(arguments.backend)


def use_up_memory():
    kept = []
    while True:
        kept.append(torch.empty(16 * MIB, dtype=torch.uint8, device=device))


class RunsOutInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        use_up_memory()


def misbehave():
    match fault:
        case "caught-then-hangs":
            try:
                use_up_memory()
            except torch.OutOfMemoryError:
                time.sleep(600)
        case "skips-once" | "skips-once-beside-convolutions":
            with contextlib.suppress(torch.OutOfMemoryError):
                use_up_memory()
        case "bug":
            print(  # noqa: T201
                "INFO kernel limits: INT_MAX, /dev/shm 64M, CUDNN_STATUS_EXECUTION_FAILED is handled",
                flush=True,
            )
            raise KeyError("input_ids")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)


model = nn.Sequential(
    nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 512)
).to(device)
if world_size > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
if fault == "records-later":
    torch.cuda.memory._record_memory_history(max_entries=1000)
size = 4 if fault == "ignores" else arguments.batch_size
samples = arguments.samples or size * arguments.steps
for number in range(min(arguments.steps, samples // size)):
    if "quotes" in fault:
        print(TIP, f"step {number}", flush=True)  # noqa: T201
    if number == 1:
        misbehave()
    y = model(torch.randn(size * 256, 512, device=device))
    if fault == "backward" and number == 1:
        y = RunsOutInBackward.apply(y)
    y.square().mean().backward()
    if "resets" in fault:
        reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
    optimizer.step()
    optimizer.zero_grad()
if "fails-at-the-end" in fault:
    print("FileNotFoundError: validation.jsonl", flush=True)  # noqa: T201
    os._exit(1)  # at once: exiting takes torch some time
if world_size > 1:
    torch.distributed.destroy_process_group()
# torch 2.14 may abort an exit right after a backward pass: https://github.com/pytorch/pytorch/issues/190489
time.sleep(0.1)
