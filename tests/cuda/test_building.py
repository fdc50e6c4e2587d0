"""Building on a simulated card makes torch's requests, in torch's order, and leaves the memory and the cache that building leaves."""

import copy
import io

import pytest
import torch
from bed import forked
from sequences import A100, in_order, simulated
from sequences import of_torch as events_of_torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from zoo import training_step


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


def loaded():
    model = linear()
    model.load_state_dict(
        {name: torch.zeros_like(value, device="cpu") for name, value in model.state_dict().items()}
    )
    return model


def wrapped():
    """A tensor that wraps two others, as quantised weights do."""
    pair = TwoTensor(torch.ones(512, 512, device="cuda"), torch.zeros(512, 512, device="cuda"))
    return pair, pair.to(torch.float16) * 2


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


def scaled_warm_up():
    model, scaler = linear(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.randn(64, 512, device="cuda")).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    return model, scaler


def initialized():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 10))
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


WAYS = {
    "a state loaded to the card": loaded_to_the_card,
    "views of one buffer": flat,
    "a restored optimizer": restored_optimizer,
    "a scaled warm-up": scaled_warm_up,
    "initialized on the card": initialized,
    "a tensor that wraps others": wrapped,
    "deep copy": lambda: (model := linear(), copy.deepcopy(model).half()),
    "half on the way": lambda: nn.Linear(512, 512).to("cuda", torch.float16),
    "another dtype": in_another_dtype,
    "steps": warmed_up,
    "device as a context": in_a_context,
    "buffers": with_a_mask,
    "channels last": lambda: nn.Conv2d(16, 32, 3).cuda().to(memory_format=torch.channels_last),
    "loaded state": loaded,
    "from numbers": lambda: torch.tensor([[1.0] * 100] * 50, device="cuda"),
}


def figures():
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def of_torch(name):
    torch.cuda.init()
    kept = []
    requests = in_order(events_of_torch(lambda: kept.append(WAYS[name]())))
    return requests, figures()


def of_a_simulated_card(name):
    device, kept = simulated(A100, "40GiB"), []
    with device.history() as history, device.building():
        kept.append(WAYS[name]())
        left = figures()
    return in_order(history.events), left


@pytest.mark.parametrize("name", WAYS)
def test_building_makes_torchs_requests(name):
    assert forked(of_a_simulated_card, name) == forked(of_torch, name, memory="40GiB", card=A100)
