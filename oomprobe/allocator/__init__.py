"""Torch's caching allocator as a model: the same blocks, segments and refusals, without a card or torch.

Example:
    >>> from oomprobe.allocator import AllocatorOutOfMemory, AllocatorSettings, CachingAllocator
    >>> MIB = 2**20
    >>> def left_over(text):
    ...     allocator = CachingAllocator(100 * MIB, AllocatorSettings.from_text(text))
    ...     allocator.free(allocator.malloc(60 * MIB))
    ...     allocator.malloc(30 * MIB)  # of the 60
    ...     try:
    ...         allocator.malloc(60 * MIB)
    ...     except AllocatorOutOfMemory:
    ...         return "refused"
    ...     return f"reserved {allocator.reserved_bytes // MIB} MiB"
    >>> left_over(""), left_over("expandable_segments:True"), left_over("max_split_size_mb:40")
    ('refused', 'reserved 100 MiB', 'reserved 90 MiB')
"""

from oomprobe.allocator.caching import AllocatorOutOfMemory as AllocatorOutOfMemory
from oomprobe.allocator.caching import CachingAllocator as CachingAllocator
from oomprobe.allocator.caching import adopt as adopt
from oomprobe.allocator.pinned import PinnedAllocator as PinnedAllocator
from oomprobe.allocator.settings import AllocatorSettings as AllocatorSettings
from oomprobe.allocator.settings import BlockOrder as BlockOrder
