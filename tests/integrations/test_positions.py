"""How long a sequence a model takes, told from its config, against the model itself."""

import pytest
import torch

from oomprobe import InvalidArgumentError
from oomprobe.integrations.transformers import refuse_too_long

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
    model, count = model_of(name), {"roberta": 30, "roberta, padded with 0": 31}.get(name, 32)
    assert (runs(model, count), runs(model, count + 1)) == (True, False)
    refuse_too_long(model, count)
    told = rf"max_length={count + 1} is longer .* {count} \(max_position_embeddings=32 .*Pass max_length={count}"
    with pytest.raises(InvalidArgumentError, match=told):
        refuse_too_long(model, count + 1)


@pytest.mark.parametrize("name", ["llama", "esm, rotary", "deberta"])
def test_a_model_without_an_end_takes_any_length(name):
    model = model_of(name)
    refuse_too_long(model, 50)
    assert runs(model, 50)
