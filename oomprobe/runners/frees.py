"""Notice where memory is freed at a time of its own: such a call is not like others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from oomprobe.ground.replaced import replaced


@contextmanager
def watch_frees(live_bytes: Callable[[], int]) -> Iterator[list[str]]:
    """Note who may have freed memory: the next call may be the one in which they do so.

    Python's collector where it frees device memory, and autograd's thread where a backward returns
    results or keeps its graph, which the thread lets go of at any time later.

    Args:
        live_bytes: Returns the bytes in live tensors.
    """
    noted, before_bytes = list[str](), 0
    autograd: Any = torch.autograd
    run_backward = autograd._engine_run_backward

    def watch_backward(*args: Any, **options: Any) -> Any:
        keeps_graph, returns = args[2], not options["accumulate_grad"]
        if keeps_graph or returns:
            noted.append("autograd")
        return run_backward(*args, **options)

    def watch_collector(phase: str, info: Mapping[str, Any]) -> None:
        nonlocal before_bytes
        now_bytes = live_bytes()
        if phase == "stop" and now_bytes < before_bytes:
            noted.append("collector")
        before_bytes = now_bytes

    gc.callbacks.append(watch_collector)
    try:
        with replaced([(autograd, "_engine_run_backward", watch_backward)]):
            yield noted
    finally:
        gc.callbacks.remove(watch_collector)
