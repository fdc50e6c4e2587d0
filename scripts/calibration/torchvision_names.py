"""Import torchvision where its binary operators do not load, as beside a torch without CUDA.

timm imports torchvision, and torchvision registers how its operators act on tensors without data as it is imported:
for that they must have names. No model here runs one of them.
"""

import torch

SCHEMAS = (
    "nms(Tensor boxes, Tensor scores, float threshold) -> Tensor",
    "qnms(Tensor boxes, Tensor scores, float threshold) -> Tensor",
)
_kept = []  # a library forgets its names when it dies


def declare():
    """Give the operators names, unless torchvision brings them, or is not here."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError:  # "operator torchvision::nms does not exist"
        library = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            library.define(schema)
        _kept.append(library)
