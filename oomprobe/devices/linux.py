"""What Linux says about memory: of the machine, of the cgroup, of this process."""

from __future__ import annotations

import mmap
from pathlib import Path

MEMINFO, STATM, STATUS = Path("/proc/meminfo"), Path("/proc/self/statm"), Path("/proc/self/status")
MAPS = Path("/proc/self/maps")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def machine_bytes(name: str, meminfo: Path = MEMINFO) -> int | None:
    """A figure of /proc/meminfo such as ``MemAvailable``, in bytes; None where there is none."""
    return _kib_field(meminfo, name)


def process_bytes(name: str) -> int | None:
    """A figure of /proc/self/status: ``VmSize`` (address space), ``VmRSS`` (resident), ``VmHWM``, ``VmPeak``."""
    if name == "VmSize" and (pages := _first_word(STATM)):  # the same, at a fifth of the time
        return int(pages) * mmap.PAGESIZE
    return _kib_field(STATUS, name)


def _kib_field(path: Path, name: str) -> int | None:
    try:
        text = b"\n" + _read(path)
    except OSError:
        return None
    _, _, figure = text.partition(b"\n" + name.encode() + b":")
    return int(figure.split(maxsplit=1)[0]) * 1024 if figure else None


def left_by_ulimits() -> list[int]:
    """What ``ulimit -v`` and ``ulimit -d`` leave to this process, where they are set."""
    import resource  # not on Windows

    used = {resource.RLIMIT_AS: "VmSize", resource.RLIMIT_DATA: "VmData"}
    limits = {name: resource.getrlimit(kind)[0] for kind, name in used.items()}
    return [
        max(0, limit - (process_bytes(name) or 0)) for name, limit in limits.items() if limit != resource.RLIM_INFINITY
    ]


def has_loaded(library: str) -> bool:
    """Whether this process has mapped a file of that name, such as ``libjemalloc.so.2``."""
    try:
        return f"lib{library}" in MAPS.read_text()
    except OSError:
        return False


def free_bytes(meminfo: Path = MEMINFO, table: Path = CGROUP_MEMBERSHIP, root: Path = CGROUP_ROOT) -> int | None:
    """Memory this process could still use: the least of what the machine and each of its cgroups have free.

    None where nothing says (not Linux).
    """
    figures = [machine_bytes("MemAvailable", meminfo), *(_cgroup_free(d) for d in _cgroup_folders(table, root))]
    return min((f for f in figures if f is not None), default=None)


def _cgroup_folders(table: Path, root: Path) -> list[Path]:
    """The folders that can hold a limit for us: our cgroup and its parents, version 2 and 1."""
    try:
        entries = [line.split(":", 2) for line in table.read_text().splitlines()]
    except OSError:
        return []
    folders: list[Path] = []
    for _, controllers, path in (entry for entry in entries if len(entry) == 3):
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        own = top / path.lstrip("/")
        folders += [own, *(p for p in own.parents if p == top or top in p.parents)]
    return folders


def _first_word(file: Path) -> str:
    try:
        return _read(file).split(maxsplit=1)[0].decode()
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def _read(file: Path) -> bytes:
    """Without a path's own way of reading, which takes twice as long: some files are read in each trial."""
    with open(file, "rb", buffering=0) as opened:
        return opened.read()


def _cgroup_free(folder: Path) -> int | None:
    """Limit less use, where page cache that can be dropped does not count as use."""
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit_text = (folder / limit_name).read_text().strip()
            if limit_text == "max":
                return None
            unused = int(limit_text) - int((folder / used_name).read_text())
        except (OSError, ValueError):
            continue
        return max(0, unused + (_count(folder / "memory.stat", cache_name) or 0))
    return None


def oom_kills(
    vmstat: Path = Path("/proc/vmstat"), table: Path = CGROUP_MEMBERSHIP, root: Path = CGROUP_ROOT
) -> int | None:
    """Processes that the system's OOM killer has ended, of the machine and of our cgroups; None where nothing says.

    Counted with this function before and after: a rise between them is what says that a process was killed for memory
    (proc_vmstat(5), cgroup v2 ``memory.events``, v1 ``memory.oom_control``).
    """
    files = [vmstat]
    files += [
        folder / name for folder in _cgroup_folders(table, root) for name in ("memory.events", "memory.oom_control")
    ]
    counts = [count for file in files if (count := _count(file, "oom_kill")) is not None]
    return sum(counts) if counts else None


def _count(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
