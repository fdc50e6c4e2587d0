"""Values that simulated tensors keep: integers, booleans and a few numbers that came from the host, and what operators make of these alone.

So a mask of labels or of padding selects as many elements as it would. Where values are unknown, an operator whose result depends on
them is counted as if it selected all elements, which is the most it can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
KEPT = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
MOST_BYTES = 2**26  # of one tensor, whatever the batch
MOST_FLOAT_BYTES = 2**12  # of floating-point numbers: flags, scales, the boxes of an image
COUNTED = "{line} counts elements by values of this batch: a batch with more of them takes more memory; make every batch the worst case"
ALL_CHOSEN = "{line} chooses elements by values that are unknown: counted as if it chose all of them, the most it can"

# Operators whose results do not depend on the values of their arguments.
_CONSTANT = frozenset(
    getattr(_aten, name)
    for name in (
        "arange", "eye", "full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "tril_indices",
        "triu_indices", "zeros", "zeros_like",
    )
)  # fmt: skip
MASKING = frozenset(
    {
        _aten.index,
        _aten.index_put,
        _aten.index_put_,
        _aten._index_put_impl_,
        _aten._unsafe_index,
        _aten.masked_select,
    }
)
_RANDOM = torch.Tag.nondeterministic_seeded
_Storage = torch.UntypedStorage
Geometry = tuple[torch.Size | tuple[int, ...], torch.dtype]


class Values:
    """The known values, by the storages of fakes: all views of a storage are known, or none.

    Args:
        is_real: Whether a tensor is a real one in host memory.
        fake: Returns the fake of a tensor.
    """

    def __init__(
        self, is_real: Callable[[torch.Tensor], bool], fake: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._is_real, self._fake = is_real, fake
        self._known: WeakKeyDictionary[_Storage, _Storage | None] = (
            WeakKeyDictionary()
        )  # None: no longer
        self._origins: WeakKeyDictionary[_Storage, ref[_Storage]] = (
            WeakKeyDictionary()
        )  # real tensors, of their fakes

    def start_trial(self) -> None:
        """Take the values of real tensors anew."""
        for storage in [*self._origins]:
            self._known.pop(storage, None)

    def stands_for(self, simulated: _Storage, real: _Storage) -> None:
        """Take note that a simulated storage has the values of a real one until something is written to it."""
        self._origins[simulated] = ref(real)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are known, of a kind that is kept."""
        if not _is_kept(tensor):
            return False
        return self._is_real(tensor) or self._storage_of(self._fake(tensor)) is not None

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor, in host memory; None if they are not known."""
        if self._is_real(tensor):
            return tensor
        fake = self._fake(tensor)
        known = self._storage_of(fake)
        if known is None:
            return None
        with torch._C._DisableTorchDispatch():
            values = torch.empty(0, dtype=fake.dtype)
            return values.set_(known, fake.storage_offset(), fake.shape, fake.stride())

    def _storage_of(self, fake: torch.Tensor) -> _Storage | None:
        if not _is_kept(fake):
            return None
        storage = fake.untyped_storage()
        if (
            storage not in self._known
            and storage in self._origins
            and storage.nbytes() <= MOST_BYTES
        ):
            real = self._origins[storage]()
            if real is not None:
                with torch._C._DisableTorchDispatch():
                    self._known[storage] = real.clone()  # type: ignore[no-untyped-call]
        return self._known.get(storage)

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator on known values, in host memory; tensors to which it writes change there."""
        args, kwargs = tree_map_only(torch.Tensor, self._values_or_shape, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)

    def _values_or_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self.of(tensor)
        if values is None:
            with torch._C._DisableTorchDispatch():
                values = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
        return values

    def keep(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Keep the values of the results of an operator on known values, and what it writes to tensors."""
        fakes = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor) and _is_kept(leaf)
        ]
        largest_bytes = max((fake.untyped_storage().nbytes() for fake in fakes), default=0)
        if largest_bytes > MOST_BYTES:
            return
        if fakes or written(func, args, kwargs):
            try:
                computed = self.compute(func, args, kwargs)
            except (
                RuntimeError,
                IndexError,
            ):  # of values that nobody has filled in, such as those of `to_empty`
                self.forget(func, args, kwargs)
                return
            for fake, values in zip(tree_leaves(result), tree_leaves(computed), strict=False):
                if isinstance(fake, FakeTensor):
                    self.learn(fake, values)

    def learn(self, fake: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the values of a fake that has a storage of its own."""
        storage = fake.untyped_storage()
        if (
            not _is_kept(fake)
            or storage.nbytes() > MOST_BYTES
            or self._known.get(storage) is not None
        ):
            return
        with torch._C._DisableTorchDispatch():
            kept = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            kept.copy_(values)
        if kept.untyped_storage().nbytes() == storage.nbytes():  # not a part of a larger one
            self._known[storage] = kept.untyped_storage()

    def forget(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forget the values of tensors, and of all their views, to which an operator writes something unknown."""
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return  # the gradients of training are finite, so the flag stays as it is
        for tensor in written(func, args, kwargs):
            if _is_kept(tensor) and not self._is_real(tensor):
                self._known[self._fake(tensor).untyped_storage()] = None


def _is_kept(tensor: torch.Tensor) -> bool:
    if tensor.dtype in KEPT:
        return True
    is_small = tensor.is_floating_point() and tensor.numel() <= MOST_FLOAT_BYTES
    if not is_small or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() <= MOST_FLOAT_BYTES


def is_constant(func: Any) -> bool:
    """Whether an operator's results do not depend on the values of its arguments."""
    return func.overloadpacket in _CONSTANT


def is_random(func: Any) -> bool:
    """Whether an operator's results are random."""
    return _RANDOM in func.tags


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append((index, argument.name))
    return tuple(written)


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors to which an operator writes."""
    tensors = []
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tensors


def with_positions(func: Any, args: Any) -> tuple[Any, Any] | None:
    """Return an operator and its arguments with positions in place of masks, as CUDA's kernels make them; None without masks.

    Source: aten/src/ATen/native/IndexingUtils.h (expandTensors), cuda/IndexKernel.cpp (masked_select_out_cuda_impl).
    """
    if func.overloadpacket is _aten.masked_select:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in args))  # type: ignore[no-untyped-call]
        tensor, mask = (_aten.expand.default(tensor, shape) for tensor in args)
        func, args = _aten.index.Tensor, (tensor, [mask])
    if not any(map(_is_mask, args[1])) or _fills_mask(*args):
        return None
    indices = []
    for index in args[1]:
        if _is_mask(index):
            positions = _aten.nonzero.default(index)
            indices += [
                _aten.select.int(positions, 1, dimension) for dimension in range(index.dim())
            ]
        else:
            indices.append(index)
    return func, (args[0], indices, *args[2:])


def _fills_mask(
    tensor: torch.Tensor, indices: Any, value: Any = None, accumulate: bool = False
) -> bool:
    """Whether a number is written where a mask says, for which torch runs `masked_fill_`. Source: native/TensorAdvancedIndexing.cpp."""
    if value is None or accumulate or value.numel() != 1 or value.device.index is not None:
        return False
    return sum(index is not None for index in indices) == 1


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def of_geometry(results: Any) -> list[Geometry]:
    """Return the shapes and dtypes of an operator's results."""
    return [(tensor.shape, tensor.dtype) for tensor in tree_leaves(results)]
