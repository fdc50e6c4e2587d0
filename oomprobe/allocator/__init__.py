"""Torch's caching allocator as a model: the same blocks, segments and refusals, without a card."""
