"""The bytes of a log, whatever wrote them: a compressor, a Windows shell, a terminal, a logger."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from itertools import chain

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_bytes

_GZIP = b"\x1f\x8b"
_PROBED = 1000  # bytes at the start that tell how characters are written
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_COLOURS = re.compile(rb"\x1b(?:\[[0-9;?]{0,40}[A-Za-z]|\]8;[^\x07\x1b]{0,400}(?:\x07|\x1b\\))")
# What launchers, containers and collectors of logs put in front of a line.
_FRONT = re.compile(
    r"""(?:
        \[?(?:rank|default)[ ]?\d{1,5}\]?:[ ]?                       # torchrun
        | \d{1,5}:[ ]                                                # srun --label
        | \d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:\d\d)[ ](?:std(?:out|err)[ ][FP][ ])?
        | \[pod/[^\]\s]{1,200}\][ ]
        | [\u2500-\u257f]+[ ]?                                       # the frames of rich
    )""",
    re.VERBOSE,
)
_FRAME_ENDS = re.compile(r"[ ]*[\u2500-\u257f]+$")


def unpacked(data: bytes, most_bytes: int) -> bytes:
    """Return what a gzip file holds, or the data if they are none.

    Raises:
        InvalidArgumentError: it is damaged, or larger than `most_bytes` when unpacked.
    """
    if not data.startswith(_GZIP):
        return data
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        whole = reader.decompress(data, most_bytes + 1)
    except zlib.error as error:
        raise InvalidArgumentError(f"it is compressed by gzip, and damaged: {error}") from None
    if len(whole) > most_bytes:
        raise InvalidArgumentError(
            f"it is compressed by gzip, and larger than {format_bytes(most_bytes)} when unpacked: "
            "pass its end, gunzip -c train.log.gz | tail -c 50M | oomprobe explain -"
        )
    return whole


def plain_lines(data: bytes) -> bytes:
    """Return a log as UTF-8, with a line feed after each line and without colours."""
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "")
    start = data[:_PROBED]
    if not encoding and start.count(0) > len(start) // 4:  # UTF-16 without a mark
        encoding = "utf-16-be" if start[::2].count(0) > start[1::2].count(0) else "utf-16-le"
    if encoding:
        data = data.decode(encoding, errors="replace").encode("utf-8", errors="replace")
    if b"\x1b" in data:
        data = _COLOURS.sub(b"", data)
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def said_in(line: str) -> str:
    """Return what a program wrote: the texts of a JSON object, or the line without its prefixes."""
    stripped = line.strip()
    if stripped.startswith("{"):
        try:
            fields = json.loads(stripped)
        except (ValueError, RecursionError):
            return stripped  # a dict that Python printed
        return "\n".join(_texts(fields))
    while front := _FRONT.match(stripped):
        stripped = stripped[front.end() :].lstrip()
    return _FRAME_ENDS.sub("", stripped)


def _texts(fields: object) -> list[str]:
    """Return the texts in an object of JSON, those of its inner objects too."""
    match fields:
        case str(text):
            return [text.strip()]
        case dict():
            return [*chain.from_iterable(map(_texts, fields.values()))]
        case list():
            return [*chain.from_iterable(map(_texts, fields))]
    return []
