"""The frameworks, as they come from the registry."""

import pytest
from calibration import torchvision_names


@pytest.fixture(autouse=True, scope="session")
def torchvision_imports():
    """Beside a torch without CUDA the operators of torchvision do not load, and with them whatever imports it."""
    torchvision_names.declare()
