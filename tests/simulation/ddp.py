"""Targets as for torchrun: DDP over NCCL, with other habits of such scripts."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def make(wrap, *, backend="nccl", model=None, shape=(64,)):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    if backend:
        dist.init_process_group(backend)
    model = wrap(
        (model or nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))).to(local_rank)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        inputs = torch.randn(batch_size, *shape, device=local_rank)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        if dist.is_initialized():
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, {"rank": dist.get_rank()})
            assert len(gathered) == int(os.environ["WORLD_SIZE"])
            dist.all_reduce(loss.detach(), async_op=True).wait()
            assert (
                dist.all_reduce(loss.detach()) is None
            )  # work is returned only if it is asked for
            dist.barrier()

    return model, step


def ddp():
    return make(
        lambda model: DistributedDataParallel(
            model, device_ids=[torch.device(int(os.environ["LOCAL_RANK"]))]
        )
    )


def small_buckets():
    buckets = {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True}
    return make(
        lambda model: DistributedDataParallel(
            model, process_group=dist.new_group(backend="gloo"), **buckets
        )
    )


def compressed():
    def wrap(model):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped

    return make(wrap)


def sync_batch_norm():
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers))
    return make(DistributedDataParallel, model=model, shape=(3, 8, 8))


def no_group():
    return make(lambda model: model, backend=None)
