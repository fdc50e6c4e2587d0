"""Trials in processes that may die.

The probe's process starts one *template*: a process that has imported torch and supervises. Its *children* run trials. On
host memory the template builds the target with one thread, and every trial is a child forked from it; on an accelerator
the child builds the target, and runs trial after trial for as long as it is healthy.
"""
