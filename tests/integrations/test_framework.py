import sys
import types

import pytest

import oomprobe
from oomprobe.integrations.framework import FrameworkError, framework, refuse_several


@pytest.fixture
def installed(monkeypatch):
    def install(version):
        module = types.ModuleType("someframe")
        module.__version__ = version
        monkeypatch.setitem(sys.modules, "someframe", module)

    return install


def test_a_framework_that_is_not_there_says_what_to_type():
    with pytest.raises(
        FrameworkError, match=r"nothere 3.1 or newer, and it is not installed: pip install 'oomprobe\[x\]'"
    ):
        framework("nothere.part", minimum="3.1", extra="x")


def test_an_old_one_says_its_version(installed):
    installed("8.3.9")
    with pytest.raises(FrameworkError, match=r"8.4 or newer, and 8.3.9 is installed: .*--upgrade"):
        framework("someframe", minimum="8.4", extra="x")


@pytest.mark.parametrize("version", ["8.4", "8.4.0", "8.4.190+cpu", "8.10.0rc1", "9.0.dev2"])
def test_a_newer_one_is_imported(installed, version):
    installed(version)
    assert framework("someframe", minimum="8.4", extra="x").__version__ == version


def test_one_that_breaks_as_it_is_imported_is_told(tmp_path, monkeypatch):
    (tmp_path / "brokenframe.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "hungryframe.py").write_text("import what_it_lacks")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FrameworkError, match=r"brokenframe is installed and cannot be imported.*torchvision::nms"):
        framework("brokenframe", minimum="1", extra="x")
    with pytest.raises(FrameworkError, match="hungryframe lacks what_it_lacks"):
        framework("hungryframe", minimum="1", extra="x")


def test_it_is_an_import_error_and_ours():
    assert issubclass(FrameworkError, ImportError)
    assert issubclass(FrameworkError, oomprobe.OomProbeError)


def test_ranks_are_refused():
    refuse_several("strategy='auto'", 1)
    with pytest.raises(oomprobe.InvalidArgumentError, match=r"devices=4 trains on 4 ranks.*memory_fraction"):
        refuse_several("devices=4", 4)


def test_importing_oomprobe_imports_no_framework():
    import subprocess

    code = (
        "import oomprobe, oomprobe.integrations, oomprobe.integrations.framework, sys;"
        "print([n for n in ('transformers', 'lightning', 'ultralytics', 'accelerate') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
