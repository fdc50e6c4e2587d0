"""CUDA's code paths, where they differ from the CPU's and the difference affects memory.

The simulation runs on CPU tensors, so these paths are registered with the dispatcher while a step
runs. ``torch.autocast("cuda")`` becomes the CPU's autocast, which casts weights once, keeps them
until the context ends, and also applies to operators called from C++. The differences between its
operator lists and CUDA's are registered here.

Sources, torch 2.13: aten/src/ATen/native/Dropout.cpp (fused dropout keeps a mask of one byte per
element), aten/src/ATen/autocast_mode.h (CUDA's lists),
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (choice of the attention kernel, simplified
here).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._decomp import decompositions
from torch.utils._pytree import tree_leaves

from oomprobe.ground import torch_versions
from oomprobe.simulation.kernels.steps import entry

_aten = torch.ops.aten
_set_autocast_enabled = torch.set_autocast_enabled
_FLASH_MAX_HEAD = 256
_CUDNN_MAX_HEAD = 128
_OWN_MODES = 2  # the card's, and that of its fakes
_MAX_GRID = 65_535  # blocks in the second dimension of a kernel's grid: flash attention's has one for each sample
_HALF = (torch.float16, torch.bfloat16)
_EFFICIENT_MULTIPLES = {
    torch.float16: 8,
    torch.bfloat16: 8,
    torch.float32: 4,
}  # of the heads' widths, by dtype


_KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.softmax.int: lambda *args, **kwargs: _softmax("softmax", *args, **kwargs),
    _aten.log_softmax.int: lambda *args, **kwargs: _softmax("log_softmax", *args, **kwargs),
}


class CudaKernels:
    """Registration of CUDA's code paths with the dispatcher.

    Kernels are process-wide. Those of dropout, linear, attention and softmax use CUDA's path only
    in threads for which `active` returns True; the autocast lists, registered once something turns
    autocast on, apply to every thread. The attention kernel depends on the compute capability.
    """

    def __init__(self, active: Callable[[], bool], capability: tuple[int, int]) -> None:
        self._active, self._capability = active, capability
        self._has_autocast = False

    def __enter__(self) -> CudaKernels:
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        attend = partial(_attend, self._capability)
        kernels: dict[Any, Callable[..., Any]] = {
            **_KERNELS,
            _aten.scaled_dot_product_attention.default: attend,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once about overriding a kernel
            for op, kernel in kernels.items():
                for key in ("AutogradCPU", "CPU"):
                    library.impl(op, self._where_active(op, kernel), key)
            if hasattr(_aten, "_fused_rms_norm_backward"):
                # One kernel on CUDA since torch 2.9, several on the CPU.
                norm = _aten._fused_rms_norm.default
                library.impl(norm, partial(_composite, norm), "CPU")
                backward = decompositions._fused_rms_norm_backward
                library.impl(backward.__name__, backward, "CPU")
        self._library = library
        self.set_autocast_enabled("cpu", torch.is_autocast_enabled("cpu"))
        return self

    def _where_active(self, op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel that takes CUDA's path in simulated threads, and the operator's own in others."""

        def choose(*args: Any, **kwargs: Any) -> Any:
            if self._active():
                return kernel(*args, **kwargs)
            return _composite(op, *args, **kwargs)

        return choose

    def set_autocast_enabled(self, *args: Any, **kwargs: Any) -> None:
        """Do what torch's function does, and register the autocast lists before they are needed: 180 kernels, where all others are 16."""
        is_turned_on = True in (*args, *kwargs.values())
        if is_turned_on and not self._has_autocast:
            self._has_autocast = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for name, kernel in _autocast_kernels().items():
                    self._library.impl(name, kernel, "AutocastCPU")
        _set_autocast_enabled(*args, **kwargs)

    def __exit__(self, *_: object) -> None:
        self._library._destroy()


@entry(_KERNELS, _aten.dropout.default)
def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    return torch.native_dropout(tensor, p, train)[0]


@entry(_KERNELS, _aten.linear.default)
def _linear(
    tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the bias to the product if the input is not contiguous."""
    is_gapped = tensor.dim() >= 3 and not tensor.is_contiguous()
    if is_gapped and bias is not None:
        return _added(torch.matmul(tensor, weight.t()), bias)
    return _composite(_aten.linear.default, tensor, weight, bias)  # type: ignore[no-any-return]


def _added(tensor: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add in place, but not where a dispatch mode of the user's own sees it, such as that of selective checkpointing.

    Torch then takes all tensors for subclasses, and adds out of place.
    """
    if torch._C._len_torch_dispatch_stack() > _OWN_MODES:
        return tensor.add(bias)
    return tensor.add_(bias)


@entry(_KERNELS, _aten.batch_norm.default)
def _batch_norm(tensor: torch.Tensor, weight: torch.Tensor | None, *args: Any) -> torch.Tensor:
    """Make the input contiguous for cuDNN, which keeps the copy for the backward pass."""
    if uses_cudnn_norm(tensor, weight):
        tensor = tensor.contiguous(memory_format=image_format(tensor))
    return _composite(_aten.batch_norm.default, tensor, weight, *args)  # type: ignore[no-any-return]


def uses_cudnn_norm(given: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Return whether cuDNN computes a batch norm in training."""
    if given.dim() == 2 or weight is None:
        return False
    return weight.dtype is torch.float32 and given.dtype is not torch.bfloat16


@entry(_KERNELS, _aten.one_hot.default)
def _one_hot(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Scatter ones into zeros; for fakes, torch compares each index with each class."""
    if num_classes < 0:
        return _composite(_aten.one_hot.default, index, num_classes)  # type: ignore[no-any-return]
    zeros = torch.zeros((*index.shape, num_classes), dtype=torch.int64, device=index.device)
    return zeros.scatter_(-1, index.unsqueeze(-1), 1)


def _softmax(
    name: str, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Convert 16 to 32 bits inside the kernel; the CPU makes a copy first."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return getattr(_aten, f"_{name}")(tensor, dim, True)  # type: ignore[no-any-return]
    return _composite(getattr(_aten, name).int, tensor, dim, dtype)  # type: ignore[no-any-return]


def _composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the operator's own C++ implementation, bypassing the kernels registered here."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


# --- attention ---


def _attend(
    capability: tuple[int, int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Run the attention kernel that the card would choose; heads are in dimension -3."""
    # The elements of each head must lie one after the other.
    if {tensor.stride(-1) for tensor in (query, key, value)} != {1}:
        if enable_gqa:
            key, value = _repeat_heads(query, key), _repeat_heads(query, value)
        return _attend_step_by_step(query, key, value, attn_mask, dropout_p, is_causal, scale)[0]
    needs_backward = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (query, key, value)
    )
    is_plain = attn_mask is None and dropout_p == 0
    if is_plain and _uses_cudnn(capability, query, key, value):
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, needs_backward, dropout_p, is_causal, False, scale=scale
        )[0]
    if _uses_flash(capability, query, key, attn_mask):
        if (
            query.shape[0] > _MAX_GRID
        ):  # pytorch/pytorch#146704; efficient attention divides the batch
            raise RuntimeError(
                f"CUDA error: invalid configuration argument (attention over {query.shape[0]} samples)"
            )
        head = query.shape[-1]
        query, key, value = _pad(query, 8), _pad(key, 8), _pad(value, 8)
        if scale is None:
            scale = head**-0.5
        out = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return out[..., :head]
    if enable_gqa:
        key, value = _repeat_heads(query, key), _repeat_heads(query, value)
    if _uses_efficient(capability, query, key, value):
        bias = _bias(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_backward, dropout_p, is_causal, scale=scale
        )[0]
    return _attend_step_by_step(query, key, value, attn_mask, dropout_p, is_causal, scale)[0]


def _attend_step_by_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> Any:  # fmt: skip
    """_scaled_dot_product_attention_math; for fakes, torch does not add the mask in place."""
    if mask is not None and mask.dtype is torch.bool:
        mask = _additive(mask, query)
    dtype = query.dtype
    if dtype in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():  # type: ignore[no-untyped-call]
        query, key, value = query.float(), key.float(), value.float()
    factor = (query.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
    scaled = query * factor
    if is_causal:
        allowed = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).tril()
        mask = _additive(allowed, query)
        del allowed
    weights = scaled @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        weights = _added(weights, mask)
    weights = _aten._safe_softmax.default(weights, -1)
    if dropout_p > 0:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    returned = weights.to(dtype)
    return (weights @ value).to(dtype), returned


def _uses_cudnn(
    capability: tuple[int, int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    if not torch_versions.prefers_cudnn_attention(capability):
        return False
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    if query.dim() != 4 or query.dtype not in _HALF or query.shape[-2] <= 1:
        return False
    width = query.shape[-1]
    if {key.shape[-1], value.shape[-1]} != {width}:
        return False
    return width <= _CUDNN_MAX_HEAD and width % 8 == 0


def _uses_flash(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
) -> bool:
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    if capability < torch_versions.FLASH_CAPABILITY or attn_mask is not None:
        return False
    if query.dim() != 4 or query.dtype not in _HALF:
        return False
    return query.shape[-1] == key.shape[-1] and query.shape[-1] <= _FLASH_MAX_HEAD


def _uses_efficient(
    capability: tuple[int, int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    if not torch.backends.cuda.mem_efficient_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    multiple = _EFFICIENT_MULTIPLES.get(query.dtype)
    if multiple is None or query.dim() != 4 or query.shape[1] != key.shape[1]:
        return False
    if query.dtype is torch.bfloat16 and capability < torch_versions.FLASH_CAPABILITY:
        return False
    return query.shape[-1] % multiple == 0 and value.shape[-1] % multiple == 0


def _repeat_heads(query: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    times = query.shape[-3] // tensor.shape[-3]
    return tensor.repeat_interleave(times, -3) if times > 1 else tensor


def _pad(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the mask in the kernel's form: additive, expanded, rows aligned to 8 elements."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = _additive(mask, query)
    length = mask.shape[-1]
    mask = _pad(mask, 8)
    return mask[..., :length].expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, query.new_zeros(()), query.new_full((), float("-inf")))


# --- results ---

_Conversion = Callable[[Any, Any], Any]  # of an operator's arguments and result
_AS_ON_CUDA: dict[Any, _Conversion] = {}


# The tensors of which CUDA's kernel wants one dtype, and fakes take several. Sources:
# native/LinearAlgebra.cpp (ADDMM_META), native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu,
# native/TensorAdvancedIndexing.cpp (index_func_meta_impl).
_OF_ONE_DTYPE = {
    _aten.addmm.default: slice(3),
    _aten._addmm_activation.default: slice(3),
    _aten.native_layer_norm.default: slice(0, 4, 2),
    _aten.native_group_norm.default: slice(2),
    _aten.index_add.default: slice(0, 4, 3),
}


def as_on_cuda(func: Any, args: Any, result: Any) -> Any:
    """Return an operator's result in the dtype and the memory format that CUDA's kernel returns.

    Raises:
        RuntimeError: CUDA's kernel takes no tensors of several dtypes.
    """
    tensors = args[_OF_ONE_DTYPE.get(func, slice(0))]
    dtypes = [*dict.fromkeys(tensor.dtype for tensor in tensors if tensor is not None)]
    if len(dtypes) > 1:
        names = " and ".join(map(str, dtypes))
        raise RuntimeError(f"{func} wants tensors of one dtype on CUDA, but got {names}")
    return _AS_ON_CUDA.get(func, lambda _, result: result)(args, result)


@entry(_AS_ON_CUDA, _aten.native_layer_norm.default)
def _statistics(args: Any, result: Any) -> Any:
    return result[0], *_cast(result[1:], _HALF, torch.float32)


@entry(_AS_ON_CUDA, _aten.native_batch_norm.default)
def _batch_norm_results(args: Any, result: Any) -> Any:
    """Keep statistics in float32; without cuDNN, they are kept in evaluation too."""
    given, is_training = args[0], args[5]
    if is_training or given.dtype is not torch.bfloat16:
        return _statistics(args, result)
    channels = given.shape[1]
    mean, deviation = (given.new_empty(channels, dtype=torch.float32) for _ in range(2))
    return result[0], mean, deviation


@entry(_AS_ON_CUDA, _aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
def _loss_of_classes(args: Any, result: Any) -> Any:
    if args[1].dtype not in (torch.long, torch.uint8):
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {args[1].dtype}")
    return result


@entry(_AS_ON_CUDA, _aten.convolution_backward.default)
def _convolution_gradients(args: Any, result: Any) -> Any:
    *gradients, bias = result
    chosen = convolution_format(args[1:3])
    for at, gradient in enumerate(gradients):
        if gradient is not None:
            gradients[at] = gradient.contiguous(memory_format=chosen)
    return *gradients, bias


@entry(_AS_ON_CUDA, _aten._scaled_dot_product_efficient_attention.default)
def _efficient_attention(args: Any, result: Any) -> Any:
    """Leave the seed of its dropout in host memory, which newer versions of torch do if nothing is dropped."""
    dropout_p = args[5] if len(args) > 5 else 0.0
    if dropout_p == 0 and torch_versions.EFFICIENT_ATTENTION_KEEPS_SEEDS:
        return result
    return *result[:2], *(seed.new_empty(0) for seed in result[2:])


@entry(_AS_ON_CUDA, _aten.native_batch_norm_backward.default)
def _first_like_input(args: Any, result: Any) -> Any:
    """Lay out the input's gradient as the input, not as the gradient of the result."""
    gradient, *others = result
    if gradient is None:
        return result
    return gradient.contiguous(memory_format=image_format(args[1])), *others


@entry(
    _AS_ON_CUDA, _aten.native_layer_norm_backward.default, _aten.native_group_norm_backward.default
)
def _contiguous_first(_: Any, result: Any) -> Any:
    gradient, *others = result
    return gradient if gradient is None else gradient.contiguous(), *others


_AS_ON_CUDA |= {
    **dict.fromkeys(
        (
            *(
                _aten.mse_loss_backward.default,
                _aten.smooth_l1_loss_backward.default,
                _aten.huber_loss_backward.default,
            ),
            *(_aten.pixel_shuffle.default, _aten.pixel_unshuffle.default),
            *(_aten.reflection_pad2d.default, _aten.replication_pad2d.default),
            *(_aten._log_softmax_backward_data.default, _aten._softmax_backward_data.default),
        ),
        lambda _, result: result.contiguous(),
    ),
    _aten.log_sigmoid_forward.default: lambda _, result: (result[0], result[1].new_empty(0)),
    _aten._weight_norm_interface.default: lambda _, result: (
        result[0],
        *_cast(result[1:], (torch.float16,), torch.float32),
    ),
    # Copied again, if it has gaps or overlaps: a fake that is moved keeps them.
    _aten._to_copy.default: lambda _, result: (
        result if _aten.is_non_overlapping_and_dense.default(result) else result.clone()
    ),
    _aten.convolution.default: lambda args, result: result.contiguous(
        memory_format=convolution_format(args[:2])
    ),
    # Without the log-sum-exp of each row, unless it is asked for.
    _aten._scaled_dot_product_cudnn_attention.default: lambda args, result: (
        result if args[4] else (result[0], result[1].new_empty(0), *result[2:])
    ),
}
if not torch_versions.GROUP_NORM_KEEPS_FORMAT:
    _AS_ON_CUDA[_aten.native_group_norm.default] = lambda _, result: (
        result[0].contiguous(),
        *result[1:],
    )
if hasattr(_aten, "_fused_rms_norm_backward"):
    of_layer_norm = _AS_ON_CUDA[_aten.native_layer_norm_backward.default]
    _AS_ON_CUDA[_aten._fused_rms_norm_backward.default] = of_layer_norm


def convolution_format(tensors: Sequence[torch.Tensor]) -> torch.memory_format:
    """Return the memory format of a convolution with this input and weight.

    Source: aten/src/ATen/native/Convolution.cpp (determine_backend_memory_format), cudnn/ConvShared.cpp.
    """
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensors[0].dim())
    if channels_last is not None:
        for tensor in tensors:
            if has_only_format(tensor, channels_last):
                return channels_last
    return torch.contiguous_format


def image_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format of images: channels last if they have no other, else contiguous."""
    if tensor.dim() == 4 and has_only_format(tensor, torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def has_only_format(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    """Whether a tensor has this memory format and is not contiguous."""
    return tensor.is_contiguous(memory_format=memory_format) and not tensor.is_contiguous()


# --- autocast ---

_IN_FLOAT32 = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist",
    "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
]  # fmt: skip
_FLOAT32_RESULT = [
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
]  # fmt: skip
_PROMOTED = [
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
]  # fmt: skip
_IN_LOW_PRECISION = [
    "addmv",
    "addr",
    "mv",
    "convolution",
    "einsum",
]  # in addition to the CPU's own list
_CASTS: dict[str, Callable[..., Any]] = {}  # by operator
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@cache
def _autocast_kernels() -> dict[str, Any]:
    """Return a kernel for each operator that does what CUDA's autocast does."""
    kernels: dict[str, Any] = dict.fromkeys(_cpu_extras(), torch.library.fallthrough_kernel)
    for name, kernel in _CASTS.items():
        if _has_kernel(name, "AutocastCUDA"):  # rms_norm has none before torch 2.12
            base, _, overload = name.partition(".")
            kernels[name] = partial(kernel, getattr(getattr(_aten, base), overload or "default"))
    return kernels


def _cpu_extras() -> tuple[str, ...]:
    """Return operators that the CPU's autocast handles and CUDA's does not."""
    extras = []
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten":
            continue
        if _has_kernel(name, "AutocastCPU") and not _has_kernel(name, "AutocastCUDA"):
            extras.append(name)
    return tuple(extras)


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _without_autocast(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*args, **kwargs)


@entry(_CASTS, *_IN_FLOAT32)
def _in_float32(op: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs = {name: _cast(value, _HALF, torch.float32) for name, value in kwargs.items()}
    return _without_autocast(op, *_cast(args, _HALF, torch.float32), **kwargs)


@entry(_CASTS, *_IN_LOW_PRECISION)
def _in_low_precision(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _without_autocast(
        op, *_cast(args, (torch.float32,), torch.get_autocast_dtype("cpu")), **kwargs
    )


@entry(_CASTS, *_FLOAT32_RESULT)
def _with_float32_result(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Widen the input inside the kernel, without a copy."""
    index = [argument.name for argument in op._schema.arguments].index("dtype")
    (requested,) = args[index : index + 1] or (kwargs.get("dtype"),)
    if requested is None and args[0].dtype in _HALF:
        args, kwargs = args[:index], {**kwargs, "dtype": torch.float32}
    return _without_autocast(op, *args, **kwargs)


@entry(_CASTS, *_PROMOTED)
def _promoted(op: Any, *args: Any, **kwargs: Any) -> Any:
    for value in tree_leaves(args):
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
            return _in_float32(op, *args, **kwargs)
    return _without_autocast(op, *args, **kwargs)


def _cast(value: Any, dtypes: tuple[torch.dtype, ...], to: torch.dtype) -> Any:
    """Cast the tensors of certain dtypes in a nested value; of arguments the last first, as compilers evaluate them."""
    if type(value) is tuple:
        return tuple([_cast(item, dtypes, to) for item in reversed(value)][::-1])
    if type(value) is list:
        return [_cast(item, dtypes, to) for item in value]
    if isinstance(value, torch.Tensor) and value.dtype in dtypes:
        return value.to(to)
    return value
