"""Where two questions differ, entry by entry."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from oomprobe.result import shortened

_SHOWN = 60  # characters: a digest of 64 is recognised by its beginning
_Entries = Mapping[tuple[str, ...], Any]


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each entry that differs; of JSON types.

    Example:
        >>> differences({"options": {"steps": 2}, "torch": "2.11"}, {"options": {"steps": 3}, "torch": "2.11"})
        ['options.steps: 2 in the journal, 3 now']
    """
    before, after = dict(_entries((), then)), dict(_entries((), now))
    return [
        f"{'.'.join(name)}: {_shown(before, name)} in the journal, {_shown(after, name)} now"
        for name in {**before, **after}
        if name not in before or name not in after or not _same(before[name], after[name])
    ]


def _entries(name: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and value:
        for part, inner in value.items():
            yield from _entries((*name, part), inner)
    else:
        yield name, value


def _same(one: Any, other: Any) -> bool:
    """Equal, or written alike: NaN is not equal to itself."""
    return bool(one == other) or json.dumps(one) == json.dumps(other)


def _shown(entries: _Entries, name: tuple[str, ...]) -> str:
    text = shortened(entries[name]) if name in entries else "nothing"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
