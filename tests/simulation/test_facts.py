"""What is claimed about the values of operators holds for real tensors, and is as tight as shapes that depend on it need."""

import json
import math
from types import SimpleNamespace

import numpy as np
import operators
import pytest
import torch
from torch import distributions as D
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomprobe.simulation.facts import RULES, Facts
from simulation.bench import Bench

ASSUMED = {"isnan", "isinf", "isposinf", "isneginf", "isfinite", "_is_all_true"}
NO_VALUES = SimpleNamespace(knows=lambda _: False)  # so that all is claimed by operators


class Claims(TorchDispatchMode):
    """Runs operators for real, and compares what is claimed of their results with these."""

    def __init__(self):
        super().__init__()
        self.facts = Facts(NO_VALUES, lambda tensor: tensor, {})
        self.broken, self.followed = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        self.facts.follow(func, args, kwargs or {}, result)
        if name in RULES and name not in ASSUMED:
            self.followed.add(name)
            for index, tensor in enumerate(tree_leaves(result)):
                self.check(f"{func}, {index}", tensor)
        return result

    def check(self, name, tensor):
        fact = self.facts.of(tensor)
        values = tensor.detach().double().flatten()
        values = values[~values.isnan()]
        rounding = 1e-5 if tensor.dtype.itemsize > 2 else 1e-2
        for value in (values.min().item(), values.max().item()) if len(values) else ():
            slack = 0 if math.isinf(value) else rounding * max(1, abs(value))
            if not fact.low - slack <= value <= fact.high + slack:
                self.broken.append((name, value, fact))

    def of(self, tensor):
        return self.facts.of(tensor)[:2]


def integers(low=0, high=7, shape=(6, 5)):
    return torch.randint(low, high, shape)


def wrapped():
    small = integers(100, 120).to(torch.uint8)
    return small + small + small, (small.int() * 10).to(torch.uint8), -small


def written_views():
    x = torch.rand(6, 5)
    x[2].add_(7)
    x[:, 1].copy_(torch.randn(6))
    y = integers()
    y[0] = 50
    y[1:].mul_(-3)
    y.view(torch.int32)[0, 0] = -9
    z = torch.rand(8)
    z.view(torch.int32).random_(0, 5)
    w, v = torch.rand(6, 5), integers()
    w[2].add_(7)
    v[0].fill_(50)
    w.neg_()
    return w.clone(), v.mul(-3), x, y, z + 0, y + 0, y.sort()[0], x.clone(), z.clone()


# Each is run in 20 ways, with other random numbers.
OPERATORS = {
    "indices": lambda: [
        f(torch.randn(6, 5), dim) for f in (torch.argmax, torch.argmin, torch.argsort) for dim in (0, 1)
    ],
    "chosen": lambda: [
        f(integers(-3, 9), 1)
        for f in (torch.max, torch.min, torch.sort, torch.topk, torch.kthvalue, torch.mode, torch.median, torch.cummax, torch.cummin)
        if f is not torch.topk
    ] + [torch.rand(6, 5).topk(3), integers().topk(2, 0)],
    "of all": lambda: [getattr(integers(-4, 9), name)() for name in ["max", "min", "amax", "amin", "sum", "argmax", "unique", "count_nonzero", "any", "all"]],
    "two": lambda: [f(integers(-4, 9), torch.rand(5)) for f in (torch.max, torch.min, torch.maximum, torch.minimum)],
    "drawn": lambda: [
        torch.rand(6, 5).multinomial(3), integers(3, 5), torch.randint_like(integers(), 2, 4), torch.rand(3).uniform_(-2, 5),
        torch.randperm(9), integers().random_(4), integers().random_(-2, 4), torch.rand(9).bernoulli(), torch.rand(9).bernoulli_(0.2),
        torch.empty(9).random_(0, 2), torch.rand(5).exponential_().clamp(max=2), F.dropout(torch.rand(9), 0.5),
    ],
    "found": lambda: [
        torch.searchsorted(torch.rand(4).sort()[0], torch.rand(6)), torch.bucketize(torch.randn(9), torch.arange(4.0)),
        (torch.randn(6, 5) > 0).nonzero(), integers().unique(return_inverse=True, return_counts=True),
        integers().unique(dim=0, return_inverse=True, return_counts=True), integers().unique_consecutive(return_inverse=True),
        integers().flatten().bincount(minlength=9), integers().flatten().bincount(torch.randn(30)),
        F.max_pool2d(torch.rand(2, 3, 6, 6), 2, return_indices=True),
    ],
    "probabilities": lambda: [
        torch.randn(6, 5).softmax(1), torch.randn(6, 5).log_softmax(0), torch.randn(9).mul(90).sigmoid(), F.logsigmoid(torch.randn(9)),
        torch.randn(9).tanh(), F.hardsigmoid(torch.randn(9)), torch.randn(9).half().softmax(0), F.gumbel_softmax(torch.randn(6, 5)),
    ],
    "compared": lambda: [
        f(x, y)
        for f in (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne)
        for x in (integers(0, 3), torch.rand(6, 5)) for y in (integers(1, 3), torch.rand(6, 5), 0, 2, 3, 0.5)
    ],
    "logic": lambda: [
        f(x, y)
        for f in (torch.logical_and, torch.logical_or, torch.logical_xor, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)
        for x in (integers(0, 2) > 0, integers(0, 2) < 5) for y in (integers(0, 2) > 4, integers(0, 3) > 1)
    ] + [~(integers() > 9), ~integers(), torch.logical_not(integers(0, 2)), integers() & 3, integers(-5, 5) | 2] + [
        f(integers(0, 2), y)
        for f in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)
        for y in (integers(0, 2), integers() > 3, integers(1, 2), 1)
    ],
    "arithmetic": lambda: [
        f(x, y)
        for f in (torch.add, torch.sub, torch.rsub, torch.mul, torch.div, torch.floor_divide, torch.remainder, torch.fmod)
        for x in (integers(-3, 9), torch.rand(6, 5)) for y in (integers(1, 4), torch.rand(6, 5) + 1, 3, -2, 2.5)
    ] + [
        torch.add(integers(), integers(), alpha=-3), torch.sub(integers(), integers(), alpha=2), 5 - integers(), 1 - torch.rand(5),
        torch.div(integers(-9, 9), 4, rounding_mode="trunc"), torch.div(integers(-9, 9), 4, rounding_mode="floor"), torch.rand(5) / 0,
        torch.div(integers(-9, 9), torch.rand(5) + 1, rounding_mode="floor"), integers(-9, 9) % -4, integers(-9, 9) % 4,
    ],
    "of one": lambda: [
        f(x)
        for f in (torch.neg, torch.abs, torch.relu, torch.exp, torch.log, torch.log1p, torch.sqrt, torch.rsqrt, torch.square, torch.floor,
                  torch.ceil, torch.round, torch.trunc, torch.sign, torch.sin, torch.cos, torch.erf, F.softplus, torch.reciprocal)
        for x in (torch.randn(9), torch.rand(9) - 2, torch.rand(9) * 900, torch.rand(9).clamp(0.1, 0.4), -torch.rand(9), torch.zeros(3))
    ],
    "powers": lambda: [torch.randn(9) ** p for p in (0, 1, 2, 3, 0.5, -2)] + [torch.rand(9) ** torch.randn(9), 2 ** torch.randn(9)],
    "clamped": lambda: [
        torch.randn(9).clamp(-0.2, 0.1), torch.rand(9).clamp(min=0.5), integers().clamp_(max=3), torch.rand(9).clamp(torch.rand(9)),
        integers().clamp_min(4), integers().clamp_max(4), torch.rand(9).clamp(5, 2), torch.randn(9).clamp(max=torch.rand(9)),
        F.hardtanh(torch.randn(9) + 5), F.relu6(torch.randn(9) * 9),
    ],
    "summed": lambda: [
        integers(-3, 5).sum(0), torch.rand(6, 5).mean(1), torch.rand(6, 5).cumsum(1), integers(-2, 3).cumsum(0), integers().prod(1),
        (torch.randn(6, 5) > 0).sum(1), torch.rand(6, 5).std(0), torch.rand(6, 5).norm(), integers(1, 3).flatten().cumprod(0),
        torch.rand(6, 5).var(), torch.rand(3).half().sum(), torch.rand(6, 5).amax(0), integers(0, 2).all(1), integers(0, 2).any(),
    ],
    "moved": lambda: [
        integers().to(torch.float32), (torch.randn(9) * 9).to(torch.int64), torch.rand(9).bool(), integers(0, 2).bool(), torch.rand(9).half(),
        integers(2, 5).repeat(2, 1), integers().flip(0), integers().roll(1), integers().gather(1, integers(0, 5)), torch.cat([integers(), integers(8, 9)]),
        torch.stack([torch.rand(4), torch.randn(4)]), torch.where(torch.rand(5) > 0.5, integers(), 12), F.embedding(integers(0, 5), torch.rand(6, 3)),
        F.pad(integers(4, 6), (1, 1)), F.pad(torch.rand(3), (1, 1), value=-4), torch.rand(5, 5).tril() + 3, (torch.rand(5, 5) + 1).triu(),
        integers()[integers(0, 5, (3,))], integers().index_select(0, integers(0, 5, (3,))), torch.rand(6, 5)[torch.rand(6, 5) > 0.5], -(integers() > 2).long(),
    ],
    "put": lambda: [
        torch.zeros(6, 5).scatter_(1, integers(0, 5), 1.0), torch.zeros(6, 5).scatter(1, integers(0, 5), torch.rand(6, 5) + 3),
        torch.zeros(6, 5).scatter_(1, integers(0, 5), 2.0, reduce="add"), torch.ones(6, 5).scatter_add_(1, integers(0, 5), torch.rand(6, 5)),
        torch.rand(6, 5).masked_fill(torch.rand(6, 5) > 0.5, -9), torch.zeros(6).index_put_([integers(0, 5, (9,))], torch.ones(9), accumulate=True),
        torch.zeros(6).index_put_([integers(0, 5, (9,))], torch.rand(9)), torch.zeros(6).index_add(0, integers(0, 5, (9,)), torch.ones(9)),
        torch.zeros(6).index_fill(0, integers(0, 5, (2,)), 8), F.one_hot(integers(), 9),
        torch.ones(6).masked_scatter(torch.rand(6) > 0.5, torch.randn(6)), torch.zeros(6).scatter_reduce(0, integers(0, 5, (6,)), torch.ones(6), "sum"),
    ],
    "made": lambda: [torch.full((3,), 4), torch.zeros(3).fill_(2.5), torch.ones_like(torch.rand(3)), torch.rand(3).new_full((2,), 9), torch.rand(3).zero_(),
                     torch.full_like(integers(), -3), torch.empty(4).fill_(torch.tensor(3.0)), torch.normal(0.0, 1.0, (9,))],
    "sampled": lambda: [
        torch.rand_like(torch.rand(3)), torch.poisson(torch.rand(9) * 5), torch._standard_gamma(torch.rand(9) + 0.1),
        torch._sample_dirichlet(torch.rand(6, 5)), torch._safe_softmax(torch.randn(6, 5), 1), torch.randn(6, 5).nanmedian(1),
        torch.rand(6, 5).take(integers()), torch.rand(5).masked_select(torch.rand(5) > 0.5), torch.rand(3).new_ones(3),
        torch.rand(3).new_zeros(3), torch.zeros_like(torch.rand(3)),
        torch.ops.aten._index_put_impl_(torch.zeros(6), [integers(0, 5, (9,))], torch.rand(9)),
    ],
    "wrapped": wrapped,
    "views": written_views,
    "out": lambda: torch.add(torch.rand(3), 5, out=torch.zeros(3)) + 0,
}  # fmt: skip


def broken_by(run, times):
    claims = Claims()
    for seed in range(times):
        torch.manual_seed(seed)
        with claims:
            run()
    return claims


@pytest.mark.parametrize("name", OPERATORS)
def test_claims_hold_for_real_tensors(name):
    assert broken_by(OPERATORS[name], 20).broken == []


def test_each_rule_is_compared_with_real_tensors():
    followed = set()
    for run in OPERATORS.values():
        followed |= broken_by(run, 1).followed
    assert set(RULES) - followed - ASSUMED == set()


def made(*shape, grad=True, dtype=torch.float32):
    tensor = torch.randn([min(length, 24) for length in shape]).to(dtype)
    return tensor.requires_grad_(grad and dtype.is_floating_point)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the bed, no kernel writes a result")
def test_claims_hold_over_the_table_of_operators():
    """With real tensors, as far as a case needs no card; forward and backward."""
    make, broken, ran = made, [], 0
    make.weight, make.dtype = made, torch.float32
    make.indices = lambda *shape, dtype=torch.long: made(*shape, grad=False).abs().to(dtype)
    for case in operators.CASES.values():
        claims = Claims()
        try:
            with claims:
                results = case(make)
                for result in results if isinstance(results, tuple) else (results,):
                    if result.requires_grad:
                        result.sum().backward(retain_graph=True)
            ran += 1
        except Exception:  # it needs a card, or the lengths that it names
            pass
        broken += claims.broken
    assert broken == []
    assert ran > 150


# --- on a simulated card ---


def indices():
    return torch.randn(64, 10, device="cuda").argmax(1)


SHAPES = {
    "classes": (lambda: F.one_hot(indices()), (64, 10)),
    "counts": (lambda: indices().bincount(), (10,)),
    "pairs": (lambda: (torch.arange(64, device="cuda") % 4 * 10 + indices()).bincount(minlength=40), (40,)),
    "distinct": (lambda: indices().unique(), (10,)),
    "few distinct": (lambda: indices()[:3].unique(), (3,)),
    "largest": (lambda: torch.zeros(int(indices().max()) + 1), (10,)),
    "longest": (lambda: torch.zeros(4, 8)[:, : (torch.randn(4, 8, device="cuda") > 0).sum(1).max().item()], (4, 8)),
    "repeated": (lambda: torch.zeros(64, 2, device="cuda").repeat_interleave(indices(), 0), (576, 2)),
    "no NaN": (lambda: torch.randn(4, device="cuda").isnan().nonzero(), (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_ranges_bound_what_depends_on_values(name):
    make, shape = SHAPES[name]
    assert Bench().run(lambda: tuple(make().shape)) == shape


def decoded():
    """Take tokens until all sequences have ended, at the latest by their length."""
    unfinished, tokens = torch.ones(4, dtype=torch.long, device="cuda"), indices()[:4, None]
    while unfinished.max() != 0:
        tokens = torch.cat([tokens, indices()[:4, None]], 1)
        ended = torch.full((4,), tokens.shape[1] >= 9, device="cuda") | torch.isin(
            tokens[:, -1], torch.tensor([3, 4], device="cuda")
        )
        unfinished = unfinished & ~ended
    return tokens.shape[1]


def numbers_of_numpy():
    """Return what numpy makes of one array, as JSON takes it."""
    predicted = indices().cpu().numpy()
    correct = (predicted == 1).astype(np.float64)
    return json.loads(
        json.dumps([correct.mean(), correct.max() - 1, float((predicted == 0).sum())])
    )


def boxes():
    return (torch.arange(800.0).view(200, 4) * 0.5).cuda() / 2


def flag(value):
    return torch.tensor(value).cuda()


READ = {
    "a flag": (lambda: bool(flag(0.0)), False),
    "a flag that is set": (lambda: bool(flag([0.0]).fill_(1)), True),
    "a scale": (lambda: (flag([2.0, 3.0]) * 2).tolist(), [4.0, 6.0]),
    "a scale that changed": (lambda: flag(2.0).add_(torch.randn((), device="cuda")).item(), 1.0),
    "a trained number": (lambda: stepped(flag([5.0]).requires_grad_()).item(), 1.0),
    "a number of classes": (lambda: int(indices().max()), 9),
    "an action": (lambda: indices()[0].item() in range(10), True),
    "correct": (lambda: (indices() == torch.arange(64, device="cuda")).sum().item(), 64),
    "NaNs": (lambda: bool(torch.randn(8, device="cuda").isnan().sum() > 0), False),
    "in a range": (lambda: torch.randint(5, 9, (3,), device="cuda").tolist(), [5, 5, 5]),
    "logarithm": (lambda: bool((torch.randn(8, device="cuda").log_softmax(0) > 0.5).any()), False),
    "valid": (lambda: bool(torch._is_all_true(torch.randn(8, device="cuda") < -5)), True),
    "decoded to the end": (decoded, 9),
    "numbers of numpy": (numbers_of_numpy, [1.0, 0.0, 0.0]),
    "invalid boxes": (lambda: bool((boxes()[:, 2:] <= boxes()[:, :2]).any()), False),
    "skipped steps": (lambda: scaled_steps(), [65536.0, 65536.0]),
}


def stepped(weight):
    (weight * torch.randn(1, device="cuda")).sum().backward()
    torch.optim.Adam([weight]).step()
    return weight


def scaled_steps():
    weight, scaler = torch.randn(8, device="cuda", requires_grad=True), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD([weight])
    scales = []
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("name", READ)
def test_what_a_program_reads(name):
    read, value = READ[name]
    assert Bench().run(read) == value


def two(make):
    return lambda x: make(x[:, :2].exp(), x[:, 2:4].exp())


DISTRIBUTIONS = {
    "categorical": lambda x: D.Categorical(logits=x),
    "probabilities": lambda x: D.Categorical(x.softmax(-1)),
    "one hot": lambda x: D.OneHotCategorical(logits=x),
    "Bernoulli": lambda x: D.Independent(D.Bernoulli(x.sigmoid()), 1),
    "normal": two(D.Normal),
    "beta": two(D.Beta),
    "gamma": two(D.Gamma),
    "Dirichlet": lambda x: D.Dirichlet(x.exp()),
    "multivariate": lambda x: D.MultivariateNormal(x, torch.diag_embed(x.exp())),
    "squashed": lambda x: D.TransformedDistribution(D.Normal(x, x.exp()), [D.TanhTransform(1)]),
    "mixture": lambda x: D.MixtureSameFamily(D.Categorical(logits=x[:, :3]), D.Normal(x[:, :3], x[:, 3:6].exp())),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_validate_their_arguments(name):
    """Parameters, samples and divergences, forward and backward; with the shapes that real tensors give."""

    def step(device):
        logits = torch.randn(4, 6, device=device, requires_grad=True)
        distribution = DISTRIBUTIONS[name](logits)
        sample = distribution.rsample() if distribution.has_rsample else distribution.sample()
        said = distribution.log_prob(sample)
        if name not in ("squashed", "mixture"):
            said = (
                said
                + distribution.entropy()
                + D.kl_divergence(distribution, DISTRIBUTIONS[name](logits + 1))
            )
        said.sum().backward()
        return sample.shape, said.shape, logits.grad.shape

    assert Bench().run(lambda: step("cuda")) == step("cpu")
