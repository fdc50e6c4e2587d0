import sys
import types

import pytest

import oomprobe
from oomprobe.integrations.framework import FrameworkError, load, skipped_callbacks


def test_a_missing_framework_names_the_command(tmp_path, monkeypatch):
    with pytest.raises(
        FrameworkError,
        match=r"nothere 3.1 or newer, and it is not installed: pip .*'oomprobe\[x\]'",
    ) as caught:
        load("nothere.part", minimum="3.1", extra="x")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, oomprobe.OomProbeError)
    (tmp_path / "lacking.py").write_text("import its_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'its_dependency'$"):
        load("lacking", minimum="1", extra="x")


@pytest.mark.parametrize("version", ["8.3.9", "8.4.190+cpu", "8.10.0rc1"])
def test_an_old_framework_is_refused(monkeypatch, version):
    module = types.SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "someframe", module)
    if version != "8.3.9":
        assert load("someframe", minimum="8.4", extra="x") is module
        return
    with pytest.raises(FrameworkError, match=r"8.4 or newer, and 8.3.9 is installed: .*--upgrade"):
        load("someframe", minimum="8.4", extra="x")


def test_weight_averaging_is_said_to_copy_the_weights():
    callback = type("StochasticWeightAveraging", (), {})()
    said = "callbacks, which trials do not call: StochasticWeightAveraging (weight averaging keeps a copy of the weights)"
    assert skipped_callbacks([callback, 1], (int,)) == [said]
