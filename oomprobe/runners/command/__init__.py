"""Trials that are runs of the user's own command, on whatever engine launches it.

A *keeper* starts the command and leaves nothing of it. In each Python process of the command a *sitecustomize* caps torch's
memory and writes *reports*: optimizer steps, peaks, out-of-memory errors. The runner reads these and the command's output.
"""
