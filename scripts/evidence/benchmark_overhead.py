"""Measure how much of a probe's time is spent outside the user's steps, on a CUDA card or the CUDA bed.

The steps sleep, so their time is the same at every size. Frameworks are imported and the garbage collector is not
frozen, as in a user's process. Targets: 3 % at steps of 100 ms, 10 % at steps of 10 ms, both beside the time before the
first trial, in which garbage is collected and the state is found and copied (0.2 s with these frameworks).

    .venv-cuda/bin/python scripts/evidence/benchmark_overhead.py [--step-ms 100 10]
"""

import argparse
import contextlib
import importlib
import time

import torch

import oomprobe

FRAMEWORKS = ("transformers", "lightning", "accelerate", "ultralytics")


def sleeping_mlp(step_s):
    """Return a model of 32 MiB that takes a dozen doublings to probe, and a step that sleeps."""
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        optimizer.zero_grad()
        model(torch.empty(batch_size, 1024, device="cuda")).sum().backward()
        optimizer.step()
        time.sleep(step_s)

    return model, step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[100, 10])
    step_times_ms = parser.parse_args().step_ms
    imported = []
    for name in FRAMEWORKS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            imported.append(name)
    print(f"imported: {', '.join(imported) or 'no framework'}")
    print("step_ms  trials  batch  probe_s  in_steps_s  outside")
    for step_ms in step_times_ms:
        result = oomprobe.find_max_batch(*sleeping_mlp(step_ms / 1000), progress="off")
        outside = 1 - result.in_steps_s / result.elapsed_s
        print(
            f"{step_ms:7g}  {len(result.trials):6}  {result.batch_size:5}  {result.elapsed_s:7.1f}  "
            f"{result.in_steps_s:10.1f}  {outside:7.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
