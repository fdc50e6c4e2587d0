"""What a call asked of an allocator: recorded, fitted over batch sizes, replayed, and told by what held the memory."""
