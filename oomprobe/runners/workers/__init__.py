"""Trials in processes that may die.

On an accelerator a *worker*, a separate program, builds the target and runs trial after trial while it is healthy. On host
memory each trial runs in a *child* forked from the process that holds the model: the user's, or a worker that has built the
target. Both answer their parent with JSON messages.
"""
