"""Ask a tool on two ranks with DDP over NCCL, a card of the bed each: what each rank answers, and whether that lasts.

Run as a script, this file is a rank under torchrun: `ranks.py TOOL MODEL FOLDER`, or `ranks.py lasts MODEL FOLDER SIZE SIZE`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from gpu_check.check import within
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from peers import tools
from peers.models import WORKLOADS

CARDS = {"ranks alike": "4GiB,4GiB", "rank 1 has less memory": "4GiB,3GiB"}
STARTS = {
    "mlp_adamw": 2**18,
    "gpt_bf16": 1024,
    "conv": 2048,
}  # the first power of two above the limit of one card
LASTING_STEPS, LONGEST_S = 50, 120


def row(tool, name, cards):
    """Return each rank's answer, how the ranks ended, and whether fresh ranks on the whole cards run fifty steps."""
    ended, answers = group(tool, name, cards)
    lasts = len(answers) == 2 and len(group("lasts", name, cards, *answers)[1]) == 2
    return {"answers": answers, "ended": ended, "lasts": lasts}


def group(tool, name, cards, *sizes):
    """Start a process, or a rank on each card; return how they ended, and what each rank wrote."""
    launcher = (
        [] if tool == "oomprobe" else ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    )
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/output", "w+") as output:
        command = [sys.executable, *launcher, __file__, tool, name, folder, *map(str, sizes)]
        bed = {
            "CUDASTUB_MEMORY": CARDS[cards],
            "CUDASTUB_SHARED": f"{folder}/cards",
            "CUDASTUB_NCCL": "64MiB",
        }
        try:
            status = within(
                command, LONGEST_S, env={**os.environ, **bed}, stdout=output, stderr=output
            ).returncode
            ended = f"status {status}" if status else "answered"
        except subprocess.TimeoutExpired:
            ended = f"not done in {LONGEST_S} s"
        output.seek(0)
        raised = re.findall(
            r"^(?:\[rank\d\]: )?([\w.]*(?:Error|Exception): .*)", output.read(), re.MULTILINE
        )
        answers = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("answer-*"))]
    return "; ".join([ended, *raised[:1]])[:200], answers


def target(name):
    """Return the model under DDP on this rank's card, and its step."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    model, optimizer = WORKLOADS[name].build()
    return DistributedDataParallel(model, device_ids=[device]), WORKLOADS[name].step(optimizer)


globals().update({name: partial(target, name) for name in STARTS})


def lasts(name, *sizes):
    """Run fifty steps; ranks may have sizes of their own."""
    model, step = target(name)
    size = int(sizes[int(os.environ["RANK"])])
    for _ in range(LASTING_STEPS):
        step(model, size)
    torch.cuda.synchronize()
    return size


def oomprobe(name):
    return tools.oomprobe.probe_target(
        f"{__file__}:{name}", nproc_per_node=2, progress="off"
    ).batch_size


def accelerate(name):
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator, workload = Accelerator(), WORKLOADS[name]

    @find_executable_batch_size(starting_batch_size=STARTS[name])
    def train(batch_size):
        accelerator.free_memory()
        model, optimizer = accelerator.prepare(*workload.build())
        for _ in range(tools.TRAINING_STEPS):
            x = workload.inputs(batch_size)
            optimizer.zero_grad()
            accelerator.backward(model(x))
            optimizer.step()
        torch.cuda.synchronize()
        return batch_size

    return train()


def lightning(name):
    model, optimizer = WORKLOADS[name].build()
    call = tools.Call(
        name=name, workload=WORKLOADS[name], model=model, optimizer=optimizer, start=STARTS[name]
    )
    return tools.lightning("binsearch", call, devices=2, strategy="ddp")


TOOLS = {"oomprobe": oomprobe, "accelerate": accelerate, "Lightning binsearch": lightning}


def main(tool, name, folder, *sizes):
    rank = os.environ.get("RANK")
    torch.cuda.set_device(int(rank or 0))
    answer = {**TOOLS, "lasts": lasts}[tool](name, *sizes)
    for number in "01" if rank is None else rank:
        (Path(folder) / f"answer-{number}").write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # torch 2.14 aborts an interpreter's own exit now and then (pytorch/pytorch#190489)


if __name__ == "__main__":
    main(*sys.argv[1:])
