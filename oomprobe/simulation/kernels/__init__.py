"""What CUDA's kernels ask of the allocator, and in which order: one table, and the rules of each family."""
