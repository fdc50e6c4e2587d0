"""The frameworks, as they come from the registry."""

import gc

import pytest
from calibration import torchvision_names


@pytest.fixture(autouse=True, scope="session")
def torchvision_imports():
    """Beside a torch without CUDA the operators of torchvision do not load, and with them whatever imports it."""
    torchvision_names.declare()


@pytest.fixture(autouse=True)
def frozen_so_far():
    """Frameworks import as they go, and collect garbage at each start of a loop: what is there by now is not looked at."""
    gc.collect()
    gc.freeze()
