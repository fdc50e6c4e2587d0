"""Adapters for frameworks: each takes the framework's own objects and calls `find_max_batch`.

Nothing is imported here: ``from oomprobe.integrations.transformers import find_max_batch`` imports that framework, and says
what to install if it is missing.
"""
