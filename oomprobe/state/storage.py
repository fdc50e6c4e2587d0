"""The memory under tensors: its bytes, kept on the host and put back once for all the tensors that look at it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from oomprobe.scope import scope
from oomprobe.state.kept_bytes import KeptBytes, keep_bytes
from oomprobe.state.shelf import Shelf

# Answers of `same_bytes` by storage and copy: many tensors may look at one storage.
_COMPARED: ContextVar[dict[tuple[int, int], bool] | None] = ContextVar("_COMPARED", default=None)


@scope
def once_per_storage() -> Iterator[None]:
    """Inside, each storage is compared and written once, however many tensors look at it."""
    token = _COMPARED.set({})
    try:
        yield
    finally:
        _COMPARED.reset(token)


class KeptStorage:
    """A storage and its bytes. It is only watched, so that a step which lets go of it is not charged for it.

    Tensors that shared it share it again: where it has died it is made anew, once.

    Args:
        storage: Its bytes are copied.
        shelf: Where to; None: into this process.
    """

    def __init__(self, storage: torch.UntypedStorage, shelf: Shelf | None = None) -> None:
        self._device = storage.device
        self._find: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)  # one Python object a storage
        self._kept = keep_bytes(_as_bytes(storage), shelf)
        self._find_on_host: Callable[[], torch.UntypedStorage | None] = _nowhere

    def put_back(self) -> torch.UntypedStorage:
        """The storage, with its bytes as they were."""
        storage = self._find()
        if storage is None:
            data = torch.empty(len(self._kept), dtype=torch.uint8, device=self._device)
            self._kept.write_to(data)
            made = data.untyped_storage()
            self._find = lambda: made
            return made
        _write(storage, self._kept)
        return storage

    def on_host(self) -> torch.UntypedStorage:
        """A storage in host memory with the bytes as they were, to be read only; the same one while it lives."""
        storage = self._find_on_host()
        if storage is None:
            storage = self._kept.whole().untyped_storage()
            self._find_on_host = weakref.ref(storage)
        return storage

    def is_under(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor looks at this storage and no other."""
        return tensor.untyped_storage() is self._find()

    def differs(self, storage: torch.UntypedStorage) -> bool:
        """Whether the bytes of a storage are not those that were kept."""
        return not _same_bytes(storage, self._kept)


def _nowhere() -> None:
    return None


def _same_bytes(storage: torch.UntypedStorage, kept: KeptBytes) -> bool:
    known = _COMPARED.get()
    key = (storage._cdata, id(kept))
    if known is not None and key in known:
        return known[key]
    answer = storage.nbytes() == len(kept) and kept.same_as(_as_bytes(storage))
    if known is not None:
        known[key] = answer
    return answer


def _write(storage: torch.UntypedStorage, kept: KeptBytes) -> None:
    """Only where it differs: memory that was never written may be read-only, such as a mapped file."""
    if _same_bytes(storage, kept):
        return
    if storage.nbytes() != len(kept):
        storage.resize_(len(kept))
    kept.write_to(_as_bytes(storage))
    known = _COMPARED.get()
    if known is not None:
        known[storage._cdata, id(kept)] = True


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage seen as a tensor of bytes, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
