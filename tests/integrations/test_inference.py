"""The generation loop of docs/inference.md with a Llama of random weights on a simulated card; tests/cuda/test_examples.py runs one on the bed."""

import torch
from generation import PROMPT, generate, llama

import oomprobe


def test_more_new_tokens_take_more_memory():
    model = llama()

    def peak_bytes(new_tokens):
        def step(model, batch_size):
            generate(model, batch_size, PROMPT, new_tokens)

        result = oomprobe.check(model, step, 1024, device="sim:1GiB", progress="off")
        assert not [note for note in result.notes if "optimizer" in note]
        return result.trials[-1].peak_allocated_bytes

    assert peak_bytes(16) > 1.5 * peak_bytes(4)
    assert not model.training
    assert torch.is_grad_enabled()
