"""Exception -> verdict, by a fixed order of rules over a table of error texts.

Two steps, so that nothing of a failed trial stays alive: `facts_of` turns an exception into strings and
numbers, `classify` weighs those against what was seen around the failure. Torch is not imported: classes are
known by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oomprobe.errors import SIGNALS, text_of
from oomprobe.verdicts.texts import ERROR_TEXTS, LIBRARIES, ErrorText, Verdict

# What another probe, run inside the step, has judged already: its text quotes an out of memory that it has handled, and
# one class is a MemoryError. A lost device is lost to this probe too.
_OURS, _LOST = "oomprobe.errors.OomProbeError", "oomprobe.errors.DeviceLostError"
_SPEAKERS = frozenset({"builtins.RuntimeError", "builtins.MemoryError"})
MAX_LINKS = 64  # a chain deeper than this was not made by torch
MAX_TEXT = 16_000  # characters kept of each end of a text: the cause stands first, or last below a traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One exception of a chain: ``module.Name`` of each class, its text, its ``error_code`` if it has one."""

    classes: tuple[str, ...]
    text: str
    error_code: int | None = None


Facts = tuple[Link, ...]  # of an exception and of those it was made from; they outlive it


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen around a failure.

    Attributes:
        smaller_size_passed: A smaller size ran in this probe.
        memory_pressure: The allocator saw failures or retries, or free memory was near zero.
        healthy: The health check after the failure passed.
        on_host: The probed device is host memory.
        integrated: The device shares the host's memory, such as Jetson.
    """

    smaller_size_passed: bool
    memory_pressure: bool
    healthy: bool = True
    on_host: bool = False
    integrated: bool = False


def classify_error(exc: object, evidence: Evidence | None = None) -> Verdict:
    """Say what an exception means for the size that was tried.

    Total: whatever it is given, it answers and does not raise. What it does not know is a BUG.

    Args:
        exc: The exception. The chain of ``inner_exception``, ``__cause__`` and group members is read with it,
            but not ``__context__``: an out of memory that was handled already must not excuse a later bug.
        evidence: What was seen around the failure. Without it, and with what is no `Evidence`, an ambiguous text
            gets the verdict of its row.

    Returns:
        OOM, HOST_OOM (with evidence only), SIZE_LIMIT, POISONED or BUG.

    Example:
        >>> classify_error(RuntimeError("CUDA error: out of memory")).name
        'OOM'
        >>> engine = RuntimeError("GET was unable to find an engine to execute this computation")
        >>> classify_error(engine, Evidence(smaller_size_passed=False, memory_pressure=False)).name
        'BUG'
        >>> classify_error(KeyError("CUDA error: out of memory")).name
        'BUG'
    """
    return classify(facts_of(exc), evidence if isinstance(evidence, Evidence) else None)


def facts_of(exc: object) -> Facts:
    """Read an exception and the chain it carries; keep no reference to any of it."""
    links: list[Link] = []
    waiting: list[object] = [exc]
    seen: set[int] = set()
    while waiting and len(links) < MAX_LINKS:
        error = waiting.pop(0)
        if isinstance(error, BaseException) and id(error) not in seen:
            seen.add(id(error))
            links.append(_link_of(error))
            if not _is_judged(links[-1]):
                waiting += [_attribute(error, "inner_exception"), _attribute(error, "__cause__")]
                if issubclass(type(error), BaseExceptionGroup):  # the class does not run the exception's own code
                    waiting += (_attribute(error, "exceptions") or ())[:MAX_LINKS]
    return tuple(links)


def classify(facts: Facts, evidence: Evidence | None = None) -> Verdict:
    """Weigh facts against evidence; a process that failed its health check is POISONED whatever they say."""
    if evidence is not None and not evidence.healthy:
        return Verdict.POISONED
    met = (_row_met(link) for link in facts if not _is_judged(link))
    row = min((row for row in met if row is not None), key=ERROR_TEXTS.index, default=None)
    if row is None:
        return Verdict.BUG
    if evidence is None:
        return row.verdict
    out_of_memory = Verdict.HOST_OOM if row.of_host and not evidence.on_host else Verdict.OOM
    if not row.ambiguous:
        return out_of_memory if row.verdict is Verdict.OOM else row.verdict
    if row.verdict is Verdict.SIZE_LIMIT:
        return Verdict.SIZE_LIMIT if evidence.smaller_size_passed else Verdict.BUG
    # Also where such a text would mean a lost device, since the health check has passed.
    corroborated = evidence.smaller_size_passed and evidence.memory_pressure
    return out_of_memory if corroborated and (evidence.integrated or not row.only_integrated) else Verdict.BUG


def _row_met(link: Link) -> ErrorText | None:
    """The first row that an exception meets, which is the strongest; none where that row says that it is a bug."""
    text, code = link.text.lower(), _device_code(link)
    classes = {*link.classes}
    is_heard = not _SPEAKERS.isdisjoint(classes) or any(_root(name) in LIBRARIES for name in classes)
    for row in ERROR_TEXTS:
        # Texts count only from what torch and its libraries raise: a user's ValueError may say anything.
        may_say = is_heard or not row.also_raised_as.isdisjoint(classes)
        if code in row.codes or not row.classes.isdisjoint(classes) or (may_say and row.pattern.search(text)):
            return None if row.verdict is Verdict.BUG else row
    return None


def _is_judged(link: Link) -> bool:
    return _OURS in link.classes and _LOST not in link.classes


def _device_code(link: Link) -> int | None:
    """The ``error_code``, where it is a device's: other libraries count their own errors under that name."""
    plain = link.classes[:1] == ("builtins.RuntimeError",)
    accelerator = any(name.endswith("AcceleratorError") or _root(name) == "torch" for name in link.classes)
    return link.error_code if plain or accelerator else None


def _root(name: str) -> str:
    return name.partition(".")[0]


# Reading an exception. Nothing here may raise but signals, or be kept: each value is copied to a plain str or int.


def _link_of(error: BaseException) -> Link:
    code = _attribute(error, "error_code")
    text = text_of(error)
    return Link(
        classes=tuple(f"{cls.__module__}.{cls.__name__}" for cls in type(error).__mro__),
        text=text if len(text) <= 2 * MAX_TEXT else f"{text[:MAX_TEXT]}\n...\n{text[-MAX_TEXT:]}",
        error_code=int(code) if isinstance(code, int) and not isinstance(code, bool) else None,
    )


def _attribute(thing: object, name: str) -> Any:
    try:
        return getattr(thing, name, None)
    except SIGNALS:
        raise
    except BaseException:
        return None
