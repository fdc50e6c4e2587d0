"""The frameworks, as they come from the registry."""

import gc

import pytest
from calibration import torchvision_names


@pytest.fixture(autouse=True, scope="session")
def torchvision_imports():
    """Beside a torch without CUDA the operators of torchvision do not load, and with them whatever imports it."""
    torchvision_names.declare()


@pytest.fixture(autouse=True, scope="session")
def frozen_imports():
    """Loops of frameworks collect garbage at each start: a quarter of a second where everything imported is looked at."""
    gc.collect()
    gc.freeze()
