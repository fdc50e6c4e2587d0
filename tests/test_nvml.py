"""A fake NVML in the place of `pynvml`; the names are compared with those of the real one where it is installed."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_linux import run_python

from oomprobe.devices import nvml
from oomprobe.devices.nvml import Tenant, device_used_bytes, name_tenants, processes_on, program_name, visible_device

GIB = 2**30
LOST, TIMEOUT, NOT_SUPPORTED, IN_USE, NOT_READY, SMALL = 15, 10, 3, 19, 27, 7


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(value)
        self.value = value


class FakeNvml:
    """What `pynvml` answers for two cards; `failing` maps a function to the errors of its next calls."""

    NVML_ERROR_TIMEOUT, NVML_ERROR_IN_USE, NVML_ERROR_NOT_READY, NVML_ERROR_INSUFFICIENT_SIZE = 10, 19, 27, 7

    def __init__(self):
        self.uuids = ["GPU-aaaa-1", "GPU-aabb-2"]
        self.names = ["Card", "Card"]
        self.compute = [[(4711, 12 * GIB)], [(4712, GIB)]]
        self.mps, self.graphics = [[], []], [[], []]
        self.failing = {}
        self.initialised = self.asked = 0

    def _enter(self, name):
        self.asked += 1
        assert self.initialised or name in ("nvmlInit", "nvmlShutdown")
        errors = self.failing.get(name, [])
        if errors:
            raise errors.pop(0) if isinstance(errors, list) else errors

    def nvmlInit(self):
        self._enter("nvmlInit")
        self.initialised += 1

    def nvmlShutdown(self):
        self.initialised -= 1
        self._enter("nvmlShutdown")

    def nvmlDeviceGetCount(self):
        self._enter("nvmlDeviceGetCount")
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index):
        self._enter("nvmlDeviceGetHandleByIndex")
        if index >= len(self.uuids):
            raise NVMLError(2)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._enter("nvmlDeviceGetHandleByUUID")
        if uuid == "MIG-slice":
            return 1
        raise NVMLError(6)

    def nvmlDeviceGetUUID(self, card):
        self._enter("nvmlDeviceGetUUID")
        return self.uuids[card]

    def nvmlDeviceGetName(self, card):
        self._enter("nvmlDeviceGetName")
        return self.names[card]

    def nvmlDeviceGetMemoryInfo(self, card):
        self._enter("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=(5 + card) * GIB)

    def nvmlSystemGetProcessName(self, pid):
        self._enter("nvmlSystemGetProcessName")
        return b"/opt/bin/server --token=x"

    def _list(self, name, processes):
        self._enter(name)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return self._list("nvmlDeviceGetComputeRunningProcesses", self.compute[card])

    def nvmlDeviceGetMPSComputeRunningProcesses(self, card):
        return self._list("nvmlDeviceGetMPSComputeRunningProcesses", self.mps[card])

    def nvmlDeviceGetGraphicsRunningProcesses(self, card):
        return self._list("nvmlDeviceGetGraphicsRunningProcesses", self.graphics[card])


@pytest.fixture
def fake(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml, "_contained", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    yield fake
    assert fake.initialised == 0


def pids(device, **options):
    return [tenant.pid for tenant in processes_on(device, **options)]


# --- who ---


def test_a_neighbour_is_named(fake):
    tenants = processes_on(0)
    assert tenants == (Tenant(pid=4711, name="server", used_bytes=12 * GIB),)
    assert name_tenants(tenants) == "pid 4711 (server) holds 12.00 GiB"


def test_the_largest_first_and_once(fake):
    fake.compute[0] = [(4711, GIB), (4712, None), (4713, 3 * GIB)]
    fake.mps[0] = [(4711, 2 * GIB)]
    fake.graphics[0] = [(4713, None), (4714, GIB)]
    tenants = processes_on(0)
    assert [(t.pid, t.used_bytes) for t in tenants] == [(4713, 3 * GIB), (4711, 2 * GIB), (4714, GIB), (4712, None)]


def test_this_process_and_its_children_are_no_neighbours(fake):
    child = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], "
         "stdin=subprocess.PIPE); print(p.pid, flush=True); input(); p.communicate(b'x')"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        grandchild = int(child.stdout.readline())
        fake.compute[0] = [(os.getpid(), GIB), (child.pid, GIB), (grandchild, GIB), (os.getppid(), GIB)]
        assert pids(0) == [os.getppid()]
    finally:
        child.communicate("x\n", timeout=20)


def test_in_a_container_numbers_of_the_host_are_not_told_as_neighbours(fake, monkeypatch):
    monkeypatch.setattr(nvml, "_contained", lambda: True)
    assert processes_on(0) == ()
    fake.compute[0].append((os.getpid(), GIB))  # this driver translates
    assert pids(0) == [4711]


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_a_container_is_known_by_its_namespace(monkeypatch):
    monkeypatch.setattr(nvml.os, "readlink", lambda path: "pid:[4026531836]")
    assert nvml._contained() is False
    monkeypatch.setattr(nvml.os, "readlink", lambda path: "pid:[4026532256]")
    assert nvml._contained() is True


def test_a_living_neighbour_is_named_by_its_command_line(fake):
    fake.compute[0] = [(os.getppid(), GIB)]
    words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    assert processes_on(0)[0].name == program_name(words) != "server"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/usr/bin/python3.11", "-u", "/srv/jobs/train.py", "--wandb-key=123"], "python3.11 train.py"),
        (["python", "-m", "torch.distributed.run", "train.py"], "python -m torch.distributed.run"),
        (["python", "train.py", "-m", "resnet"], "python train.py"),
        (["python", "-c", "secret = 1"], "python"),
        (["/usr/lib/xorg/Xorg", "vt2", "-auth", "/run/x"], "Xorg"),
        (["evil\x1b[31m\n"], "evil?[31m?"),
        (["x" * 100], "x" * 60),
        ([""], ""),
        ([], ""),
    ],
)
def test_names_show_no_arguments(words, name):
    assert program_name(words) == name


def test_many_tenants():
    tenants = tuple(Tenant(pid=pid, name="", used_bytes=GIB) for pid in range(1, 6))
    assert name_tenants(tenants) == (
        "pid 1 holds 1.00 GiB; pid 2 holds 1.00 GiB; pid 3 holds 1.00 GiB; 2 more hold 2.00 GiB"
    )
    unknown = tuple(Tenant(pid=pid, name="x", used_bytes=None) for pid in range(1, 5))
    assert (
        name_tenants(unknown)
        == "pid 1 (x) holds memory; pid 2 (x) holds memory; pid 3 (x) holds memory; 1 more hold memory"
    )
    assert name_tenants(()) == ""


# --- on which card ---


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, 0, [4711]),
        (None, 1, [4712]),
        (None, torch.device("cuda"), [4711]),
        (None, torch.device("cuda", 1), [4712]),
        (None, "cuda:1", [4712]),
        (None, 2, []),
        (None, torch.device("cpu"), []),
        (None, "xpu:0", []),
        (None, "GPU-aabb-2", [4712]),
        (None, "nonsense", []),
        ("1", 0, [4712]),
        ("1,0", 1, [4711]),
        ("1", 1, []),
        ("", 0, []),
        ("-1", 0, []),
        ("1,1", 0, []),
        ("GPU-aabb", 0, [4712]),
        ("GPU-aabb-2,GPU-aaaa-1", 1, [4711]),
        ("GPU-aa", 0, []),  # might be either
        ("GPU-cccc", 0, []),
        ("MIG-slice", 0, [4712]),
    ],
)
def test_which_card(fake, monkeypatch, visible, device, expected):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert pids(device) == expected
    used = {(): None, (4711,): 5 * GIB, (4712,): 6 * GIB}
    assert device_used_bytes(device) == used[tuple(expected)]


@pytest.mark.parametrize(("order", "expected"), [(None, []), ("FASTEST_FIRST", []), ("PCI_BUS_ID", [4712])])
def test_cuda_counts_unlike_cards_in_an_order_of_its_own(fake, monkeypatch, order, expected):
    fake.names = ["Slow Card", "Fast Card"]
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert pids(1) == expected
    assert pids("GPU-aabb-2") == [4712]


def test_where_a_context_exists_torch_knows_the_card(fake, monkeypatch):
    fake.names = ["Slow Card", "Fast Card"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=["aabb-2", "aaaa-1"][index])
    )
    assert pids(0) == [4712]
    assert pids(torch.device("cuda", 1)) == [4711]


def test_no_context_is_created(fake, monkeypatch):
    def refuse(*args):
        raise AssertionError("this would create a context")

    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    assert pids(0) == [4711]
    assert not torch.cuda.is_initialized()


def test_amd_cards_are_not_nvidias(fake, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert processes_on(0) == ()


def test_visible_devices_reads_the_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert visible_device(0) == 7


# --- when NVML does not answer ---


FUNCTIONS = [name for name in dir(FakeNvml) if name.startswith("nvml")]


@pytest.mark.parametrize(
    "error", [NVMLError(LOST), NVMLError(NOT_SUPPORTED), OSError("x"), AttributeError("x"), TypeError()]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_ever_raises_and_nothing_stays_initialised(fake, name, error):
    fake.failing = {name: error}
    slept = []
    for device in (0, torch.device("cuda", 1), "GPU-aaaa-1", "MIG-slice"):
        assert isinstance(processes_on(device, sleep=slept.append), tuple)
        assert device_used_bytes(device, sleep=slept.append) in (None, 5 * GIB, 6 * GIB)
    assert slept == []  # a lost card stays lost


def test_everything_raises(fake):
    fake.failing = {name: RuntimeError("broken") for name in FUNCTIONS}
    assert processes_on(0) == ()
    assert device_used_bytes(0) is None


@pytest.mark.parametrize("value", [TIMEOUT, IN_USE, NOT_READY, SMALL])
@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetComputeRunningProcesses"])
def test_a_busy_driver_is_asked_again(fake, name, value):
    fake.failing = {name: [NVMLError(value), NVMLError(value)]}
    slept = []
    assert pids(0, sleep=slept.append) == [4711]
    assert len(slept) == 2
    assert sum(slept) < 1


def test_a_driver_that_stays_busy_is_left_alone(fake):
    fake.failing = {"nvmlDeviceGetMemoryInfo": NVMLError(TIMEOUT)}
    slept = []
    assert device_used_bytes(0, sleep=slept.append) is None
    assert len(slept) == 2


def test_a_listing_that_is_not_supported_leaves_the_others(fake):
    fake.failing = {"nvmlDeviceGetMPSComputeRunningProcesses": NVMLError(NOT_SUPPORTED)}
    fake.graphics[0] = [(4799, 2 * GIB)]
    assert pids(0) == [4711, 4799]


def test_ctrl_c_is_not_swallowed_and_leaves_nothing_initialised(fake):
    fake.failing = {"nvmlDeviceGetMemoryInfo": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        device_used_bytes(0)


def test_without_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert processes_on(0) == ()
    assert device_used_bytes(0) is None


def test_the_module_is_imported_only_when_asked():
    run_python(
        """
        import sys
        sys.modules["pynvml"] = None
        import oomprobe.devices.nvml as nvml
        assert nvml.processes_on(0) == ()
        """
    )
    tree = ast.parse(Path(nvml.__file__).read_text())
    assert not [n for n in tree.body if isinstance(n, ast.Import) and n.names[0].name == "pynvml"]


# --- the real module ---


def names_used():
    text = Path(nvml.__file__).read_text()
    listed = {*re.findall(r"nvml\.(nvml\w+)", text), *nvml.LISTINGS}
    return listed | {f"NVML_ERROR_{name}" for name in nvml.TRANSIENT}


def test_the_fake_has_what_is_used():
    assert len(names_used()) > 12
    assert {name for name in names_used() if name.startswith("nvml")} <= set(dir(FakeNvml))


def test_the_real_module_has_what_is_used():
    real = pytest.importorskip("pynvml")
    assert {name for name in names_used() if not hasattr(real, name)} == set()
    for name in ("TIMEOUT", "IN_USE", "NOT_READY", "INSUFFICIENT_SIZE"):
        assert getattr(real, f"NVML_ERROR_{name}") == getattr(FakeNvml, f"NVML_ERROR_{name}")
    assert real.NVMLError(real.NVML_ERROR_GPU_IS_LOST).value == LOST


def test_the_real_module_without_a_driver_names_nobody():
    real = pytest.importorskip("pynvml")
    importlib.reload(real)
    try:
        real.nvmlInit()
    except real.NVMLError:
        assert processes_on(0, sleep=lambda seconds: None) == ()
        assert device_used_bytes(0, sleep=lambda seconds: None) is None
    else:
        real.nvmlShutdown()
        assert isinstance(processes_on(0), tuple)
