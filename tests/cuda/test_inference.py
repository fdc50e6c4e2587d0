"""The generation loop of docs/inference.md on torch's own CUDA allocator: as on a simulated card, and it survives."""

import pytest
from bed import forked
from zoo import runs

import oomprobe

pytest.importorskip("transformers")
from generation import PROMPT, generate, llama

NEW_TOKENS = 8
BED = {
    "memory": "1GiB",
    "limit_s": 90,
    "CUDASTUB_ASSERT": 0,
}  # tokens have no values there, so an embedding would refuse them


def step(model, batch_size):
    generate(model, batch_size, PROMPT, NEW_TOKENS)


def test_generation_is_probed_and_runs():
    result = forked(lambda: oomprobe.find_max_batch(llama().cuda(), step, resolution=0.1, progress="off"), **BED)
    assert (result.limited_by, result.state_verified) == ("memory", True)
    assert not [note for note in result.notes if "optimizer" in note or note.startswith("leak")]
    assert forked(lambda: runs(lambda: (llama().cuda(), step), result.batch_size, steps=5), **BED)
