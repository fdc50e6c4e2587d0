"""Building on a simulated card makes torch's requests, in torch's order, and leaves the memory and the cache that building leaves."""

import copy
import io
import itertools
from functools import partial

import pytest
import torch
from bed import forked
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.two_tensor import TwoTensor

import oomprobe
from oomprobe.ground.torch_versions import VERSION

from .test_simulated import A100, simulated


def linear():
    return nn.Linear(512, 512, bias=False).cuda()


def trained(model, loss_of, make=torch.optim.AdamW):
    optimizer = make(model.parameters())
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def warmed_up():
    return trained(linear(), lambda model: model(torch.randn(64, 512, device="cuda")).square().mean())


def with_images():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10)
    ).cuda()

    def loss_of(model):
        labels = torch.zeros(16, dtype=torch.long, device="cuda")
        return F.cross_entropy(model(torch.randn(16, 3, 8, 8, device="cuda")), labels)

    return trained(model, loss_of, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


def in_another_dtype():
    weight = linear().weight
    weight.data = weight.data.to(torch.bfloat16)
    return weight


def in_a_context():
    with torch.device("cuda"):
        return nn.Linear(300, 300), nn.Embedding(100, 64)


def merged():
    """LoRA's update, added to the weight while building."""
    model, down, up = linear(), torch.randn(8, 512, device="cuda"), torch.zeros(512, 8, device="cuda")
    with torch.no_grad():
        model.weight.add_(up @ down, alpha=0.5)
    return model, down, up


def with_a_mask():
    model = nn.Linear(3, 3)
    model.register_buffer("positions", torch.arange(64).expand(8, -1))
    model.register_buffer("mask", torch.full((256, 256), float("-inf")).triu(1))
    return model.cuda()


def frozen_teacher():
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)).cuda()
    return model, copy.deepcopy(model).half().requires_grad_(False).eval()


def replaced_layer():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 10)).cuda()
    model[1] = nn.Linear(512, 100).cuda()
    return model


def loaded():
    model = linear()
    model.load_state_dict({name: torch.zeros_like(value, device="cpu") for name, value in model.state_dict().items()})
    return model


def attended():
    query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    return query


def wrapped():
    """A tensor that wraps two others, as quantised weights do."""
    pair = TwoTensor(torch.ones(512, 512, device="cuda"), torch.zeros(512, 512, device="cuda"))
    return pair, pair.to(torch.float16) * 2


def weight_normalized():
    return nn.utils.parametrizations.weight_norm(linear())


def tied():
    model = nn.ModuleDict({"tokens": nn.Embedding(1000, 256), "head": nn.Linear(256, 1000, bias=False)}).cuda()
    model["head"].weight = model["tokens"].weight
    return model


def quantized():
    weight = linear().weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().clamp(-128, 127).to(torch.int8), scale


def loaded_to_the_card():
    model, file = nn.Linear(512, 512), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, map_location="cuda"), assign=True)
    return model


def rotary():
    """Buffers made by arithmetic on the card."""
    frequencies = 1.0 / 10_000 ** (torch.arange(0, 64, 2, device="cuda").float() / 64)
    angles = torch.outer(torch.arange(512, device="cuda").float(), frequencies)
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def moving_average():
    model = linear()
    average = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.mul_(0.99).add_(new, alpha=0.01)
    return model, average


def flat():
    """Parameters that are views of one buffer."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
    buffer = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    at = 0
    for parameter in model.parameters():
        parameter.data = buffer[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return model, buffer


def restored_optimizer():
    model, optimizer = warmed_up()
    state = {
        "state": copy.deepcopy(optimizer.state_dict()["state"]),
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(state)
    return model, fresh


def folded():
    """A batch norm folded into the convolution before it."""
    convolution, norm = nn.Conv2d(16, 32, 3).cuda().eval(), nn.BatchNorm2d(32).cuda().eval()
    return nn.utils.fusion.fuse_conv_bn_eval(convolution, norm)


def scaled_warm_up():
    model, scaler = linear(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.randn(64, 512, device="cuda")).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    return model, scaler


def evaluated():
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)).cuda().eval()
    with torch.no_grad():
        return model, model(torch.randn(64, 512, device="cuda"))


def ensemble():
    models = [nn.Linear(128, 128).cuda() for _ in range(4)]
    return torch.func.stack_module_state(models)


def grouped_weights():
    """Weights of queries, keys and values in one."""
    layers = [linear() for _ in range(3)]
    joined = nn.Linear(512, 1536, bias=False).cuda()
    with torch.no_grad():
        joined.weight.copy_(torch.cat([layer.weight for layer in layers]))
    return joined


def pruned():
    model = linear()
    prune.random_unstructured(model, "weight", 0.3)
    return model


def initialized():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 10))
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def adapted():
    """A frozen base, adapters in float32 beside it, an optimizer of the adapters that has stepped."""
    base = linear().half().requires_grad_(False)
    down, up = nn.Linear(512, 8, bias=False).cuda(), nn.Linear(8, 512, bias=False).cuda()

    def loss_of(adapters):
        x = torch.randn(64, 512, device="cuda")
        return (base(x.half()).float() + adapters(x)).square().mean()

    return base, trained(nn.Sequential(down, up), loss_of)


def with_checkpoints():
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda()

    def loss_of(model):
        x = torch.randn(64, 512, device="cuda", requires_grad=True)
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean()

    return trained(model, loss_of)


WAYS = {
    "weight norm": weight_normalized,
    "tied weights": tied,
    "quantized weights": quantized,
    "a state loaded to the card": loaded_to_the_card,
    "buffers by arithmetic": rotary,
    "a moving average": moving_average,
    "views of one buffer": flat,
    "a restored optimizer": restored_optimizer,
    "a folded batch norm": folded,
    "a scaled warm-up": scaled_warm_up,
    "an evaluation": evaluated,
    "an ensemble": ensemble,
    "joined weights": grouped_weights,
    "pruned weights": pruned,
    "initialized on the card": initialized,
    "adapters beside a frozen base": adapted,
    "checkpointed steps": with_checkpoints,
    "a teacher in bfloat16": lambda: (model := linear(), copy.deepcopy(model).bfloat16().requires_grad_(False)),
    "synchronized batch norms": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    ).cuda(),
    "embeddings from a tensor": lambda: nn.Embedding.from_pretrained(
        torch.randn(1000, 64, device="cuda"), freeze=False
    ),
    "a vector of parameters": lambda: (model := linear(), nn.utils.parameters_to_vector(model.parameters())),
    "a fused optimizer": lambda: trained(
        linear(),
        lambda model: model(torch.randn(64, 512, device="cuda")).mean(),
        partial(torch.optim.AdamW, fused=True),
    ),
    "attention": attended,
    "a tensor that wraps others": wrapped,
    "a layer": linear,
    "deep copy": lambda: (model := linear(), copy.deepcopy(model)),
    "average": lambda: (model := linear(), AveragedModel(model)),
    "clone": lambda: (model := linear(), model.weight.detach().clone()),
    "copied state": lambda: (model := linear(), {name: value.clone() for name, value in model.state_dict().items()}),
    "deep copy of the state": lambda: (model := linear(), copy.deepcopy(model.state_dict())),
    "half": lambda: linear().half(),
    "half on the way": lambda: nn.Linear(512, 512).to("cuda", torch.float16),
    "another dtype": in_another_dtype,
    "steps": warmed_up,
    "steps with images": with_images,
    "deep copy of an optimizer": lambda: copy.deepcopy(warmed_up()[1]),
    "device as a context": in_a_context,
    "merged": merged,
    "buffers": with_a_mask,
    "modules in modules": lambda: nn.Sequential(nn.Linear(100, 200), nn.TransformerEncoderLayer(64, 4)).cuda(),
    "channels last": lambda: nn.Conv2d(16, 32, 3).cuda().to(memory_format=torch.channels_last),
    "teacher": frozen_teacher,
    "replaced layer": replaced_layer,
    "loaded state": loaded,
    "from numbers": lambda: torch.tensor([[1.0] * 100] * 50, device="cuda"),
    "empty on meta": lambda: nn.Linear(512, 512, device="meta").to_empty(device="cuda"),
}


def of_torch(name):
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None)
    kept = WAYS[name]()
    [trace] = torch.cuda.memory._snapshot()["device_traces"]
    signs = {"alloc": 1, "free_completed": -1}
    requests = [signs[event["action"]] * event["size"] for event in trace if event["action"] in signs]
    return requests, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), kept is not None


def of_a_simulated_card(name):
    device = simulated(A100, "40GiB")
    with device.history() as history, device.building():
        kept = WAYS[name]()
        figures = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), kept is not None
    return [nbytes for _, nbytes in history.events], *figures


def frees_in_order(requests, *figures):
    """Sort what is freed between two requests: that order decides nothing."""
    groups = itertools.groupby(requests, lambda nbytes: nbytes < 0)
    return [nbytes for is_free, group in groups for nbytes in (sorted(group) if is_free else group)], *figures


# Before, torch had other seeds of attention, and took cuBLASLt's workspace before that of cuBLAS.
OLDER = {
    **dict.fromkeys(("attention", "steps with images", "an evaluation", "checkpointed steps"), (2, 9)),
    "pruned weights": (2, 14),  # one block more, for the number that is assigned
}


@pytest.mark.parametrize("name", [name for name in WAYS if OLDER.get(name, VERSION) <= VERSION])
def test_building_makes_torchs_requests(name):
    found = frees_in_order(*forked(of_a_simulated_card, name))
    assert found == frees_in_order(*forked(of_torch, name, memory="40GiB", card=A100))


def actor_critic():
    """Twin critics and their targets, copied while building."""

    def mlp(inside, outside):
        return nn.Sequential(nn.Linear(inside, 512), nn.ReLU(), nn.Linear(512, outside)).cuda()

    actor, critics = mlp(64, 8), [mlp(72, 1) for _ in range(2)]
    targets = [copy.deepcopy(critic).requires_grad_(False) for critic in critics]
    replay = torch.zeros(20_000, 64, device="cuda")
    optimizer = torch.optim.Adam([*actor.parameters(), *(p for critic in critics for p in critic.parameters())])

    def step(model, batch_size):
        state = replay[torch.zeros(batch_size, dtype=torch.long, device="cuda")]
        both = torch.cat([state, model(state)], 1)
        with torch.no_grad():
            wanted = torch.min(*(target(both) for target in targets))
        optimizer.zero_grad()
        sum((critic(both) - wanted).square().mean() for critic in critics).backward()
        optimizer.step()
        with torch.no_grad():
            for target, critic in zip(targets, critics, strict=True):
                torch._foreach_lerp_([*target.parameters()], [*critic.parameters()], 0.005)

    return actor, step


def simulated_answer(make):
    device = simulated(A100, "256MiB")
    with device.building():
        model, step = make()
    return oomprobe.find_max_batch(model, step, device=device, progress="off", resolution=0, steps=2).batch_size


def answer(make):
    return oomprobe.find_max_batch(*make(), progress="off", resolution=0, steps=2).batch_size


def test_an_answer_beside_what_building_has_copied():
    assert forked(simulated_answer, actor_critic) == forked(answer, actor_critic, memory="256MiB", card=A100)
