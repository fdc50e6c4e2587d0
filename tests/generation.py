"""The generation loop of docs/inference.md, as it stands there, and a model for it."""

import re
from pathlib import Path

import torch
import transformers

PAGE = Path(__file__).parent.parent / "docs" / "inference.md"
SOURCE = re.search(r"^@torch.inference_mode\(\)\ndef generate\(.*?\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
names = {"torch": torch}
exec(SOURCE[0], names)
generate = names["generate"]


def llama():
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config).eval()


PROMPT = 4  # tokens: few, so that the cache decides
