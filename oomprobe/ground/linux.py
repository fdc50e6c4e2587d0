"""Memory figures that Linux reports for the machine, the cgroup and this process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from oomprobe.ground.units import known

ROOT = Path("/")  # below which /proc and /sys are


def machine_bytes(name: str, root: Path = ROOT) -> int | None:
    """Return a figure of /proc/meminfo, such as ``MemAvailable``, in bytes; None if it is missing."""
    kib = _read_count(root / "proc/meminfo", f"{name}:")
    return None if kib is None else kib * 1024


def process_bytes(name: str) -> int:
    """Return a figure of /proc/self/status, such as ``VmSize`` (address space) or ``VmRSS`` (resident), in bytes."""
    return 1024 * (_read_count(ROOT / "proc/self/status", f"{name}:") or 0)


def free_bytes(root: Path = ROOT) -> int | None:
    """Return the least free memory of the machine and this process's cgroups; None if unknown (not Linux)."""
    figures = [machine_bytes("MemAvailable", root), *map(_cgroup_free, _cgroup_folders(root))]
    return min(known(figures), default=None)


def _cgroup_folders(root: Path) -> list[Path]:
    """Return the folders of this process's cgroup and its parents, version 2 and 1."""
    folders: list[Path] = []
    for line in _lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if controllers:  # version 1
            if "memory" not in controllers.split(","):
                continue
            top /= "memory"
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
        except OSError:
            continue
        return max(0, unused + (_read_count(folder / "memory.stat", cache_name) or 0))
    return None


def oom_kills(root: Path = ROOT) -> int | None:
    """Count the processes that the OOM killer ended, on the machine and in this process's cgroups; None if unknown.

    Sources: proc_vmstat(5), cgroup v2 ``memory.events``, v1 ``memory.oom_control``.
    """
    files = [root / "proc/vmstat"]
    for folder in _cgroup_folders(root):
        files += [folder / "memory.events", folder / "memory.oom_control"]
    counts = known(_read_count(file, "oom_kill") for file in files)
    return sum(counts) if counts else None


class OomKills:
    """Counts what the OOM killer ends from now on."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root, self._before = root, oom_kills(root)

    def __int__(self) -> int:
        now = oom_kills(self._root)
        if now is None or self._before is None:
            return 0
        return now - self._before


def _lines_of(file: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    with suppress(OSError):
        return file.read_text().splitlines()
    return []


def _read_count(file: Path, name: str) -> int | None:
    """Return the number that follows `name` at the start of a line; None if there is none."""
    for line in _lines_of(file):
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None
