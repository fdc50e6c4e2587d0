"""How many anchors the loss selects: as many as it can, whatever the weights and the images are.

The assigner chooses anchors for each object by what the net predicts, and the loss goes on with those. A net that has
learned chooses more, and more scattered ones, than one with random weights on random images; and on a simulated card
nobody knows how many. So every selection is the largest that training can meet.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from oomprobe.errors import SimulationError
from oomprobe.integrations.ultralytics.batches import SIDE

_T = torch.Tensor
OF_ONE_IMAGE = "_oomprobe_of_one_image"  # an attribute of a mask over all objects of a batch
UNKNOWN_HERE = (
    "a simulated card cannot run this loss ({what}): how much it selects depends on masks. "
    "Probe on the card itself, or on host memory with device='cpu:8GiB'"
)


class _Escaped(Exception):
    """Takes an out-of-memory error past a handler that would go on image by image."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@dataclass(slots=True)
class Selections:
    """What the losses of a batch select.

    Attributes:
        objects: In every image.
        anchors: In every image, once known.
        matched: Anchors of every image that belong to an object, in the loss that ran its assigner last.
    """

    objects: int
    anchors: int = 0
    matched: int = 0

    def impose_on(self, assigner: Any) -> None:
        """Have the assigner match as many anchors as it can, and let its out-of-memory errors out.

        Args:
            assigner: A `TaskAlignedAssigner`, of a criterion that nobody else uses.
        """
        topk = int(getattr(assigner, "topk2", None) or assigner.topk)  # the older ones have one only

        def match(_: Any, __: Any, outputs: tuple[_T, ...]) -> tuple[_T, ...]:
            labels, boxes, scores, found, indices = outputs
            self.anchors = found.shape[1]
            self.matched = min(self.anchors, self.objects * topk)
            found = torch.zeros_like(found)
            found[:, : self.matched] = True
            return labels, boxes, scores, found, indices

        assigner.register_forward_hook(match)
        _let_errors_out(assigner)

    def count(self, mask: torch.Tensor) -> int:
        """How many elements of a mask of the loss are true, at most."""
        if mask.dim() == 3:  # images, objects, anchors: those inside the object
            return max(1, int(mask.numel() * SIDE * SIDE))
        if hasattr(mask, OF_ONE_IMAGE):
            return self.objects
        if self.anchors and mask.shape[-1] == self.anchors:
            return mask.numel() // self.anchors * self.matched
        return mask.numel()


def _let_errors_out(assigner: Any) -> None:
    """A size at which the assigner has to go on image by image, in every step, is none that fits.

    Its `forward` catches what `_forward` raises. That is the only place to step in: whoever sees the outputs sees a step
    that passed.
    """
    inner = assigner._forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except RuntimeError as error:
            raise _Escaped(error) from None

    assigner._forward = forward


def call(loss: Any, *args: Any) -> Any:
    """Call what runs the loss; an out-of-memory error of the assigner comes out as it was raised."""
    try:
        return loss(*args)
    except _Escaped as escaped:
        error = escaped.error
    raise error


def criteria(criterion: Any) -> Iterator[Any]:
    """A criterion, or the two of an end-to-end one, that have an assigner."""
    for part in (criterion, *vars(criterion).values()):
        if hasattr(part, "assigner"):
            yield part


class AsManyAsCan(TorchFunctionMode):
    """On a simulated card, inside the loss: what depends on values is as large as it can be.

    Args:
        selections: Knows how large that is.
    """

    def __init__(self, selections: Selections) -> None:
        super().__init__()
        self._selections = selections

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_T.nonzero, torch.nonzero):
            return self._nonzero(*args, **kwargs)
        if func in (_T.bincount, torch.bincount):  # objects of each image; on the host, where numbers have values
            return torch.full((kwargs["minlength"],), args[0].numel() // kwargs["minlength"], device="cpu")
        if func is _T.__bool__:  # "is any object matched?"
            return True
        if func in (_T.lt, torch.lt) and args[0].dim() == 0:  # "are there too few?"
            return False
        if func in (_T.__eq__, _T.eq, torch.eq) and args[0].dim() == 1:  # "whose image is this one?"
            found = func(*args, **kwargs)
            setattr(found, OF_ONE_IMAGE, True)
            return found
        if func in (_T.__getitem__, _T.__setitem__):
            tensor, key, *value = args
            args = (tensor, self._positions(key), *value)
        return func(*args, **kwargs)

    def _nonzero(self, mask: torch.Tensor, *, as_tuple: bool = False) -> Any:
        found = torch.zeros(self._selections.count(mask), mask.dim(), dtype=torch.int64, device=mask.device)
        return found.unbind(1) if as_tuple else found

    def _positions(self, key: Any) -> Any:
        """An index in which masks have become positions."""
        if isinstance(key, torch.Tensor) and key.dtype is torch.bool:
            return self._nonzero(key, as_tuple=True)
        if not isinstance(key, tuple):
            return key
        split = [self._positions(part) if isinstance(part, torch.Tensor) else part for part in key]
        return tuple(one for part in split for one in (part if isinstance(part, tuple) else (part,)))


def prepare_for_simulation(criterion: Any, selections: Selections) -> None:
    """Take out of a criterion what counts the values of its targets: they are the same for every image here.

    Raises:
        SimulationError: the loss selects by what cannot be bounded from shapes.
    """
    for part in criteria(criterion):
        if _looks_at_masks(part.assigner):
            raise SimulationError(UNKNOWN_HERE.format(what=type(part).__name__))
        part.preprocess = _padded(selections)


def _looks_at_masks(assigner: Any) -> bool:
    overlaps = getattr(assigner, "pair_overlaps", None)
    return overlaps is not None and "proto" in inspect.signature(overlaps).parameters


def _padded(selections: Selections) -> Any:
    def preprocess(targets: torch.Tensor, batch_size: int, scale_tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(batch_size, selections.objects, targets.shape[1] - 1, device=targets.device)

    return preprocess
