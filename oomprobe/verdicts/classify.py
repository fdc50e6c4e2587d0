"""Classify exceptions with a table of error texts, strongest row first.

There are two steps, so that nothing of a failed trial stays alive: `facts_of_error` turns an exception into strings and
numbers, and `classify` combines these with the evidence around the failure. Torch is not imported: classes are compared
by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oomprobe.errors import SIGNALS, DeviceLostError, OomProbeError, text_of
from oomprobe.records.trials import Verdict
from oomprobe.verdicts.texts import ERROR_TEXTS, LIBRARIES, ErrorText

# Errors of another probe that ran inside the step are final: their texts quote out-of-memory errors that it has handled,
# and one class is a MemoryError. A lost device, however, is lost to this probe too.
_PROBE_ERROR, _DEVICE_LOST = (
    f"{error.__module__}.{error.__name__}" for error in (OomProbeError, DeviceLostError)
)
_BUILTINS_OF_TORCH = frozenset({"builtins.RuntimeError", "builtins.MemoryError"})
MAX_LINKS = 64  # torch makes no longer chains
MAX_TEXT = (
    16_000  # characters kept from each end of a text: the cause is first, or last below a traceback
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One exception of a chain: ``module.Name`` of each of its classes, its text and its ``error_code``."""

    classes: tuple[str, ...]
    text: str
    error_code: int | None = None


ErrorFacts = tuple[Link, ...]  # an exception and its causes, without references to them


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The circumstances of a failure.

    Attributes:
        smaller_size_passed: Whether a smaller size ran in this probe.
        memory_pressure: Whether the allocator saw failures or retries, or free memory was near zero.
        healthy: Whether the health check after the failure passed.
        on_host: Whether the probed device is host memory.
        integrated: Whether the device shares the host's memory, as Jetson does.

    Examples:
        >>> no_engine = RuntimeError("GET was unable to find an engine to execute this computation")
        >>> for passed in (True, False):
        ...     print(classify_error(no_engine, Evidence(smaller_size_passed=passed, memory_pressure=passed)).name)
        OOM
        BUG
    """

    smaller_size_passed: bool
    memory_pressure: bool
    healthy: bool = True
    on_host: bool = False
    integrated: bool = False


def classify_error(exc: object, evidence: Evidence | None = None) -> Verdict:
    """Classify what an exception means for the size that was tried.

    Accepts any object and never raises. Everything unknown is a BUG.

    Args:
        exc: The exception. Its ``inner_exception``, ``__cause__`` and group members are read too, but not its
            ``__context__``: an out-of-memory error that was handled must not hide a later bug.
        evidence: The circumstances of the failure. Without an `Evidence`, an ambiguous text gets the verdict of its row
            in the table.

    Returns:
        OOM, HOST_OOM (only with evidence), SIZE_LIMIT, POISONED or BUG.

    Examples:
        >>> classify_error(RuntimeError("CUDA error: out of memory")).name
        'OOM'
        >>> classify_error(KeyError("CUDA error: out of memory")).name
        'BUG'
    """
    return classify(facts_of_error(exc), evidence)


def facts_of_error(exc: object) -> ErrorFacts:
    """Return the facts of an exception and its chain, without references to any of them."""
    links: list[Link] = []
    pending: list[object] = [exc]
    seen: set[int] = set()
    while pending and len(links) < MAX_LINKS:
        error = pending.pop(0)
        if isinstance(error, BaseException) and id(error) not in seen:
            seen.add(id(error))
            links.append(_link_of(error))
            if not _is_final(links[-1]):
                pending += [_attribute(error, "inner_exception"), _attribute(error, "__cause__")]
                if issubclass(
                    type(error), BaseExceptionGroup
                ):  # isinstance() could run the exception's own code
                    pending += (_attribute(error, "exceptions") or ())[:MAX_LINKS]
    return tuple(links)


def classify(facts: ErrorFacts, evidence: Evidence | None = None) -> Verdict:
    """Return the verdict for facts and evidence; after a failed health check, always POISONED."""
    if evidence is not None and not evidence.healthy:
        return Verdict.POISONED
    rows = filter(None, map(_matching_row, facts))
    row = min(rows, key=ERROR_TEXTS.index, default=None)
    if row is None:
        return Verdict.BUG
    if evidence is None:
        return row.verdict
    out_of_memory = Verdict.OOM
    if row.of_host and not evidence.on_host:
        out_of_memory = Verdict.HOST_OOM
    if not row.ambiguous:
        return out_of_memory if row.verdict is Verdict.OOM else row.verdict
    # An ambiguous text needs corroboration: a smaller size that ran and, except for a limit of sizes, signs of full memory.
    if not evidence.smaller_size_passed:
        return Verdict.BUG
    if row.verdict is Verdict.SIZE_LIMIT:
        return Verdict.SIZE_LIMIT
    if not evidence.memory_pressure:
        return Verdict.BUG
    if row.only_integrated and not evidence.integrated:
        return Verdict.BUG
    return out_of_memory  # of ambiguous POISONED rows too: if the process is poisoned, the health check says so


def _matching_row(link: Link) -> ErrorText | None:
    """Return the first row that matches, which is the strongest; None if there is none or its verdict is BUG."""
    if _is_final(link):
        return None
    text, code = link.text.lower(), _device_code(link)
    classes = {*link.classes}
    roots = {name.partition(".")[0] for name in classes}
    is_from_library = not (_BUILTINS_OF_TORCH.isdisjoint(classes) and roots.isdisjoint(LIBRARIES))
    for row in ERROR_TEXTS:
        # Read texts only from classes that torch and its libraries raise: a user's ValueError may say anything.
        reads_text = is_from_library or not classes.isdisjoint(row.also)
        if (
            code in row.codes
            or not classes.isdisjoint(row.classes)
            or (reads_text and row.pattern.search(text))
        ):
            return None if row.verdict is Verdict.BUG else row
    return None


def _is_final(link: Link) -> bool:
    return _PROBE_ERROR in link.classes and _DEVICE_LOST not in link.classes


def _device_code(link: Link) -> int | None:
    """Return ``error_code`` if it is a device's; other libraries use that name for their own numbers."""
    if link.classes[:1] == ("builtins.RuntimeError",):
        return link.error_code
    for name in link.classes:
        if name.endswith("AcceleratorError"):
            return link.error_code
    return None


# The functions below read an exception. Only signals may escape them, and each value is copied to a plain str or int.


def _link_of(error: BaseException) -> Link:
    text, code = text_of(error), _attribute(error, "error_code")
    if len(text) > 2 * MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n...\n{text[-MAX_TEXT:]}"
    is_code = isinstance(code, int) and not isinstance(code, bool)
    classes = tuple(f"{cls.__module__}.{cls.__name__}" for cls in type(error).__mro__)
    return Link(classes=classes, text=text, error_code=int(code) if is_code else None)


def _attribute(thing: object, name: str) -> Any:
    try:
        return getattr(thing, name, None)
    except SIGNALS:
        raise
    except BaseException:
        return None
