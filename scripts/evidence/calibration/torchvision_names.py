"""Make torchvision importable if its binary operators do not load, as with a torch without CUDA.

timm imports torchvision, which on import registers fake implementations of its operators: for that they must be
declared. No model here runs any of them.
"""

import torch

SCHEMAS = (
    "nms(Tensor boxes, Tensor scores, float threshold) -> Tensor",
    "qnms(Tensor boxes, Tensor scores, float threshold) -> Tensor",
)
_kept = []  # a Library drops its declarations when it is freed


def declare():
    """Declare the operators unless torchvision does, or is not installed."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError:  # "operator torchvision::nms does not exist"
        library = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            library.define(schema)
        _kept.append(library)
