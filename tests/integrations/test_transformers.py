"""What only the adapter for transformers promises: the split of the global batch, evaluation, and Trainers of other kinds."""

import pytest
import torch
from ledger import Box
from torch.utils.data import DataLoader

import oomprobe
from oomprobe.integrations.transformers import find_max_batch

from .drivers import QUICK, Collator, Sentences, WatchedTrainer, trainer, transformers

pytestmark = pytest.mark.filterwarnings("ignore")


def find(trainer, **options):
    return find_max_batch(trainer, **{"max_batch": 8} | QUICK | options)


def split_of(trainer):
    return trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps


# --- writing back ---


@pytest.mark.parametrize(
    ("split", "options", "written"),
    [
        ((4, 6), {}, (8, 3)),
        ((16, 1), {"max_batch": 6}, (4, 4)),
        ((4, 1), {"global_batch": 40}, (8, 5)),
        ((4, 1), {"global_batch": 7, "multiple_of": 4}, None),
    ],
)
def test_the_global_batch_is_kept(tmp_path, split, options, written):
    probed = trainer(
        tmp_path, per_device_train_batch_size=split[0], gradient_accumulation_steps=split[1]
    )
    result = find(probed, **options)
    batch_size, accumulated = written or split
    assert split_of(probed) == (batch_size, accumulated)
    assert next(iter(probed.get_train_dataloader()))["input_ids"].shape[0] == batch_size
    assert batch_size in probed.watch.trained
    split_said = f"per_device_train_batch_size={batch_size}, gradient_accumulation_steps={accumulated} (before"
    said = split_said if written else "no size up to 8 divides the global batch of 7 and runs"
    [note] = [note for note in result.notes if said in note]
    could_be_larger = written and "global_batch" not in options and batch_size < result.batch_size
    larger = f"To train with {result.batch_size} instead, pass global_batch={result.batch_size}"
    assert (larger in note) == bool(could_be_larger)
    assert ("with 4 micro-batches a step" in note) == (accumulated > 4)


def test_a_time_limit_includes_the_split(tmp_path, monkeypatch, caplog):
    def takes_too_long(*_, time_limit_s, **rest):
        limits.append(time_limit_s)
        raise oomprobe.TimeLimitError("too long")

    limits = []
    monkeypatch.setattr("oomprobe.integrations.transformers.check", takes_too_long)
    caplog.set_level("INFO", logger="oomprobe")
    result = find(
        trainer(tmp_path, gradient_accumulation_steps=30), time_limit_s=1000.0, max_batch=1
    )
    assert [record.getMessage() for record in caplog.records if record.name == "oomprobe"] == [
        *result.notes
    ]
    assert 0 < limits[0] < 1000
    assert any(
        "nothing was written back" in note and "stay (too long)" in note for note in result.notes
    )


@pytest.mark.parametrize(
    ("fails_from", "written", "note"),
    [
        (8, (6, 4), "written back: per_device_train_batch_size=6, gradient_accumulation_steps=4"),
        (1, (4, 2), "stay: no size up to 8 divides the global batch of 24 and runs; 1 x 24 failed"),
    ],
    ids=["a smaller one runs", "none runs"],
)
def test_a_split_that_does_not_run_is_not_written(tmp_path, fails_from, written, note):
    """Batch 8 runs in the search, and fails with more than two micro-batches per step."""

    class Fails(WatchedTrainer):
        def training_step(self, *args, **kwargs):
            self.watch.room = fails_from - 1 if self.args.gradient_accumulation_steps > 2 else 8
            return super().training_step(*args, **kwargs)

    probed = trainer(tmp_path, Fails, gradient_accumulation_steps=2)
    result = find(probed, global_batch=24)
    assert result.batch_size == 8
    assert split_of(probed) == written
    assert any(note in one for one in result.notes)
    verdict = str(result).partition("\n")[0]
    assert ("batch 8 fits, written: 6 x 4 (your global batch), in " in verdict) is (
        written == (6, 4)
    )


# --- evaluation ---


class Hungry(torch.nn.Module):
    """Takes 24 MiB per example: the ones, their product with the weight, and its gradient."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids, labels=None):
        return {"loss": (torch.ones(len(input_ids), 2**21) * self.weight).mean()}


def test_an_evaluation_that_does_not_fit_is_named(tmp_path):
    given = {"model": Hungry(), "eval_dataset": Sentences(64)}
    probed = trainer(
        tmp_path, transformers.Trainer, given, eval_strategy="steps", per_device_eval_batch_size=64
    )
    with pytest.raises(
        oomprobe.NothingFitsError, match="with all available memory, in step 'eval': out of"
    ) as error:
        find(probed, device="cpu:256MiB")
    said = "evaluation is what does not fit, at per_device_eval_batch_size=64: make that smaller"
    assert error.value.__notes__ == [said]
    assert probed.args.per_device_train_batch_size == 4


class PreparesWhatItIsGiven(WatchedTrainer):
    """As trl's Trainers do; what is already in `eval_dataset` was prepared when the Trainer was made."""

    def evaluate(self, eval_dataset=None, **rest):
        assert eval_dataset is None, "cannot prepare a Subset"
        return super().evaluate(**rest)


def test_evaluation_runs_on_the_longest_as_in_training(tmp_path):
    given = {"eval_dataset": {"a": Sentences(9), "b": Sentences(3, longest=60)}}
    settings = {"eval_strategy": "epoch", "per_device_eval_batch_size": 5, "bf16_full_eval": True}
    probed = trainer(tmp_path, PreparesWhatItIsGiven, given, **settings)
    seen, forward, data = Box(set()), probed.model.forward, probed.eval_dataset

    def watched(input_ids, **rest):
        seen.held.add(
            (probed.model.training, tuple(input_ids.shape), probed.model.lm_head.weight.dtype)
        )
        return forward(input_ids=input_ids, **rest)

    probed.model.forward = watched
    result = find(probed, max_batch=2)
    # At most the size of the data set.
    assert {shape for trains, shape, _ in seen.held if not trains} == {(5, 24), (3, 60)}
    assert {shape for trains, shape, _ in seen.held if trains} == {(1, 24), (2, 24)}
    assert {dtype for *_, dtype in seen.held} == {
        torch.float32
    }  # outside training it would be cast
    assert not any("no optimizer" in note for note in result.notes)
    assert probed.eval_dataset is data


def test_a_bug_of_evaluation_is_reported_with_the_call_to_make(tmp_path):
    def of_two(examples):
        if len(examples) > 2:
            raise KeyError("labels")
        return Collator()(examples)

    given = {"data_collator": of_two, "eval_dataset": Sentences(6)}
    with pytest.raises(oomprobe.StepFailedError) as caught:
        find(
            trainer(tmp_path, given=given, eval_strategy="epoch", per_device_eval_batch_size=5),
            max_batch=2,
        )
    assert "run trainer.evaluate() with per_device_eval_batch_size=5. A trial" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [
        ({"eval_on_start": True}, True),
        ({"eval_strategy": "epoch", "eval_accumulation_steps": 1}, False),
    ],
)
def test_predictions_kept_on_the_device_are_reported(tmp_path, settings, is_said):
    given = {
        "eval_dataset": Sentences(6),
        "compute_metrics": lambda _: pytest.fail("called in a trial"),
    }
    listed = " ".join(find(trainer(tmp_path, given=given, **settings), max_batch=1).not_covered)
    assert ("eval_accumulation_steps" in listed) is is_said


# --- Trainers that cannot be probed ---


class OwnBatches(WatchedTrainer):
    def get_train_dataloader(self):
        return DataLoader(Sentences(), batch_size=2, collate_fn=self.data_collator)


class OwnCollator(WatchedTrainer):
    def get_train_dataloader(self):
        return DataLoader(Sentences(), batch_size=self._train_batch_size, collate_fn=Collator())


class StopsEarly(WatchedTrainer):
    def training_step(self, *args, **kwargs):
        self.control.should_training_stop = True
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            OwnBatches,
            r"batches of \[2\] examples were collated instead of 1: .*get_train_dataloader",
        ),
        (
            OwnCollator,
            "the data_collator of the Trainer was never called: .*use self.data_collator",
        ),
        (StopsEarly, "made 1 of 2 optimizer steps"),
    ],
)
def test_a_loop_that_does_not_run_as_asked_is_an_error(tmp_path, kind, said):
    with pytest.raises(oomprobe.UnreliableError, match=said):
        find(trainer(tmp_path, kind))


@pytest.mark.parametrize(
    ("given", "attributes", "options", "said"),
    [
        (None, {}, {}, r"must be a transformers\.Trainer, not Linear"),
        ({"train_dataset": None}, {}, {}, "no train_dataset"),
        ({}, {}, {"global_batch": "8"}, "global_batch must be"),
        ({}, {"deepspeed": "a config"}, {}, "deepspeed='a config' spreads the model over ranks"),
        ({}, {"n_gpu": 3}, {}, r"DataParallel .*CUDA_VISIBLE_DEVICES=0.* 3 ranks"),
        ({}, {"world_size": 3}, {}, "--nproc-per-node 3; .*transformers.model_and_step"),
    ],
    ids=str,
)
def test_what_cannot_be_probed_is_refused(tmp_path, monkeypatch, given, attributes, options, said):
    probed = torch.nn.Linear(1, 1) if given is None else trainer(tmp_path, given=given)
    for name, value in attributes.items():
        monkeypatch.setattr(type(probed.args), name, property(lambda _, value=value: value))
    with pytest.raises(oomprobe.InvalidArgumentError, match=said):
        find(probed, **options)
