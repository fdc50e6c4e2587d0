import os
import queue
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from helpers import Training, find_hastily
from ledger import Log
from torch import nn
from torch.nn import functional as F
from zoo import classifier, numbered, training_step

import oomprobe
from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.devices.simulated import SimulatedDevice
from oomprobe.errors import InvalidArgumentError, NothingFitsError, SimulationError
from oomprobe.records.patience import Patience
from oomprobe.simulation.catalogue import card_of
from simulation.bench import Blocks

MIB = 2**20


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )  # fmt: skip


class Tokens(nn.Module):
    """Tokens from pixels: the convolution's gradient comes channels last, so that of its bias needs partial sums."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(64, 10)

    def forward(self, images):
        return self.inner(self.embed(images).permute(0, 2, 3, 1)).mean((1, 2))


def conv_step(model, device=None):
    optimizer = torch.optim.AdamW(model.parameters())
    return training_step(
        optimizer,
        lambda batch_size: torch.randn(batch_size, 3, 32, 32, device=device),
        lambda out: F.cross_entropy(out, out.new_zeros(len(out), dtype=torch.long)),
    )


def linear_step(model, width, make=torch.optim.AdamW, inputs=lambda x: [x]):
    optimizer = make(model.parameters())

    def step(model, batch_size):
        optimizer.zero_grad()
        for x in inputs(torch.randn(batch_size, width, device="cuda")):
            model(x).square().mean().backward()
        optimizer.step()

    return step


def probe(model, step, device="sim:1GiB", **options):
    return oomprobe.find_max_batch(model, step, device=device, progress="off", **options)


def check(model, step, batch_size, device="sim:1GiB", **options):
    return oomprobe.check(model, step, batch_size, device=device, progress="off", **options)


def answer_ran(result):
    confirmed = [t for t in result.trials if t.phase == "confirm" and t.passed and not t.replayed]
    return result.batch_size in [t.batch_size for t in confirmed]


# --- the search ---


def test_the_answer_ran_and_its_report_says_that_it_is_simulated():
    model = conv_net()
    step = conv_step(model)
    result = probe(model, step)
    assert answer_ran(result)
    with pytest.raises(NothingFitsError):
        check(model, step, result.batch_size + 1)
    assert (result.limited_by, result.state_verified, result.available_bytes) == (
        "memory",
        True,
        1024 * MIB,
    )
    assert sum(t.replayed for t in result.trials) > 8
    assert all(
        t.peak_reserved_bytes <= t.cap_bytes
        for t in result.trials
        if t.passed and t.cap_bytes is not None
    )
    assert all(t.step_s is None for t in result.trials)  # fake steps have no meaningful time
    assert result.trials[-1].peak_upper_bytes >= result.trials[-1].peak_reserved_bytes
    text = " ".join(str(result).split())
    for said in ("simulated: no kernel ran", "workspaces of cuDNN", "on simulated GPU, 1.0 GiB)"):
        assert said in text
    assert oomprobe.ProbeResult.from_dict(result.to_dict()) == result


class Running(SimulatedDevice):
    """A card on which every call runs, since nobody knows what one asked for."""

    calls = ()


@torch.no_grad()
def evaluated(model, batch_size):
    model(torch.randn(8 * batch_size, 256))


def with_evaluation(model, step):
    return model, {"train": step, "eval": evaluated}


def steady(model=None, **options):
    model = model or nn.Linear(256, 256)
    return model, linear_step(model, 256, **options)


def kept(model, batch_size):
    with torch.no_grad():
        return model(torch.randn(2 * batch_size, 256))


def adversarial():
    """Two optimizers, each in a step of its own, of which one reads the other's model."""
    model = nn.ModuleDict({"made": nn.Linear(64, 256), "judged": nn.Linear(256, 64)})
    optimizers = {name: torch.optim.Adam(part.parameters()) for name, part in model.items()}

    def step(trained):
        def call(model, batch_size):
            loss = model["judged"](model["made"](torch.randn(batch_size, 64))).square().mean()
            loss.backward()
            optimizers[trained].step()
            model.zero_grad()
            return loss

        return call

    return model, {name: step(name) for name in optimizers}


def evaluating_at_times():
    """Every third call of a step makes more, so that calls do not repeat."""
    model, step = steady()
    made = []

    def train(model, batch_size):
        made.append(batch_size)
        step(model, batch_size)
        if len(made) % 3 == 0:
            evaluated(model, batch_size)

    return model, {"train": train, "eval": kept}


def counting():
    model = nn.Linear(256, 256)
    return classifier(model, torch.optim.AdamW(model.parameters()), accumulate=5)


def with_a_smaller_last_batch():
    """An epoch's last batch is smaller, which the sizes that teach the prediction do not leave."""
    return steady(Blocks(), inputs=lambda x: [x, x[: 6000 % len(x)]] if 6000 % len(x) else [x])


def tokens_of_images():
    model = Tokens()
    return model, conv_step(model)


def attention():
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return model, training_step(
        torch.optim.AdamW(model.parameters()), lambda n: torch.randn(n, 64, 64)
    )


LOOPS = {
    "steady": (steady, "64MiB"),
    "two optimizers": (adversarial, "64MiB"),
    "evaluates at times": (evaluating_at_times, "64MiB"),
    "counts them and evaluates": (lambda: with_evaluation(*counting()), "64MiB"),
    "a smaller last batch": (with_a_smaller_last_batch, "256MiB"),
    "tokens of images": (tokens_of_images, "200MiB"),
    "attention": (attention, "96MiB"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_predicted_is_what_runs_show(name):
    make, memory = LOOPS[name]
    found, truth = (
        find_hastily(
            Patience(look_calls=15), *make(), device=device, resolution=0.2, confirm_steps=2
        )
        for device in (f"sim:{memory}", Running(memory))
    )
    answers = [(one.batch_size, one.limit_batch_size, one.limiting_step) for one in (found, truth)]
    assert answers[0] == answers[1]
    assert answer_ran(found)
    assert not any(trial.replayed for trial in truth.trials)
    assert sum(not trial.replayed for trial in found.trials) <= 7 < len(truth.trials)
    peaks = {
        (t.batch_size, t.phase): (t.peak_allocated_bytes, t.peak_reserved_bytes)
        for t in truth.trials
        if t.passed
    }
    for trial in found.trials:
        if trial.passed and name != "a smaller last batch":  # whose remainders follow no line
            assert (trial.peak_allocated_bytes, trial.peak_reserved_bytes) == peaks[
                trial.batch_size, trial.phase
            ]


def test_steps_that_take_turns_run_until_their_calls_repeat(tmp_path):
    """Calls write to a file, as nobody who looks for counters sees."""
    model, step = steady()
    log = os.open(tmp_path / "calls", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def train(model, batch_size):
        os.write(log, b"t")
        step(model, batch_size)

    def evaluate(model, batch_size):
        os.write(log, b"e")
        evaluated(model.eval(), batch_size)

    result = probe(model, {"train": train, "eval": evaluate}, "sim:64MiB")
    os.close(log)
    made = (tmp_path / "calls").read_text()
    *_, confirmed = [trial for trial in result.trials if trial.phase == "confirm"]
    assert (confirmed.steps, confirmed.replayed) == (24, False)
    assert made.startswith("tteettee" * 2 + "ttteettee")  # two sizes, and the answer
    assert len(made) <= 3 * 9 + len("tte")  # the failure that is explained


def test_a_failed_backward_leaves_nothing_to_the_next_trial():
    model, layer = nn.Linear(256, 256), nn.Linear(256, 256)

    def step(model, batch_size):
        hidden = model(torch.randn(batch_size, 256, device="cuda"))
        waits, fails = layer(hidden).relu(), layer(hidden).relu()  # the last branch goes back first
        fails.register_hook(lambda _: torch.empty(16, batch_size, 256, device="cuda")[0])
        (waits + fails).sum().backward()
        model.zero_grad()
        layer.zero_grad()

    assert probe(model, step, Running("64MiB")).limited_by == "memory"


def test_why_no_size_is_predicted_is_said():
    """Parts of 4 at first, and of 1 from there on: no two sizes have the same events."""
    model = nn.Linear(256, 256)
    step = linear_step(model, 256, torch.optim.SGD, lambda x: x.split(1))
    result = oomprobe.find_max_batch(model, step, device="sim:64MiB", max_batch=16, progress="off")
    assert not any(t.replayed for t in result.trials)
    [note] = [note for note in result.notes if "not predicted" in note]
    assert "the allocations at batch 16 and 8 differ" in note
    assert f"each of the {len(result.trials)} trials ran, which took " in note


def test_steps_whose_turns_differ_are_not_predicted():
    """Evaluation keeps what it computed from its second turn on."""
    model, turns = nn.Linear(256, 256), Log()
    inner = linear_step(model, 256, torch.optim.SGD)

    def train(model, batch_size):
        turns.append("train")
        inner(model, batch_size)

    @torch.no_grad()
    def evaluate(model, batch_size):
        is_later = turns.count("train") % 4 == 0
        results = [
            model(torch.randn(batch_size, 256, device="cuda")) for _ in range(3 if is_later else 1)
        ]
        del results

    options = {"confirm_steps": 2, "max_batch": 4096, "progress": lambda trial: turns.clear()}
    result = oomprobe.find_max_batch(
        model, {"train": train, "eval": evaluate}, device="sim:64MiB", **options
    )
    assert not any(trial.replayed for trial in result.trials)
    [note] = [note for note in result.notes if "not predicted" in note]
    assert "step 'eval' allocates something else in its second turn than in its first" in note


@pytest.mark.parametrize(("at", "times"), [(1000, 4), (300, 1 / 4)], ids=["fails", "passes"])
def test_a_search_whose_predictions_fail_goes_on_from_what_ran(at, times):
    """The smallest sizes follow a line that larger ones leave."""
    model = nn.Linear(256, 256)

    def inputs(x):
        more = torch.cat([x] * times) if times > 1 else x[: max(1, int(times * len(x)))]
        return [more if len(x) > at else x]

    step = linear_step(model, 256, torch.optim.SGD, inputs)
    result, truth = probe(model, step, "sim:64MiB"), probe(model, step, Running("64MiB"))
    assert (result.batch_size, result.limit_batch_size) == (
        truth.batch_size,
        truth.limit_batch_size,
    )
    assert answer_ran(result)
    sizes = [trial.batch_size for trial in result.trials]
    assert sizes[:2] == [1, 2]
    assert min(sizes[2:]) > 250  # it goes on near the size that contradicted the predictions
    assert len(sizes) < len(truth.trials)
    assert not any(trial.replayed for trial in result.trials)
    [note] = [note for note in result.notes if "predict" in note]
    assert note == (
        f"memory at batch {sizes[2]} differs from what other sizes predicted: predicted trials were dropped, and the search went on from what ran"
    )


def test_a_verdict_that_contradicted_predictions_stands():
    """The size is not run again until it is confirmed."""
    model, ran = nn.Linear(256, 256), Log()

    def inputs(x):
        ran.append(len(x))
        return x.chunk(2) if len(x) > 300 else [x]

    result = probe(
        model,
        linear_step(model, 256, torch.optim.SGD, inputs),
        "sim:64MiB",
        max_batch=1024,
        memory_fraction=1.0,
    )
    assert result.batch_size == 1024
    assert [(t.batch_size, t.phase) for t in result.trials] == [
        (1, "grow"),
        (2, "grow"),
        (512, "grow"),
        (1024, "confirm"),
        (1024, "confirm"),
    ]


def test_padded_small_batches_are_not_the_limit():
    """Two padded sizes predict the same memory at every size."""
    model, padded = steady()
    result = probe(model, lambda model, batch_size: padded(model, max(batch_size, 64)), "sim:64MiB")
    assert (result.limited_by, result.batch_size > 1024) == ("memory", True)


def test_max_batch_and_the_plan_run():
    model = conv_net()
    result = probe(model, conv_step(model), max_batch=100, steps=9, global_batch=10_000)
    assert (result.batch_size, result.limited_by) == (100, "max_batch")
    assert answer_ran(result)
    assert {t.steps for t in result.trials if t.phase == "grow" and not t.replayed} == {10}
    assert [t.steps >= 10 for t in result.trials if t.phase == "confirm"] == [True, True]
    assert result.plan(10_000)[0].ran_accumulated
    assert not any(t.replayed and t.accumulation_steps > 1 for t in result.trials)


# --- nothing changes ---


@pytest.mark.parametrize("stopped", [False, True], ids=["answer", "Ctrl-C"])
def test_every_exit_restores_everything(stopped):
    training, calls = Training(warm_steps=3), Log()

    def stopping(model, batch_size):
        training.step(model, batch_size)
        calls.append(batch_size)
        if stopped and len(calls) == 5:
            raise KeyboardInterrupt

    before = training.picture()
    with pytest.raises(KeyboardInterrupt) if stopped else nullcontext():
        probe(training.model, stopping, min_batch=2, max_batch=8)
    assert training.picture() == before
    training.step(training.model, 4)  # training can continue
    state = [value for kept in training.optimizer.state.values() for value in kept.values()]
    held = [
        torch.randn(3),
        *state,
        *(p.grad for p in training.model.parameters() if p.grad is not None),
    ]
    assert {type(value) for value in held} == {torch.Tensor}


# --- reports ---


def test_the_report_says_above_which_size_convolutions_may_be_slower():
    """The unfolded patches are 25 times the input, so they stop to fit long before the rest."""
    model = nn.Conv2d(8, 8, 5, padding=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = training_step(optimizer, lambda n: torch.zeros(n, 8, 64, 64, device="cuda"), torch.mean)
    result = probe(model, step, "sim:256MiB", memory_fraction=1.0)
    [note] = [note for note in result.notes if note.startswith("simulated")]
    patches = 8 * 25 * 64 * 64 * 4
    had_room = [
        t.batch_size
        for t in result.trials
        if t.passed and t.peak_reserved_bytes + t.batch_size * patches < 2**28
    ]
    assert note.endswith(f"convolutions may be slower above batch {max(had_room)}")
    assert max(had_room) * 4 < result.batch_size


def test_a_card_forgets_the_previous_model():
    card = SimulatedDevice("300MiB")
    first = probe(
        nn.Linear(256, 256),
        lambda m, n: int(m(torch.zeros(n, 256, device="cuda")).long()[0, 0]),
        card,
    )
    assert any("reads an integer" in note for note in first.notes)
    model = conv_net()
    second, fresh = (
        probe(model, conv_step(model), card),
        probe(model, conv_step(model), "sim:300MiB"),
    )
    assert not any("reads an integer" in note for note in second.notes)
    tried = [
        [(t.batch_size, t.phase, t.passed, t.replayed) for t in result.trials]
        for result in (second, fresh)
    ]
    assert tried[0] == tried[1]


# --- cards, limits and settings ---


def test_a_card_smaller_than_the_model_says_by_how_much():
    model = nn.Linear(4096, 4096)
    with pytest.raises(
        NothingFitsError, match=r"takes 64\.02 MiB.*has 48\.00 MiB.*16\.02 MiB too little"
    ):
        probe(model, lambda m, n: m(torch.randn(n, 4096)).sum(), "sim:48MiB")


def test_a_model_on_the_meta_device_is_refused():
    with pytest.raises(InvalidArgumentError, match="on the meta device"):
        probe(nn.Linear(4, 4, device="meta"), lambda m, n: None)


def test_allocator_settings_apply(monkeypatch):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    step = linear_step(model, 1024, torch.optim.SGD)

    plain = probe(model, step, "sim:200MiB", memory_fraction=1.0).batch_size
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert probe(model, step, "sim:200MiB", memory_fraction=1.0).batch_size != plain


def test_the_process_memory_fraction_is_a_limit():
    card = SimulatedDevice("1GiB", settings=AllocatorSettings(per_process_memory_fraction=0.75))
    assert card.available_bytes() == 768 * MIB
    with card.building():
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert card.available_bytes() == 512 * MIB
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.cuda.get_per_process_memory_fraction() == 1.0
    assert card._memory.allocator.limit_bytes is None


def bytes_on_card(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def test_a_cap_between_live_and_reserved_memory():
    """A process that starts under this cap would not have reserved those segments."""
    card, kept = SimulatedDevice("1GiB"), []
    with card.session():
        kept += [bytes_on_card(5) for _ in range(32)][::4]
    card.release()
    assert (
        card._memory.allocator.reserved_bytes == 160 * MIB
    )  # a quarter of each 20 MiB segment is live
    with card.cap(100 * MIB), card.session():
        assert torch.cuda.memory_reserved() == 40 * MIB
        bytes_on_card(50)
    with pytest.raises(torch.OutOfMemoryError), card.cap(39 * MIB), card.session():
        pass  # less than the live memory


def test_live_bytes_are_requested_bytes():
    """A block may be up to 1 MiB larger for the same gradient in the next call, which is no leak."""
    card, kept = SimulatedDevice("1GiB"), []
    with card.session():
        kept.append(bytes_on_card(11))
        assert (
            torch.cuda.memory_allocated() == 12 * MIB
        )  # own segment, remainder too small to split
    assert card.live_bytes() == 11 * MIB


# --- building ---


def test_a_model_built_for_cuda():
    card = SimulatedDevice("1GiB")
    with card.building():
        assert torch.cuda.is_available()
        model = conv_net().cuda()
        more = torch.zeros(MIB, device="cuda")
        assert {str(p.device) for p in model.parameters()} == {"cuda:0"} == {str(more.device)}
        assert str(torch.randn(3).to("cuda").device) == "cuda:0"
        assert str(more.cpu().device) == "cpu"
        x = torch.tensor(
            [1.0, 2.0, 3.0], device="cuda"
        )  # initialisation may read the tensors it creates
        assert (
            [float(value) for value in x]
            == x.tolist()
            == x.cpu().numpy().tolist()
            == [1.0, 2.0, 3.0]
        )
        assert (x[1].item(), x.data_ptr()) == (2.0, x.view(3).data_ptr())
        shaped_by_values = x[x > 1], (x > 1).nonzero(), x.unique(), x.masked_select(x > 2)
        assert [len(one) for one in shaped_by_values] == [2, 2, 3, 1]
        assert all(one.is_cuda for one in shaped_by_values)
        assert x.to_sparse().to_dense().tolist() == [1.0, 2.0, 3.0]
    del x, shaped_by_values
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.device.type == "cpu"
    assert card.live_bytes() == 4 * MIB + sum(
        t.nbytes for t in [*model.parameters(), *model.buffers()]
    )
    assert probe(model, conv_step(model, "cuda"), card).state_verified


def test_a_recurrent_net_is_built_beside_cudnn(monkeypatch):
    """As with torch's CUDA build on a machine without a driver."""
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *_: pytest.fail("it was asked"))
    card = SimulatedDevice("64MiB")
    with card.building():
        model = nn.GRU(64, 64).cuda()
    assert next(model.parameters()).device.type == "cpu"
    assert card.live_bytes() > 0


def test_building_that_runs_out_of_memory_fits_nowhere():
    """Even if what it leaves would fit: on a card the process would have ended."""
    card = SimulatedDevice("64MiB")
    with card.building():
        model = nn.Linear(8, 8).cuda()
        model.weight.data = (torch.zeros(8, 4 * MIB, device="cuda") + 1)[:, :8].clone()
    with pytest.raises(
        NothingFitsError,
        match=r"building the model ran out of memory at test_device\.py:\d+, although",
    ):
        probe(model, lambda model, n: None, card)


def test_what_building_leaves_in_the_cache_is_told():
    card = SimulatedDevice("1GiB")
    with card.building():
        model = nn.Linear(8, 8).cuda()
        torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
    assert card.cached_bytes() == 32 * MIB
    [note] = [
        note
        for note in probe(model, linear_step(model, 8), card).notes
        if "were reserved and free" in note
    ]
    assert "32.00 MiB" in note
    assert "torch.cuda.empty_cache()" in note


def test_checkpoints_load_onto_the_card_and_in_a_step(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(512, 512).state_dict(), path)
    card = SimulatedDevice("1GiB")
    with card.building():
        assert torch.load(path, map_location="cuda")["weight"].is_cuda
        assert not torch.load(path, map_location=lambda storage, _: storage)["weight"].is_cuda
        model = nn.Linear(512, 512, device="meta").to_empty(device="cuda")
        model.load_state_dict(torch.load(path, map_location=torch.device("cuda", 0)))
        assert not model.weight.is_meta
    assert model.weight.device.type == "cpu"
    card.place([*model.parameters()])
    live, kept = card.live_bytes(), torch.load(path)
    with card.session():
        model.load_state_dict(kept)
    assert card.live_bytes() == live


# --- breakdowns ---


def step_using(kib):
    """Return a step that allocates this much per sample."""
    return lambda model, n: (
        torch.ones(n, kib, 256, device="cuda").sum() + model(torch.ones(2, 8)).sum()
    )


@pytest.mark.parametrize("kibs", [(1, 64), (64, 1)])
def test_the_breakdown_is_of_the_largest_step(kibs):
    steps = {f"{kib} KiB": step_using(kib) for kib in kibs}
    breakdown = check(nn.Linear(8, 8), steps, 64, breakdown=True).breakdown
    assert breakdown.step_name == "64 KiB"
    assert sum(breakdown.parts.values()) == breakdown.peak_reserved_bytes


def test_a_step_that_accumulates_makes_the_calls_that_it_makes_on_a_card():
    model, calls = nn.Linear(256, 256), Log()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @numbered
    def step(number, model, batch_size):
        calls.append(batch_size)
        model(torch.randn(batch_size, 256, device="cuda")).square().mean().backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    result = probe(model, step, "sim:64MiB", resolution=0.1)
    assert answer_ran(result)
    assert (calls.count(1), calls.count(2)) == (8, 8)
    assert sum(not trial.replayed for trial in result.trials) == 4  # a look and a confirmation


@pytest.mark.parametrize("every", [10, None], ids=["a large tenth call", "only counts"])
def test_a_step_that_counts_is_looked_at(every):
    """Repeats would not show what a counter brings, so the look and, if that finds something, all trials run for real."""
    model, calls = nn.Linear(256, 256), Log()
    train = linear_step(model, 256, torch.optim.SGD)

    @numbered
    def step(number, model, batch_size):
        calls.append(batch_size)
        train(model, batch_size)
        if every and number % every == 0:
            evaluated(model, batch_size)

    result = probe(model, step, "sim:64MiB", resolution=0.1)
    assert any("ran for 50 calls" in note for note in result.notes)
    bisected = [trial for trial in result.trials if trial.phase == "bisect"]
    assert any(trial.replayed is (every is None) for trial in bisected)
    assert max(trial.steps for trial in bisected) == (11 if every else 0)
    assert any(trial.steps == 9 and not trial.passed for trial in bisected) is (every is not None)
    assert (len(calls) <= 50 + 14) is (every is None)


# --- what is in host memory ---


def test_pinned_memory_is_host_memory():
    card = oomprobe.SimulatedDevice("1GiB")
    with card.session():
        on_card = torch.ones(2**20, device="cuda")
        kept = torch.empty(2**20, pin_memory=True)
        kept.copy_(on_card, non_blocking=True)
        assert card.live_bytes() == on_card.nbytes
        back = kept.to("cuda", non_blocking=True)
        assert card.live_bytes() == on_card.nbytes + back.nbytes


def test_what_building_leaves_in_host_memory_stays_there():
    card = oomprobe.SimulatedDevice("1GiB")
    with card.building():
        counts = torch.zeros(256, 256)
        model = nn.Linear(256, 256, bias=False).cuda()
    card.place([*model.parameters(), counts])
    assert card.live_bytes() == counts.nbytes
    on_host = oomprobe.SimulatedDevice("1GiB")  # where nothing says "cuda", all of it is the card's
    with on_host.building():
        model = nn.Linear(256, 256, bias=False)
    on_host.place([*model.parameters(), counts])
    assert on_host.live_bytes() == 2 * counts.nbytes


# --- threads ---


def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def evaluate(model, x):
    with torch.no_grad():
        model(torch.randn(4 * len(x), 64, device="cuda"))


def prefetch(model, x):
    batches = queue.Queue()
    threading.Thread(target=lambda: batches.put(torch.zeros(4 * len(x), 64).cuda())).start()
    model(batches.get())


def count(model, x):
    numbers = []
    run_in_thread(lambda: numbers.append(torch.ones(4).sum().item()))
    assert numbers == [4]


def end_thread(model, x):
    run_in_thread(sys.exit)


def threaded(in_thread):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch_size):
        x = torch.randn(batch_size, 64, device="cuda")
        model(x).sum().backward()
        in_thread(model, x)
        optimizer.step()

    return model, step


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("in_thread", "here"),
    [
        (lambda *given: run_in_thread(lambda: evaluate(*given)), evaluate),
        (prefetch, lambda model, x: model(torch.zeros(4 * len(x), 64, device="cuda"))),
        (count, lambda *given: None),
        (end_thread, lambda *given: None),
    ],
    ids=["evaluate", "prefetch", "count", "end"],
)
def test_threads_are_on_the_card(in_thread, here):
    """A thread has a handle of cuBLAS, and so a workspace, of its own where torch keeps them."""
    peaks = []
    for function in (in_thread, here):
        trial = check(*threaded(function), 2**12).trials[-1]
        peaks.append(trial.peak_allocated_bytes)
    kept_bytes = card_of("1GiB").cublas_workspace_bytes
    assert 0 <= peaks[0] - peaks[1] <= kept_bytes


def raise_in_thread(model, x):
    run_in_thread(lambda: model(x[:, :3]))


def wait_for_ever(model, x):
    batches = queue.Queue()
    threading.Thread(target=lambda: batches.put(model(x[:, :3]))).start()
    batches.get()


def run_out_in_thread(model, x):
    run_in_thread(lambda: torch.zeros(2**31, device="cuda"))


def go_on(model, x):
    batches = queue.Queue(1)

    def produce():
        while True:
            batches.put(torch.zeros(len(x), device="cuda"))

    threading.Thread(target=produce, daemon=True).start()
    batches.get()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("in_thread", "error", "said"),
    [
        (raise_in_thread, oomprobe.StepFailedError, "must have same reduction dim"),
        (wait_for_ever, oomprobe.StepFailedError, "must have same reduction dim"),
        (run_out_in_thread, NothingFitsError, "Tried to allocate 8.00 GiB"),
        (go_on, SimulationError, r"test_device\.py:\d+ uses the card in a thread that goes on"),
    ],
)
def test_what_a_thread_raises_ends_the_trial(in_thread, error, said):
    with pytest.raises(error, match=said):
        check(*threaded(in_thread), 8)


# --- what lives on between calls ---


@pytest.mark.parametrize("is_loop", [True, False])
def test_the_report_names_the_variables_that_live_on(is_loop):
    model = nn.Linear(64, 64)

    def step(model, batch_size):
        x = torch.randn(batch_size, 64, device="cuda")
        small = torch.ones(1, device="cuda")
        (model(x).square().mean() * small).backward()

    found = check(model, oomprobe.Step(step, is_loop=is_loop), 2**16)
    notes = [note for note in found.notes if "these live on until the next one" in note]
    assert ["x (16.00 MiB)" in note and "small" not in note for note in notes] == [True] * is_loop


# --- one card ---


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [("cuda:0", "cuda:1", True), ("cuda:1", "cuda:1", False), (0, "cuda:0", False)],
)
def test_a_second_card_is_not_the_first(first, second, is_refused):
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def step(model, batch_size):
        x = torch.randn(batch_size, 64, device=first)
        assert x.device.index == int(str(first)[-1])
        model[1](model[0](x).to(second)).sum().backward()

    if not is_refused:
        assert check(model, step, 8).batch_size == 8
        return
    with pytest.raises(SimulationError, match=r"test_device\.py:\d+ uses cuda:1, and this process"):
        check(model, step, 8)


def test_weights_that_a_step_swaps_go_back():
    """As an average of weights that is swapped in for an evaluation, where a trial ends between."""
    model = nn.Linear(64, 64)
    average = [torch.zeros_like(p) for p in model.parameters()]

    def step(model, batch_size):
        model(torch.randn(batch_size, 64, device="cuda")).sum().backward()
        for p, other in zip(model.parameters(), average, strict=True):
            p.data = 0.9 * other + 0.1 * p.data
        assert model(torch.randn(batch_size, 64, device="cuda")).is_cuda

    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = probe(model, step)
    assert result.state_verified
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
