"""Training loops composed of the habits that keep state: each part may stand beside any other."""

import collections
import itertools

import torch
from torch import nn

PARTS = (
    "own optimizer", "attribute of a parameter", "replaced parameter", "counter", "iterator", "frozen part", "slots", "dict",
    "replaced containers", "made by the step", "inference tensor",
)  # fmt: skip


class Momentum(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "exp_avg" not in state:
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["exp_avg"].mul_(0.9).add_(p.grad)
                    p.sub_(state["exp_avg"], alpha=group["lr"])


class Slotted:
    __slots__ = ("best", "n")

    def __init__(self):
        self.n = 0


class EasyDict(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Rollout:
    def __init__(self):
        self.outputs, self.by_call = [], {}


class Trainer:
    """A loop with the given parts."""

    def __init__(self, parts, width=8, device="cpu"):
        torch.manual_seed(0)
        self.parts, self.width, self.device = parts, width, device
        self.model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(device)
        kind = Momentum if "own optimizer" in parts else torch.optim.Adam
        self.optimizer = kind([{"params": [p]} for p in self.model.parameters()])
        self.table = torch.randn(64, width, device=device)
        self.slotted, self.state = Slotted(), EasyDict(seen=0)
        self.feed = itertools.repeat(1.0) if "iterator" not in parts else (1.0 for _ in range(10**6))
        self.n = 0
        self.outputs, self.rollout, self.made = [], Rollout(), {}
        with torch.inference_mode("inference tensor" in parts):
            self.scale = torch.ones(1, device=device)

    def step(self, model, batch_size):
        """Run one step; what the parts count decides the learning rate."""
        parts, drops = self.parts, 0.0
        if "counter" in parts:
            self.n += 1
            model.calls = self.n
            drops += self.n
        if "frozen part" in parts:
            self.state["calls"] = self.state.get("calls", 0) + 1
            model[0].bias.requires_grad_(self.state["calls"] % 4 == 0)
        if "slots" in parts:
            self.slotted.n += 1
            drops += self.slotted.n
        if "dict" in parts:
            self.state.seen += batch_size
            self.state.mean = 0.9 * self.state.get("mean", 0.0) + self.state.seen
            drops += self.state.mean
        if "made by the step" in parts:
            if batch_size not in self.made:
                self.made[batch_size] = collections.Counter(), Slotted(), [0]
            numbers, slotted, counts = self.made[batch_size]
            numbers["calls"] += 1
            slotted.n += numbers["calls"]
            counts[0] += 1
            drops += slotted.n + counts[0]
        if "replaced containers" in parts:
            drops += len(self.outputs) + len(self.rollout.by_call)
            if len(self.outputs) == 3:
                self.outputs, self.rollout = [], Rollout()
        x = self.table[torch.arange(batch_size, device=self.device) % len(self.table)] * self.scale
        loss = model(x * next(self.feed)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + drops)
        self.optimizer.step()
        if "attribute of a parameter" in parts:
            for p in model.parameters():
                p.ema = p.detach().clone() if not hasattr(p, "ema") else p.ema.lerp(p.detach(), 0.1)
                p.main_grad = torch.zeros_like(p) if not hasattr(p, "main_grad") else p.main_grad
                if p.grad is not None:
                    p.main_grad += p.grad
            with torch.no_grad():
                model[2].bias.add_(model[2].bias.ema + model[2].bias.main_grad, alpha=0.01)
        if "replaced parameter" in parts:
            self.grow(model)
        if "replaced containers" in parts:
            self.outputs.append(loss.detach())
            self.rollout.outputs.append(x[:1])
            self.rollout.by_call[len(self.outputs)] = loss.detach()
        return loss.detach()

    def grow(self, model):
        """Replace the last layer's parameters by longer ones, and move their optimizer state, as densification does."""
        for group, name in zip(self.optimizer.param_groups[2:], ("weight", "bias"), strict=True):
            old = group["params"][0]
            if len(old) >= self.width + 6:
                return
            new = nn.Parameter(torch.cat([old.detach(), old.detach()[:1]]))
            state = self.optimizer.state.pop(old)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([state[key], torch.zeros_like(state[key][:1])])
            group["params"][0], self.optimizer.state[new] = new, state
            for key, value in vars(old).items():
                setattr(new, key, torch.cat([value, value[:1]]))
            setattr(model[2], name, new)
