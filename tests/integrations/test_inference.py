"""The generation loop of docs/inference.md, as it stands there, with a Llama of random weights on a simulated card."""

import re

import torch
import transformers
from processes import REPOSITORY

import oomprobe


def test_more_new_tokens_take_more_memory():
    page, names = (REPOSITORY / "docs/inference.md").read_text(encoding="utf-8"), {"torch": torch}
    exec(re.search(r"^@torch.inference_mode\(\)\ndef generate\(.*?\n\n", page, re.MULTILINE | re.DOTALL)[0], names)
    sizes = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()

    def peak_bytes(new_tokens):
        def step(model, batch_size):
            names["generate"](model, batch_size, prompt=2, new_tokens=new_tokens)

        result = oomprobe.check(model, step, 4096, device="sim:1GiB", confirm_steps=1, progress="off")
        assert not [note for note in result.notes if "optimizer" in note]
        return result.trials[-1].peak_allocated_bytes

    assert peak_bytes(8) > 1.5 * peak_bytes(2)
