"""Caches of functions that a step fills with tensors: each trial starts with them empty, where the probe found them so."""

import functools

import pytest
import torch
from bed import forked
from torch import nn
from zoo import peaks, runs, training_step

import oomprobe

WIDTH = 256


def masked(cached, *, warm=()):
    """Return a model and a step whose masks, one for each batch size, are in a cache that may hold some already."""
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    mask = cached(lambda samples: torch.ones(samples, 16 * WIDTH, device="cuda"))
    for samples in warm:
        mask(samples)

    step = training_step(
        optimizer,
        lambda samples: torch.randn(samples, WIDTH, device="cuda"),
        lambda output: output.mean() * mask(len(output)).mean(),
    )
    return model, step, mask


class Masks:
    def __init__(self, samples_width):
        self.width = samples_width

    @functools.lru_cache(maxsize=8)  # noqa: B019 - as users write it
    def made(self, samples):
        return torch.ones(samples, self.width, device="cuda")


def of_a_method(_):
    masks = Masks(16 * WIDTH)

    def mask(samples):
        return masks.made(samples)

    mask.cache_info = Masks.made.cache_info
    return mask


CACHES = {
    "lru_cache": functools.lru_cache,
    "of one entry": functools.lru_cache(maxsize=1),
    "of a method": of_a_method,
}


@pytest.mark.parametrize("way", CACHES)
def test_a_cache_that_was_empty_is_emptied(way):
    def probe():
        model, step, mask = masked(CACHES[way])
        before = torch.cuda.memory_allocated()
        result = oomprobe.find_max_batch(model, step, progress="off")
        answer = result.trials[-1]
        left = torch.cuda.memory_allocated() - before, mask.cache_info().currsize
        return (
            result.batch_size,
            answer.peak_allocated_bytes,
            left,
            result.state_verified,
            result.notes,
        )

    batch_size, peak_bytes, left, verified, notes = forked(probe)
    assert left == (0, 0)
    assert verified
    assert not [note for note in notes if "leak" in note or "not restored" in note]
    build = functools.partial(masked, CACHES[way])
    assert forked(lambda: runs(lambda: build()[:2], batch_size, steps=60))
    assert forked(lambda: peaks(lambda: build()[:2], batch_size, 3))[-1][0] == peak_bytes


@pytest.mark.parametrize(
    ("max_batch", "said"), [(None, "did not come back after batch"), (256, "not restored: ")]
)
def test_a_cache_that_was_not_empty_is_named(max_batch, said):
    def probe():
        model, step, _ = masked(functools.cache, warm=[8])
        try:
            result = oomprobe.find_max_batch(model, step, max_batch=max_batch, progress="off")
        except oomprobe.UnreliableError as error:
            return [str(error)]
        return result.notes

    [named] = [text for text in forked(probe) if said in text]
    assert "mask" in named
    assert "mask.cache_clear()" in named
    assert "losses" not in named
