"""Makes torchvision importable for the frameworks, and undoes what they set in the environment."""

import os
from unittest import mock

import pytest
from calibration import torchvision_names

# Its operators do not load with a torch without CUDA, and then imports of torchvision fail.
torchvision_names.declare()


@pytest.fixture(autouse=True)
def environment():
    """`YOLO()` sets how large cuBLAS's workspaces are, for example."""
    with mock.patch.dict(os.environ):
        yield
