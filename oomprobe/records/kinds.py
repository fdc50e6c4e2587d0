"""Kinds of values in records that a file may get wrong; `oomprobe.records.plain` checks them."""

from __future__ import annotations

from typing import Annotated, Any

Bytes = Annotated[int, "at least 0"]
Samples = Annotated[int, "at least 1"]  # a batch size
Plain = Annotated[Any, "what JSON has"]
