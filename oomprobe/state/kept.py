"""What everything that is remembered has in common."""

from __future__ import annotations

from typing import Any, Protocol


class Kept(Protocol):
    """Something remembered: it can be put back, and compared with what is there now."""

    def recall(self) -> Any: ...

    def differs(self, value: Any) -> bool: ...

    def on_host(self) -> Any: ...
