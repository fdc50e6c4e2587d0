"""The part of gpu-check for machines with two cards or more: DDP and FSDP2 on NCCL, a rank on each card.

The answer of `probe_target` with all cards, then 50 steps of it in fresh ranks that may use all memory. What NCCL takes is the
difference between the memory that is available here and to one process.
"""

import os

import oomprobe

MOST_RANKS = 8
LIMIT_S = 75  # of each search


def ddp():
    """A small GPT under DDP."""
    return _gpt(shard=False)


def fsdp():
    """A small GPT under FSDP2."""
    return _gpt(shard=True)


def _gpt(*, shard):
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional

    from oomprobe.demo import CONTEXT, VOCABULARY, SmallGPT

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    model = SmallGPT().to(device)
    if shard:
        for module in [*model.blocks, model]:
            fully_shard(module)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device])
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1), device=device)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return model, step


def check_ranks(strategy, cards):
    """Return what was found for one strategy."""
    target, ranks = f"{os.path.abspath(__file__)}:{strategy}", min(cards, MOST_RANKS)
    options = {"nproc_per_node": ranks, "progress": "off"}
    try:
        result = oomprobe.probe_target(
            target, start_batch=64, resolution=0.02, time_limit_s=LIMIT_S, **options
        )
        found = {"answer": result.batch_size, "result": result.to_dict()}
    except oomprobe.OomProbeError as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    try:
        oomprobe.check_target(
            target, result.batch_size, memory_fraction=1.0, confirm_steps=50, **options
        )
    except oomprobe.OomProbeError as error:
        return {**found, "whole_card": f"{type(error).__name__}: {error}"[:2000]}
    return {**found, "whole_card": "ran"}
