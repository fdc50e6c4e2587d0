"""How many anchors the loss selects: as many as it can, whatever the weights and the images are.

The assigner chooses anchors for each object by what the net predicts, and the loss goes on with those. A net that has
learned chooses more, and more scattered ones, than one with random weights on random images; and on a simulated card
nobody knows how many. So every selection is the largest that training can meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from oomprobe.integrations.ultralytics.batches import SIDE

_T = torch.Tensor


class _Escaped(Exception):
    """Takes an out-of-memory error past a handler that would go on image by image."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Selections:
    """What the losses of a batch select.

    Args:
        objects: In every image.
    """

    def __init__(self, objects: int) -> None:
        self.objects = objects
        self.anchors = 0  # in every image, once known
        self.matched = 0  # of those, in the loss that ran its assigner last

    def impose_on(self, assigner: Any) -> None:
        """Have a `TaskAlignedAssigner` match as many anchors as it can, and let its out-of-memory errors out.

        Its `forward` catches what `_forward` raises and goes on image by image; a size at which that happens in every step
        is none that fits.
        """
        topk, inner = int(getattr(assigner, "topk2", None) or assigner.topk), assigner._forward

        def match(_: Any, __: Any, outputs: tuple[_T, ...]) -> tuple[_T, ...]:
            labels, boxes, scores, found, indices = outputs
            self.anchors = found.shape[1]
            self.matched = min(self.anchors, self.objects * topk)
            found = torch.zeros_like(found)
            found[:, : self.matched] = True
            return labels, boxes, scores, found, indices

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            except RuntimeError as error:
                raise _Escaped(error) from None

        assigner.register_forward_hook(match)
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
        if func in (_T.__getitem__, _T.__setitem__):
            tensor, key, *value = args
            args = (tensor, self._positions(key), *value)
        return func(*args, **kwargs)

    def _nonzero(self, mask: _T, *, as_tuple: bool = False) -> Any:
        known = self._selections
        if mask.dim() == 3:  # images, objects, anchors: those inside the object
            count = max(1, int(mask.numel() * SIDE * SIDE))
        elif known.anchors and mask.shape[-1] == known.anchors:
            count = mask.numel() // known.anchors * known.matched
        else:
            count = mask.numel()
        found = torch.zeros(count, mask.dim(), dtype=torch.int64, device=mask.device)
        return found.unbind(1) if as_tuple else found

    def _positions(self, key: Any) -> Any:
        """An index in which masks have become positions."""
        if isinstance(key, torch.Tensor) and key.dtype is torch.bool:
            return self._nonzero(key, as_tuple=True)
        if not isinstance(key, tuple):
            return key
        split = [self._positions(part) if isinstance(part, torch.Tensor) else part for part in key]
        return tuple(one for part in split for one in (part if isinstance(part, tuple) else (part,)))


def padded_targets(objects: int) -> Any:
    """In place of what counts the values of the targets of a criterion: they are the same for every image here."""

    def preprocess(targets: _T, batch_size: int, scale_tensor: _T) -> _T:
        return torch.zeros(batch_size, objects, targets.shape[1] - 1, device=targets.device)

    return preprocess
