"""What fresh processes run, beside what one probe answers, on host memory: isolated, or in one process.

For each model: the largest batch that a fresh process survives with its address space held to what it has after one
step at batch 1, plus the budget, found by bisection over processes (each runs the warm step and six steps). Then the
answer of oomprobe.probe_target, whose trials are processes, or of oomprobe.find_max_batch, from each start, under the
same budget. Prints both and their ratio.

    python scripts/host_truth.py [--budget-mib 384] [--model images conv gpt mlp] [--start 1 48] [--in-process]
"""

import argparse
import json
import subprocess
import sys

import torch
from torch import nn

STEPS = 6


def big_fixed_mlp():
    """Most of the memory is fixed: parameters, gradients and AdamW's state; a sample costs little."""
    model = nn.Sequential(nn.Linear(16, 16384), nn.ReLU(), nn.Linear(16384, 16))
    model.table = nn.Parameter(torch.zeros(12_000_000))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        optimizer.zero_grad()
        (model(torch.randn(batch_size, 16)).square().mean() + model.table.mean()).backward()
        optimizer.step()

    return model, step


def conv():
    from oomprobe import demo

    return demo.conv_net()


def gpt():
    from oomprobe import demo

    return demo.small_gpt()


def images():
    """A convolutional net on 64 pixels: a sample takes megabytes, so malloc's heap has little part in it."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        x, y = torch.randn(batch_size, 3, 64, 64), torch.randint(10, (batch_size,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, step


def target(name):
    return {"images": images, "conv": conv, "gpt": gpt, "mlp": big_fixed_mlp}[name]()


TARGETS = {"images": "images", "conv": "conv", "gpt": "gpt", "mlp": "big_fixed_mlp"}


def child_survives(name, batch_size, budget_bytes):
    """Written without oomprobe's devices on purpose: a second opinion."""
    import resource

    model, step = target(name)
    step(model, 1)
    with open("/proc/self/statm") as statm:
        address_space = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (address_space + budget_bytes, resource.RLIM_INFINITY))
    for _ in range(STEPS):
        step(model, batch_size)


def child_isolated(name, budget_bytes, start):
    import oomprobe

    options = {"device": f"cpu:{budget_bytes}B", "memory_fraction": 1.0, "min_batch": start, "progress": "off"}
    report(oomprobe.probe_target(f"{__file__}:{TARGETS[name]}", **options))


def child_probe(name, budget_bytes, start):
    import oomprobe

    model, step = target(name)
    report(
        oomprobe.find_max_batch(
            model, step, device=f"cpu:{budget_bytes}B", memory_fraction=1.0, min_batch=start, progress="off"
        )
    )


def report(result):
    share = result.in_steps_s / result.elapsed_s
    print(json.dumps([result.batch_size, len(result.trials), round(result.elapsed_s, 1), round(share, 3)]))


def run_child(*arguments):
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def truth(name, budget_bytes):
    good, bad = 0, 1
    while run_child("survives", name, bad, budget_bytes).returncode == 0:
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        if run_child("survives", name, middle, budget_bytes).returncode == 0:
            good = middle
        else:
            bad = middle
    return good


def main():
    if "--child" in sys.argv:
        kind, name, *numbers = sys.argv[2:]
        return {"survives": child_survives, "probe": child_probe, "isolated": child_isolated}[kind](
            name, *map(int, numbers)
        )
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-mib", type=int, default=384)
    parser.add_argument("--model", nargs="+", default=["images", "conv", "gpt", "mlp"])
    parser.add_argument("--start", nargs="+", type=int, default=[1])
    parser.add_argument("--in-process", action="store_true")
    arguments = parser.parse_args()
    kind = "probe" if arguments.in_process else "isolated"
    budget_bytes = arguments.budget_mib * 2**20
    print(f"budget {arguments.budget_mib} MiB of address space beyond the warm process")
    print("model  fresh processes  start  one probe  share  trials  seconds  in steps")
    for name in arguments.model:
        fresh = truth(name, budget_bytes)
        for start in arguments.start:
            probe = run_child(kind, name, budget_bytes, start)
            if probe.returncode:
                print(f"{name:5}  {fresh:15}  {start:5}  failed: {probe.stderr.strip().splitlines()[-1:]}")
                continue
            answer, trials, seconds, inside = json.loads(probe.stdout)
            print(
                f"{name:5}  {fresh:15}  {start:5}  {answer:9}  {answer / fresh:5.1%}  {trials:6}  {seconds:7}  {inside:.1%}",
                flush=True,
            )
    return None


if __name__ == "__main__":
    main()
