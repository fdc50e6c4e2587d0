"""A transformers Trainer on torch's own CUDA allocator: the answer trains in a fresh process."""

import os

import pytest
import torch
from bed import fail, forked

import oomprobe
from oomprobe import DeviceLostError

from .ranks import BRIEF, on_ranks

transformers = pytest.importorskip("transformers")
Trainer, Gpt2 = transformers.Trainer, transformers.GPT2LMHeadModel  # else each child imports them

# Torch 2.10 warns of an argument that torch's own DataLoader passes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor.:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:`torch.distributed.all_gather_into_tensor` is deprecated:FutureWarning"
    ),
]
CARD = {"memory": "512MiB", "limit_s": 180}


def trainer(folder, batch_size=4, **arguments):
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=2048,
        n_positions=128,
        n_embd=256,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    settings = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=batch_size, max_steps=6, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, **arguments,
    )  # fmt: skip
    examples = [torch.arange(length) % 2048 for length in [*range(16, 128), 128]] * 40
    return Trainer(
        model=Gpt2(config),
        args=settings,
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in examples],
        eval_dataset=[{"input_ids": ids, "labels": ids} for ids in examples[:32]],
        data_collator=padded,
    )


def padded(examples):
    def stacked(name, value):
        sequences = [one[name] for one in examples]
        return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)

    return {"input_ids": stacked("input_ids", 0), "labels": stacked("labels", -100)}


def found(folder):
    from oomprobe.integrations.transformers import find_max_batch

    made = trainer(folder, **FULL_EVAL)
    home = next(made.model.parameters()).device.type
    result = find_max_batch(made, write_back=False, progress="off")
    assert next(made.model.parameters()).device.type == home
    return result.batch_size, result.limited_by, result.state_verified


def trains(folder, batch_size):
    """Train on batches of the longest examples."""
    made = trainer(folder, batch_size, **FULL_EVAL)
    made.train_dataset = [made.train_dataset[112]] * len(made.train_dataset)
    made.train()
    return made.state.global_step


# With full_eval, the Trainer leaves the model on the CPU until it trains.
FULL_EVAL = {"bf16": True, "bf16_full_eval": True, "eval_strategy": "steps", "eval_steps": 3}


def test_an_answer_trains_in_a_fresh_process(tmp_path):
    batch_size, limited_by, verified = forked(found, tmp_path, **CARD)
    assert (limited_by, verified) == ("memory", True)
    assert forked(trains, tmp_path, batch_size, **CARD) == 6
    with pytest.raises(torch.OutOfMemoryError):
        forked(trains, tmp_path, batch_size * 5 // 4, **CARD)


def test_a_lost_card_is_told_as_such_though_the_model_was_moved(tmp_path):
    """Moving it back would raise another error."""

    def probe():
        from oomprobe.integrations.transformers import find_max_batch

        made = trainer(tmp_path, **FULL_EVAL)
        made.data_collator = lambda examples: fail("launch") or padded(examples)
        find_max_batch(made, write_back=False, progress="off")

    with pytest.raises(DeviceLostError):
        forked(probe, **CARD)


def build():
    from oomprobe.integrations.transformers import model_and_step

    arguments = {"eval_strategy": "steps", "eval_steps": 3} if "EVALUATES" in os.environ else {}
    return model_and_step(trainer(os.environ["FOLDER"], gradient_accumulation_steps=2, **arguments))


def test_a_trainer_on_two_ranks_is_a_target(tmp_path):
    def probe():
        options = {
            "start_batch": 32,
            "resolution": 0.9,
            "confirm_steps": 2,
            "patience": BRIEF,
            "progress": "off",
        }
        return oomprobe.probe_target(build, nproc_per_node=2, **options)

    result = on_ranks(tmp_path, probe, limit_s=120, memory="512MiB,512MiB", FOLDER=tmp_path)
    assert (result.limited_by, result.world_size) == ("memory", 2)
    assert {trial.samples_per_s for trial in result.trials} == {None}
    assert not [note for note in result.notes if "leak" in note or "differ" in note]


def test_a_trainer_on_two_ranks_evaluates_and_ends_with_its_data(tmp_path):
    def probe():
        return oomprobe.probe_target(build, nproc_per_node=2, min_batch=4000, progress="off")

    with pytest.raises(
        oomprobe.InvalidArgumentError, match="has 4520 examples, too few for min_batch=5000"
    ):
        on_ranks(
            tmp_path,
            lambda: oomprobe.probe_target(build, nproc_per_node=2, min_batch=5000),
            FOLDER=tmp_path,
        )
    with pytest.raises(oomprobe.NothingFitsError, match="on rank"):
        on_ranks(tmp_path, probe, limit_s=60, FOLDER=tmp_path, EVALUATES=1)
