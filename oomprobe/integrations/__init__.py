"""One line for users of a framework: each module takes what they already have, and asks the same `find_max_batch`.

Nothing is imported here: ``from oomprobe.integrations.transformers import find_max_batch`` imports that framework, and
says what to install where it is missing.
"""
