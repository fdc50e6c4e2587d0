"""Building on a simulated card makes torch's requests, in torch's order, and leaves the memory and the cache that building leaves."""

import copy
import itertools

import pytest
import torch
from bed import forked
from torch import nn
from torch.nn import functional as F
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


WAYS = {
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
OLDER = {"attention": (2, 9), "steps with images": (2, 9)}


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
