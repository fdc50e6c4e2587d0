"""Training goes on after a probe as if there had been none, in loops of every kind that strangers write.

One table: a row is a loop, and says what it counts and keeps. After a probe all of that is as before, bit for bit, and training
goes on as without the probe. What cannot be put back must be named in a note, and then the state is not verified. The trials
run in this process on a ledger device: trials on host memory run in children, and could not change anything.
"""

import argparse
import array
import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import io
import itertools
import math
import queue
import random
import re
import statistics
import types
import weakref

import composed
import numpy as np
import pytest
import tenacity
import torch
from composed import Average, EasyDict, Hidden, Momentum, Rollout
from helpers import Training, generators, picture
from ledger import MIB, Box, LedgerDevice, Log, probe
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader
from zoo import numbered

import oomprobe
from oomprobe.runners.hooks import InputWatch

CALLS = 23
SAMPLES = torch.arange(1600.0).view(400, 4).sin()
TORCHS = {
    "model",
    "generators",
    "optimizer",
    "loader",
}  # put back already, and words that a note may use
LOOPS = []


def loop(*lost):
    """Add a builder of (model, step, look) to the table. `look` returns what the loop counts and keeps, by name.

    Only the names in `lost` may be named in notes, and those whose values change must be.
    """

    def add(build):
        LOOPS.append(pytest.param(build, {*lost}, id=build.__name__))
        return build

    return add


def begun(build, calls=0):
    """Build a loop, always from the same seed, and train it up to the probe."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model, step, look = build()
    for _ in range(calls):
        step(model, 4)
    return model, step, look


class Watched:
    """A step that notes with what each trial begins, and fails above a size after it has changed all that it does."""

    def __init__(self, step, look, device):
        self.step, self.device, self.look, self.trials = step, device, Box(look), Log()

    def __call__(self, model, batch_size):
        if len(self.trials) < len(self.device.caps):
            with without_watch(model):
                begins = seen(model, self.look.held)
            self.trials.append((begins, random.random(), torch.rand(()).item(), Returned()))
        returned = self.step(model, batch_size)
        self.trials[-1][-1].add(returned)
        self.device.take(batch_size * MIB)


@contextlib.contextmanager
def without_watch(model):
    """Take away, for a while, the hook that counts what reaches the model in some trials."""
    kept = [
        dict(hooks) for hooks in (model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs)
    ]
    for number, hook in kept[0].items():
        if isinstance(getattr(hook, "__self__", None), InputWatch):
            del model._forward_pre_hooks[number], model._forward_pre_hooks_with_kwargs[number]
    try:
        yield
    finally:
        model._forward_pre_hooks.update(kept[0])
        model._forward_pre_hooks_with_kwargs.update(kept[1])


class Returned:
    """What the calls of a trial have returned: how many of the earlier ones are alive after each."""

    def __init__(self):
        self.references, self.alive = [], []

    def add(self, value):
        self.alive.append(sum(reference() is not None for reference in self.references))
        if isinstance(value, torch.Tensor):
            self.references.append(weakref.ref(value))


@pytest.mark.parametrize("calls", [0, 18], ids=["fresh", "mid-training"])
@pytest.mark.parametrize(("build", "lost"), LOOPS)
def test_training_goes_on(build, lost, calls):
    untouched = train(*begun(build, calls))
    model, step, look = begun(build, calls)
    before, device = seen(model, look), LedgerDevice((6 if calls else 10) * MIB)
    moved = different(before, untouched) - TORCHS - {"losses", "alive"}
    if not calls:  # a probe that put only torch's state back would be seen
        assert moved
        assert lost <= moved
    watched = Watched(step, look, device) if calls else step
    result = probe(model, watched, device=device, max_batch=8, memory_fraction=1.0)
    assert result.batch_size in (5, 6 if calls else 8)
    notes = [note for note in result.notes if note.startswith("not restored: ")]
    names = {
        name: re.compile(rf"(?<!\w){re.escape(name)}(?!\w)") for name in {*before, *lost} - TORCHS
    }
    named = {name for name, word in names.items() if any(map(word.search, notes))}
    assert different(before, seen(model, look)) <= named <= lost, notes
    assert all(any(names[name].search(note) for name in named) for note in notes)
    assert result.state_verified == (not notes)
    missed = [
        note for note in result.notes if "no optimizer stepped" in note or "did not step" in note
    ]
    assert not ("averages" in before and missed)
    if (
        calls and not lost
    ):  # trials begin as the first did, but for the values of tensors, and free what training frees
        starts, *draws, returned = zip(*watched.trials, strict=True)
        assert {str(shapes(start)) for start in starts} == {str(shapes(before))}
        assert [len({*numbers}) for numbers in draws] == [1, 1]
        for trial in returned:
            assert trial.alive[:CALLS] == untouched["alive"][: len(trial.alive)]
    copy.deepcopy(model)
    if not named:
        assert different(train(model, step, look), untouched) == set()


def train(model, step, look):
    losses, returned = [], Returned()
    for _ in range(CALLS):
        loss = step(model, 4)
        losses.append(picture(loss))
        returned.add(loss)
    return {"losses": losses, "alive": returned.alive, **seen(model, look)}


def seen(model, look):
    kept, met = {**look(), "model": model, "generators": generators()}, {}
    return {name: picture(value, (name,), met) for name, value in kept.items()}


def different(one, other):
    return {
        name
        for name in one.keys() | other.keys()
        if name not in one or one[name] != other.get(name)
    }


def shapes(picture):
    """Return what decides about memory in a picture: everything but the values in tensors."""
    if isinstance(picture, dict):
        return {name: shapes(value) for name, value in picture.items()}
    if isinstance(picture, tuple | list):
        return [shapes(one) for one in picture if not isinstance(one, bytes)]
    return picture


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
        cfg.loss = state["loss"] = loss = fit(
            model, optimizer, batch(batch_size), args.lr / state["n"]
        ).item()
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
    del notebook.__name__
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

    def note(self):
        self.steps += 1


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


@loop()
def a_step_that_a_library_decorates():
    model, optimizer = net_and_optimizer()
    n = 0

    def step(model, batch_size):
        nonlocal n
        n += 1
        return fit(model, optimizer, batch(batch_size), lr=0.1 / n)

    return (
        model,
        tenacity.retry(stop=tenacity.stop_after_attempt(1))(step),
        lambda: {"n": cells(step)["n"]},
    )


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
    self.total += self.fit(
        x - torch.from_numpy(self.mean), lr=0.05 / (1 + self.square.sum() + self.total.item())
    )
    return self.total.clone()


# --- schedules and phases ---


@method(
    optimizer=lambda model: sgd(model[2]), started=False, n=0, layers=lambda model: [model[0].bias]
)
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


# --- what a model and its optimizers hold ---


def linear(**attributes):
    model = nn.Linear(4, 2)
    vars(model).update(attributes)
    return model


@loop()
def attributes_of_a_module():
    sizes, loss, nested, inner = (
        [1],
        collections.deque([1.0]),
        {"a": [[1], (torch.ones(1), [1])]},
        Record(),
    )
    inner.callbacks = {inner.losses.append, inner.note}
    model = linear(
        sizes=sizes,
        loss=loss,
        text="a",
        nested=nested,
        seen=Marks({1}),
        table=np.zeros(2),
        act=len,
        inner=inner,
    )

    def step(model, batch_size):
        inner.note()
        sizes.append(batch_size)
        loss.append(2.0)
        model.nested = {"a": 1}
        nested["a"][1][0].zero_()
        nested["a"][1][1].append(1)
        model.seen.add(batch_size)
        model.table += 1
        model.act, model.inner, model.later = abs, None, 1
        vars(model).pop("text", None)

    return (
        model,
        step,
        lambda: {
            "held": (sizes, loss, nested, inner),
            "attributes": dict(sorted(vars(model).items())),
        },
    )


@loop()
def parameters_and_gradients():
    """NaN bits and a negative zero, swapped data, a frozen parameter, a gradient that changes, and one that comes."""
    odd, swapped, frozen, graded = model = nn.ModuleList(linear() for _ in range(4))
    with torch.no_grad():
        odd.weight.view(-1).view(torch.int32)[:2].copy_(
            torch.tensor([0x7FC00001, -(2**31)], dtype=torch.int32)
        )
    frozen.bias.requires_grad_(False)
    graded.weight.grad = torch.full((2, 4), 7.0)
    held = [*model.parameters(), graded.weight.grad]

    def step(model, batch_size):
        nn.init.ones_(odd.weight)
        swapped.weight.data = torch.zeros(len(swapped.weight) + 1, 5)
        frozen.bias.requires_grad_(True)
        graded.weight.grad.zero_()
        graded.bias.grad = torch.ones(2)

    return model, step, lambda: {"held": held}


@loop()
def shared_and_expanded_buffers():
    model, base, given_back = nn.Module(), torch.arange(4.0), torch.ones(3)
    model.register_buffer("given_back", given_back)
    for name, view in {
        "base": base,
        "view": base[1:3],
        "wide": base[:1].expand(3, 1),
        "seen": torch.ones(2),
    }.items():
        model.register_buffer(name, view)

    def step(model, batch_size):
        base.mul_(2)
        model.seen.data = model.seen.view(torch.int32)
        given_back.untyped_storage().resize_(0)  # as FSDP does

    return model, step, lambda: {"held": [*model.buffers()]}


@loop()
def replaced_parameters_children_and_hooks():
    first = nn.Linear(2, 2)
    model = nn.Sequential(first, nn.Linear(2, 2))
    model.register_forward_hook(lambda *_: None)

    def step(model, batch_size):
        model.append(nn.Linear(1, 1))
        model[0].weight = model[0]._parameters.pop("weight")  # now the last
        model[1] = nn.Linear(2, 2)
        model[0].register_parameter("extra", nn.Parameter(torch.ones(1)))
        model[0].bias = None
        model.register_forward_hook(lambda *_: None)

    return model, step, lambda: {"held": first, "children": model._modules}


@loop()
def gradients_that_share_memory():
    """Gradients in one buffer, as DDP and flat optimizers have them."""
    model, flat = linear(), torch.arange(10.0)
    model.weight.grad, model.bias.grad = flat[:8].view(2, 4), flat[8:]
    del flat
    return (
        model,
        lambda model, n: model.zero_grad(),
        lambda: {"gradients": [p.grad for p in model.parameters()]},
    )


@loop()
def wrapped_tensors():
    """A parameter and an average that are subclasses of tensors, and hold others."""
    model, average = nn.Module(), Average()
    model.weight = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    average.shadow["weight"] = TwoTensor(torch.ones(2), torch.ones(2))
    held = [model.weight.a, model.weight.b]

    def step(model, batch_size):
        model.weight.b.mul_(2)
        model.weight.a.data = torch.zeros(2)
        average.shadow["weight"].a.mul_(2)

    return model, step, lambda: {"held": held, "average": average}


class WithExtra(nn.Module):
    """A module whose extra state only get_extra_state shows."""

    def __init__(self):
        super().__init__()
        self.box = Box({"scale": torch.ones(1)})

    def get_extra_state(self):
        return dict(self.box.held)

    def set_extra_state(self, state):
        self.box.held = dict(state)


@loop()
def extra_state_averages_hidden_state_and_a_closure():
    model, average, hidden, scale = (
        WithExtra(),
        Average(),
        Hidden(),
        torch.ones(2, requires_grad=True),
    )
    shadow = average.shadow

    def step(model, batch_size):
        model.box.held["scale"] = model.box.held["scale"] + 1
        average.shadow["weight"].mul_(2)
        hidden.box.held["mean"].add_(1)
        hidden.box.held["seen"] = [hidden.box.held["seen"][0] + 1]
        scale.data.mul_(2)

    return (
        model,
        step,
        lambda: {"held": shadow, "average": average, "hidden": [hidden, model.box], "scale": scale},
    )


class Marks(set):
    """A set subclass, such as Lightning's cache of warnings."""


@loop()
def all_kinds_of_state_in_torch():
    training = Training()
    return training.model, lambda model, n: training.step(model, max(2, n)), lambda: vars(training)


@loop()
def an_optimizer_out_of_reach_that_the_first_step_makes():
    model, hidden = net(), Box([])

    def step(model, batch_size):
        if not hidden.held:
            hidden.held.append(torch.optim.Adam(model.parameters(), lr=0.5))
        return fit(model, hidden.held[0], batch(batch_size))

    return (
        model,
        step,
        lambda: {"averages": [optimizer.state for optimizer in hidden.held if optimizer.state]},
    )


@loop()
def optimizers_out_of_reach():
    """Two of the model, in training; each call changes them after they have stepped."""
    model = net()
    hidden = Box([torch.optim.Adam(model.parameters()), sgd(model)])
    for optimizer in hidden.held:
        fit(model, optimizer, batch(2))
    held = [part for state in hidden.held[0].state.values() for part in state.values()]

    def step(model, batch_size):
        for optimizer in hidden.held:
            loss = fit(model, optimizer, batch(batch_size), lr=optimizer.param_groups[0]["lr"])
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        return loss

    return model, step, lambda: {"held": held, "averages": hidden.held}


@loop()
def an_optimizer_made_in_each_call_for_networks_of_which_one_is_out_of_reach():
    model, hidden = net(), Box(net())

    def step(model, batch_size):
        for network in (model, hidden.held):
            optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
            fit(network, optimizer, batch(batch_size))
            optimizer.zero_grad()
        return optimizer.state[network[0].weight]["exp_avg"]  # which is freed with its optimizer

    return model, step, lambda: {"hidden": hidden.held}


# --- optimizers of the user's own are seen when they step ---


class Wrapped(torch.optim.Optimizer):
    """Like accelerate's, it calls the step of another optimizer, so no hook ever sees its own."""

    def __init__(self, params):
        self.inner = Momentum(params)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, {}

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


def stepped_by(kind):
    def build():
        model = net()
        optimizer = kind(model.parameters())
        return (
            model,
            lambda model, n: fit(model, optimizer, batch(n)),
            lambda: {"averages": optimizer},
        )

    build.__name__ = kind.__name__
    return build


for kind in (Momentum, Wrapped):
    loop()(stepped_by(kind))


# --- what a step replaces is freed as in training, and comes back ---


@dataclasses.dataclass(slots=True)
class Outputs:
    outputs: list = dataclasses.field(default_factory=list)

    def append(self, output):
        self.outputs = [*self.outputs, output]


class Logged(Rollout):
    """Holds a method of its own, so that only the garbage collector frees it."""

    def __init__(self):
        super().__init__()
        self.add = self.append


class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self.preds = []

    def forward(self, output):
        return output

    def append(self, output):
        self.preds.append(output)


class Own(list):
    pass


Pair = collections.namedtuple("Pair", "outputs labels")


class ByKey(dict):
    def append(self, output):
        self[len(self)] = output


def append(kept, output):
    kept.append(output)


def append_to_first(kept, output):
    kept[0].append(output)


def kept_in(name, kinds, *, is_held=False):
    """Add a loop whose model keeps losses in containers that are replaced at every other call; a caller may hold the first ones."""

    def build():
        model, optimizer = net_and_optimizer()

        def renew():
            for kind in kinds:
                setattr(model, kind, KEPT[kind][0]())

        renew()
        held = [getattr(model, kind) for kind in kinds] if is_held else None

        @numbered
        def step(n, model, batch_size):
            loss = fit(model, optimizer, batch(batch_size))
            if n % 2 == 0:
                renew()
            if "an_object_in_a_cycle" in kinds:
                gc.collect()
            for kind in kinds:
                KEPT[kind][1](getattr(model, kind), loss)
            return loss

        return model, step, lambda: {"held": held, "calls": cells(step)["number"]}

    build.__name__ = name
    loop()(build)


KEPT = {
    "a_list": (list, append),
    "a_list_of_ones_own": (Own, append),
    "a_deque": (lambda: collections.deque(maxlen=50), append),
    "a_dict": (ByKey, append),
    "a_defaultdict": (
        lambda: collections.defaultdict(list),
        lambda kept, output: kept["all"].append(output),
    ),
    "a_set": (set, lambda kept, output: kept.add(output)),
    "an_object": (Rollout, append),
    "an_object_with_slots": (Outputs, append),
    "an_object_in_a_cycle": (Logged, append),
    "a_module": (Metric, append),
    "a_namespace": (
        lambda: types.SimpleNamespace(a=[]),
        lambda kept, output: kept.a.append(output),
    ),
    "a_tuple_of_lists": (lambda: ([], []), append_to_first),
    "a_tuple_with_a_tensor": (lambda: ([], torch.ones(1)), append_to_first),
    "a_named_tuple": (lambda: Pair([], []), append_to_first),
    "lists_in_a_list": (lambda: [[], {}], append_to_first),
    "objects_in_a_dict": (lambda: {0: Rollout()}, append_to_first),
}
kept_in("containers_of_most_kinds", [kind for kind in KEPT if kind != "an_object_in_a_cycle"])
kept_in("an_object_in_a_cycle", ["an_object_in_a_cycle"])
kept_in(
    "containers_that_a_caller_holds_too",
    ["a_list", "a_dict", "an_object", "an_object_with_slots", "a_tuple_of_lists"],
    is_held=True,
)


@loop()
def a_replaced_variable():
    model, optimizer = net_and_optimizer()
    bank = {}

    @numbered
    def step(n, model, batch_size):
        nonlocal bank
        if n % 2 == 0:
            bank = {}
        loss = fit(model, optimizer, batch(batch_size))
        bank.setdefault(n % 3, []).append(loss)
        return loss

    return model, step, lambda: {"bank": cells(cells(step)["step"])["bank"]}


@method(n=0, target=copy.deepcopy)
def a_target_network_an_optimizer_and_a_schedule_made_anew(self, model, batch_size):
    if self.n % 5 == 0:
        self.target, self.optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
    self.n += 1
    self.fit(
        batch(batch_size) + self.target(batch(batch_size)).detach(),
        lr=self.schedule.get_last_lr()[0],
    )
    self.schedule.step()
    return self.optimizer.state[model[0].weight]["exp_avg"]


@loop()
def all_habits_at_once():
    return by(composed.Trainer())


@loop("feed")
def all_habits_beside_an_iterator():
    return by(composed.Trainer(feed=(1.0 for _ in range(10**6))))


# --- what cannot be put back, or perhaps not: then it is named ---


class Prefetcher:
    def __init__(self, loader):
        self.drawn, self.handed_out = iter(loader), 0

    def __next__(self):
        self.handed_out += 1
        return next(self.drawn)


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
    ring, root = (
        itertools.cycle(pool),
        functools.cache(math.sqrt),
    )  # of which nobody knows the results by their identity

    def step(model, batch_size):
        while waiting.qsize() < 4:
            waiting.put(torch.randn(8, 4))
        x = torch.stack([next(ring) for _ in range(batch_size)]) + noise(batch_size)
        return fit(
            model, optimizer, x + waiting.get_nowait()[:batch_size], lr=0.1 / root(next(ticks))
        )

    def look():
        return {
            "ring": pool,
            "ticks": ticks,
            "waiting": waiting,
            "noise": noise.cache_info().currsize,
        }

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
    self.losses_so_far.append(
        self.fit(batch(batch_size), lr=0.1 / (1 + len(self.losses_so_far))).item()
    )
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


@method(
    "numbered", "n", numbered=lambda _: Prefetcher((i, torch.randn(8, 4)) for i in range(200)), n=0
)
def a_number_checked_against_a_generator_in_an_object(self, model, batch_size):
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
    assert [
        note
        for note in result.notes
        if "batch 2 failed with ValueError: step 1 was logged already" in note
    ]
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


def test_what_was_replaced_stays_so_beside_an_iterator():
    """And each trial begins without the optimizer state that the last one made."""
    trainer, lengths, states = composed.Trainer(feed=(1.0 for _ in range(10**6))), Log(), Log()

    def step(model, batch_size):
        lengths.append(len(model[2].weight))
        states.append(len(trainer.optimizer.state))
        trainer.step(model, batch_size)

    result = probe(trainer.model, step, max_batch=8)
    assert [*lengths] == sorted(lengths)
    assert (lengths[0], lengths[-1], len(trainer.model[2].weight)) == (8, trainer.longest, 8)
    assert states.count(0) == len(result.trials)


def test_members_of_types_written_in_c_are_not_the_users():
    """Reading them may make a new object each time, and their module need not be in sys.modules."""
    regex = pytest.importorskip("regex")  # transformers needs it
    model, pattern = nn.Linear(2, 2), regex.compile("a|b")

    def step(model, batch_size):
        assert pattern.match("b")
        model(torch.randn(batch_size, 2)).sum().backward()

    result = probe(model, step, max_batch=2)
    assert result.state_verified, result.notes


def test_what_does_something_when_it_is_freed_stays():
    (model, optimizer), closed, numbers = net_and_optimizer(), Log(), Log(range(9999))

    class Closing(Rollout):
        def __init__(self):
            super().__init__()
            self.number = numbers.pop(0)

        def __del__(self):
            closed.append(self.number)

    held = types.SimpleNamespace(kept=Closing())

    def step(model, batch_size):
        held.kept = Closing()
        held.kept.append(fit(model, optimizer, batch(batch_size)))

    probe(model, step, max_batch=2)
    assert held.kept.number == 0
    assert 0 not in closed
    assert 1 in closed
