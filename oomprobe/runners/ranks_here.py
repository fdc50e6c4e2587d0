"""Refusals that concern ranks: this process is one itself, cannot start any, or is one on which no trial can run."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

import torch

from oomprobe.errors import InvalidArgumentError, NoDeviceError, check_size
from oomprobe.ground.words import count
from oomprobe.records.trials import DeviceInfo

SEVERAL_RANKS = (
    "{what} {ranks} ranks: one that runs out of memory leaves the others waiting in a collective, and no group survives that. Move "
    "what builds the model into a function build() and type oomprobe run train.py:build --nproc-per-node {ranks}; or probe the "
    "command that starts the ranks, oomprobe run -- torchrun ... --batch-size {{batch}}"
)
NO_GROUP = (
    "neither build() nor the step initialised a process group on rank {rank}, so its model trains alone: call "
    "torch.distributed.init_process_group() in build(), as under torchrun"
)
OTHER_GROUP = "the process group of rank {rank} has {made} ranks, but the probe has {ranks}: call init_process_group() without world_size"
IN_A_RANK = (
    "this process is rank {rank} of {ranks}, and a probe starts ranks of its own: call it in one process, before torchrun or "
    "accelerate launch, with nproc_per_node={local} (oomprobe run path/to/train.py:build --nproc-per-node {local})"
)
SEVERAL_MACHINES = (
    "oomprobe runs the ranks of one machine: probe on one of them (in a Slurm job: srun -N1 -n1 --gpus-per-node=8 oomprobe run ... "
    "--nproc-per-node 8). DDP needs the same memory per rank on every machine, and FSDP over more ranks needs less, so that answer "
    "is safe, less what NCCL takes between machines"
)
ON_HOST = (
    "the model of rank {rank} is on the {kind}, but several ranks need an accelerator each: build it on "
    "torch.device('cuda', int(os.environ['LOCAL_RANK']))"
)
SHARED_CARD = (
    "ranks {ranks} have built their models on one card, {device}: call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first "
    "in build()"
)


def refuse_ranks(what: str, ranks: int, pair: str = "") -> None:
    """Raise InvalidArgumentError for a live model on more than one rank: if one ran out of memory, the others would hang.

    `what` says who has the ranks, such as ``"torch.distributed has"``. `pair` is the call, in `oomprobe.integrations`, that
    makes what ``build()`` returns; empty if there is none.
    """
    if ranks > 1:
        returned = f". build() returns oomprobe.integrations.{pair}" if pair else ""
        raise InvalidArgumentError(SEVERAL_RANKS.format(what=what, ranks=ranks) + returned)


def check_process_group(ranks: int = 1, *, has_stepped: bool = True) -> None:
    """Raise InvalidArgumentError unless the process group has as many ranks as run each trial.

    Other ranks would wait in a step that this one abandons. A group of several must exist once the step has been called.
    """
    distributed = torch.distributed
    made = (
        distributed.get_world_size()
        if distributed.is_available() and distributed.is_initialized()
        else 0
    )
    if ranks == 1:
        refuse_ranks("torch.distributed has", made)
        return
    rank = os.environ.get("RANK", 0)
    if made not in (0, ranks):
        raise InvalidArgumentError(OTHER_GROUP.format(rank=rank, made=made, ranks=ranks))
    if not made and has_stepped:
        raise InvalidArgumentError(NO_GROUP.format(rank=rank))


def refuse_in_a_rank() -> None:
    """Raise InvalidArgumentError in a rank of torchrun or srun: each of them would start a probe of its own."""
    ranks, local = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "")
    if "RANK" in os.environ and ranks not in ("", "1"):
        text = IN_A_RANK.format(rank=os.environ["RANK"], ranks=ranks, local=local or ranks)
        raise InvalidArgumentError(
            f"{text}. {SEVERAL_MACHINES}" if local not in ("", ranks) else text
        )


def ranks_to_start(nproc_per_node: int | str) -> int:
    """Return the number of ranks, after checking that each has an accelerator; this process opens none."""
    refuse_in_a_rank()
    if (tasks := os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        raise InvalidArgumentError(
            f"this is one of {tasks} tasks that srun has started. {SEVERAL_MACHINES}"
        )
    kind = torch.accelerator.current_accelerator()  # that torch was built for, present or not
    cards = (
        0
        if kind is None or kind.type == "mps"
        else int(torch.get_device_module(kind).device_count())
    )
    ranks = cards
    if nproc_per_node != "gpu":
        check_size("nproc_per_node", nproc_per_node)
        ranks = int(nproc_per_node)
    instead = "lower --nproc-per-node, or " if cards else ""
    if not 0 < ranks <= cards:
        raise NoDeviceError(
            f"{count(ranks or 1, 'rank needs', 'ranks need')} an accelerator each, and this machine shows "
            f"{count(cards, 'accelerator', 'accelerators')} for ranks (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): {instead}simulate a rank of DDP, --device sim:24GiB"
        )
    return ranks


def refuse_host(device: torch.device) -> NoReturn:
    """Raise InvalidArgumentError on one of several ranks whose model is in host memory."""
    raise InvalidArgumentError(ON_HOST.format(rank=os.environ["RANK"], kind=device))


def check_cards(devices: Sequence[DeviceInfo]) -> None:
    """Raise InvalidArgumentError unless each rank has an accelerator of its own."""
    ranks = defaultdict(list)
    for rank, device in enumerate(devices):
        ranks[device.uuid or device.torch_device].append(rank)
    for shared in ranks.values():
        if len(shared) > 1:
            place = devices[shared[0]].torch_device
            raise InvalidArgumentError(
                SHARED_CARD.format(ranks=" and ".join(map(str, shared)), device=place)
            )
