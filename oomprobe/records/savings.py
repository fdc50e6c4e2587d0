"""Savings of memory: their names in the order of what they cost, what each does to the numbers, and what to type for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.words import did_you_mean
from oomprobe.records.kinds import Samples
from oomprobe.records.trials import Verdict

AXIS = "saving"  # of their table
ALL = "all"
AS_IS = "as is"
EXPANDABLE, BF16, FP16 = "expandable_segments", "bf16_autocast", "fp16_autocast"
CHECKPOINT, ATTENTION_SAVED = "checkpoint", "checkpoint_attention_saved"
FUSED, NO_FOREACH, OFFLOAD = "fused_optimizer", "no_foreach", "offload_activations"
SAME, ROUNDING = "same numbers", "changes rounding"
# In the order in which they run, and in which a pair is named; `from_the_cheapest` sorts their rows.
NUMBERS = {
    AS_IS: SAME,
    EXPANDABLE: SAME,
    BF16: ROUNDING,
    FP16: ROUNDING,
    ATTENTION_SAVED: SAME,
    CHECKPOINT: SAME,
    FUSED: ROUNDING,
    NO_FOREACH: SAME,
    OFFLOAD: SAME,
}
ORDER = tuple(NUMBERS)
EXCLUDE_EACH_OTHER = ({BF16, FP16}, {FUSED, NO_FOREACH}, {CHECKPOINT, ATTENTION_SAVED})
AUTOCAST = {"bf16": BF16, "fp16": FP16}  # by `DeviceInfo.half`

DIVISIBLE = (CHECKPOINT, OFFLOAD)  # can act on some of the model's blocks
DIVIDED = "{name} {end} {count} of {total}"  # the name of such a saving
FIRST, LAST = "first", "last"
PART = re.compile(
    rf"({CHECKPOINT}|{OFFLOAD}) ({FIRST}|{LAST}) ([1-9]\d{{0,5}}) of ([1-9]\d{{0,5}})"
)

ONLY_SETTINGS = (
    f"of the savings, a command can be given {EXPANDABLE} alone, a setting of its environment. For "
    "the others, write a target: oomprobe run path/to/train.py:build --savings all"
)

Saving = tuple[str, ...]  # the names of those that act together; none: as is


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The blocks, of those that a model repeats, on which a saving acts.

    Attributes:
        places, others: Those on which it acts, and all others.
        total: How many blocks there are; 0: it acts on all, however many these are.

    Examples:
        >>> part = Part.of("checkpoint last 3 of 12")
        >>> "abcdefghijkl"[part.places], "abcdefghijkl"[part.others]
        ('jkl', 'abcdefghi')
        >>> Part.of("checkpoint").total
        0
    """

    places: slice
    others: slice
    total: int

    @classmethod
    def of(cls, name: str) -> Part:
        """Return what the name of a saving says."""
        match = PART.fullmatch(name)
        if match is None:
            return cls(places=slice(None), others=slice(0), total=0)
        _, end, count, total = match.groups()
        if end == FIRST:
            return cls(places=slice(int(count)), others=slice(int(count), None), total=int(total))
        return cls(places=slice(-int(count), None), others=slice(-int(count)), total=int(total))


def saving_of(name: str) -> str:
    """Return the saving of a name, which may say on which blocks it acts."""
    return name.partition(" ")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a table of savings shows beside the answers.

    Attributes:
        batch_size: The size at which the savings are compared.
        required: Whether that size was asked for; otherwise it is the answer without savings.
        typed: What to type, by saving.
        recomputed: On a simulated card, the share of the forward's module calls that backward makes again, by row.
        not_run: Why a saving was not run, by name: it is on already, or has nothing to apply to.
        failed: How the smallest size failed, by row without an answer.
    """

    batch_size: Samples
    required: bool = False
    typed: Mapping[str, str] = field(default_factory=dict)
    recomputed: Mapping[str, float] = field(default_factory=dict)
    not_run: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, Verdict] = field(default_factory=dict)


def label(saving: Saving) -> str:
    """Return the name of a row, such as ``"bf16_autocast+checkpoint"``."""
    return "+".join(saving) or AS_IS


def names_in(row: str) -> Saving:
    """Return the savings that a row names."""
    if row == AS_IS:
        return ()
    return tuple(row.split("+"))


def numbers_of(saving: Saving) -> str:
    """Return what savings do to the numbers that training computes."""
    if all(NUMBERS.get(saving_of(name)) == SAME for name in saving):
        return SAME
    return ROUNDING


def cost(saving: Saving) -> tuple[int, ...]:
    """Return a key by which savings are sorted from the cheapest: fewer first, then by the dearest of them.

    Examples:
        >>> sorted([(CHECKPOINT,), (BF16, CHECKPOINT), (), (EXPANDABLE, OFFLOAD), (BF16,)], key=cost)
        [(), ('bf16_autocast',), ('checkpoint',), ('bf16_autocast', 'checkpoint'), ('expandable_segments', 'offload_activations')]
    """
    places = sorted(map(ORDER.index, map(saving_of, saving)), reverse=True)
    return (len(places), *places)


def go_together(saving: Saving) -> bool:
    """Return whether savings can act together; none does twice.

    Examples:
        >>> go_together((BF16, CHECKPOINT)), go_together((BF16, BF16))
        (True, False)
    """
    kinds = {*map(saving_of, saving)}
    if len(kinds) < len(saving):
        return False
    return not any(pair.issubset(kinds) for pair in EXCLUDE_EACH_OTHER)


def pairs_of(savings: Iterable[Saving]) -> list[Saving]:
    """Return the pairs of single savings that can act together, the cheapest first."""
    names = sorted(chain.from_iterable(savings), key=ORDER.index)
    return sorted(filter(go_together, combinations(names, 2)), key=cost)


def best_pair(savings: Sequence[Saving]) -> Saving | None:
    """Return the first two single savings, given from the best, that can act together; None if no two can."""
    for best, second in combinations(savings, 2):
        if go_together(best + second):
            return tuple(sorted(best + second, key=ORDER.index))
    return None


def next_count(tried: Mapping[int, bool]) -> int | None:
    """Return on how many blocks to try a saving next, until the fewest that run a size are known.

    Under a cap, memory need not fall with each block more: one count may fail between two that
    run. So bisect, and then try the next but one below the fewest that run.

    Args:
        tried: Whether the size ran, by count; with that of none, and that of all blocks.

    Examples:
        >>> tried = {0: False, 12: True}
        >>> while (count := next_count(tried)) is not None:
        ...     tried[count] = count in (3, 5, 6, 7, 8, 9, 10, 11, 12)
        >>> sorted(tried)
        [0, 1, 2, 3, 6, 12]
    """
    fewest = min((count for count, runs in tried.items() if runs), default=max(tried) + 1)
    failing = max(count for count in tried if count < fewest)
    following = (failing + fewest) // 2
    if following == failing:
        following = fewest - 2
    if following in tried or following < 1:
        return None
    return following


def chosen(savings: str | Sequence[str]) -> list[Saving] | None:
    """Return the savings that are named, each once, the cheapest first; None for all.

    Raises:
        InvalidArgumentError: there is no such saving, or two cannot act together.

    Examples:
        >>> chosen("checkpoint+bf16_autocast,no_foreach")
        [('no_foreach',), ('bf16_autocast', 'checkpoint')]
    """
    if savings == ALL:
        return None
    rows = savings
    if isinstance(savings, str):
        rows = savings.split(",")
    named = set[Saving]()
    for row in rows:
        saving = names_in(row)
        for name in saving:
            if name not in ORDER[1:] and not PART.fullmatch(name):
                known = ", ".join(ORDER[1:])
                raise InvalidArgumentError(
                    f"there is no saving {name!r}{did_you_mean(name, ORDER) or '.'} Name some of {known}, or 'all'"
                )
        if not go_together(saving):
            raise InvalidArgumentError(f"{row} cannot act together: name each by itself")
        named.add(tuple(sorted(saving, key=lambda name: cost((name,)))))
    return sorted(named - {()}, key=lambda saving: (cost(saving), saving))


def check_settings(savings: str | Sequence[str]) -> None:
    """Raise InvalidArgumentError for savings that cannot be set from outside of a process."""
    if chosen(savings) != [(EXPANDABLE,)]:
        raise InvalidArgumentError(ONLY_SETTINGS)
