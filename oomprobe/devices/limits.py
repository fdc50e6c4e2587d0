"""Limits on the memory of this process, for a while: what torch asks for beyond them fails for real."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from oomprobe.devices import linux
from oomprobe.scope import scope


def left_by_own_limits() -> list[int]:
    """What the user's own ulimits leave to this process: a margin must be a share of that."""
    import resource  # Linux only, like this device

    used = {resource.RLIMIT_AS: "VmSize", resource.RLIMIT_DATA: "VmData"}
    limits = {name: resource.getrlimit(kind)[0] for kind, name in used.items()}
    return [
        max(0, limit - (linux.process_bytes(name) or 0))
        for name, limit in limits.items()
        if limit != resource.RLIM_INFINITY
    ]


def limited_by_the_user() -> bool:
    """Whether ulimits of the user's own hold this process, whatever a trial around this holds it to."""
    import resource  # Linux only, like this device

    outermost = {kind: limits for held in reversed(_held) for kind, limits in held.items()}
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any((outermost.get(kind) or resource.getrlimit(kind))[0] != resource.RLIM_INFINITY for kind in kinds)


@scope
def address_space(limit_bytes: int, more_data_bytes: int | None = None) -> Iterator[None]:
    """Hold this process to an address space, and lift the limit before anything else runs.

    Args:
        limit_bytes: For ``RLIMIT_AS``.
        more_data_bytes: How much more may become writable; arenas of malloc reserve address space ahead, and using it
            is seen by ``RLIMIT_DATA`` only.
    """
    import resource  # Linux only, like this device

    wanted = {resource.RLIMIT_AS: limit_bytes}
    if more_data_bytes is not None:
        wanted[resource.RLIMIT_DATA] = (linux.process_bytes("VmData") or 0) + more_data_bytes
    before = {kind: resource.getrlimit(kind) for kind in wanted}
    _lift_in_children()
    _held.append(before)
    try:
        for kind, limit in wanted.items():
            stricter = [own for own in before[kind] if own != resource.RLIM_INFINITY]
            resource.setrlimit(kind, (min([limit, *stricter]), before[kind][1]))
        yield
    finally:
        _lift(before)
        if before in _held:  # a forked child has none
            _held.remove(before)


Limits = dict[int, tuple[int, int]]
# What was before the limits that hold now, outermost first. Of the process, as the limits are: a child forked in a trial
# inherits them, and a data loader's persistent worker would keep them for the whole training run.
_held: list[Limits] = []


def _lift(before: Limits) -> None:
    import resource  # Linux only, like this device

    for kind, limits in before.items():
        resource.setrlimit(kind, limits)


@functools.cache
def _lift_in_children() -> None:
    """Once a process: what is registered cannot be taken back."""
    os.register_at_fork(after_in_child=_lift_all)


def _lift_all() -> None:
    while _held:
        _lift(_held.pop())
