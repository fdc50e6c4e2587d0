"""Sequences longer than a model has positions for: an error of the arguments, and not of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from oomprobe.errors import InvalidArgumentError
from oomprobe.integrations.largest import shapes_of
from oomprobe.integrations.longest import Longest

OFFSETS = (0, 1, 2)  # rows that a table may have beyond the positions its config tells of
NAMES = ("pos", "wpe")  # of tables of positions: position_embeddings, embed_positions, pos_emb, wpe
FIELDS = ("input_ids", "decoder_input_ids")
# Kinds that make further rows as they need them (fsmt), or give all positions beyond the table its last row (tapas).
WITHOUT_END = ("fsmt", "tapas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """A table with a row for each position: a longer sequence looks beyond its end.

    Attributes:
        count: Of the longest sequence.
        table: Its name in the model.
        stated: ``max_position_embeddings`` of the config.
        fields: Of an example, whose elements have positions.
    """

    count: int
    table: str
    stated: int
    fields: tuple[str, ...] = FIELDS

    def __str__(self) -> str:
        return (
            f"{self.count} (max_position_embeddings={self.stated} in its config, and {self.table} has no row for more)"
        )


def positions_of(model: torch.nn.Module) -> Positions | None:
    """What the config of a model of transformers and its table of positions agree on; None where they do not.

    Rotary and relative positions have no such table, and no such end.

    Example:
        >>> model = torch.nn.ModuleDict({"wpe": torch.nn.Embedding(64, 8)})
        >>> model.config = type("Config", (), {"max_position_embeddings": 64})
        >>> str(positions_of(model))
        '64 (max_position_embeddings=64 in its config, and wpe has no row for more)'
    """
    config = getattr(model, "config", None)
    stated = getattr(config, "max_position_embeddings", None)
    if not isinstance(stated, int) or getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return None
    if getattr(config, "model_type", None) in WITHOUT_END:
        return None
    for name, module in model.named_modules():
        if _is_table(module, name) and module.num_embeddings - stated in OFFSETS:
            count = min(stated, module.num_embeddings - _before_first(module))
            fields = (*FIELDS, "labels") if getattr(config, "is_encoder_decoder", False) else FIELDS
            return Positions(count=count, table=name, stated=stated, fields=fields)
    return None


def _is_table(module: torch.nn.Module, name: str) -> TypeGuard[torch.nn.Embedding]:
    return isinstance(module, torch.nn.Embedding) and any(word in name.rpartition(".")[2] for word in NAMES)


def _before_first(table: torch.nn.Embedding) -> int:
    """Rows that no token uses: models of RoBERTa's kind count positions from the one after the padding's."""
    return 0 if type(table) is not torch.nn.Embedding or table.padding_idx is None else table.padding_idx + 1


def refuse_too_long(
    positions: Positions | None,
    examples: Iterable[tuple[str, Longest]],
    *,
    max_length: int | None,
    loader_of: Callable[[str, Any], Any],
) -> None:
    """Refuse examples that the model has no positions for.

    Args:
        positions: Of the model.
        examples: Of each data set, with the name it has for the user.
        max_length: The user's.
        loader_of: Makes the data loader of the data set of that name from one example: its collator may cut it.

    Raises:
        InvalidArgumentError: they are too long, also as collated.
    """
    if positions is None:
        return
    for name, longest in examples:
        example, field, length = _longest_sequence(longest, positions.fields)
        if length > positions.count and _collated(loader_of, name, longest, example, field) > positions.count:
            raise InvalidArgumentError(
                _told(positions, f"the longest example of {name} has {length} {field}", max_length)
            )


def _told(positions: Positions, found: str, max_length: int | None) -> str:
    advised = f"max_length={positions.count}"
    if max_length is not None:
        return f"max_length={max_length} is longer than the model has positions for: {positions}. Pass {advised}"
    return (
        f"{found}, and the model has positions for {positions}: training would fail there, too, unless your Trainer cuts "
        f"them. Cut them as you tokenize (truncation=True, {advised}), or have a collator do it. To probe with sequences of that length, pass {advised}"
    )


def _longest_sequence(longest: Longest, fields: tuple[str, ...]) -> tuple[Any, str, int]:
    """The example, of those that lead, and its field with the most elements that have positions."""
    leaders = (longest.examples[index] for index in longest.order.indices[: longest.order.leaders])
    lengths = [(example, field, _length(example, field)) for example in leaders for field in fields]
    return max(lengths, key=lambda one: one[2])


def _length(example: Any, field: str) -> int:
    """The last dimension, which is that of the positions; 0 where there is none."""
    return max((shape[-1] for shape in shapes_of(example).get(field, ()) if shape), default=0)


def _collated(loader_of: Callable[[str, Any], Any], name: str, longest: Longest, example: Any, field: str) -> int:
    """As long as the collator leaves it; 0 where it fails, which the step will tell better."""
    try:
        batch = loader_of(name, longest.batches(1, 1)).collate_fn([example])
        return _length(dict(batch), field)
    except Exception:
        return 0
