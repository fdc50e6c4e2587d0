"""Building on a simulated card makes torch's requests, in torch's order, and leaves the memory and the cache that building leaves."""

import copy
import io
import itertools

import pytest
import torch
from bed import forked
from sequences import A100, simulated
from torch import nn
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor
from zoo import training_step

from oomprobe.ground.torch_versions import VERSION


def linear():
    return nn.Linear(512, 512, bias=False).cuda()


def warmed_up():
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters())
    step = training_step(optimizer, lambda: torch.randn(64, 512, device="cuda"))
    for _ in range(2):
        step(model)
    optimizer.zero_grad()
    return model, optimizer


def in_another_dtype():
    weight = linear().weight
    weight.data = weight.data.to(torch.bfloat16)
    return weight


def in_a_context():
    with torch.device("cuda"):
        return nn.Linear(300, 300), nn.Embedding(100, 64)


def with_a_mask():
    model = nn.Linear(3, 3)
    model.register_buffer("positions", torch.arange(64).expand(8, -1))
    model.register_buffer("mask", torch.full((256, 256), float("-inf")).triu(1))
    return model.cuda()


def frozen_teacher():
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)).cuda()
    return model, copy.deepcopy(model).half().requires_grad_(False).eval()


def loaded():
    model = linear()
    model.load_state_dict({name: torch.zeros_like(value, device="cpu") for name, value in model.state_dict().items()})
    return model


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


def loaded_to_the_card():
    model, file = nn.Linear(512, 512), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, map_location="cuda"), assign=True)
    return model


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


WAYS = {
    "weight norm": weight_normalized,
    "tied weights": tied,
    "a state loaded to the card": loaded_to_the_card,
    "views of one buffer": flat,
    "a restored optimizer": restored_optimizer,
    "a folded batch norm": folded,
    "a scaled warm-up": scaled_warm_up,
    "pruned weights": pruned,
    "initialized on the card": initialized,
    "synchronized batch norms": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    ).cuda(),
    "embeddings from a tensor": lambda: nn.Embedding.from_pretrained(
        torch.randn(1000, 64, device="cuda"), freeze=False
    ),
    "a tensor that wraps others": wrapped,
    "a layer": linear,
    "deep copy": lambda: (model := linear(), copy.deepcopy(model)),
    "copied state": lambda: (model := linear(), {name: value.clone() for name, value in model.state_dict().items()}),
    "deep copy of the state": lambda: (model := linear(), copy.deepcopy(model.state_dict())),
    "half": lambda: linear().half(),
    "half on the way": lambda: nn.Linear(512, 512).to("cuda", torch.float16),
    "another dtype": in_another_dtype,
    "steps": warmed_up,
    "deep copy of an optimizer": lambda: copy.deepcopy(warmed_up()[1]),
    "device as a context": in_a_context,
    "buffers": with_a_mask,
    "channels last": lambda: nn.Conv2d(16, 32, 3).cuda().to(memory_format=torch.channels_last),
    "teacher": frozen_teacher,
    "loaded state": loaded,
    "from numbers": lambda: torch.tensor([[1.0] * 100] * 50, device="cuda"),
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


OLDER = {"pruned weights": (2, 14)}  # before, one block more, for the number that is assigned


@pytest.mark.parametrize("name", [name for name in WAYS if OLDER.get(name, VERSION) <= VERSION])
def test_building_makes_torchs_requests(name):
    found = frees_in_order(*forked(of_a_simulated_card, name))
    assert found == frees_in_order(*forked(of_torch, name, memory="40GiB", card=A100))
