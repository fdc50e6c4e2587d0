"""The ways to reset torch's statistics of memory; names that are imported here are bound before a probe begins."""

import torch
from torch.cuda import reset_accumulated_memory_stats, reset_peak_memory_stats


def all_of_them():
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()


def by_old_names():
    torch.cuda.reset_max_memory_allocated()
    torch.cuda.reset_max_memory_cached()


RESETS = {
    "peaks": lambda: reset_peak_memory_stats(device=torch.device("cuda", 0)),
    "counters": lambda: reset_accumulated_memory_stats("cuda"),
    "peaks and counters": all_of_them,
    "peaks, by old names": by_old_names,
}
if hasattr(torch.accelerator, "reset_peak_memory_stats"):  # since torch 2.9
    RESETS |= {
        "peaks of the accelerator": lambda: torch.accelerator.reset_peak_memory_stats(),
        "counters of the accelerator": lambda: torch.accelerator.reset_accumulated_memory_stats(0),
    }
