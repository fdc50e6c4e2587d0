"""The frameworks, as they come from the registry."""

from calibration import torchvision_names

# Beside a torch without CUDA the operators of torchvision do not load, and with them whatever imports it.
torchvision_names.declare()
