"""How long a sequence a model takes, told from its config, against the model itself."""

import numpy as np
import pytest
import torch

from oomprobe import InvalidArgumentError
from oomprobe.integrations.longest import longest_of
from oomprobe.integrations.positions import positions_of, refuse_too_long

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
WIDE = {"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
WIDE |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 1}


def model_of(name, *, positions=32):
    torch.manual_seed(0)
    n = {"max_position_embeddings": positions}
    t = transformers
    made = {
        "gpt2": lambda: t.GPT2Model(t.GPT2Config(vocab_size=50, n_positions=positions, n_embd=16, n_layer=1, n_head=2)),
        "bert": lambda: t.BertModel(t.BertConfig(**SMALL, **n)),
        "roberta": lambda: t.RobertaModel(t.RobertaConfig(**SMALL, **n)),
        "roberta, padded with 0": lambda: t.RobertaModel(t.RobertaConfig(**SMALL, **n, pad_token_id=0)),
        "fsmt": lambda: t.FSMTModel(t.FSMTConfig(src_vocab_size=50, tgt_vocab_size=50, **WIDE, **n)),
        "tapas": lambda: t.TapasModel(t.TapasConfig(**SMALL, **n)),
        "opt": lambda: t.OPTModel(
            t.OPTConfig(**{**SMALL, **n, "ffn_dim": 16, "word_embed_proj_dim": 16, "pad_token_id": 1})
        ),
        "bart": lambda: t.BartModel(t.BartConfig(**WIDE, **n)),
        "roformer": lambda: t.RoFormerModel(t.RoFormerConfig(**SMALL, **n)),
        "llama": lambda: t.LlamaModel(t.LlamaConfig(**SMALL, **n)),
        "esm, rotary": lambda: t.EsmModel(
            t.EsmConfig(**SMALL, **n, position_embedding_type="rotary", pad_token_id=1, mask_token_id=2)
        ),
        "deberta": lambda: t.DebertaV2Model(
            t.DebertaV2Config(
                **SMALL, **n, relative_attention=True, position_buckets=positions // 2, position_biased_input=False,
                pos_att_type=["c2p", "p2c"], norm_rel_ebd="layer_norm", share_att_key=True,
            )
        ),
    }  # fmt: skip
    return made[name]().eval()


def runs(model, length):
    ids = torch.randint(3, 50, (1, length))
    try:
        with torch.no_grad():
            model(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    except (IndexError, RuntimeError):  # of the table, or of token types, which BERT has as many of
        return False
    return True


@pytest.mark.parametrize("name", ["gpt2", "bert", "roberta", "roberta, padded with 0", "opt", "bart", "roformer"])
def test_the_longest_sequence_that_is_allowed_runs_and_the_next_does_not(name):
    model = model_of(name)
    count = positions_of(model).count
    assert (runs(model, count), runs(model, count + 1)) == (True, False)
    assert count == {"roberta": 30, "roberta, padded with 0": 31}.get(name, 32)


@pytest.mark.parametrize("name", ["llama", "esm, rotary", "deberta", "fsmt", "tapas"])
def test_a_model_without_an_end_has_none(name):
    model = model_of(name)
    assert positions_of(model) is None
    assert runs(model, 50)


def test_what_has_no_config_or_another_table_has_none():
    assert positions_of(torch.nn.Linear(1, 1)) is None
    model = model_of("gpt2")
    model.config.n_positions = 20  # it is not about this table, then
    assert positions_of(model) is None
    model = model_of("gpt2")
    model.config.position_embedding_type = "relative_key"  # there, and not used
    assert positions_of(model) is None


class Loader:
    def __init__(self, collate):
        self.collate_fn = collate


def refuse(data, collate, *, name="gpt2", max_length=None):
    loaders = []
    sets = [("train_dataset", longest_of(data, max_length=max_length))]
    refuse_too_long(
        positions_of(model_of(name)),
        sets,
        max_length=max_length,
        loader_of=lambda *asked: loaders.append(asked) or Loader(collate),
    )
    return loaders


def as_tensors(examples):
    return {key: torch.tensor(np.array([one[key] for one in examples])) for key in examples[0]}


KINDS = {
    "list": list,
    "array": np.array,
    "tensor": torch.tensor,
    "numbers of numpy": lambda ids: [np.int64(i) for i in ids],
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_that_is_too_long_is_refused_with_what_to_type(kind):
    data = [{"input_ids": KINDS[kind](list(range(length))), "labels": 1} for length in (5, 40, 7)]
    told = r"train_dataset has 40 input_ids.* positions for 32 \(max_position_embeddings=32.*wpe.*max_length=32"
    with pytest.raises(InvalidArgumentError, match=told):
        refuse(data, as_tensors)
    with pytest.raises(InvalidArgumentError, match=r"max_length=33 is longer.*Pass max_length=32"):
        refuse(data, as_tensors, max_length=33)
    assert refuse(data, as_tensors, max_length=32) == []  # and the collator is not asked


def test_the_example_with_the_most_of_another_field_hides_none():
    data = [{"input_ids": [1] * 5, "pixels": [1] * 99}, {"input_ids": [1] * 40, "pixels": [1]}]
    with pytest.raises(InvalidArgumentError, match="40 input_ids"):
        refuse(data, as_tensors)


def test_each_choice_has_positions_of_its_own():
    assert refuse([{"input_ids": [[1] * 30] * 4}], as_tensors) == []
    with pytest.raises(InvalidArgumentError, match="33 input_ids"):
        refuse([{"input_ids": [[1] * 33] * 4}], as_tensors)


def test_labels_have_positions_where_a_decoder_reads_them():
    data = [{"input_ids": [1] * 5, "labels": [1] * 40}]
    with pytest.raises(InvalidArgumentError, match="40 labels"):
        refuse(data, as_tensors, name="bart")
    assert refuse(data, as_tensors, name="gpt2") == []


def test_a_collator_that_cuts_is_believed():
    def cut(examples):
        return as_tensors([{key: value[:32] for key, value in one.items()} for one in examples])

    assert len(refuse([{"input_ids": [1] * 40}], cut)) == 1


def test_a_collator_that_fails_is_left_to_the_step():
    assert len(refuse([{"input_ids": [1] * 40}], lambda _: 1 / 0)) == 1


def test_texts_are_for_the_step_to_tell():
    assert refuse(["some text " * 40], as_tensors) == []
