"""Probes of a real Trainer: the answers, and that training afterwards is the same as without a probe."""

import pickle
import random
import weakref

import pytest
import torch
from ledger import HERE, Box, Log
from torch.nn.functional import pad

import oomprobe
import oomprobe.integrations.transformers
from oomprobe.integrations import framework
from oomprobe.integrations.transformers import PeakMonitorCallback

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet_logs():
    transformers.logging.set_verbosity_error()


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count=40, longest=24):
        random = torch.Generator().manual_seed(3)
        lengths = torch.randint(4, longest, (count,), generator=random).tolist()
        lengths[count // 2] = longest
        self.examples = [torch.randint(0, 90, (length,), generator=random) for length in lengths]
        self.fetched = Log()

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        self.fetched.append(index)
        return {"input_ids": self.examples[index], "labels": self.examples[index]}


def collate(examples):
    longest = max(len(one["input_ids"]) for one in examples)

    def padded(name, value):
        return torch.stack([pad(one[name], (0, longest - len(one[name])), value=value) for one in examples])

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


def language_model(**config):
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends, **config))


@pytest.fixture
def trainer(tmp_path):
    def make(kind=transformers.Trainer, model=None, dataset=None, given=None, **args):
        model = language_model() if model is None else model
        defaults = {"per_device_train_batch_size": 4, "max_steps": 9, "logging_steps": 1, "save_strategy": "no"}
        settings = transformers.TrainingArguments(
            output_dir=tmp_path / "out", report_to=[], disable_tqdm=True, use_cpu=True, **{**defaults, **args}
        )
        rest = {"data_collator": collate, "train_dataset": Sentences() if dataset is None else dataset} | (given or {})
        made = kind(model=model, args=settings, **rest)
        made.remove_callback(transformers.PrinterCallback)
        return made

    return make


def find(trainer, **options):
    return oomprobe.integrations.transformers.find_max_batch(
        trainer, **{"device": HERE, "max_batch": 8, "progress": "off", "steps": 1, "confirm_steps": 1} | options
    )


def trained(trainer):
    """Losses and weights after training."""
    trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return losses, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def same(one, other):
    return one[0] == other[0] and len(one[0]) > 3 and torch.equal(one[1], other[1])


def with_a_given_optimizer(make):
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return make(model=model, given={"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))})


def with_model_init(make):
    return make(kind=lambda model, **rest: transformers.Trainer(model_init=lambda: language_model(), **rest))


class DrawingCollator:
    def __init__(self):
        self.generator, self.made = torch.Generator().manual_seed(7), None

    def __call__(self, examples):
        self.made = self.made or torch.Generator().manual_seed(8)
        batch = collate(examples)
        drawn = torch.rand(batch["labels"].shape, generator=self.generator)
        drawn *= torch.rand(batch["labels"].shape, generator=self.made)
        batch["labels"][drawn < 0.1] = -100
        return batch


class DrawingTrainer(transformers.Trainer):
    def __init__(self, *, model, **rest):
        super().__init__(model=model, **rest)
        model.generator, self.generator = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)

    def training_step(self, model, inputs, *rest):
        drawn = torch.rand(1, generator=self.generator) + torch.rand(1, generator=self.model.generator)
        inputs["labels"][:, : int(10 * drawn)] = -100
        return super().training_step(model, inputs, *rest)


class DrawingSentences(Sentences):
    """Draws random numbers for each example, as image data sets do."""

    def __init__(self, **rest):
        super().__init__(**rest)
        self.generator = torch.Generator().manual_seed(7)

    def __getitem__(self, index):
        ids = super().__getitem__(index)["input_ids"].clone()
        ids[torch.rand(len(ids), generator=self.generator) * random.random() * torch.rand(1) < 0.1] = 3
        return {"input_ids": ids, "labels": ids}


def with_generators(make):
    random.seed(5)  # a Trainer seeds only once, before its model is created
    dataset = torch.utils.data.Subset(DrawingSentences(), range(40))
    given = {"data_collator": DrawingCollator(), "eval_dataset": {"a": DrawingSentences(count=6)}}
    return make(kind=DrawingTrainer, dataset=dataset, given=given, eval_strategy="steps", eval_steps=4)


def with_a_tokenizer(make):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    # The loop aligns the model's special tokens with it.
    given = {"processing_class": tokenizer, "eval_dataset": Sentences(12)}
    return make(given=given, eval_strategy="steps", eval_steps=3)


def in_bf16(make):
    noisy = {"train_sampling_strategy": "group_by_length", "neftune_noise_alpha": 5.0}
    return make(bf16=True, gradient_accumulation_steps=3, gradient_checkpointing=True, **noisy)


SET_UPS = [in_bf16, with_a_given_optimizer, with_model_init, with_a_tokenizer, with_generators]


@pytest.mark.parametrize("set_up", SET_UPS)
def test_a_probed_trainer_trains_to_the_same_bits(trainer, set_up):
    expected, probed = trained(set_up(trainer)), set_up(trainer)
    before = dict(vars(probed)), dict(vars(probed.args)), [dict(vars(module)) for module in probed.model.modules()]
    configs = [probed.model.config, probed.model.generation_config]
    of_configs = [dict(vars(one)) for one in configs]
    result = find(probed, write_back=False, max_batch=2)
    assert result.batch_size == 2
    assert result.state_verified
    assert dict(vars(probed)) == before[0]
    assert dict(vars(probed.args)) == before[1]
    assert [list(vars(module)) for module in probed.model.modules()] == [list(one) for one in before[2]]
    assert [vars(one) for one in configs] == of_configs
    assert same(trained(probed), expected)


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyboardInterrupt, KeyboardInterrupt), (ValueError, oomprobe.StepFailedError)]
)
def test_a_trainer_trains_to_the_same_bits_after_an_error(trainer, error, raised):
    expected = trained(trainer(bf16=True))
    probed, calls = trainer(bf16=True), Log()

    def collate_and_fail(examples):
        calls.append(len(examples))
        if len(calls) >= 6:
            raise error
        return collate(examples)

    probed.data_collator = collate_and_fail
    with pytest.raises(raised):
        find(probed)
    probed.data_collator = collate
    assert probed.args.per_device_train_batch_size == 4
    assert not probed.accelerator.gradient_state.in_dataloader
    assert same(trained(probed), expected)


def test_a_bug_is_reported_with_the_call_to_make(trainer):
    def of_two(examples):
        if len(examples) > 2:
            raise KeyError("labels")
        return collate(examples)

    alone = "create the Trainer with per_device_train_batch_size=4 and run trainer.train()"
    with pytest.raises(oomprobe.StepFailedError, match="batch 2 ran: pass max_batch=2") as caught:
        find(trainer(given={"data_collator": of_two}))
    assert f"comes without oomprobe, {alone}. A trial begins with the longest" in str(caught.value)
    given = {"data_collator": of_two, "eval_dataset": Sentences(6)}
    with pytest.raises(oomprobe.StepFailedError) as caught:
        find(trainer(given=given, eval_strategy="epoch", per_device_eval_batch_size=5), max_batch=2)
    assert "run trainer.evaluate() with per_device_eval_batch_size=5. A trial" in str(caught.value)


def test_a_trainer_that_has_trained_continues_as_without_a_probe(trainer):
    results = []
    for is_probed in (False, True):
        one = trainer()
        trained(one)
        if is_probed:
            find(one, write_back=False, max_batch=2)
        torch.manual_seed(7)
        results.append(trained(one))
    assert same(*results)


def test_no_file_is_written_nothing_printed_no_callback_called(trainer, tmp_path, capsys):
    heard = Log()

    class Listener(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            heard.append("step")

        def on_train_begin(self, *args, **kwargs):
            heard.append("begin")

    probed = trainer(given={"callbacks": [Listener()]}, save_strategy="steps", save_steps=1)
    before = sorted(tmp_path.rglob("*"))
    result = find(probed, max_batch=2)
    assert sorted(tmp_path.rglob("*")) == before
    assert capsys.readouterr().out == ""
    assert heard == []
    assert any("Listener" in one for one in result.not_covered)


def test_a_failed_loop_leaves_no_neftune_hook(trainer):
    probed, hooks = trainer(neftune_noise_alpha=5.0), Log()
    embeddings = probed.model.get_input_embeddings()

    def collate_and_fail(examples):
        hooks.append(sum("neftune" in str(hook) for hook in embeddings._forward_hooks.values()))
        if len(examples) > 4:
            torch.empty(2**50)
        return collate(examples)

    probed.data_collator = collate_and_fail
    assert find(probed, write_back=False).batch_size == 4
    assert set(hooks) == {1}
    assert not embeddings._forward_hooks


# --- writing back ---


@pytest.mark.parametrize(
    ("split", "options", "written"),
    [
        ((4, 6), {}, (8, 3)),
        ((2, 1), {}, (2, 1)),
        ((16, 1), {"max_batch": 6}, (4, 4)),
        ((4, 1), {"global_batch": 40}, (8, 5)),
        ((4, 1), {"global_batch": 7, "multiple_of": 4}, None),
    ],
)
def test_the_global_batch_is_kept(trainer, split, options, written):
    probed, ran = trainer(per_device_train_batch_size=split[0], gradient_accumulation_steps=split[1]), Log()
    steps = probed.training_step

    def seen(model, inputs, *rest):
        ran.append(len(inputs["input_ids"]))
        return steps(model, inputs, *rest)

    probed.training_step = seen
    result = find(probed, **options)
    batch_size, accumulated = written or split
    args = probed.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (batch_size, accumulated)
    assert next(iter(probed.get_train_dataloader()))["input_ids"].shape[0] == batch_size
    assert batch_size in ran
    split_said = f"per_device_train_batch_size={batch_size}, gradient_accumulation_steps={accumulated} (before"
    said = split_said if written else "no size up to 8 divides the global batch of 7 and runs"
    [note] = [note for note in result.notes if said in note]
    could_be_larger = written and "global_batch" not in options and batch_size < result.batch_size
    assert (f"To train with {result.batch_size} instead, pass global_batch={result.batch_size}" in note) == bool(
        could_be_larger
    )


def test_a_time_limit_includes_the_split(trainer, monkeypatch, caplog):
    def takes_too_long(*_, time_limit_s, **rest):
        limits.append(time_limit_s)
        raise oomprobe.TimeLimitError("too long")

    limits = []
    monkeypatch.setattr("oomprobe.integrations.transformers.check", takes_too_long)
    caplog.set_level("INFO", logger="oomprobe")
    result = find(trainer(gradient_accumulation_steps=30), time_limit_s=1000.0, max_batch=1)
    assert [record.getMessage() for record in caplog.records if record.name == "oomprobe"] == [*result.notes]
    assert 0 < limits[0] < 1000
    assert any("nothing was written back" in note and "stay (too long)" in note for note in result.notes)
    assert result.trials[0].samples_per_s is None  # a rate that includes the loop's set-up would be too low


@pytest.mark.parametrize(
    ("fails_from", "written", "note"),
    [
        (8, (6, 4), "written back: per_device_train_batch_size=6, gradient_accumulation_steps=4"),
        (1, (4, 2), "stay: no size up to 8 divides the global batch of 24 and runs; 1 x 24 failed"),
    ],
    ids=["a smaller one runs", "none runs"],
)
def test_a_split_that_does_not_run_is_not_written(trainer, fails_from, written, note):
    """Batch 8 runs in the search, and fails with more than two micro-batches per step."""

    class Fails(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            micro, steps = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
            if steps > 2 and micro >= fails_from:
                torch.empty(2**50)
            return super().training_step(*args, **kwargs)

    probed = trainer(kind=Fails, gradient_accumulation_steps=2)
    result = find(probed, global_batch=24)
    assert result.batch_size == 8
    assert (probed.args.per_device_train_batch_size, probed.args.gradient_accumulation_steps) == written
    assert any(note in one for one in result.notes)
    verdict = str(result).partition("\n")[0]
    assert ("batch 8 fits, written: 6 x 4 (your global batch), in " in verdict) is (written == (6, 4))


def test_objects_in_preserve_are_restored(trainer):
    """Here, an average of the weights to which the Trainer has only a weak reference."""

    class Averages(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            updated.append(self.average().update_parameters(self.model))
            return loss

    probed = trainer(kind=Averages)
    average = torch.optim.swa_utils.AveragedModel(probed.model)
    average.update_parameters(probed.model)
    probed.average, updated = weakref.ref(average), Log()
    before = {name: value.clone() for name, value in average.state_dict().items()}
    assert find(probed, preserve=[average]).state_verified
    assert len(updated) > 4
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())


# --- memory ---


class Hungry(torch.nn.Module):
    """Takes 24 MiB per example: the ones, their product with the weight, and its gradient."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids, labels=None):
        return {"loss": (torch.ones(len(input_ids), 2**21) * self.weight).mean()}


def test_an_evaluation_that_does_not_fit_is_named(trainer):
    given = {"eval_dataset": Sentences(64)}
    probed = trainer(model=Hungry(), given=given, eval_strategy="steps", per_device_eval_batch_size=64)
    with pytest.raises(oomprobe.NothingFitsError, match="with all available memory, in step 'eval': out of") as error:
        find(probed, device="cpu:256MiB")
    said = "evaluation is what does not fit, at per_device_eval_batch_size=64: make that smaller"
    assert error.value.__notes__ == [said]
    assert probed.args.per_device_train_batch_size == 4


class PreparesWhatItIsGiven(transformers.Trainer):
    """As trl's Trainers do; what is already in `eval_dataset` was prepared when the Trainer was made."""

    def evaluate(self, eval_dataset=None, **rest):
        assert eval_dataset is None, "cannot prepare a Subset"
        return super().evaluate(**rest)


def test_evaluation_takes_no_data_set_as_an_argument(trainer):
    data = Sentences(9)
    probed = trainer(kind=PreparesWhatItIsGiven, given={"eval_dataset": data}, eval_strategy="steps")
    assert find(probed, max_batch=2).batch_size == 2
    assert probed.eval_dataset is data


def test_a_simulated_card(trainer):
    # Of three examples the last batch of two holds one, which counts as two.
    result = find(trainer(dataset=Sentences(3)), device="sim:300MiB", max_batch=100, write_back=False)
    assert result.device.startswith("simulated GPU")
    assert (result.batch_size, result.limited_by, result.state_verified) == (3, "max_batch", True)
    assert "the data set limits the batch size: it has 3 examples" in result.notes


# --- loops that do not run as asked ---


class OwnBatches(transformers.Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(Sentences(), batch_size=2, collate_fn=self.data_collator)


class OwnCollator(transformers.Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(Sentences(), batch_size=self._train_batch_size, collate_fn=collate)


class StopsEarly(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        self.control.should_training_stop = True
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OwnBatches, r"batches of \[2\] examples were collated instead of 1: .*get_train_dataloader"),
        (OwnCollator, "the data_collator of the Trainer was never called: .*use self.data_collator"),
        (StopsEarly, "made 1 of 2 optimizer steps"),
    ],
)
def test_a_loop_that_does_not_run_as_asked_is_an_error(trainer, kind, said):
    with pytest.raises(oomprobe.UnreliableError, match=said):
        find(trainer(kind=kind))


def test_evaluation_runs_on_the_longest_as_in_training(trainer):
    given = {"eval_dataset": {"a": Sentences(9), "b": Sentences(3, longest=60)}}
    probed = trainer(given=given, eval_strategy="epoch", per_device_eval_batch_size=5, bf16_full_eval=True)
    seen, forward = Box(set()), probed.model.forward

    def watched(input_ids, **rest):
        seen.held.add((probed.model.training, tuple(input_ids.shape), probed.model.lm_head.weight.dtype))
        return forward(input_ids=input_ids, **rest)

    probed.model.forward = watched
    result = find(probed, max_batch=2)
    # At most the size of the data set.
    assert {shape for trains, shape, _ in seen.held if not trains} == {(5, 24), (3, 60)}
    assert {shape for trains, shape, _ in seen.held if trains} == {(1, 24), (2, 24)}
    assert {dtype for *_, dtype in seen.held} == {torch.float32}  # outside training it would be cast
    assert not any("no optimizer" in note for note in result.notes)


class DropsLast(transformers.Trainer):
    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        return torch.utils.data.DataLoader(
            loader.dataset, self._train_batch_size, collate_fn=self.data_collator, drop_last=True
        )


@pytest.mark.parametrize(
    ("args", "sizes"),
    [
        ({"max_steps": 30}, [7, 5, 7]),
        ({"num_train_epochs": 2, "gradient_accumulation_steps": 3}, [7, 7, 5, 7, 7]),
        ({"num_train_epochs": 2, "kind": DropsLast}, [7, 7, 7]),  # by itself
        ({"num_train_epochs": 2, "dataloader_drop_last": True}, [7, 7]),
        ({"num_train_epochs": 1}, [7, 7]),
        ({"max_steps": 2}, [7, 7]),
        ({"max_steps": 30, "dataset": Sentences(36)}, [7, 2, 7]),  # batch norm cannot train on one example
    ],
)
def test_a_smaller_last_batch_runs_if_an_epoch_follows(trainer, args, sizes):
    seen, probed = Log(), trainer(**{"max_steps": -1, "per_device_train_batch_size": 7} | args)
    collated = probed.data_collator

    def watched(examples):
        seen.append(len(examples))
        return collated(examples)

    probed.data_collator = watched
    result = find(probed, min_batch=7, max_batch=7, write_back=False)  # of 40 examples
    assert seen[: len(sizes)] == sizes
    assert set(seen) == set(sizes)
    assert not any("last batch" in item for item in result.not_covered)


def test_predictions_kept_on_the_device_are_reported(trainer):
    given = {"eval_dataset": Sentences(6), "compute_metrics": lambda _: pytest.fail("called in a trial")}
    listed = " ".join(find(trainer(given=given, eval_on_start=True), max_batch=1).not_covered)
    assert "eval_accumulation_steps" in listed
    to_the_host = trainer(given=given, eval_strategy="epoch", eval_accumulation_steps=1)
    assert "eval_accumulation_steps" not in " ".join(find(to_the_host, max_batch=1).not_covered)


# --- refusals ---


@pytest.mark.parametrize(
    ("given", "attributes", "options", "said"),
    [
        (None, {}, {}, r"must be a transformers\.Trainer, not Linear"),
        ({"train_dataset": None}, {}, {}, "no train_dataset"),
        ({}, {}, {"steps": 0}, "steps must be"),
        ({}, {}, {"global_batch": "8"}, "global_batch must be"),
        ({}, {}, {"scan_s": "a"}, "scan_s must be"),
        ({}, {}, {"preserve": 5}, "preserve"),
        ({}, {}, {"min_batch": 50, "max_batch": None}, "the data set has 40 examples, too few for min_batch=50$"),
        ({}, {"deepspeed": "a config"}, {}, "deepspeed='a config' spreads the model over ranks"),
        ({}, {"fsdp": "a config"}, {}, "fsdp='a config' spreads the model over ranks"),
        ({}, {"n_gpu": 3}, {}, r"DataParallel .*CUDA_VISIBLE_DEVICES=0.* 3 ranks"),
        ({}, {"world_size": 3}, {}, "--nproc-per-node 3; .*transformers.model_and_step"),
    ],
    ids=str,
)
def test_what_cannot_be_probed_is_refused(trainer, monkeypatch, given, attributes, options, said):
    probed = torch.nn.Linear(1, 1) if given is None else trainer(given=given)
    for name, value in attributes.items():
        monkeypatch.setattr(type(probed.args), name, property(lambda _, value=value: value))
    with pytest.raises(oomprobe.InvalidArgumentError, match=said):
        find(probed, **options)


# --- a rank on a simulated card ---


def on_a_rank():
    """A target for several ranks; the Trainer makes the process group."""
    args = transformers.TrainingArguments(output_dir="unused", report_to=[], max_steps=9, save_strategy="no")
    trainer = transformers.Trainer(
        model=language_model(), args=args, data_collator=collate, train_dataset=Sentences(100)
    )
    return oomprobe.integrations.transformers.model_and_step(trainer)


@pytest.fixture
def accelerate_forgets():
    """It remembers the number of ranks until its process ends."""
    from accelerate.state import AcceleratorState, PartialState

    yield
    AcceleratorState._reset_state()
    PartialState._reset_state()


@pytest.mark.usefixtures("accelerate_forgets")
def test_a_trainer_on_a_simulated_rank():
    options = {"nproc_per_node": 4, "device": "sim:1GiB", "progress": "off", "steps": 1, "confirm_steps": 1}
    result = oomprobe.probe_target(on_a_rank, min_batch=2, max_batch=2, **options)
    assert (result.batch_size, result.world_size) == (2, 4)
    assert not torch.distributed.is_initialized()


# --- the monitor of the real run ---


@pytest.fixture
def probe():
    return oomprobe.check_target("oomprobe.demo:wide_mlp", 4, device="sim:1GiB", progress="off")


class Noted(oomprobe.PeakMonitor):
    """Notes what the callback tells it."""

    def seen(self, phase):
        vars(self).setdefault("heard", []).append((self.steps, phase))
        super().seen(phase)


@pytest.fixture
def watch(probe, monkeypatch):
    monkeypatch.setattr(framework, "PeakMonitor", Noted)
    return PeakMonitorCallback(probe)


def test_the_callback_tells_steps_evaluations_and_checkpoints(trainer, watch):
    made = trainer(
        given={"callbacks": [watch], "eval_dataset": Sentences(count=8)},
        max_steps=4, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4,
        save_strategy="steps", save_steps=4,
    )  # fmt: skip
    made.train()
    evaluated = [(2, "evaluation")] * 3  # two batches, and their end
    assert watch.monitor.heard == [
        (1, "training"), (2, "training"), *evaluated, (3, "training"), (4, "training"),
        *[(4, "evaluation")] * 3, (4, "saving a checkpoint"),
    ]  # fmt: skip
    assert watch.monitor.batch_size == 4
    assert watch.monitor.probed_bytes is not None


@pytest.mark.parametrize(("asked", "expected"), [(None, 2), (4, 4)])
def test_the_callback_compares_at_the_trainers_size_unless_told(trainer, probe, asked, expected):
    watch = PeakMonitorCallback(probe, batch_size=asked)
    monitor = watch.monitor
    trainer(given={"callbacks": [watch]}, per_device_train_batch_size=2, max_steps=1).train()
    assert watch.monitor is monitor
    assert (monitor.batch_size, monitor.steps) == (expected, 1)
    assert (monitor.probed_bytes is None) == (expected == 2)  # of the probe's one size


def test_the_callback_is_a_trainer_callback_that_pickles(probe, tmp_path):
    path = tmp_path / "probe.json"
    probe.to_json(path)
    for watch in (PeakMonitorCallback(path, 4, False), pickle.loads(pickle.dumps(PeakMonitorCallback(path, 4, False)))):
        assert isinstance(watch, transformers.TrainerCallback)
        assert isinstance(watch, PeakMonitorCallback)
        assert (type(watch).__name__, watch.monitor.batch_size, watch.monitor.ok) == ("PeakMonitorCallback", 4, True)
    with pytest.raises(oomprobe.InvalidArgumentError, match="cannot be read"):
        PeakMonitorCallback(tmp_path / "none.json")


def test_a_broken_monitor_ends_no_training(trainer, watch, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: 1 / 0)
    made = trainer(given={"callbacks": [watch]}, max_steps=2)
    made.train()
    assert made.state.global_step == 2
    assert "ZeroDivisionError" in watch.monitor.to_dict()["notes"][-1]


def test_the_callback_is_not_said_to_be_missed(trainer, probe):
    result = find(trainer(given={"callbacks": [PeakMonitorCallback(probe)]}), max_batch=2)
    assert not [item for item in result.not_covered if "callbacks" in item]
