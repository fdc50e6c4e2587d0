"""Optimizer classes that users write themselves, or copy into their script, are seen when they step."""

import functools

import pytest
import tenacity
import torch
from ledger import probe
from torch import nn
from torch.optim import optimizer as torchs
from zoo import training_step

import oomprobe


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, **defaults):
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                self.update(p, m.mul_(0.9).add_(p.grad), group)

    def update(self, p, m, group):
        p.sub_(m, alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and overrides step itself."""

    def __init__(self, inner):
        self.inner, self.n = inner, 0
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.slow = {p: p.detach().clone() for p in self.param_groups[0]["params"]}

    def step(self):
        self.inner.step()
        self.n += 1
        if self.n % 5 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)


class Wrapped(torch.optim.Optimizer):
    """Like accelerate's, it calls the step of another optimizer, so no hook ever sees its own."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


class Decorated(Momentum):
    """An installed library wraps a helper of its."""

    @tenacity.retry(stop=tenacity.stop_after_attempt(2))
    def update(self, p, m, group):
        p.sub_(m, alpha=group["lr"])


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return function(*args, **kwargs)

    wrapper.calls = 0
    return wrapper


class WithOwnDecorator(Momentum):
    step = logged(Momentum.step)


class Grouped(Momentum):
    """Muon: matrices are orthogonalised, everything else is left to AdamW."""

    def __init__(self, params):
        params = list(params)
        super().__init__([p for p in params if p.dim() > 1])
        self.others = torch.optim.AdamW([p for p in params if p.dim() < 2], lr=0.01)

    def step(self):
        self.others.step()
        super().step()

    def update(self, p, m, group):
        p.sub_(m / (m.norm() + 1e-9), alpha=group["lr"])


OPTIMIZERS = [
    Momentum, lambda params: Lookahead(torch.optim.AdamW(params)), lambda params: Wrapped(Momentum(params)), Decorated,
    WithOwnDecorator, Grouped,
]  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: getattr(make, "__name__", make))
def test_an_optimizer_of_the_users_own_is_seen(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = make(model.parameters())
    result = probe(model, training_step(optimizer, lambda n: torch.randn(n, 4)), max_batch=4)
    assert not any("no optimizer stepped" in note or "did not step" in note for note in result.notes)
    assert result.trials[0].steps < 10
    assert result.state_verified, result.notes
    assert all(p.grad is None and p not in optimizer.state for p in model.parameters())


def test_a_trial_that_finds_its_hooks_gone_says_so():
    model = nn.Linear(2, 2)
    optimizer = Momentum(model.parameters())

    def draw(batch_size):
        torchs._global_optimizer_post_hooks.clear()
        return torch.ones(batch_size, 2)

    before = dict(torchs._global_optimizer_post_hooks)
    try:
        with pytest.raises(oomprobe.UnreliableError, match=r"oomprobe's own hooks .* are gone"):
            probe(model, training_step(optimizer, draw), max_batch=4)
    finally:
        torchs._global_optimizer_post_hooks.update(before)
