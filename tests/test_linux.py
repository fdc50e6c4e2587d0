import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from oomprobe.devices import linux

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says about memory")

MIB = 2**20
GIB = 2**30
MEMINFO = """\
MemTotal:       24000000 kB
MemFree:         1000000 kB
MemAvailable:   20000000 kB
HugePages_Total:       0
"""


def run_python(code, timeout_s=120, warnings="error", stdin=""):
    """Run code that changes its process, in a process of its own; what it prints is returned."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-W", warnings, "-c", textwrap.dedent(code)]
    child = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        cwd=REPOSITORY,
        check=False,
    )
    assert child.returncode == 0, f"exit code {child.returncode}\n{child.stdout}\n{child.stderr}"
    return child.stdout


# --- /proc ---


def test_a_figure_of_meminfo_is_read_in_bytes(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    assert linux.machine_bytes("MemAvailable", meminfo) == 20_000_000 * 1024
    assert linux.machine_bytes("Mem", meminfo) is None
    assert linux.machine_bytes("MemTotal", tmp_path / "none") is None


def test_figures_of_this_machine_and_process_are_plausible():
    assert MIB < linux.machine_bytes("MemAvailable") <= linux.machine_bytes("MemTotal")
    assert MIB < linux.process_bytes("VmRSS") <= linux.process_bytes("VmHWM")
    assert linux.process_bytes("VmRSS") < linux.process_bytes("VmSize") <= linux.process_bytes("VmPeak")
    assert linux.process_bytes("VmNothing") is None


# --- cgroups ---


class Tree:
    """A /proc/meminfo, a /proc/self/cgroup and a /sys/fs/cgroup of one's own."""

    def __init__(self, folder, table):
        self.meminfo, self.table, self.root = folder / "meminfo", folder / "cgroup", folder / "sys"
        self.meminfo.write_text(MEMINFO)
        if table is not None:
            self.table.write_text(table)

    def put(self, group, **files):
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / ("memory." + name)).write_text(f"{text}\n")

    @property
    def free(self):
        return linux.free_bytes(self.meminfo, self.table, self.root)


MACHINE_FREE = 20_000_000 * 1024


def test_without_cgroups_the_machine_decides(tmp_path):
    assert Tree(tmp_path, None).free == MACHINE_FREE
    assert Tree(tmp_path, "0::/gone/away\nnonsense\n").free == MACHINE_FREE


def test_not_linux_says_nothing(tmp_path):
    assert linux.free_bytes(tmp_path / "none", tmp_path / "none", tmp_path / "none") is None


def test_version_2_limit_less_use(tmp_path):
    tree = Tree(tmp_path, "0::/job/step\n")
    tree.put("job/step", max=4 * GIB, current=GIB)
    assert tree.free == 3 * GIB


def test_page_cache_that_can_be_dropped_counts_as_free(tmp_path):
    tree = Tree(tmp_path, "0::/job\n")
    tree.put("job", max=4 * GIB, current=3 * GIB, stat=f"anon 7\ninactive_file {2 * GIB}\nactive_file 5")
    assert tree.free == 3 * GIB


def test_a_tighter_parent_decides(tmp_path):
    tree = Tree(tmp_path, "0::/slice/job/step\n")
    tree.put("slice", max=2 * GIB, current=GIB)
    tree.put("slice/job", max="max", current=GIB)
    tree.put("slice/job/step", max=8 * GIB, current=GIB)
    assert tree.free == GIB


def test_a_limit_on_the_root_of_a_container_counts(tmp_path):
    tree = Tree(tmp_path, "0::/\n")
    tree.put("", max=2 * GIB, current=GIB)
    assert tree.free == GIB


@pytest.mark.parametrize("table", ["0::/\n", "0::/job\n", "0::/job/step\n"])
def test_nothing_above_the_root_of_cgroups_is_read(tmp_path, table):
    tree = Tree(tmp_path, table)
    (tmp_path / "memory.max").write_text("1\n")
    (tmp_path / "memory.current").write_text("0\n")
    assert tree.free == MACHINE_FREE


def test_max_is_no_limit(tmp_path):
    tree = Tree(tmp_path, "0::/job\n")
    tree.put("job", max="max", current=GIB)
    assert tree.free == MACHINE_FREE


@pytest.mark.parametrize(
    "files", [{"max": GIB}, {"current": GIB}, {"max": "what", "current": 1}, {"max": 1, "current": "?"}]
)
def test_files_that_are_missing_or_odd_say_nothing(tmp_path, files):
    tree = Tree(tmp_path, "0::/job\n")
    tree.put("job", **files)
    assert tree.free == MACHINE_FREE


def test_more_used_than_allowed_is_nothing_free_and_not_less(tmp_path):
    tree = Tree(tmp_path, "0::/job\n")
    tree.put("job", max=GIB, current=2 * GIB)
    assert tree.free == 0


def test_version_1_is_read_from_its_own_controller(tmp_path):
    tree = Tree(tmp_path, "12:cpu,cpuacct:/fast\n7:hugetlb,memory:/docker/abc\n0::/unified\n")
    used = {"usage_in_bytes": 3 * GIB, "stat": f"inactive_file 1\ntotal_inactive_file {GIB}"}
    tree.put("memory/docker/abc", limit_in_bytes=4 * GIB, **used)
    tree.put("memory/fast", limit_in_bytes=1, usage_in_bytes=0)
    assert tree.free == 2 * GIB


def test_version_1_without_a_limit_is_a_huge_number(tmp_path):
    tree = Tree(tmp_path, "7:memory:/job\n")
    tree.put("memory/job", limit_in_bytes=9223372036854771712, usage_in_bytes=GIB)
    assert tree.free == MACHINE_FREE


# --- the resident peak ---


def test_the_oom_killer_is_counted_where_there_are_counters(tmp_path):
    vmstat, table = tmp_path / "vmstat", tmp_path / "cgroup"
    vmstat.write_text("nr_free_pages 7\noom_kill 3\n")
    table.write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    assert linux.oom_kills(vmstat, table, tmp_path) == 3
    (tmp_path / "job" / "memory.events").write_text("low 0\noom 9\noom_kill 2\n")
    assert linux.oom_kills(vmstat, table, tmp_path) == 5
    assert linux.oom_kills(tmp_path / "none", tmp_path / "none", tmp_path) is None
