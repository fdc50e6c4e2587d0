"""Who else is on an NVIDIA card, as its driver tells: for messages only, so nothing here ever raises.

The management library (NVML) answers without a CUDA context, which costs hundreds of MiB and rules out forking. It is
read through `pynvml` (``pip install "oomprobe[nvml]"``); without it, or without a driver, nobody is named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tenacity
import torch

from oomprobe.units import format_bytes

T = TypeVar("T")

NAMED = 3  # tenants in one message
NAME_LENGTH = 60
# Of `nvmlReturn_t`: those that another try may do away with. A lost card stays lost.
TRANSIENT = ("TIMEOUT", "IN_USE", "NOT_READY", "INSUFFICIENT_SIZE", "INSUFFICIENT_RESOURCES")
LISTINGS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
INITIAL_NAMESPACE = "pid:[4026531836]"  # include/linux/proc_ns.h: PROC_PID_INIT_INO


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Another process on the card.

    Attributes:
        pid: Its number, as the driver counts.
        name: Its program, and the script where that is Python; empty where nothing says.
        used_bytes: What it holds of the card; None where the driver does not say.
    """

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Again:
    """The driver could not answer just now."""


def processes_on(
    device: torch.device | int | str, *, sleep: Callable[[float], None] = time.sleep
) -> tuple[Tenant, ...]:
    """Name the other processes on a card, the largest first; this one and its children are left out.

    Args:
        device: As torch counts it (CUDA_VISIBLE_DEVICES is respected), or a UUID such as ``"GPU-8f2c..."``.
        sleep: Waits between the tries of a busy driver.

    Returns:
        Nobody where the driver, `pynvml` or the right to ask is missing, or where its numbers of processes are not
        those of this container.
    """
    return _ask(device, _tenants, sleep) or ()


def device_used_bytes(device: torch.device | int | str, *, sleep: Callable[[float], None] = time.sleep) -> int | None:
    """Memory in use on a card, by all processes and the driver; None where NVML does not say."""
    return _ask(device, lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used), sleep)


def name_tenants(tenants: tuple[Tenant, ...]) -> str:
    """Write who holds how much; nothing for nobody.

    Example:
        >>> name_tenants((Tenant(pid=4711, name="python train.py", used_bytes=12 * 2**30),))
        'pid 4711 (python train.py) holds 12.00 GiB'
    """
    lines = [_describe(tenant) for tenant in tenants[:NAMED]]
    others = tenants[NAMED:]
    if others:
        held = sum(tenant.used_bytes or 0 for tenant in others)
        lines.append(f"{len(others)} more hold {format_bytes(held) if held else 'memory'}")
    return "; ".join(lines)


def _describe(tenant: Tenant) -> str:
    name = f" ({tenant.name})" if tenant.name else ""
    held = "memory" if tenant.used_bytes is None else format_bytes(tenant.used_bytes)
    return f"pid {tenant.pid}{name} holds {held}"


# --- asking ---


def _ask(
    device: torch.device | int | str, question: Callable[[Any, Any], T], sleep: Callable[[float], None]
) -> T | None:
    """The answer, tried thrice while the driver is busy; None where there is none."""
    with suppress(Exception):
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]  # an extra

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(3),
            wait=tenacity.wait_exponential(multiplier=0.05, max=0.4),
            retry=tenacity.retry_if_result(lambda answer: isinstance(answer, _Again)),
            retry_error_callback=lambda state: None,
            sleep=sleep,
        )
        answer = retrying(_ask_once, pynvml, device, question)
        return None if isinstance(answer, _Again) else answer
    return None


def _ask_once(nvml: Any, device: torch.device | int | str, question: Callable[[Any, Any], T]) -> T | _Again | None:
    try:
        with _initialised(nvml):
            handle = _handle(nvml, device)
            return None if handle is None else question(nvml, handle)
    except Exception as error:
        return _Again() if _is_transient(nvml, error) else None


def _is_transient(nvml: Any, error: Exception) -> bool:
    value = getattr(error, "value", None)
    return value is not None and value in [getattr(nvml, f"NVML_ERROR_{name}", None) for name in TRANSIENT]


@contextmanager
def _initialised(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()  # counted by the library: others who use it keep it
    try:
        yield
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


def _tenants(nvml: Any, handle: Any) -> tuple[Tenant, ...]:
    used: dict[int, int | None] = {}
    for listing in LISTINGS:
        for process in _listed(nvml, listing, handle):
            used[process.pid] = max(used.get(process.pid) or 0, process.usedGpuMemory or 0) or None
    own = _family()
    if _contained() and own.isdisjoint(used):
        return ()  # the driver counts as the host does, and one of these may be this process
    tenants = [Tenant(pid=pid, name=_name(nvml, pid), used_bytes=size) for pid, size in used.items() if pid not in own]
    return tuple(sorted(tenants, key=lambda tenant: (-(tenant.used_bytes or 0), tenant.pid)))


def _listed(nvml: Any, listing: str, handle: Any) -> list[Any]:
    try:
        return list(getattr(nvml, listing)(handle))
    except Exception as error:
        if _is_transient(nvml, error):
            raise
        return []


# --- which card ---


def _handle(nvml: Any, device: torch.device | int | str) -> Any:
    uuid = device if isinstance(device, str) and device.startswith(("GPU-", "MIG-")) else None
    if uuid is None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if torch.version.hip is not None or (not isinstance(device, int) and torch.device(device).type != "cuda"):
            return None
        uuid = _uuid_known(index)
        visible = None if uuid else visible_device(index)
        if isinstance(visible, int):
            return nvml.nvmlDeviceGetHandleByIndex(visible) if _counts_alike(nvml) else None
        uuid = uuid or visible
    return None if uuid is None else _handle_by_uuid(nvml, uuid)


def _uuid_known(index: int) -> str | None:
    """What torch knows where a context exists already; asking otherwise would create one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def visible_device(index: int, environ: Mapping[str, str] | None = None) -> int | str | None:
    """The card that torch calls `index`: the driver's index, or a UUID, which may be abbreviated.

    Source: CUDA C Programming Guide, "CUDA Environment Variables": what follows an invalid entry is invisible, and an
    entry that is there twice hides all.

    Example:
        >>> [visible_device(1, {"CUDA_VISIBLE_DEVICES": text}) for text in ("3,1", "GPU-8f,GPU-2c", "3,-1,1", "2,2")]
        [1, 'GPU-2c', None, None]
        >>> visible_device(1, {})
        1
    """
    text = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return index
    entries: list[int | str] = []
    for entry in (entry.strip() for entry in text.split(",")):
        known: int | str = int(entry) if entry.isdecimal() else entry
        if isinstance(known, str) and not known.startswith(("GPU-", "MIG-")):
            break
        if known in entries:
            return None
        entries.append(known)
    return entries[index] if 0 <= index < len(entries) else None


def _counts_alike(nvml: Any) -> bool:
    """Whether CUDA counts the cards as the driver does: it begins with the fastest where nothing was said."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return True
    cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return len({nvml.nvmlDeviceGetName(card) for card in cards}) <= 1


def _handle_by_uuid(nvml: Any, uuid: str) -> Any:
    cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    found = [card for card in cards if _text(nvml.nvmlDeviceGetUUID(card)).startswith(uuid)]
    if len(found) == 1:
        return found[0]
    return None if found else nvml.nvmlDeviceGetHandleByUUID(uuid)  # a slice of a card is in no list


# --- which process ---


def _family() -> set[int]:
    """This process and its descendants, as far as /proc shows them."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # "4711 (a name) S 1 ...": the name may hold anything, the parent is the second after it
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while True:
        born = {child for child, parent in parents.items() if parent in family} - family
        if not born:
            return family
        family |= born


def _contained() -> bool:
    """Whether processes have other numbers here than outside, as in a container."""
    try:
        return os.readlink("/proc/self/ns/pid") != INITIAL_NAMESPACE
    except OSError:
        return False


def _name(nvml: Any, pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        name = program_name(words)
    except OSError:
        name = ""
    if not name:
        with suppress(Exception):
            name = program_name([_text(nvml.nvmlSystemGetProcessName(pid)).split(" ")[0]])
    return name


def program_name(words: list[str]) -> str:
    """The program of a command line and, for Python, its script; not the other arguments, which may be secrets.

    Example:
        >>> program_name(["/usr/bin/python3", "-u", "jobs/train.py", "--token", "s3cret"])
        'python3 train.py'
        >>> program_name(["python", "-m", "torch.distributed.run", "x"]), program_name(["/usr/bin/Xorg", ":0"])
        ('python -m torch.distributed.run', 'Xorg')
    """
    program, *rest = words or [""]
    shown = [os.path.basename(program)]
    if shown[0].startswith("python") and rest:
        if "-m" in rest[:-1] and not any(word.endswith(".py") for word in rest[: rest.index("-m")]):
            shown += ["-m", rest[rest.index("-m") + 1]]
        else:
            shown += [os.path.basename(word) for word in rest if word.endswith(".py")][:1]
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(shown))[:NAME_LENGTH]


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
