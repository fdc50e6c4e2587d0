"""Memory figures that Linux reports for the machine, the cgroup and this process."""

from __future__ import annotations

from pathlib import Path

MEMINFO, STATUS, VMSTAT = Path("/proc/meminfo"), Path("/proc/self/status"), Path("/proc/vmstat")
CGROUP_MEMBERSHIP, CGROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def machine_bytes(name: str) -> int | None:
    """Return a figure of /proc/meminfo, such as ``MemAvailable``, in bytes; None if it is missing."""
    kib = _count(MEMINFO, f"{name}:")
    return None if kib is None else kib * 1024


def process_bytes(name: str) -> int:
    """Return a figure of /proc/self/status, such as ``VmSize`` (address space) or ``VmRSS`` (resident), in bytes."""
    return 1024 * (_count(STATUS, f"{name}:") or 0)


def free_bytes() -> int | None:
    """Return the least free memory of the machine and this process's cgroups; None if unknown (not Linux)."""
    figures = [machine_bytes("MemAvailable"), *map(_cgroup_free, _cgroup_folders())]
    return min((f for f in figures if f is not None), default=None)


def _cgroup_folders() -> list[Path]:
    """Return the folders of this process's cgroup and its parents, version 2 and 1."""
    try:
        lines = CGROUP_MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        top = CGROUP_ROOT
        if controllers:  # version 1
            if "memory" not in controllers.split(","):
                continue
            top = CGROUP_ROOT / "memory"
        own = top / path.lstrip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(top))]
    return folders


def _cgroup_free(folder: Path) -> int | None:
    """Return a cgroup's limit minus its use, not counting page cache that can be dropped; None without a limit."""
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


def oom_kills() -> int | None:
    """Count the processes that the OOM killer ended, on the machine and in this process's cgroups; None if unknown.

    Sources: proc_vmstat(5), cgroup v2 ``memory.events``, v1 ``memory.oom_control``.
    """
    files = [VMSTAT]
    for folder in _cgroup_folders():
        files += [folder / "memory.events", folder / "memory.oom_control"]
    counts = [count for file in files if (count := _count(file, "oom_kill")) is not None]
    return sum(counts) if counts else None


class OomKills:
    """Counts what the OOM killer ends from now on."""

    def __init__(self) -> None:
        self._before = oom_kills()

    def __int__(self) -> int:
        now = oom_kills()
        if now is None or self._before is None:
            return 0
        return now - self._before


def _count(file: Path, name: str) -> int | None:
    """Return the number that follows `name` at the start of a line; None if there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None
