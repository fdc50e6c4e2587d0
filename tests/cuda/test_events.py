"""Answers for loops that need more memory at some calls than at others, compared with fresh processes on the bed."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from bed import forked
from gpu_check.check import search_around
from torch import nn
from zoo import numbered, peaks, runs, training_step

import oomprobe
from oomprobe.ground.torch_versions import VERSION

WIDTH, LENGTH, CALLS = 64, 32, 50
# Events that raise the peak of the first call by a smaller factor prove nothing.
LARGER = 1.1


# --- steps ---


def network(*, inner=1024, layers=1):
    sides = [WIDTH, *[inner] * layers, WIDTH]
    stack = [
        layer for pair in pairwise(sides) for layer in (nn.Linear(*pair, device="cuda"), nn.ReLU())
    ]
    return nn.Sequential(*stack[:-1])


def begun(*, optimize=torch.optim.AdamW, **sides):
    model = network(**sides)
    return model, optimize(model.parameters())


# Weights of 65 MB, a sixth of the card they are tried on, gradients of the same size, and no state.
heavy = partial(begun, layers=17, optimize=torch.optim.SGD)


def forward(model, samples, length=LENGTH):
    return model(torch.randn(samples, length, WIDTH, device="cuda"))


def train(model, optimizer, samples, length=LENGTH):
    """Train, and return the output without its graph."""
    optimizer.zero_grad()
    output = forward(model, samples, length)
    output.square().mean().backward()
    optimizer.step()
    return output.detach()


def evaluate(model, optimizer, samples, times=4):
    model.eval()
    with torch.no_grad():
        forward(model, times * samples)
    model.train()


def train_on_more(model, optimizer, samples):
    train(model, optimizer, 3 * samples)


def in_closure(event, every):
    """Count the calls in a variable of the enclosing function; `event` follows every n-th, or as many as a batch size has."""
    model, optimizer = begun()

    @numbered
    def step(number, model, batch_size):
        train(model, optimizer, batch_size)
        if number % (every(batch_size) if callable(every) else every) == 0:
            event(model, optimizer, batch_size)

    return model, step


def by_epoch(examples):
    """Evaluate at each epoch's end. Epochs of small batches have many calls, so a look does not see it."""
    return in_closure(
        partial(evaluate, times=12), lambda batch_size: max(1, examples // batch_size)
    )


def with_lengths(lengths):
    model, optimizer = begun()
    return model, numbered(
        lambda n, model, size: train(model, optimizer, size, lengths[(n - 1) % len(lengths)])
    )


def averaging():
    """Copy the model after 20 calls, and average its weights from then on."""
    (model, optimizer), average = heavy(), None

    @numbered
    def step(number, model, batch_size):
        nonlocal average
        train(model, optimizer, batch_size, 1)
        if number == 20:
            average = copy.deepcopy(model)
        elif average is not None:
            with torch.no_grad():
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)

    return model, step


def keeping(*, most=None, every=1):
    """Keep an output of every n-th call, with its graph if they are kept for ever; clear the list when it holds `most`."""
    (model, optimizer), kept = begun(inner=512), []

    @numbered
    def step(number, model, batch_size):
        output = train(model, optimizer, batch_size)
        if number % every == 0:
            kept.append(forward(model, batch_size) if most is None else output)
        if len(kept) == most:
            kept.clear()

    return model, step


def scheduled():
    """Train, on more samples at every tenth call, with learning rates for 20 calls."""
    model, optimizer = begun(optimize=torch.optim.SGD)
    rates = [0.1 / (1 + call) for call in range(20)]

    @numbered
    def step(number, model, batch_size):
        train(model, optimizer, batch_size * (3 if number % 10 == 0 else 1))
        optimizer.param_groups[0].update(lr=rates[number - 1])

    return model, step


def loading():
    """Make an iterator over 30 batches for each batch size; the 10th is three times as long."""
    (model, optimizer), iterators = begun(), {}

    def step(model, batch_size):
        lengths = iterators.setdefault(
            batch_size, iter([LENGTH] * 9 + [3 * LENGTH] + [LENGTH] * 20)
        )
        train(model, optimizer, batch_size, next(lengths))

    return model, step


def embedding():
    """Update many weights with few samples: up to a batch of thousands, the peak is the optimizer's."""
    model = nn.Sequential(
        nn.Embedding(125_000, WIDTH, device="cuda"), nn.Linear(WIDTH, 512, device="cuda"), nn.ReLU()
    )
    optimizer = torch.optim.AdamW(model.parameters())
    return model, training_step(
        optimizer, lambda n: torch.zeros(n, dtype=torch.long, device="cuda")
    )


def two_steps(every):
    model, train = in_closure(train_on_more, every)
    return model, {
        "train": train,
        "eval": lambda model, batch_size: evaluate(model, None, batch_size, times=2),
    }


def in_turn(every):
    model, steps = two_steps(every)
    return model, lambda *given: [step(*given) for step in steps.values()]


# --- answers ---


def probed(build, **options):
    return oomprobe.find_max_batch(*build(), progress="off", **options).to_dict()


def check(build, *, memory="1GiB", calls=CALLS, share=0.95, trained=None, rises=True, **options):
    """Compare an answer with fresh processes that run `trained`."""
    bed, trained = {"memory": memory, "limit_s": 120}, trained or build
    found = forked(lambda: probed(build, **options), **bed)
    answer, cap_bytes = found["batch_size"], found["budget_bytes"]
    assert (found["limited_by"], found["state_verified"]) == ("memory", True)
    assert not [note for note in found["notes"] if note.startswith("leak") or "transient" in note]
    assert forked(lambda: runs(trained, answer, steps=calls), **bed)
    (first, _), *_, (highest, _) = forked(lambda: peaks(trained, answer, calls), **bed)
    assert not rises or highest > LARGER * first

    def passes(size):
        return forked(lambda: runs(trained, size, steps=calls, cap_bytes=cap_bytes), **bed)

    *_, largest = search_around(answer, max(1, answer // 32), passes)
    assert answer >= share * largest
    # If trials make as many calls as the largest event needs, confirming finds nothing new; except where the second such
    # event meets a less favourable layout than the first, as in other versions of torch than the suite's own. One more
    # confirmation may show that the replays before it were wrong.
    assert [trial["phase"] for trial in found["trials"]].count("confirm") <= (
        4 if VERSION == (2, 14) else 9
    )
    assert not rises or any(f"ran for {calls} calls" in note for note in found["notes"])


LOOPS = {
    "every 25th long": (partial(in_closure, train_on_more, 25), {}),
    "twelve buckets": (partial(with_lengths, [32, 8, 64, 16, 48, 24, 40, 8, 56, 192, 16, 32]), {}),
    "larger evaluation after 4000 examples": (partial(by_epoch, 4000), {}),
    "average from call 20": (averaging, {"memory": "384MiB"}),
    "list cleared at ten": (partial(keeping, most=10), {}),
    "train, every 10th long; eval": (partial(two_steps, 10), {"trained": partial(in_turn, 10)}),
    "ends with IndexError": (scheduled, {"calls": 20}),
    "iterator for each size ends": (loading, {"calls": 30}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_vary(name):
    build, options = LOOPS[name]
    check(build, **options)


def test_a_leak_is_told():
    def told():
        try:
            return any(
                note.startswith("leak") for note in probed(partial(keeping, every=5))["notes"]
            )
        except oomprobe.UnreliableError:
            return True

    assert forked(told)


def test_a_flat_peak_is_not_taken_for_a_split():
    at_one, at_thousands = (
        forked(peaks, embedding, size, 3, memory="512MiB")[-1][0] for size in (1, 4096)
    )
    assert at_thousands < 1.01 * at_one
    check(embedding, memory="512MiB", calls=10, rises=False)
