"""What a step drops is freed in the trial, as in training: its peak is that of a fresh process, to the byte."""

import collections
import copy
import gc
import types
from dataclasses import dataclass, field

import pytest
import torch
from bed import forked
from ledger import Log
from torch import nn
from zoo import numbered, peaks

import oomprobe

WIDTH, EPOCH = 512, 10


class Rollout:
    def __init__(self):
        self.outputs, self.count = [], 0

    def append(self, output):
        self.outputs.append(output)
        self.count += 1


@dataclass(slots=True)
class Slotted:
    outputs: list = field(default_factory=list)
    count: int = 0

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


def keeps(make, add=lambda kept, output: kept.append(output), *, collect=False):
    """Return a target whose model keeps outputs in what `make` returns, and replaces it after each epoch; then it may `collect` garbage."""

    def build():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model.kept = make()

        @numbered
        def step(n, model, batch_size):
            output = model(torch.randn(batch_size, WIDTH, device="cuda"))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if n % EPOCH == 1 and n > 1:
                model.kept = make()  # in the middle of a call, which still peaks afterwards
                if collect:
                    gc.collect()
            add(model.kept, output.detach())

        return model, step

    return build


def replaced_variable():
    model, bank = nn.Linear(WIDTH, WIDTH).cuda(), {}
    optimizer = torch.optim.AdamW(model.parameters())

    @numbered
    def step(n, model, batch_size):
        nonlocal bank
        if n % EPOCH == 0:
            bank = {}
        output = model(torch.randn(batch_size, WIDTH, device="cuda"))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        bank.setdefault(n % 3, []).append(output.detach())

    return model, step


def replaced_models():
    """A target network, and an optimizer with its schedule, made anew."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
    held = types.SimpleNamespace()

    def begin():
        held.target = copy.deepcopy(model)
        held.optimizer = torch.optim.AdamW(model.parameters())
        held.schedule = torch.optim.lr_scheduler.StepLR(held.optimizer, 5)

    begin()

    @numbered
    def step(n, model, batch_size):
        x = torch.randn(batch_size, WIDTH, device="cuda")
        (model(x) - held.target(x).detach()).square().mean().backward()
        held.optimizer.step()
        held.schedule.step()
        held.optimizer.zero_grad()
        if n % EPOCH == 0:
            begin()

    return model, step


ELSEWHERE = []


def held_elsewhere():
    """Something that the step does not reach holds the first list too, so it stays alive."""
    model, step = keeps(list)()
    ELSEWHERE.append(model.kept)
    return model, step


def passed_on():
    """The last two lists are kept by a container that a trial makes."""
    model, step = keeps(list)()

    def passing(model, batch_size):
        before = model.kept
        step(model, batch_size)
        if model.kept is not before:
            model.history = [*getattr(model, "history", [])[-1:], before]

    return model, passing


def add_to_the_first(kept, output):
    kept[0].append(output)


LOOPS = {
    "list": keeps(list),
    "own list": keeps(Own),
    "deque": keeps(lambda: collections.deque(maxlen=50)),
    "dict": keeps(ByKey),
    "defaultdict": keeps(lambda: collections.defaultdict(list), lambda kept, output: kept["all"].append(output)),
    "set": keeps(set, lambda kept, output: kept.add(output)),
    "object": keeps(Rollout),
    "object with slots": keeps(Slotted),
    "object in a cycle": keeps(Logged, collect=True),
    "module": keeps(Metric),
    "namespace": keeps(lambda: types.SimpleNamespace(a=[]), lambda kept, output: kept.a.append(output)),
    "tuple of lists": keeps(lambda: ([], []), add_to_the_first),
    "named tuple": keeps(lambda: Pair([], []), add_to_the_first),
    "lists in lists": keeps(lambda: [[], {}], add_to_the_first),
    "objects in a dict": keeps(lambda: {0: Rollout()}, add_to_the_first),
    "held elsewhere": held_elsewhere,
    "passed on": passed_on,
    "variable": replaced_variable,
    "models": replaced_models,
}


@pytest.mark.parametrize("build", LOOPS.values(), ids=[*LOOPS])
def test_what_a_step_drops_is_freed_at_once(build):
    def check():
        trial = oomprobe.check(*build(), 2048, confirm_steps=25, progress="off").trials[-1]
        return trial.steps, trial.peak_allocated_bytes, trial.peak_reserved_bytes

    steps, *peak_bytes = forked(check)
    assert tuple(peak_bytes) == forked(peaks, build, 2048, steps)[-1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["models", "module", "object", "tuple of lists"])
def test_training_goes_on_with_what_was_made_anew(name):
    def train():
        model, step = LOOPS[name]()
        assert oomprobe.find_max_batch(model, step, max_batch=8, progress="off").state_verified
        for _ in range(2 * EPOCH + 1):
            step(model, 8)
        return True

    assert forked(train)


CLOSED = Log()


class Closing(Rollout):
    """Closes what it holds when it is freed."""

    def __del__(self):
        CLOSED.append(self.number)


def test_what_does_something_when_it_is_freed_stays():
    def numbered_closing():
        closing = Closing()
        closing.number = len(made)
        made.append(None)
        return closing

    def probe():
        model, step = keeps(numbered_closing)()
        oomprobe.find_max_batch(model, step, max_batch=8, progress="off")
        return model.kept.number, 0 in CLOSED, 1 in CLOSED

    made = Log()
    assert forked(probe) == (0, False, True)


@pytest.mark.parametrize("name", ["list", "dict", "object with slots", "object", "tuple of lists"])
def test_what_a_caller_holds_too_is_the_same_afterwards(name):
    def probe():
        model, step = LOOPS[name]()
        held = model.kept
        before = repr(held)
        result = oomprobe.find_max_batch(model, step, max_batch=8, progress="off")
        return model.kept is held, repr(held) == before, result.state_verified

    assert forked(probe) == (True, True, True)


def test_a_loop_that_replaces_its_list_is_answered_as_one_that_clears_it():
    def clears():
        model, step = keeps(list)()

        def clearing(model, batch_size):
            kept = model.kept
            step(model, batch_size)
            if model.kept is not kept:
                kept.clear()

        return model, clearing

    def answer(build):
        return oomprobe.find_max_batch(*build(), progress="off").batch_size

    assert forked(answer, keeps(list)) == forked(answer, clears)
