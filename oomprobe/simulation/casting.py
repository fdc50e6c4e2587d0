"""CUDA's autocast lists, on top of the CPU's autocast.

``torch.autocast("cuda")`` is turned into the CPU's, which the dispatcher runs on CPU tensors: it casts weights once,
keeps them until the context ends, and catches operators that C++ calls itself. Its lists are not CUDA's; the difference
is registered here. Source: aten/src/ATen/autocast_mode.h of torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_aten = torch.ops.aten
_FP32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
]
_FP32_DTYPE = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
]
_LOWER = ["addmv", "addr", "mv", "convolution"]  # beside those that the CPU's own list has
_PROMOTE = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def kernels() -> Iterator[tuple[str, Any]]:
    """Names of operators, each with the kernel that does what CUDA's autocast does."""
    for name in _FP32:
        yield name, functools.partial(_in_float32, _overload(name))
    for name in _FP32_DTYPE:
        yield name, functools.partial(_with_float32_result, _overload(name))
    for name in _PROMOTE:
        yield name, functools.partial(_promoted, _overload(name))
    for name in _LOWER:
        yield name, functools.partial(_in_low_precision, _overload(name))
    for name in _cpu_extras():
        yield name, torch.library.fallthrough_kernel


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(_aten, base), overload or "default")


@functools.cache
def _cpu_extras() -> tuple[str, ...]:
    """Operators that the CPU's autocast treats and CUDA's does not."""
    ours = {*_FP32, *_FP32_DTYPE, *_PROMOTE}
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return tuple(
        name
        for name in names
        if name not in ours
        and not name.startswith("conv")  # with padding="same": CUDA casts in what they call
        and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")
        and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")
    )


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_mapped(change, one) for one in value)
    return change(value)


def _as_it_is(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*args, **kwargs)


def _in_float32(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        raised = _mapped(lambda v: v.float() if _is_low(v) else v, args)
        return op(*raised, **{k: _mapped(lambda v: v.float() if _is_low(v) else v, v) for k, v in kwargs.items()})


def _in_low_precision(op: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("cpu")
    lowered = _mapped(lambda v: v.to(dtype) if _wideness(v) == 2 else v, args)
    return _as_it_is(op, *lowered, **kwargs)


def _with_float32_result(op: Any, *args: Any, **kwargs: Any) -> Any:
    """These raise their input inside the kernel, where no copy of it is made."""
    index = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    stated = kwargs.get("dtype", args[index] if index < len(args) else None)
    if _is_low(args[0]) and stated is None:
        args, kwargs = args[:index], {**kwargs, "dtype": torch.float32}
    return _as_it_is(op, *args, **kwargs)


def _promoted(op: Any, *args: Any, **kwargs: Any) -> Any:
    widest = max((_wideness(v) for v in _leaves(args)), default=0)
    if widest < 2:
        return _as_it_is(op, *args, **kwargs)
    return _in_float32(op, *args, **kwargs)


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if type(value) in (list, tuple):
            yield from _leaves(value)
        else:
            yield value


def _wideness(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return 1 if _is_low(value) else 2 if value.dtype is torch.float32 else 0
