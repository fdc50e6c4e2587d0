"""The scripts that compare published figures with the simulation."""

import importlib
import pkgutil

import calibration
import pytest


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(calibration.__path__)])
def test_each_script_imports(name):
    importlib.import_module(f"calibration.{name}")
