import sys

import pytest

from oomprobe.ground import linux

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory figures of Linux")

MIB = 2**20
GIB = 2**30
MEMINFO = """\
MemTotal:       24000000 kB
MemFree:         1000000 kB
MemAvailable:   20000000 kB
HugePages_Total:       0
"""


def test_the_figures_of_this_machine_are_plausible():
    assert MIB < linux.machine_bytes("MemAvailable") <= linux.machine_bytes("MemTotal")
    assert MIB < linux.process_bytes("VmRSS") <= linux.process_bytes("VmHWM")
    assert (
        linux.process_bytes("VmRSS")
        < linux.process_bytes("VmSize")
        <= linux.process_bytes("VmPeak")
    )


MACHINE_FREE = 20_000_000 * 1024


@pytest.fixture
def system(tmp_path):
    """Return a function that writes /proc and /sys, with memory files in the folders of cgroups, and returns their root."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)

    def write(table, **folders):
        (tmp_path / "proc/self/cgroup").write_text(table)
        for name, files in folders.items():
            folder = tmp_path / "sys/fs/cgroup" / name
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / f"memory.{file}").write_text(f"{text}\n")
        return tmp_path

    return write


def limited(limit, used, **stat):
    return {"max": limit, "current": used, **stat}


TIGHTER = {
    "slice": limited(2 * GIB, GIB),
    "slice/job": limited("max", 1),
    "slice/job/step": limited(8 * GIB, GIB),
}
HALF_CACHE = f"anon 7\ninactive_file {2 * GIB}\nactive_file 5"
VERSION_1 = {
    "limit_in_bytes": 4 * GIB,
    "usage_in_bytes": 3 * GIB,
    "stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
}
NO_LIMIT = {"limit_in_bytes": 9223372036854771712, "usage_in_bytes": GIB}
OTHER = {"memory/docker/abc": VERSION_1, "memory/fast": {"limit_in_bytes": 1, "usage_in_bytes": 0}}


@pytest.mark.parametrize(
    ("table", "folders", "expected"),
    [
        ("0::/gone/away\n", {}, MACHINE_FREE),
        ("0::/job/step\n", {"job/step": limited(4 * GIB, GIB)}, 3 * GIB),
        ("0::/job\n", {"job": limited(4 * GIB, 3 * GIB, stat=HALF_CACHE)}, 3 * GIB),
        ("0::/slice/job/step\n", TIGHTER, GIB),
        ("0::/\n", {"": limited(2 * GIB, GIB)}, GIB),
        ("0::/job\n", {"..": limited(1, 0)}, MACHINE_FREE),
        ("0::/job\n", {"job": limited(GIB, 2 * GIB)}, 0),
        ("12:cpu,cpuacct:/fast\n7:hugetlb,memory:/docker/abc\n0::/unified\n", OTHER, 2 * GIB),
        ("7:memory:/job\n", {"memory/job": NO_LIMIT}, MACHINE_FREE),
    ],
    ids=[
        *(
            "no such folder",
            "limit minus use",
            "cache is free",
            "a tighter parent",
            "the root of a container",
        ),
        *("nothing above the root", "more used than allowed", "version 1"),
        "version 1 without a limit",
    ],
)
def test_the_tightest_cgroup_decides(system, table, folders, expected):
    assert linux.free_bytes(system(table, **folders)) == expected


def test_other_systems_have_no_figures(tmp_path):
    assert (
        linux.free_bytes(tmp_path),
        linux.oom_kills(tmp_path),
        int(linux.OomKills(tmp_path)),
    ) == (None, None, 0)


def test_kills_of_machine_and_cgroup_are_added(system):
    root = system("0::/job\n")
    (root / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    since = linux.OomKills(root)
    system("0::/job\n", job={"events": "low 0\noom 9\noom_kill 2"})
    assert (linux.oom_kills(root), int(since)) == (5, 2)
