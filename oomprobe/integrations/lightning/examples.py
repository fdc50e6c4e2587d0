"""What there is to train with: looked at once, before the first trial."""

from __future__ import annotations

from typing import Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.integrations.framework import LOOP_STEPS
from oomprobe.integrations.lightning.loaders import (
    EVAL,
    TRAIN,
    Kind,
    flat,
    indices_of,
    kind_of,
    length_of,
    refuse_fixed,
    size_of,
)
from oomprobe.integrations.lightning.loop import Loop, unfollowed
from oomprobe.integrations.worst_case import Order, largest_first, refuse_once
from oomprobe.result import ProbeResult

_SAID = {TRAIN: "training", EVAL: "validation"}


class Examples:
    """The examples of each loader, largest first, and how many a batch may have; `size` is the first to be tried.

    Loaders that cannot be made, or are not made, with another batch size are refused.
    """

    def __init__(self, loop: Loop, size: int, scan_s: float) -> None:
        self._loop, self._size, self._scan_s = loop, size, scan_s
        self._lengths: list[int] = []
        self._notes: dict[str, None] = {}
        self._asked_beyond = False
        self._largest_ran = True  # as far as can be told; each loader may say otherwise
        loop.look(size, self._meet)

    def _meet(self, name: str, loaders: Any) -> None:
        found, handed_in = flat(loaders), self._loop.sources[TRAIN].holder is None
        if name == TRAIN:
            sizes = {size_of(loader) for loader in found}
            for loader in found if handed_in else ():
                refuse_fixed(loader)
            if not handed_in and found and not sizes & {self._size, None}:
                own = {size for size in sizes if size is not None}
                raise InvalidArgumentError(unfollowed(self._loop.batch_size, self._size, own))
        orders = self._loop.orders.setdefault(name, {})
        for place, loader in enumerate(found):
            if kind_of(loader) is Kind.EXAMPLES:
                orders[place] = self._order(name, loader)
            else:
                self._note_unseen(name, loader)
            follows = handed_in or size_of(loader) in (self._size, None)
            if name == TRAIN and follows and (length := length_of(loader)) is not None:
                self._lengths.append(length)

    def _order(self, name: str, loader: Any) -> Order:
        order, what = largest_first(loader.dataset, indices_of(loader), self._scan_s), _SAID[name]
        if order.variable:
            self._notes[f"{what} batches were made of the largest examples"] = None
        if not order.complete:
            self._notes[
                f"{order.seen} of {len(order.indices)} {what} examples were looked at in {self._scan_s:g} s: larger ones may "
                "be among the rest (allow more with scan_s)"
            ] = None
        if not order.known and order.indices:
            self._notes[
                f"the size of {what} examples could not be told from what the data set gives: if they differ, the largest "
                "may not have been in a trial"
            ] = None
        self._largest_ran = self._largest_ran and order.complete and order.known
        return order

    def _note_unseen(self, name: str, loader: Any) -> None:
        what = f"a {type(loader).__name__}"
        if kind_of(loader) is Kind.STREAM:
            refuse_once(loader.dataset, f"{_SAID[name]} data set")
            what = "a stream"
        self._largest_ran = False
        self._notes[
            f"{_SAID[name]} batches came from {what} in its own order: longer examples may come later, and where it stood "
            "is not restored"
        ] = None

    def limited(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options, with no batch larger than the data."""
        there, asked = min(self._lengths, default=None), options.get("max_batch")
        if there is None:
            return options
        if there < self._size:
            raise InvalidArgumentError(
                f"the data set has {there} examples, fewer than the smallest batch asked for, {self._size}: lower min_batch "
                "or multiple_of, or look at what train_dataloader() reads"
            )
        self._asked_beyond = asked is None or asked > there
        return {**options, "max_batch": there if self._asked_beyond else asked}

    def covered(self, batch_size: int) -> bool:
        """Whether the largest of each field was in a batch of a trial at that size."""
        return self._largest_ran and self._all_led(batch_size)

    def _all_led(self, batch_size: int) -> bool:
        drawn = batch_size * LOOP_STEPS * self._loop.micro
        return all(order.leaders <= drawn for order in self._loop.orders.get(TRAIN, {}).values())

    def notes(self, result: ProbeResult) -> list[str]:
        """What a careful reader should know of the data behind this number."""
        found = list(self._notes)
        if not self._all_led(result.batch_size):
            found.append(
                "the largest examples are others for each of their fields, and not all of them were in a batch"
            )
        if self._asked_beyond and result.limited_by == "max_batch":
            found.append(
                f"the data set ends the search: it has {min(self._lengths)} examples, and no larger batch is possible"
            )
        if not self._lengths:
            found.append("the number of examples is not known: the answer may be larger than the data set")
        return found
