"""FSDP2 and DTensor on a simulated card: what they need to run on one rank alone, and what one card cannot stand for.

FSDP2 frees and refills the storages of whole parameters, on streams of its own; its collectives are those of `ranks`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from copy import copy
from itertools import chain
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import distributed
from torch.utils._python_dispatch import _disable_current_modes

from oomprobe.errors import SimulationError
from oomprobe.ground.frames import user_line
from oomprobe.ground.replaced import Patch
from oomprobe.ground.units import known
from oomprobe.simulation.fakes import HOST

REFUSED = "{why} (at {line}): {instead}, or probe on real devices"
OFFLOADS = (
    "CPUOffloadPolicy keeps parameters in host memory, and a simulated card has them on the card",
    "leave out the policy",
)
FSDP1 = (
    "FullyShardedDataParallel (FSDP1) gets memory back whenever the card's streams come to it, which is a matter of time",
    "shard with fully_shard (FSDP2)",
)
NCCL_POOL = (
    "FSDP2 is to take its buffers from memory of NCCL's own (symmetric memory, or that of a process group), which is not simulated",
    "leave that out",
)
PIPELINE = (
    "the stages of a pipeline take different memory, and one simulated card stands for the first rank only",
    "shard with fully_shard (FSDP2)",
)
COMPILED = (
    "a compiled model that is sharded gathers its parameters at other times than an eager one, and a simulated card runs it eagerly",
    "leave out torch.compile",
)
_STAGES = "torch.distributed.pipelining.stage"


class Sharding:
    """What FSDP2's own objects hold. Each trial begins with what building left there, as a fresh process does.

    A step that runs out of memory leaves them in the middle of a pass, with gathered parameters on the card.
    """

    def __init__(self) -> None:
        self._states: list[Any] = []  # one for each module that is sharded
        self._built: list[tuple[Any, dict[str, Any]]] | None = None

    def start_trial(self) -> None:
        """Put back what building left, before any step."""
        if self._built is None:
            self._built = [(part, _copied_groups(vars(part))) for part in self._parts()]
        for part, attributes in self._built:
            vars(part).clear()
            vars(part).update(_copied_groups(attributes))
        for state in self._states:
            for group in _groups_of(state):
                for param in group.fsdp_params:
                    param._setattr_on_modules(param.sharded_param)

    def _parts(self) -> Iterator[Any]:
        for state in self._states:
            yield from (state, state._state_ctx, state._comm_ctx)
            for group in _groups_of(state):
                yield group
                yield from group.fsdp_params

    def patches(self) -> Iterator[Patch]:
        """Yield replacements for torch's attributes, each with its owner and name."""
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        init = FSDPState.__init__

        def note_state(state: Any) -> None:
            init(state)
            self._states.append(state)

        yield FSDPState, "__init__", note_state
        yield from _on_one_rank()
        yield from _refusals()


def _groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters that one module shards; earlier versions of torch know one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return known([state._fsdp_param_group])


def _copied_groups(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy attributes and the containers among them."""
    copied = {}
    for name, value in attributes.items():
        copied[name] = copy(value) if isinstance(value, dict | list | set) else value
    return copied


def _on_one_rank() -> Iterator[Patch]:
    """Yield what FSDP2 and DTensor need to run on one rank without a card."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import _api, _dispatch, _random
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    lazy_init: Any = FSDPParamGroup.lazy_init
    make_wrapper: Any = torch.Tensor._make_wrapper_subclass

    def init_eager(group: Any) -> None:
        if _is_compiled(group.modules):
            _refuse(COMPILED)
        lazy_init(group)

    def make_host_wrapper(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        """Autograd takes a DTensor for one in host memory, as it does its part."""
        if device is not None and torch.device(device).type == "cuda":
            device = HOST
        return make_wrapper(*args, device=device, **kwargs)

    yield torch.Tensor, "_make_wrapper_subclass", staticmethod(make_host_wrapper)
    for name, function in [*vars(ShardingPropagator).items()]:
        if name.startswith("_propagate_tensor_meta") and inspect.isfunction(function):
            yield ShardingPropagator, name, _off_card(function)
    without_offsets = SimpleNamespace(
        distribute_region_enabled=False, _distribute_region=lambda *_, **__: nullcontext()
    )
    yield _random, "_rng_tracker", without_offsets
    for module in (_api, _dispatch, _random):  # random values do not exist on the card
        if hasattr(module, "is_rng_supported_mesh"):
            yield module, "is_rng_supported_mesh", lambda _: False
    yield (
        torch._C,
        "_get_accelerator",
        lambda *_: torch.device("cuda"),
    )  # of the mesh that fully_shard makes
    yield FSDPParamGroup, "lazy_init", init_eager


def _refusals() -> Iterator[Patch]:
    """Yield replacements that refuse what one simulated card cannot stand for."""
    from torch.distributed import _symmetric_memory
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel

    refused: list[tuple[Any, str, tuple[str, str]]] = [
        (CPUOffloadPolicy, "__init__", OFFLOADS),
        (FullyShardedDataParallel, "__init__", FSDP1),
        (FSDPModule, "set_symm_mem_for_comm", NCCL_POOL),
        (FSDPModule, "set_allocate_memory_from_process_group_for_comm", NCCL_POOL),
        (_symmetric_memory, "empty", NCCL_POOL),
        (_symmetric_memory, "rendezvous", NCCL_POOL),
    ]
    for owner, name, why in refused:
        if hasattr(owner, name):  # some came with later versions of torch
            yield owner, name, functools.partial(_refuse, why)
    get_rank = distributed.get_rank

    def get_rank_outside_stages(*args: Any, **kwargs: Any) -> Any:
        if (
            sys._getframe(1).f_globals.get("__name__") == _STAGES
        ):  # which takes half a second to import
            _refuse(PIPELINE)
        return get_rank(*args, **kwargs)

    yield distributed, "get_rank", get_rank_outside_stages


def _is_compiled(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether modules, or what calls them now, are compiled."""
    suspects: list[Any] = [*chain.from_iterable(module.modules() for module in modules)]
    suspects += [frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe())]
    for module in suspects:
        if isinstance(module, torch.nn.Module) and (
            module._compiled_call_impl or "_orig_mod" in module._modules
        ):
            return True
    return False


def _off_card(function: Any) -> Any:
    """Run operators that have the shapes of all ranks together, and take no memory, outside of the simulation.

    One that draws into its first argument, as those of `torch.nn.init` do, returns that: torch
    would make the values by operators of CUDA.
    """

    def run(propagator: Any, schema: Any) -> Any:
        operator = schema.op
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        if draws and operator._schema.name.endswith("_"):
            return schema.args_schema[0].tensor_meta
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(propagator, schema)

    return run


def _refuse(refusal: tuple[str, str], *_: Any, **__: Any) -> NoReturn:
    why, instead = refusal
    raise SimulationError(REFUSED.format(why=why, line=user_line(), instead=instead))
