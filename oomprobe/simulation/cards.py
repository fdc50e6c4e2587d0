"""GPU cards by name: what a card that is not here would leave to PyTorch's allocator."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from oomprobe.errors import InvalidArgumentError, NoDeviceError
from oomprobe.simulation.catalogue import CONTEXTS, MAX_THREADS, ROWS, Row
from oomprobe.simulation.reductions import Processors
from oomprobe.units import byte_unit

_SMALL_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8  # ":4096:2:16:8"
_LARGE_WORKSPACE_BYTES = 4096 * 8 * 1024
_LARGE_SINCE = {9: (0, 0), 10: (2, 12), 11: (2, 14), 12: (2, 12)}  # compute capability's major: torch
_WORKSPACE = re.compile(r":(\d+):(\d+)")

_STATED_SIZE = re.compile(r"(?<![a-z0-9])(\d{1,4}) *g(?:i?b)?\b")
_NOISE = re.compile(r"^ *sim *:|\b(?:nvidia|geforce|tesla|graphics|card|gpu)\b|\bhbm\d\w?|sxm\d?\b|[^a-z0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU as CUDA describes it, with what of its memory PyTorch's allocator cannot have.

    Args:
        name: What follows ``sim:``, such as ``"H100-80GB"``.
        full_name: As ``torch.cuda.get_device_properties`` names it.
        total_bytes: As the same reports it, which is less than the size on the box.
        context_bytes: What the CUDA context and lazily loaded kernels take of it.
        compute_capability: Major and minor.
        multi_processor_count: Streaming multiprocessors.
        max_threads_per_multi_processor: Resident threads of each; None: as its compute capability has them,
            and one that is not known as the newest known below it.
        source: Where ``total_bytes`` comes from, and how exact it is.
        context_source: The same for ``context_bytes``.

    Example:
        >>> card = find_card("L4")
        >>> card.total_bytes - card.available_bytes == card.context_bytes
        True
    """

    name: str
    full_name: str
    total_bytes: int
    context_bytes: int
    compute_capability: tuple[int, int]
    multi_processor_count: int
    source: str
    context_source: str
    max_threads_per_multi_processor: int | None = None

    @property
    def processors(self) -> Processors:
        """What the sizes of temporary buffers are computed from."""
        known = [capability for capability in MAX_THREADS if capability <= self.compute_capability]
        threads = self.max_threads_per_multi_processor or MAX_THREADS[max(known, default=(6, 0))]
        return Processors(self.compute_capability, self.multi_processor_count, threads)

    @property
    def available_bytes(self) -> int:
        """What the allocator may reserve when nothing else uses the card."""
        return self.total_bytes - self.context_bytes

    @property
    def cublas_workspace_bytes(self) -> int:
        """What cuBLAS takes for each thread and stream under the installed torch and this process's environment."""
        return cublas_workspace_bytes(self.compute_capability, version("torch"), os.environ)


def cublas_workspace_bytes(compute_capability: tuple[int, int], torch_version: str, environ: Mapping[str, str]) -> int:
    """Bytes that torch sets aside for cuBLAS, for each thread and stream, through its caching allocator.

    ``CUBLAS_WORKSPACE_CONFIG`` states them as pairs ``:SIZE:COUNT`` in KiB, which are summed; a text without a pair is not
    understood, as in torch, and the default stays.

    Source: ``parseChosenWorkspaceSize`` in torch's aten/src/ATen/cuda/CublasHandlePool.cpp. 32 MiB on Hopper since
    pytorch/pytorch#91564; on majors 10 and 12 since #175344, which was opened on 2026-02-19, two days after the first
    candidate of 2.11 (#175426), so from 2.12; on 11 since #189312 of July 2026, so from 2.14 (cut in August, #193034).
    That neither was picked into the release before it is an inference from these dates.
    """
    pairs = _WORKSPACE.findall(environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * 1024 * int(count) for size, count in pairs)
    major, minor = torch_version.split(".")[:2]
    since = _LARGE_SINCE.get(compute_capability[0])
    large = since is not None and (int(major), int(minor)) >= since
    return _LARGE_WORKSPACE_BYTES if large else _SMALL_WORKSPACE_BYTES


def find_card(name: str) -> Card:
    """Look a card up by its name as people write it.

    Case, spaces, dashes, ``sim:``, NVIDIA, GeForce, Tesla, SXM and RTX or GTX do not count. The memory may be left out
    where one card has the name, and must be right where it is given.

    Raises:
        NoDeviceError: No card has this name, or several have; the text lists those that are near.

    Example:
        >>> find_card("sim:RTX 4090").full_name, find_card("h100").name
        ('NVIDIA GeForce RTX 4090', 'H100-80GB')
    """
    key, stated = _key(name), _STATED_SIZE.search(_words(name))
    found = [card for card in CARDS if key in (_key(card.name), _key(card.full_name)) and _fits(card, stated)]
    if len(found) == 1:
        return found[0]
    if found:
        problem = f"may be {' or '.join(card.name for card in found)}"
    else:
        problem = f"is not a card of the catalogue; {_near(key)}"
    raise NoDeviceError(f"{name!r} {problem}; 'sim:24GiB' states the memory itself")


def generic_card(total: int) -> Card:
    """Make a card of which nothing is known but its memory, all of which the allocator may use.

    Raises:
        InvalidArgumentError: The size is not positive.
    """
    if total < 1:
        raise InvalidArgumentError(f"a card of {total} bytes is not possible: state a size such as 'sim:24GiB'")
    unit, factor = byte_unit(total)
    name = f"{total / factor:.1f} {unit}"
    return Card(
        name=name,
        full_name=f"GPU, {name}",
        total_bytes=total,
        context_bytes=0,
        compute_capability=(8, 6),  # the commonest kind: everything but fp8 is there
        multi_processor_count=82,  # of an RTX 3090
        source="stated by the caller",
        context_source="none: the memory stated is what the allocator may use",
    )


def _card(row: Row) -> Card:
    """A card of the catalogue; without a measurement of its own it has its compute capability's context."""
    context = row.context or CONTEXTS[row.compute_capability]
    rule = "" if row.context else "by rule, the most known of its compute capability: "
    return Card(
        name=row.name,
        full_name=row.full_name,
        total_bytes=row.total_bytes,
        context_bytes=context.nbytes,
        compute_capability=row.compute_capability,
        multi_processor_count=row.multi_processor_count,
        source=row.source,
        context_source=rule + context.source,
    )


def _key(name: str) -> str:
    """What of a name tells a card: ``"NVIDIA GeForce RTX 3080 10GB"`` -> ``"3080"``."""
    return _NOISE.sub("", _STATED_SIZE.sub("", _words(name))).removeprefix("rtx").removeprefix("gtx")


def _words(name: str) -> str:
    return name.lower().replace("_", " ")


def _fits(card: Card, stated: re.Match[str] | None) -> bool:
    """Whether a size on a box may be this card's: what is reported is 0 to 9 % less (an A10 of 24 GB: 21.99 GiB)."""
    return stated is None or 0.9 * int(stated[1]) <= card.total_bytes / 2**30 <= int(stated[1])


def _near(key: str) -> str:
    """The cards of a similar name, or of one that holds the shorter of both, as the 4090 in a laptop's; else all."""
    keys = {card.name: _key(card.name) for card in CARDS}
    close = difflib.get_close_matches(key, keys.values(), n=5, cutoff=0.65)
    near = [name for name, other in keys.items() if other in close or _within(*sorted((key, other), key=len))]
    return f"near it: {', '.join(near)}" if near else f"it has {', '.join(keys)}"


def _within(shorter: str, longer: str) -> bool:
    return len(shorter) > 3 and shorter in longer  # too short a name is in everything


CARDS: tuple[Card, ...] = tuple(_card(row) for row in ROWS)
