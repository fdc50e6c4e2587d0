"""One rank of several on a simulated card: torch's own fake process group, whose collectives return at once.

Under DDP, FSDP2 and tensor parallelism by DTensor this rank takes what a rank of a real group takes. NCCL's own memory is kept back
from the card.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from oomprobe.ground.replaced import Patch, replaced
from oomprobe.ground.units import format_bytes
from oomprobe.simulation.cards import Card
from oomprobe.simulation.sharding import Sharding
from oomprobe.simulation.unknown import check_split

# For one communicator: 0.5 GB between 2 cards, 0.7 GB between 4 (NVIDIA/nccl issue 964, A100s), 1.1 GB and more between 8
# (issue 1685, H100s).
NCCL_BYTES = 2**30
_NCCL_SHARE = 1 / 20  # of a card, at most
NCCL = (
    "one rank of {ranks} was simulated, with collectives that take no memory; {kept} of the card was kept back for NCCL, "
    "which takes 0.5 to 1.6 GB for each communicator, by figures that others published"
)
HOOK = "DDP's communication hooks are not simulated: compressed copies of gradients are left out"
RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

# Functions of torch.distributed; their operators run on tensors without data in newer versions of torch only.
_DONE_AT_ONCE = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "gather", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter",
)  # fmt: skip


def with_nccl(card: Card, ranks: int) -> tuple[Card, str]:
    """Return the card with NCCL's memory kept back, and a note of what is assumed."""
    kept_bytes = min(NCCL_BYTES, int(_NCCL_SHARE * card.total_bytes))
    note = NCCL.format(ranks=ranks, kept=format_bytes(kept_bytes))
    return replace(card, context_bytes=card.context_bytes + kept_bytes), note


@contextmanager
def first_of(
    ranks: int, variables: Mapping[str, str], notes: dict[str, None], sharding: Sharding
) -> Iterator[None]:
    """Let code inside be the first of several ranks, whatever process group it asks for.

    Args:
        ranks: Ranks of the group.
        variables: Environment variables of this rank.
        notes: Receives what is left out.
        sharding: Learns what code inside shards.
    """
    init = distributed.init_process_group

    def init_process_group(*_: Any, **__: Any) -> None:
        _join(init, 0, ranks)

    with (
        patch.dict(os.environ, variables),
        replaced(_patches_of_group(init_process_group, notes, sharding)),
    ):
        had_group = distributed.is_initialized()
        try:
            yield
        finally:
            if distributed.is_initialized() and not had_group:
                distributed.destroy_process_group()


def groups_of_program(
    notes: dict[str, None],
    has_joined: Callable[[int], None],
    on_card: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[Patch]:
    """Yield replacements that let a program be the rank that it, or its launcher, says.

    Args:
        notes: Receives what is left out.
        has_joined: Is told of how many ranks.
        on_card: Makes a function create its tensors on the card.
    """
    init = distributed.init_process_group
    signature = inspect.signature(init)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(*args, **kwargs).arguments
        rank, world_size = given.get("rank", -1), given.get("world_size", -1)
        if rank < 0:
            rank = _from_environment(RANK, 0)
        if world_size is None or world_size < 0:
            world_size = _from_environment(WORLD_SIZE, 1)
        _join(init, rank, world_size)
        has_joined(world_size)

    yield from _patches_of_group(init_process_group, notes, Sharding())
    for owner in (distributed, distributed.distributed_c10d):
        yield owner, "is_nccl_available", lambda: True
    reducer: Any = distributed.Reducer  # type: ignore[attr-defined]  # makes DDP's buckets
    for name in ("__init__", "_rebuild_buckets"):
        yield reducer, name, on_card(getattr(reducer, name))


def _from_environment(names: Iterable[str], otherwise: int) -> int:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return otherwise


def _join(init: Callable[..., None], rank: int, ranks: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    init("fake", rank=rank, world_size=ranks, store=FakeStore())


def _patches_of_group(
    init: Callable[..., None], notes: dict[str, None], sharding: Sharding
) -> Iterator[Patch]:
    """Yield replacements for torch's attributes, each with its owner and name."""
    new_group = distributed.new_group
    make, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def make_group(members: Any = None, *_: Any, **__: Any) -> Any:
        return new_group(members, backend="fake")

    def make_ddp(model: Any, *args: Any, **kwargs: Any) -> None:
        make(model, *args, **kwargs)
        register(
            model, None, _reduce_at_once
        )  # the reducer refuses the result of a fake collective

    def leave_out_hook(*_: Any, **__: Any) -> None:
        notes[HOOK] = None

    def gather_object(gathered: list[Any], value: Any, *_: Any, **__: Any) -> None:
        gathered[:] = [value] * len(gathered)

    yield distributed, "_broadcast_coalesced", lambda *_: None  # of a model's buffers
    for owner in (distributed, distributed.distributed_c10d):
        yield owner, "init_process_group", init
        yield owner, "new_group", make_group
        yield owner, "all_gather_object", gather_object
        for name in _DONE_AT_ONCE:
            if hasattr(owner, name):
                yield owner, name, _done_at_once(getattr(owner, name))
    yield DistributedDataParallel, "__init__", make_ddp
    # Its own operators have no fakes; it keeps what batch normalisation keeps, and a few numbers for each channel.
    yield torch.nn.SyncBatchNorm, "forward", torch.nn.BatchNorm2d.forward
    yield DistributedDataParallel, "register_comm_hook", leave_out_hook
    yield from sharding.patches()


def _done_at_once(collective: Callable[..., Any]) -> Callable[..., _Done | None]:
    """Return what stands for a collective: like it, it returns work to wait for only if it is asked not to wait itself."""
    signature = inspect.signature(collective)

    def return_work(*args: Any, **kwargs: Any) -> _Done | None:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("input_split_sizes"):
            check_split(given["input"], given["input_split_sizes"])
        return _Done() if given.get("async_op") else None

    return return_work


class _Done:
    """Work that a collective has done."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _reduce_at_once(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


_reduce_at_once.__annotations__ = {}  # DDP compares them with its own types, not with their names
