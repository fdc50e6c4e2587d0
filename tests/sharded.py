"""Targets for ranks that shard by FSDP2 or by tensor parallelism, each as some training code does it.

``tests/sharded.py:NAME`` builds on any number of ranks; those in `MESHES` need as many as the mesh has. On the bed they train on real
ranks, and on a simulated card as one of them.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import rand as distributed_rand
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import training_step

WIDTH, HEADS, LENGTH, VOCABULARY = 256, 4, 2048, 2000
MESHES = {"hsdp": (2, 2), "tensor_parallel": (2, 2)}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head_width = width // HEADS

    def forward(self, x):
        # Under tensor parallelism this rank has some of the heads.
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        return self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w1, self.w3 = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(width, 4 * width, bias=False),
        )
        self.w2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width=WIDTH, *, recomputes=False):
        super().__init__()
        self.attention, self.feed_forward = Attention(width), FeedForward(width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.recomputes = recomputes

    def forward(self, x):
        return (
            checkpoint(self.compute, x, use_reentrant=False) if self.recomputes else self.compute(x)
        )

    def compute(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, width=WIDTH, *, recomputes=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, recomputes=recomputes) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def join(mesh=None, names=None):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return init_device_mesh("cuda", mesh, mesh_dim_names=names) if mesh else None


def loss_of(model, batch_size, length):
    tokens = torch.randint(VOCABULARY, (batch_size, length + 1), device="cuda")
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def training(model, optimizer, *, max_norm=None, accumulates=1, length=LENGTH):
    def step(model, batch_size):
        optimizer.zero_grad()
        for number in range(accumulates):
            if accumulates > 1:
                model.set_requires_gradient_sync(number == accumulates - 1)
            loss_of(model, batch_size, length).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()

    return model, step


def sharded(*, step=training, make=Transformer, prepare=lambda model: None, **options):
    join()
    model = make()
    prepare(model)
    model.cuda()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return step(model, torch.optim.AdamW(model.parameters()))


CLIPPED = partial(training, max_norm=1.0)
in_short = partial(sharded, step=partial(training, length=128))
no_reshard = partial(sharded, reshard_after_forward=False)
bf16_clipped = partial(sharded, mp_policy=BF16, step=CLIPPED)
uneven_width = partial(sharded, make=partial(Transformer, 252), mp_policy=BF16, step=CLIPPED)
recomputing = partial(sharded, make=partial(Transformer, recomputes=True), mp_policy=BF16)
accumulating = partial(
    sharded,
    make=partial(Transformer, recomputes=True),
    step=partial(training, accumulates=2),
    reshard_after_forward=False,
)


def on_meta(initialise=lambda model: model.apply(reset)):
    join()
    with torch.device("meta"):
        model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    model.to_empty(device="cuda")
    initialise(model)
    return training(model, torch.optim.AdamW(model.parameters()))


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def draw(model):
    """Draw values by all that draws on a DTensor: `nn.init.eye_`, `orthogonal_`, `sparse_`, `random_` and `torch.normal` do not."""
    weight = model.layers[0].feed_forward.w1.weight
    for initialise in (
        nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.ones_, nn.init.zeros_,
        nn.init.xavier_uniform_, nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_,
    ):  # fmt: skip
        initialise(weight)
    nn.init.constant_(weight, 0.1)
    values = weight.detach()
    for name in ("uniform_", "normal_", "bernoulli_", "exponential_", "cauchy_", "log_normal_"):
        assert getattr(values, name)() is values
    values.geometric_(0.5)
    for made in (
        torch.rand_like(values), torch.randn_like(values), torch.randint_like(values, 3), torch.bernoulli(torch.rand_like(values)),
        F.dropout(values, 0.5), distributed_rand(*values.shape, device_mesh=weight.device_mesh),
    ):  # fmt: skip
        assert (type(made), made.shape) == (type(values), values.shape)


drawn = partial(on_meta, draw)


def large_on_meta():
    """Of four GiB of weights, and twice as much of moments, two ranks have a half each."""
    join()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16384, 16384, bias=False) for _ in range(4)])
    for layer in [*model, model]:
        fully_shard(layer)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.trunc_normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, training_step(
        optimizer, lambda batch_size: torch.randn(batch_size, 16384, device="cuda")
    )


def fails_in_backward():
    model, step = bf16_clipped()
    size = [0]

    def burst(*_):
        if size[0] > 4:
            torch.empty(2**40, dtype=torch.uint8, device="cuda")

    model.layers[1].feed_forward.register_full_backward_hook(burst)

    def train(model, batch_size):
        size[0] = batch_size
        torch.empty(batch_size**2, 1000, device="cuda")  # not on a line
        step(model, batch_size)

    return model, train


def hsdp():
    mesh = join(MESHES["hsdp"], ("replicate", "shard"))
    model = Transformer().cuda()
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=BF16)
    return training(model, torch.optim.AdamW(model.parameters()))


PLAN = {
    "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(), "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
}  # fmt: skip


def tensor_parallel():
    mesh = join(MESHES["tensor_parallel"], ("dp", "tp"))
    model = Transformer().cuda()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=BF16)
    return training(model, torch.optim.AdamW(model.parameters(), foreach=False))


# --- what a simulated card refuses ---


def offloading():
    return sharded(offload_policy=CPUOffloadPolicy())


def fsdp1():
    join()
    model = FullyShardedDataParallel(Transformer().cuda())
    return training(model, torch.optim.AdamW(model.parameters()))


def with_memory_of_nccl(model, optimizer):
    model.set_allocate_memory_from_process_group_for_comm(True)
    return training(model, optimizer)


symmetric_memory = partial(sharded, step=with_memory_of_nccl)


def pipeline():
    join()
    device = torch.device("cuda", torch.cuda.current_device())
    stage = PipelineStage(Block().to(device), dist.get_rank(), dist.get_world_size(), device)
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    return stage.submod, lambda model, batch_size: schedule.step(
        torch.randn(batch_size, LENGTH, WIDTH, device="cuda")
    )


def experts(exchange):
    """Each rank sends tokens to the experts that these choose."""
    join()
    router = nn.Linear(WIDTH, dist.get_world_size()).cuda()

    def step(model, batch_size):
        tokens = torch.randn(batch_size * LENGTH, WIDTH, device="cuda")
        chosen = F.one_hot(model(tokens).argmax(-1), dist.get_world_size()).sum(0)
        received = exchange(tokens, chosen.tolist())
        assert received.shape[1] == WIDTH

    return router, step


def exchanging():
    def exchange(tokens, sizes):
        received = torch.empty(sum(sizes), WIDTH, device="cuda")
        dist.all_to_all_single(received, tokens, sizes, sizes)
        return received

    return experts(exchange)


def exchanging_functionally():
    return experts(
        lambda tokens, sizes: all_to_all_single_autograd(tokens, sizes, sizes, dist.group.WORLD)
    )


def compile_layers(model):
    for layer in model.layers:
        layer.compile()


compiled_layers = partial(sharded, prepare=compile_layers)
