"""Compare tables with separate probes, and train with their sizes in buckets, on torch's CUDA allocator.

    .venv-cuda/bin/python scripts/evidence/benchmark_tables.py [--only WORD]

For each model and card, with torch's default settings and with expandable segments: the calls of the table's rows, as a share of those
of a probe for each value; the rows that differ; the sizes with an epoch as a share of those alone (smallest to largest);
how many rows ran out of memory in 200 steps of their value alone under the cap; and how many trainings of 200 steps in random buckets
did, in processes that have the whole card, with the sizes alone and with those of the epoch.
"""

import argparse
import random
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

from bed import forked  # noqa: E402
from cuda.test_tables import LENGTHS, TABLES, evaluating, with_value, work_of  # noqa: E402
from zoo import Gpt, language_model  # noqa: E402

import oomprobe  # noqa: E402

STEPS, TRAININGS = 200, 4
SETTINGS = {"default": {}, "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}


def checkpointed():
    """Return a GPT that recomputes its activations, and a step that takes a length."""
    model = Gpt(8, width=256, context=max(LENGTHS), checkpointed=True).cuda()
    _, inner = language_model(model, torch.optim.AdamW(model.parameters()))

    def step(model, batch_size, length):
        model.context = length
        inner(model, batch_size)

    return model, step


CASES = {
    **{name: case[:2] for name, case in TABLES.items()},
    "checkpointed GPT": (checkpointed, {"length": LENGTHS}),
    "evaluating": (evaluating, {"length": LENGTHS}),
}


def probed(name):
    """Return the results of separate probes, the table, and the sizes with which its values train in turn."""
    make, over = CASES[name]
    ((axis, values),) = over.items()
    model, step = make()
    alone = [
        oomprobe.find_max_batch(model, with_value(step, axis, value), progress="off")
        for value in values
    ]
    table = oomprobe.find_max_batches(model, step, over, progress="off")
    mixed = {}
    if all(isinstance(value, int) for value in values):
        drawn = random.Random(0).choices(values, k=2000)
        epoch = oomprobe.Epoch({axis: drawn}, calls=STEPS, orders=10)
        in_turn = oomprobe.find_max_batches(model, step, over, epoch=epoch, progress="off")
        mixed = in_turn.batch_sizes()
    return alone, table, mixed


def dies(name, sizes, seed, cap_bytes=None):
    """Return whether training in random buckets runs out of memory in this process, which has done nothing else."""
    if cap_bytes:
        torch.cuda.set_per_process_memory_fraction(
            cap_bytes / torch.cuda.get_device_properties(0).total_memory
        )
    make, ((axis, _),) = CASES[name][0], CASES[name][1].items()
    model, step = make()
    try:
        for value in random.Random(seed).choices([*sizes], k=STEPS):
            step(model, sizes[value], **{axis: value})
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return True
    return False


def line(name, memory, settings):
    bed = {"memory": memory, "limit_s": 300, **SETTINGS[settings]}
    alone, table, mixed = forked(probed, name, **bed)
    rows = [result.batch_size for result in table.rows.values()]
    differing = [
        f"{row / one.batch_size:.3f}"
        for row, one in zip(rows, alone, strict=True)
        if row != one.batch_size
    ]
    shares = [mixed[value] / size for value, size in table.batch_sizes().items() if mixed]
    died = [
        sum(forked(dies, name, sizes, seed, **bed) for seed in range(TRAININGS))
        for sizes in (table.batch_sizes(), mixed)
        if sizes
    ]
    alone_died = sum(
        forked(dies, name, {value: one.batch_size}, 0, one.budget_bytes, **bed)
        for value, one in table.rows.items()
    )
    of_rows, of_probes = work_of(table.rows.values()), work_of(alone)
    cells = (
        f"{of_rows / of_probes:.2f}",
        " ".join(differing) or "-",
        f"{min(shares):.2f} to {max(shares):.2f}" if shares else "none",
        f"{alone_died} of {len(rows)}",
        *(f"{number} of {TRAININGS}" for number in died),
    )
    print(
        f"{name:20}{memory:6}{settings:12}{cells[0]}  {cells[1]:22}{cells[2]:>14}  {'  '.join(cells[3:])}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only models whose name contains it"
    )
    only = parser.parse_args().only
    print(
        f"{'table':20}{'card':6}{'segments':12}calls      {'rows that differ':22}{'mixed':>14}  alone   rows'   mixed die"
    )
    for name in [name for name in CASES if only in name]:
        for memory in ("1GiB", "2GiB", "8GiB"):
            for settings in SETTINGS:
                line(name, memory, settings)


if __name__ == "__main__":
    main()
