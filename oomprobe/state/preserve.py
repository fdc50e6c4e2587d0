"""The objects that a caller names to have them back."""

from __future__ import annotations

from collections.abc import Iterable

from oomprobe.errors import InvalidArgumentError
from oomprobe.state.own import has_state


def preserved(preserve: object) -> list[object]:
    """The objects in `preserve`; a single one with state is taken as a list of one, None as an empty list.

    Raises:
        InvalidArgumentError: something in it has no state to keep.

    Example:
        >>> import torch
        >>> preserved(None), [type(o).__name__ for o in preserved(torch.nn.Sequential())]
        ([], ['Sequential'])
    """
    if preserve is None:
        return []
    if has_state(preserve):  # a Sequential is iterable too
        return [preserve]
    if not isinstance(preserve, Iterable):
        raise InvalidArgumentError(_refusal("is", preserve))
    items = list(preserve)
    for item in items:
        if not has_state(item):
            raise InvalidArgumentError(_refusal("holds", item))
    return items


def _refusal(verb: str, item: object) -> str:
    return (
        f"preserve {verb} a {type(item).__name__}, which has no state_dict() and load_state_dict(): pass a list of "
        "schedulers, EMA or scalers; what is only Python attributes cannot be kept"
    )
