"""Training goes on after a probe as if there had been none, in loops of every kind that strangers write.

What cannot be put back must be named in a note, and then the state is not verified.
"""

import argparse
import array
import collections
import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import math
import operator
import queue
import random
import re
import statistics
import types
import weakref

import numpy as np
import pytest
import torch
from composed import EasyDict, Slotted
from ledger import Log, probe
from torch import nn
from torch.utils.data import DataLoader

import oomprobe

CALLS = 24
SAMPLES = torch.arange(1600.0).view(400, 4).sin()
TORCHS = {"weights", "generators", "model", "optimizer", "loader"}  # put back already, and words that a note may use
LOOPS = []


def loop(*lost):
    """Add a builder of (model, step, look) to the table. `look` returns what the loop counts and keeps, by name.

    Only the names in `lost` may be named in notes, and those whose values change must be.
    """

    def add(build):
        LOOPS.append(pytest.param(build, {*lost}, id=build.__name__))
        return build

    return add


@pytest.fixture(params=[0, 18], ids=["fresh", "mid-training"])
def built(request):
    """Build a loop, always from the same seed, and train it up to the probe."""

    def from_seed(build):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model, step, look = build()
        for _ in range(request.param):
            step(model, 4)
        return model, step, look

    return from_seed


@pytest.mark.parametrize(("build", "lost"), LOOPS)
def test_training_goes_on(built, build, lost):
    untouched = train(*built(build))
    model, step, look = built(build)
    before = seen(model, look)
    result = probe(model, step, max_batch=8)
    assert result.batch_size in (5, 8)
    notes = [note for note in result.notes if note.startswith("not restored: ")]
    names = {name: re.compile(rf"(?<!\w){re.escape(name)}(?!\w)") for name in {*before, *lost} - TORCHS}
    named = {name for name, word in names.items() if any(map(word.search, notes))}
    assert different(before, seen(model, look)) <= named <= lost, notes
    assert all(any(names[name].search(note) for name in named) for note in notes)
    assert result.state_verified == (not notes)
    if not named:
        assert different(train(model, step, look), untouched) == set()


@pytest.mark.parametrize("built", [0], ids=["fresh"], indirect=True)
@pytest.mark.parametrize(("build", "lost"), LOOPS)
def test_the_loop_repeats_and_would_notice(built, build, lost):
    """The loops themselves: two runs are equal, and a probe that puts only torch's state back would be seen."""
    assert different(train(*built(build)), train(*built(build))) == set()
    model, step, look = built(build)
    before = seen(model, look)
    for batch_size in (1, 1, 1, 2, 2, 2, 4, 4, 4):
        step(model, batch_size)
    moved = different(before, seen(model, look)) - TORCHS
    assert moved
    assert lost <= moved


def train(model, step, look):
    losses = [picture(step(model, 4)) for _ in range(CALLS)]
    return {"losses": losses, **seen(model, look)}


def seen(model, look):
    kept = {
        "weights": [*model.parameters(), *model.buffers()],
        "generators": [torch.get_rng_state(), repr(random.getstate()), np.random.get_state()],
        **look(),
    }
    return {name: picture(value) for name, value in kept.items()}


def different(one, other):
    return {name for name in one.keys() | other.keys() if name not in one or one[name] != other.get(name)}


def picture(value, inside=()):
    """Describe a value and all that it holds, bit for bit, without using the package."""
    if id(value) in inside:
        return "itself"
    look = functools.partial(picture, inside=(*inside, id(value)))
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        gradient = look(value.grad) if value.is_leaf else None
        return kind, value.dtype, value.shape, value.detach().numpy().tobytes(), value.requires_grad, gradient
    if isinstance(value, np.ndarray):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        return kind, look(value.state_dict())
    if isinstance(value, random.Random | torch.Generator | np.random.Generator | io.StringIO):
        read = {random.Random: "getstate", torch.Generator: "get_state", io.StringIO: "getvalue"}.get(type(value))
        return kind, look(getattr(value, read)() if read else value.bit_generator.state)
    if isinstance(value, types.GeneratorType):
        return kind, value.gi_frame and (value.gi_frame.f_lasti, look([value.gi_frame.f_locals, value.gi_yieldfrom]))
    if isinstance(value, dict):
        return kind, [(look(key), look(part)) for key, part in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return kind, [look(part) for part in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, value))
    if isinstance(value, itertools.count | array.array):
        return kind, repr(value)
    parts = dict(sorted(getattr(value, "__dict__", {}).items()))
    for base in type(value).__mro__:
        parts |= {name: getattr(value, name) for name in getattr(base, "__slots__", ()) if hasattr(value, name)}
    if parts and not isinstance(value, type):
        return kind, look(parts)
    is_plain = isinstance(value, int | float | str | bytes | np.generic | type(None))
    return kind, repr(value) if is_plain else operator.length_hint(value)


# --- what the loops share ---


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def net_and_optimizer():
    model = net()
    return model, sgd(model)


def batch(batch_size):
    return torch.randn(batch_size, 4)


def fit(model, optimizer, x, lr=0.05):
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Trainer:
    """Counts nothing by itself, so that each loop shows only what it adds."""

    def __init__(self, *, make=net, **kept):
        self.model = make()
        self.optimizer = sgd(self.model)
        for name, value in kept.items():
            is_made = isinstance(value, types.FunctionType)
            setattr(self, name, value(self.model) if is_made else copy.deepcopy(value))

    def fit(self, x, lr=0.05):
        return fit(self.model, self.optimizer, x, lr)


def by(trainer):
    return trainer.model, trainer.step, lambda: vars(trainer)


def method(*lost, **kept):
    """Add the loop of a trainer whose `step` is this method, and which starts with the attributes `kept`.

    Functions among the attributes make them from the model.
    """

    def add(step):
        @functools.wraps(step)
        def build():
            return by(type("Mine", (Trainer,), {"step": step, "__module__": __name__})(**kept))

        return loop(*lost)(build)

    return add


def cells(function):
    """Return a function's closure variables, without those that have no value yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def public(owner):
    return {name: value for name, value in vars(owner).items() if not name.startswith("__")}


def copied(model):
    return [value.detach().clone() for value in model.parameters()]


# --- places to count in ---


@loop()
def variables_dicts_and_namespaces_in_a_closure():
    model, optimizer = net_and_optimizer()
    n, best, average = 0, math.inf, None
    del average  # it gets its first value in the step
    state, cfg, args = {"n": 0}, EasyDict(train=EasyDict(seen=0)), argparse.Namespace(lr=0.1)

    def step(model, batch_size):
        nonlocal n, best, average
        n += 1
        state["n"] += n
        cfg.train.seen += batch_size
        args.lr *= 0.95
        cfg.loss = state["loss"] = loss = fit(model, optimizer, batch(batch_size), args.lr / state["n"]).item()
        best = min(best, loss)
        try:
            average = 0.9 * average + 0.1 * loss
        except NameError:
            average = loss
        return average - best / cfg.train.seen

    return model, step, lambda: cells(step)


@loop()
def globals_of_a_notebook():
    source = """
model, optimizer = net_and_optimizer()
n, history = 0, []

def step(model, batch_size):
    global n, average
    n += 1
    cfg.calls += n
    loss = fit(model, optimizer, batch(batch_size), lr=0.1 / cfg.calls).item()
    average = loss if n == 1 else 0.9 * average + 0.1 * loss
    history.append(average)
    cfg.last = average
    return average
"""
    notebook, cfg = types.ModuleType("notebook"), types.ModuleType("cfg")
    given = {"net_and_optimizer": net_and_optimizer, "batch": batch, "fit": fit, "cfg": cfg}
    vars(notebook).update(given)
    cfg.calls = 0
    exec(source, vars(notebook))
    look = lambda: {name: value for name, value in public(notebook).items() if name not in given}  # noqa: E731
    return notebook.model, notebook.step, lambda: look() | public(cfg)


@loop()
def attributes_of_a_class_and_a_private_one():
    class Step(Trainer):
        calls, warm, __n = 0, False, 0
        n = property(lambda self: self.__n, lambda self, value: setattr(self, "_Step__n", value))

        def __call__(self, model, batch_size):
            Step.calls += 1
            self.n += 1
            if not self.warm:  # a warm start, once for all trainers
                nn.init.ones_(model[0].weight)
                type(self).warm, type(self).began_with = True, batch_size
            return self.fit(batch(batch_size), lr=0.2 / (Step.calls + self.n))

    step = Step()
    return step.model, step, lambda: public(Step) | vars(step)


@dataclasses.dataclass
class Record:
    steps: int = 0
    losses: list = dataclasses.field(default_factory=list)


class Meter:
    total, count = 0.0, 0

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1
        self.avg = self.total / self.count


Best = collections.namedtuple("Best", ["at", "loss"])


@method(slotted=Slotted(), record=Record(), best=Best(0, math.inf), logger=types.SimpleNamespace(meters={}))
def objects_in_objects(self, model, batch_size):
    self.slotted.n += 1
    self.record.steps += batch_size
    loss = self.fit(batch(batch_size), lr=1 / (9 * self.slotted.n + self.record.steps)).item()
    self.record.losses.append(loss)
    self.logger.meters.setdefault("loss", Meter()).update(loss)
    if loss < self.best.loss:
        self.best = self.best._replace(at=self.slotted.n, loss=loss)
        self.slotted.best = copy.deepcopy(model.state_dict())
    return self.logger.meters["loss"].avg


@loop()
def a_partial_and_defaults_and_attributes_of_the_step():
    def step(model, batch_size, seen=[], *, optimizer, state, rng, counts={}):  # noqa: B006
        seen.append(batch_size)
        counts[batch_size] = counts.get(batch_size, 0) + 1
        state["n"] += 1
        step.n += 1
        x = torch.tensor([rng.gauss(0, 1) for _ in range(4 * batch_size)]).view(-1, 4)
        step.loss = fit(model, optimizer, x, lr=0.2 / (len(seen) + step.n + state["n"])).item()
        return step.loss

    model, optimizer = net_and_optimizer()
    step.n = 0
    kept = {"optimizer": optimizer, "state": {"n": 0}, "rng": random.Random(3)}
    look = lambda: {"seen": step.__defaults__, "counts": step.__kwdefaults__, **vars(step), **kept}  # noqa: E731
    return model, functools.partial(step, **kept), look


# --- what loops keep ---


@method(
    history=[],
    recent=collections.deque(maxlen=5),
    sizes=collections.Counter(),
    shapes={(3, 3)},
    cache=collections.OrderedDict(),
)
def lists_deques_counters_sets_and_a_cache(self, model, batch_size):
    key = batch_size, random.randrange(6)
    x = self.cache.setdefault(key, batch(batch_size))
    self.cache.move_to_end(key)
    if len(self.cache) > 4:
        self.cache.popitem(last=False)
    self.sizes[batch_size] += 1
    self.shapes.add(tuple(x.shape))
    self.history.append(self.fit(x, lr=0.1 / (self.sizes.total() + len(self.shapes))).item())
    self.recent.append(self.history[-1])
    return statistics.mean(self.recent)


@method(mean=np.zeros(4, "f4"), square=np.zeros(4), total=torch.zeros(()))
def averages_in_arrays_and_tensors(self, model, batch_size):
    x = batch(batch_size)
    self.mean *= 0.9
    self.mean += 0.1 * x.mean(0).numpy()
    self.square = 0.9 * self.square + 0.1 * self.mean**2
    self.total += self.fit(x - torch.from_numpy(self.mean), lr=0.05 / (1 + self.square.sum() + self.total.item()))
    return self.total.clone()


@method(n=0, shadow=copied)
def averaged_weights_made_at_the_start_and_at_calls_3_and_20(self, model, batch_size):
    self.n += 1
    loss = self.fit(batch(batch_size))
    with torch.no_grad():
        for shadow, theirs in zip(self.shadow, model.parameters(), strict=True):
            shadow.lerp_(theirs, 0.1)
    if hasattr(self, "ema"):
        for mine, theirs in zip(self.ema.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)
        loss += self.ema[0].weight.sum().item()
    if self.n in (3, 20):
        self.ema = copy.deepcopy(model)
    return loss + self.shadow[0].sum()


@method(t=0, momentum={})
def an_optimizer_written_by_hand(self, model, batch_size):
    self.t += 1
    loss = model(batch(batch_size)).square().mean()
    for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
        m = self.momentum.setdefault(p, torch.zeros_like(p))
        m.mul_(0.9).add_(gradient)
        p.data.sub_(m.sign(), alpha=0.01 / self.t)
    return loss.detach()


# --- schedules and phases ---


@method(micro=1)
def gradients_accumulated_by_a_counter(self, model, batch_size):
    loss = model(batch(batch_size)).square().mean() / 4
    loss.backward()
    self.micro = (self.micro + 1) % 4
    if self.micro == 0:
        self.optimizer.step()
        self.optimizer.zero_grad()
    return loss.detach()


@method(n=0, lrs=np.linspace(0.1, 0.01, 18 + CALLS).tolist(), length=2)
def tables_that_end_with_training(self, model, batch_size):
    if self.n == len(self.lrs):
        raise RuntimeError("training is over")
    self.n += 1
    if self.n % 4 == 0:
        self.length = min(8, self.length + 1)
    return self.fit(torch.randn(batch_size, self.length, 4), self.lrs[self.n - 1])


@method(n=0)
def a_body_unfrozen_and_a_new_optimizer(self, model, batch_size):
    model[0].requires_grad_(self.n >= 5)
    self.n += 1
    if self.n == 4:
        self.optimizer, self.old = torch.optim.Adam(model.parameters()), self.optimizer
    return self.fit(batch(batch_size))


@method(optimizer=lambda model: sgd(model[2]), started=False, n=0, layers=lambda model: [model[0].bias])
def groups_added_once_and_at_call_3(self, model, batch_size):
    if not self.started:
        self.optimizer.add_param_group({"params": [model[0].weight], "lr": 0.02})
        self.started = True
    self.n += 1
    if self.n == 3:
        self.optimizer.add_param_group({"params": self.layers.pop()})
    return self.fit(batch(batch_size))


@method(is_busy=False, begun=0)
def a_guard_that_an_error_leaves_set(self, model, batch_size):
    if self.is_busy:
        raise RuntimeError("step is not reentrant")
    self.is_busy = True
    self.begun += 1
    if batch_size > 5:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    loss = self.fit(batch(batch_size))
    self.is_busy = False
    return loss


# --- where batches come from ---


@method(
    at=0,
    epoch=0,
    order=[*range(20)],
    rng=lambda _: np.random.default_rng(2),
    python=random.Random(4),
    generator=lambda _: torch.Generator().manual_seed(3),
)
def mixup_of_shuffled_data_with_generators_of_its_own(self, model, batch_size):
    if self.at + batch_size > len(self.order):
        random.shuffle(self.order)
        self.at, self.epoch = 0, self.epoch + 1
    x = SAMPLES[self.order[self.at : self.at + batch_size]]
    self.at += batch_size
    share = self.rng.beta(0.4, 0.4)
    x = share * x + (1 - share) * x[torch.randperm(batch_size, generator=self.generator)]
    return self.fit(x * self.python.gauss(1, 0.1), lr=0.1 / (1 + self.epoch))


# --- what cannot be put back, or perhaps not: then it is named ---


def draw(loader):
    while True:
        yield from loader


class Prefetcher:
    def __init__(self, loader):
        self.drawn, self.handed_out = iter(loader), 0

    def __next__(self):
        self.handed_out += 1
        return next(self.drawn)


@method("endless", endless=lambda _: draw(DataLoader(SAMPLES, batch_size=None, shuffle=True)))
def a_generator_that_never_ends(self, model, batch_size):
    return self.fit(torch.stack([next(self.endless) for _ in range(batch_size)]))


@method(
    "feed",
    "source",
    loader=lambda _: DataLoader(SAMPLES, 40, shuffle=True),
    feed=lambda _: iter(DataLoader(SAMPLES, 40)),
    source=lambda _: Prefetcher(DataLoader(SAMPLES.repeat(4, 1), 8, shuffle=True)),
)
def an_iterator_that_is_renewed_and_one_in_an_object(self, model, batch_size):
    try:
        x = next(self.feed)
    except StopIteration:
        self.feed = iter(self.loader)
        x = next(self.feed)
    return self.fit(x[:batch_size] + next(self.source)[:batch_size])


@loop("ring", "ticks", "waiting", "noise")
def count_cycle_queue_and_a_function_cache():
    @functools.cache
    def noise(batch_size):
        return torch.randn(batch_size, 4)

    model, optimizer = net_and_optimizer()
    pool, ticks, waiting = iter(SAMPLES), itertools.count(1), queue.Queue()
    ring = itertools.cycle(pool)

    def step(model, batch_size):
        while waiting.qsize() < 4:
            waiting.put(torch.randn(8, 4))
        x = torch.stack([next(ring) for _ in range(batch_size)]) + noise(batch_size)
        return fit(model, optimizer, x + waiting.get_nowait()[:batch_size], lr=0.1 / next(ticks))

    look = lambda: {"ring": pool, "ticks": ticks, "waiting": waiting, "noise": noise.cache_info().currsize}  # noqa: E731
    return model, step, look


@method(
    "log",
    "losses_so_far",
    "totals",
    log=lambda _: io.StringIO(),
    losses_so_far=array.array("d"),
    totals=collections.UserDict(),
)
def containers_of_the_standard_library(self, model, batch_size):
    self.losses_so_far.append(self.fit(batch(batch_size), lr=0.1 / (1 + len(self.losses_so_far))).item())
    self.totals["calls"] = self.totals.get("calls", 0) + 1
    self.log.write(f"{self.totals['calls']}: {self.losses_so_far[-1]}\n")
    return sum(self.losses_so_far) / self.totals["calls"]


@loop("means")
def a_hook_that_collects():
    model, optimizer = net_and_optimizer()
    means = []
    model[1].register_forward_hook(lambda module, args, out: means.append(out.mean().item()))
    return model, lambda model, n: fit(model, optimizer, batch(n)), lambda: {"means": means}


# --- values that must agree with an iterator, between trials too ---


@method("ticks", "history", ticks=lambda _: itertools.count(), history=[])
def a_list_indexed_by_an_iterator(self, model, batch_size):
    self.history.append(self.fit(batch(batch_size)))
    return self.history[next(self.ticks)]


@method("numbered", "n", numbered=lambda _: ((i, torch.randn(8, 4)) for i in range(200)), n=0)
def a_number_checked_against_a_generator(self, model, batch_size):
    i, x = next(self.numbered)
    if i != self.n:
        raise IndexError(f"batch {i} came, but {self.n} was expected")
    self.n += 1
    return self.fit(x[:batch_size])


def test_a_loop_that_cannot_go_back_is_run_as_it_was_left():
    """Its logger, which belongs to a library, refuses steps that it has seen."""
    model, optimizer = net_and_optimizer()
    logged, n = Log([0]), 0

    def step(model, batch_size):
        nonlocal n
        n += 1
        if n <= logged[-1]:
            raise ValueError(f"step {n} was logged already")
        logged.append(n)
        return fit(model, optimizer, batch(batch_size))

    result = probe(model, step, max_batch=8)
    assert (result.batch_size, n) == (8, 0)
    assert [note for note in result.notes if "batch 2 failed with ValueError: step 1 was logged already" in note]
    assert len(logged) == 1 + sum(trial.steps for trial in result.trials)


def test_a_bug_that_comes_at_once_is_not_run_again():
    calls = Log()

    def step(model, batch_size):
        calls.append(batch_size)
        raise ValueError("no such column")

    with pytest.raises(oomprobe.StepFailedError, match="no such column"):
        probe(nn.Linear(1, 1), step)
    assert len(calls) == 1


def test_a_kept_loss_does_not_keep_its_graph_alive():
    model, _ = net_and_optimizer()
    kept = types.SimpleNamespace(loss=model(batch(4)).square().mean())
    before, alive = weakref.ref(kept.loss), Log()

    def step(model, batch_size):
        kept.loss = model(batch(batch_size)).square().mean()
        alive.append(before() is not None)

    result = probe(model, step, max_batch=8)
    assert not any(alive)
    assert "not restored: kept.loss (a tensor)" in result.notes
    assert not result.state_verified


def test_what_was_unfrozen_stays_so_beside_an_iterator():
    """Its counter cannot be put back, so freezing the body again would train less than training does."""
    model, _ = net_and_optimizer()
    model[0].requires_grad_(False)
    ticks, seen = itertools.count(), Log()

    def step(model, batch_size):
        n = next(ticks)
        if n == 4:
            model[0].requires_grad_(True)
        seen.append((n, model[0].weight.requires_grad))
        model(batch(batch_size)).sum().backward()

    probe(model, step, max_batch=8)
    assert all(trainable is (n >= 4) for n, trainable in seen if n < 4 or n > 40)
    assert not model[0].weight.requires_grad


def test_members_of_types_written_in_c_are_not_the_users():
    """Reading them may make a new object each time, and their module need not be in sys.modules."""
    regex = pytest.importorskip("regex")  # transformers needs it
    model, pattern = nn.Linear(2, 2), regex.compile("a|b")

    def step(model, batch_size):
        assert pattern.match("b")
        model(torch.randn(batch_size, 2)).sum().backward()

    result = probe(model, step, max_batch=2)
    assert result.state_verified, result.notes
