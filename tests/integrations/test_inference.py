"""The generation loop of docs/inference.md, as it stands there, with a Llama of random weights on a simulated card."""

import re

import torch
import transformers
from processes import REPOSITORY

import oomprobe


def test_more_new_tokens_take_more_memory():
    page, names = (REPOSITORY / "docs/inference.md").read_text(encoding="utf-8"), {"torch": torch}
    exec(
        re.search(
            r"^@torch.inference_mode\(\)\ndef generate\(.*?\n\n", page, re.MULTILINE | re.DOTALL
        )[0],
        names,
    )
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model, peaks = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **sizes)).eval(),
        [],
    )
    with oomprobe.SimulatedDevice("1GiB").session():
        model.cuda()
        for new_tokens in (2, 8):
            torch.cuda.reset_peak_memory_stats()
            names["generate"](model, 4096, prompt=2, new_tokens=new_tokens)
            peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] > 1.5 * peaks[0]
