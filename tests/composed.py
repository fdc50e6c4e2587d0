"""A training loop with the habits that keep state, each of which may stand beside any other."""

import collections
import itertools

import torch
from ledger import Box
from torch import nn


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, **defaults):
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    self.update(p, m.mul_(0.9).add_(p.grad), group)

    def update(self, p, m, group):
        p.sub_(m, alpha=group["lr"])


class Slotted:
    __slots__ = ("best", "n")

    def __init__(self):
        self.n = 0


class EasyDict(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Rollout:
    """Keeps outputs."""

    def __init__(self):
        self.outputs, self.by_call = [], {}

    def append(self, output):
        self.outputs.append(output)
        self.by_call[len(self.outputs)] = output


class Average:
    """An object with tensors in a plain attribute, such as an EMA."""

    def __init__(self):
        self.shadow = {"weight": torch.ones(3)}

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


class Hidden:
    """An object whose state only its state_dict shows."""

    def __init__(self):
        self.box = Box({"name": "hidden", "mean": torch.zeros(1), "seen": [torch.zeros(1)]})

    def state_dict(self):
        return dict(self.box.held)

    def load_state_dict(self, state):
        self.box.held = dict(state)


class Trainer:
    """Counts in attributes, slots, dicts and on the model; freezes, replaces and decorates parameters; what it counts decides the rate."""

    def __init__(self, feed=None, width=8, device="cpu"):
        self.model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(
            device
        )
        self.optimizer = Momentum([{"params": [p]} for p in self.model.parameters()])
        self.table = torch.randn(64, width, device=device)
        self.slotted, self.state, self.feed = (
            Slotted(),
            EasyDict(seen=0),
            feed or itertools.repeat(1.0),
        )
        self.outputs, self.rollout, self.made = [], Rollout(), {}
        self.n, self.longest = 0, width + 6
        with torch.inference_mode():
            self.scale = torch.ones(1, device=device)

    def step(self, model, batch_size):
        rate = 0.1 / (
            1 + self.count(model, batch_size) + len(self.outputs) + len(self.rollout.by_call)
        )
        if len(self.outputs) == 3:
            self.outputs, self.rollout = [], Rollout()
        model[0].bias.requires_grad_(self.n % 4 == 0)
        x = (
            self.table[torch.arange(batch_size, device=self.table.device) % len(self.table)]
            * self.scale
        )
        loss = model(x * next(self.feed)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for p in model.parameters():
            p.ema = p.detach().clone() if not hasattr(p, "ema") else p.ema.lerp(p.detach(), 0.1)
            p.main_grad = getattr(p, "main_grad", 0) + (
                torch.zeros_like(p) if p.grad is None else p.grad
            )
        with torch.no_grad():
            model[2].bias.add_(model[2].bias.ema + model[2].bias.main_grad, alpha=0.01)
        self.grow(model)
        self.outputs.append(loss.detach())
        self.rollout.append(x[:1])
        return loss.detach()

    def count(self, model, batch_size):
        self.n += 1
        model.calls = self.n
        self.slotted.n += 1
        self.state.seen += batch_size
        self.state.mean = 0.9 * self.state.get("mean", 0.0) + self.state.seen
        if batch_size not in self.made:
            self.made[batch_size] = collections.Counter(), Slotted(), [0]
        numbers, slotted, counts = self.made[batch_size]
        numbers["calls"] += 1
        slotted.n += numbers["calls"]
        counts[0] += 1
        return self.n + self.slotted.n + self.state.mean + slotted.n + counts[0]

    def grow(self, model):
        """Replace the last layer's parameters by longer ones, and move their optimizer state, as densification does."""
        for group, name in zip(self.optimizer.param_groups[2:], ("weight", "bias"), strict=True):
            old = group["params"][0]
            if len(old) >= self.longest:
                return
            new = nn.Parameter(torch.cat([old.detach(), old.detach()[:1]]))
            averages = self.optimizer.state.pop(old)["exp_avg"]
            group["params"][0], self.optimizer.state[new] = (
                new,
                {"exp_avg": torch.cat([averages, averages[:1]])},
            )
            for key, value in vars(old).items():
                setattr(new, key, torch.cat([value, value[:1]]))
            setattr(model[2], name, new)
