"""The cost of imports. Each runs in a fresh process, because this one has imported torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import oomprobe

ROOT = Path(__file__).parents[1]


def imported_by(statement):
    """Return the modules that a fresh process has imported after a statement."""
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return set(done.stdout.split())


def test_the_pure_modules_import_no_torch():
    pure = [
        "rules.search",
        "results.result",
        "ground.units",
        "verdicts",
        "errors",
        "records.fit",
        "allocator",
        "cli",
    ]
    modules = imported_by("\n".join(f"import oomprobe.{name}" for name in pure))
    assert {f"oomprobe.{name}" for name in pure} <= modules
    assert "torch" not in modules


def test_importing_the_package_imports_nothing_heavy():
    ours = {"oomprobe", "oomprobe.ground", "oomprobe.ground.version"}
    assert {
        name for name in imported_by("import oomprobe") if name.startswith(("oomprobe", "torch"))
    } == ours
    adapters = ("accelerate", "lightning", "transformers", "ultralytics")
    modules = ["probe", "runners.targets", *(f"integrations.{name}" for name in adapters)]
    probing = imported_by("\n".join(f"import oomprobe.{name}" for name in modules))
    assert probing.isdisjoint(
        {"rich", "matplotlib", "pytorch_lightning", *adapters}
    )  # optional dependencies


@pytest.mark.parametrize("name", oomprobe._HOMES)
def test_every_public_name_can_be_imported_and_is_listed(name):
    value = getattr(oomprobe, name)
    assert value.__name__ == name
    assert value.__module__.startswith(f"oomprobe.{oomprobe._HOMES[name]}")
    assert name in dir(oomprobe)


def test_type_checkers_see_the_same_names():
    source = Path(oomprobe.__file__).read_text().split("if TYPE_CHECKING:")[1].split("def ")[0]
    for_checkers = {
        line.split(" as ")[1]: line.split()[1].removeprefix("oomprobe.")
        for line in source.splitlines()
        if " import " in line
    }
    assert for_checkers == oomprobe._HOMES
