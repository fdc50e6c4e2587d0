"""The generation loop of docs/inference.md with a Llama of random weights on a simulated card; tests/cuda has it on the bed."""

import pytest
import torch
from generation import PROMPT, generate, llama

import oomprobe

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values.:FutureWarning")


def test_more_new_tokens_take_more_memory():
    model, numbers = llama(), [4, 16]

    def step(model, batch_size, new_tokens):
        generate(model, batch_size, PROMPT, new_tokens)

    options = {"device": "sim:1GiB", "multiple_of": 64, "resolution": 0.1, "progress": "off", "mixed": False}
    table = oomprobe.find_max_batches(model, step, {"new_tokens": numbers}, **options)
    few, many = table.batch_sizes().values()
    assert few > 1.5 * many
    assert not [note for row in table.rows.values() for note in row.notes if "optimizer" in note]
    assert not model.training
    assert torch.is_grad_enabled()
