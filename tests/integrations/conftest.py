"""Makes torchvision importable for the frameworks."""

from calibration import torchvision_names

# Its operators do not load with a torch without CUDA, and then imports of torchvision fail.
torchvision_names.declare()
