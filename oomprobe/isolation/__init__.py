"""Trials in processes that may die.

On an accelerator a *worker*, a program of its own, builds the target and goes from trial to trial for as long as it is
healthy. On host memory each trial is a *child*, forked from the process that has the model: the user's, or a worker that
has built the target. They exchange JSON messages with their parent, and `serve` answers in both.
"""
