"""A step whose optimizer comes late, or never, and one that does not train at all."""

import pytest
import torch
from ledger import Log, probe
from torch import nn
from zoo import numbered

import oomprobe


def accumulating(over, *, backward=True, by_hand=False, reach=True):
    """Return a model and a step that accumulates gradients `over` so many calls."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters()) if reach else None

    @numbered
    def step(n, model, batch_size):
        loss = model(torch.ones(batch_size, 2)).sum()
        if backward:
            loss.backward()
        if n % over == 0 and reach:
            optimizer.step()
            optimizer.zero_grad()
        elif by_hand:
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None

    return model, step


@pytest.mark.parametrize(("over", "made"), [(200, 0), (48, 50)])
def test_an_optimizer_that_steps_late_is_waited_for(over, made):
    """A probe may begin within an accumulation."""
    model, step = accumulating(over)
    for _ in range(made):
        step(model, 4)
    calls = Log()

    def counted(model, batch_size):
        calls.append(batch_size)
        step(model, batch_size)

    result = probe(model, counted, max_batch=4)
    assert all(trial.steps >= (over if made else 2 * over) for trial in result.trials)
    assert len(calls) < 20 * max(over, 10)
    assert not [note for note in result.notes if "step in" in note or "stepped" in note]
    assert result.state_verified


def test_an_optimizer_that_never_steps_is_an_error():
    with pytest.raises(
        oomprobe.UnreliableError, match=r"AdamW did not step in 300 calls.*pass global_batch="
    ) as raised:
        probe(*accumulating(10_000), max_batch=4)
    assert raised.value.exit_status == 6


def test_a_size_at_which_the_optimizer_no_longer_steps_was_not_trained():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch_size):
        optimizer.zero_grad()
        model(torch.ones(batch_size, 2)).sum().backward()
        if batch_size < 4:
            optimizer.step()

    with pytest.raises(oomprobe.UnreliableError, match=r"at batch 4 .* did not step in 2 calls"):
        probe(model, step, max_batch=16)


NOTES = {
    "no gradient was left": accumulating(1, backward=False, reach=False),
    "though gradients were computed": accumulating(1, reach=False),
    "but weights changed": accumulating(1, by_hand=True, reach=False),
}


@pytest.mark.parametrize("text", NOTES)
def test_without_an_optimizer_a_note_says_what_was_seen(text):
    result = probe(*NOTES[text], max_batch=4)
    assert [note for note in result.notes if text in note]
    assert text in result._repr_html_()


@pytest.mark.parametrize(
    ("model", "grad"),
    [
        (nn.Linear(2, 2).eval(), True),
        (nn.Linear(2, 2).requires_grad_(False), True),
        (nn.Linear(2, 2), False),
    ],
    ids=["eval mode", "frozen", "gradients off"],
)
def test_inference_is_no_missing_training(model, grad):
    with torch.set_grad_enabled(grad):
        result = probe(model, lambda model, n: model(torch.ones(n, 2)), max_batch=4)
    assert result.notes == ("the answer ran for 50 calls; rarer events were not measured",)


@pytest.mark.parametrize("trained", [False, True])
def test_a_step_without_gradients_waits_for_no_optimizer(trained):
    """A process that has trained evaluates: its gradients are there, but no call computes any."""
    model, training = accumulating(1, reach=trained)
    if trained:
        model(torch.ones(1, 2)).sum().backward()

    @torch.no_grad()
    def step(model, batch_size):
        model(torch.ones(batch_size, 2))
        return training

    result = probe(model, step, max_batch=4)
    assert result.trials[0].steps < 40
    assert trained or any(
        "no optimizer stepped in 1 call of 'step'" in note for note in result.notes
    )


def test_a_loop_may_be_done_with_an_optimizer():
    model = nn.Linear(2, 2)
    first, then = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)

    @numbered
    def step(n, model, batch_size):
        model.zero_grad()
        model(torch.ones(batch_size, 2)).sum().backward()
        (first if n <= 10 else then).step()

    result = probe(model, step, max_batch=4)
    assert all(trial.steps >= 11 for trial in result.trials)
    assert not [note for note in result.notes if "step in" in note]


def test_an_optimizer_that_steps_unexpectedly_late_is_not_told_as_missing():
    """Its gradients are made just before it steps, as those of fp32 copies are."""
    model = nn.Linear(2, 2)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)

    @numbered
    def step(n, model, batch_size):
        model(torch.ones(batch_size, 2)).sum().backward()
        for p in model.parameters():
            p.main_grad = getattr(p, "main_grad", 0) + p.grad
            p.grad = None
        if n % 48 == 0:
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad = p.main_grad
            optimizer.step()

    assert not [note for note in probe(model, step, max_batch=4).notes if "stepped" in note]
