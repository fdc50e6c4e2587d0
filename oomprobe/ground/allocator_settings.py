"""The settings of torch's allocator in the environment; without torch, as those who read an old result may not have it."""

from __future__ import annotations

import os
from collections.abc import Mapping

# The variables, of which torch reads the first one set.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
READS_ALL = (2, 10)  # the first torch that does; older ones do not know the last


def allocator_settings() -> dict[str, str]:
    """Return the settings in the environment, by variable."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def variables_of(torch_version: str) -> tuple[str, ...]:
    """Return the variables that a version of torch reads."""
    if tuple(map(int, torch_version.split(".")[:2])) < READS_ALL:
        return VARIABLES[:2]
    return VARIABLES


def to_expand(settings: Mapping[str, str], torch_version: str) -> str:
    """Return what to set for expandable segments beside these settings; nothing if they are set, or the allocator is another.

    Examples:
        >>> to_expand({}, "2.14.1")
        'PYTORCH_ALLOC_CONF=expandable_segments:True'
        >>> to_expand({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "2.14.1")
        'PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True'
        >>> to_expand({"PYTORCH_CUDA_ALLOC_CONF": ""}, "2.14.1")
        'PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True'
        >>> to_expand({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "2.14.1")
        ''
    """
    variables = variables_of(torch_version)
    for name in variables:
        value = settings.get(name)
        if value is None:
            continue
        if "backend:" in value or "expandable_segments:true" in value.lower():
            return ""
        kept = filter(None, [value, "expandable_segments:True"])
        return f"{name}={','.join(kept)}"
    newest = VARIABLES[-1]
    if newest not in variables:
        newest = VARIABLES[0]
    return f"{newest}=expandable_segments:True"
