"""Operators whose requests were compared with those to torch's own allocator, and what is said of the others.

tests/operators.py is the table of what was compared.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

COMPARED = frozenset((
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward",
    "_cdist_backward", "_cdist_forward", "_chunk_cat", "_embedding_bag", "_embedding_bag_backward", "_euclidean_dist",
    "_local_scalar_dense", "_log_softmax", "_log_softmax_backward_data", "_prelu_kernel", "_prelu_kernel_backward",
    "_safe_softmax", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward", "_softmax",
    "_softmax_backward_data", "_to_copy", "_unsafe_view", "_upsample_bilinear2d_aa",
    "_upsample_bilinear2d_aa_backward", "_weight_norm_interface", "_weight_norm_interface_backward", "acos",
    "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "add", "addmm", "all", "amax", "aminmax", "any", "arange",
    "argmax", "asin", "atan", "avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward", "baddbmm",
    "bernoulli", "binary_cross_entropy", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits",
    "bitwise_and", "bmm", "bucketize", "cat", "celu", "clone", "col2im", "constant_pad_nd", "convolution",
    "convolution_backward", "copy", "cos", "cosh", "count_nonzero", "cummax", "cumprod", "cumsum", "diag_embed",
    "diagonal_backward", "div", "dot", "elu", "elu_backward", "embedding", "embedding_dense_backward", "empty",
    "empty_like", "eq", "erf", "exp", "expm1", "exponential", "eye", "fill", "flip", "floor", "floor_divide", "fmod",
    "full", "full_like", "gather", "ge", "gelu", "gelu_backward", "glu", "glu_backward", "grid_sampler_2d",
    "grid_sampler_2d_backward", "gt", "hardshrink", "hardshrink_backward", "hardsigmoid", "hardsigmoid_backward",
    "hardswish", "hardswish_backward", "hardtanh", "hardtanh_backward", "huber_loss", "huber_loss_backward", "im2col",
    "index", "index_add", "index_copy", "index_fill", "index_put", "index_select", "isnan", "kthvalue", "le",
    "leaky_relu", "leaky_relu_backward", "linalg_cross", "linalg_vector_norm", "linspace", "log", "log10", "log1p",
    "log_sigmoid_backward", "log_sigmoid_forward", "logsumexp", "lt", "masked_fill", "masked_scatter", "masked_scatter_backward", "masked_select", "max", "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "mean",
    "median", "min", "mish", "mish_backward", "mm", "mse_loss", "mse_loss_backward", "mul", "multinomial", "mv",
    "nanmedian", "nansum", "native_batch_norm", "native_batch_norm_backward", "native_dropout",
    "native_dropout_backward", "native_group_norm", "native_group_norm_backward", "native_layer_norm",
    "native_layer_norm_backward", "ne", "neg", "new_empty", "new_empty_strided", "new_full", "new_zeros",
    "nll_loss2d_backward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward", "nonzero", "norm", "normal", "ones",
    "ones_like", "pixel_shuffle", "pixel_unshuffle", "polar", "pow", "prod", "put", "rand", "randint", "randn",
    "randn_like", "randperm", "reflection_pad1d", "reflection_pad1d_backward", "reflection_pad2d",
    "reflection_pad2d_backward", "relu", "remainder", "repeat", "replication_pad2d", "replication_pad2d_backward",
    "resize", "roll", "rot90", "round", "rsub", "scalar_tensor", "scatter", "scatter_add", "scatter_reduce",
    "searchsorted", "select_backward", "sin", "sinh", "slice", "slice_backward", "smooth_l1_loss",
    "smooth_l1_loss_backward", "softplus", "softplus_backward", "softshrink", "softshrink_backward", "sort", "split", "split_with_sizes_copy",
    "sqrt", "stack", "std", "sub", "sum", "take", "tan", "tanh", "threshold_backward", "topk", "tril", "triu",
    "unfold_backward", "uniform", "upsample_bicubic2d", "upsample_bicubic2d_backward", "upsample_bilinear2d",
    "upsample_bilinear2d_backward", "upsample_linear1d", "upsample_linear1d_backward", "upsample_nearest1d",
    "upsample_nearest1d_backward", "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_nearest3d",
    "upsample_nearest3d_backward", "upsample_trilinear3d", "upsample_trilinear3d_backward", "var", "var_mean",
    "where", "zeros", "zeros_like",
))  # fmt: skip
NOT_COMPARED = (
    "not compared with torch's allocator: {names}. If they take scratch memory as large as their tensors, the peak is up to "
    "{percent} % higher"
)
_PERCENTS = (1, 2, 5, 10, 20, 50, 100)


class Uncompared:
    """Operators of a trial whose requests nobody has compared with torch's allocator, and the memory in use when they ran."""

    def __init__(self) -> None:
        self._most_bytes: dict[str, int] = {}

    def start_trial(self) -> None:
        self._most_bytes.clear()

    def ran(self, func: Any, in_use_bytes: int, values: Any) -> None:
        """Take note of an operator with these arguments and results, unless it is known what it asks for."""
        if is_compared(func):
            return
        own_bytes = 0
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                own_bytes += value.numel() * value.element_size()
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        self._most_bytes[name] = max(self._most_bytes.get(name, 0), in_use_bytes + own_bytes)

    def note(self, peak_bytes: int) -> str:
        """Return a note on those that ran near the peak, with the share of it that lies at risk; empty if there are none."""
        names = sorted(name for name, nbytes in self._most_bytes.items() if nbytes > peak_bytes)
        if not names:
            return ""
        above = max(self._most_bytes[name] for name in names) / peak_bytes - 1
        percent = next((percent for percent in _PERCENTS if 100 * above <= percent), _PERCENTS[-1])
        return NOT_COMPARED.format(names=", ".join(names), percent=percent)


@cache
def is_compared(func: Any) -> bool:
    """Whether an operator's requests were compared with torch's, or cannot differ: elementwise ones and views take no scratch."""
    if not isinstance(func, torch._ops.OpOverload):
        return True
    if torch.Tag.pointwise in func.tags or func.is_view:
        return True
    if func.namespace in (
        "fsdp",
        "_c10d_functional",
    ):  # in steps of ranks (tests/cuda/test_ranks.py)
        return True
    if func.namespace != "aten":
        return False
    name = func.overloadpacket.__name__
    if name.startswith(("_foreach_", "_fused_")):
        return True
    return not COMPARED.isdisjoint((name, name.removesuffix("_")))
