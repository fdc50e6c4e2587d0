"""Which kernel CUDA chooses for attention, and a call of it.

Rules, simplified, from aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13: flash wants half precision,
compute capability 8.0, a head dimension of at most 256 and no mask; memory-efficient takes what is left, with heads in
multiples of 8 (16 bit) or 4 (32 bit); everything else is computed in the open.
"""

from __future__ import annotations

import torch

_aten = torch.ops.aten
FLASH_CAPABILITY = (8, 0)
FLASH_MAX_HEAD = 256


def attend(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run attention as the card would choose to.

    Args:
        capability: Compute capability of the card.
        query: Of shape ``(batch, heads, length, head_dim)``.
        key: As query, possibly with fewer heads where `enable_gqa`.
        value: As key.
        attn_mask: Boolean (True takes part) or additive, broadcastable to ``(batch, heads, length, length)``.
        dropout_p: Probability of dropout.
        is_causal: Mask the future.
        scale: Of the scores; None: one over the root of the head dimension.
        enable_gqa: Repeat heads of key and value.
    """
    if _flash(capability, query, key, attn_mask):
        if enable_gqa:
            key, value = _repeated(query, key), _repeated(query, value)
        head = query.shape[-1]
        query, key, value = (_padded(t, 8) for t in (query, key, value))
        scale = head**-0.5 if scale is None else scale
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :head]  # type: ignore[no-any-return]
    if enable_gqa:
        key, value = _repeated(query, key), _repeated(query, value)
    if _efficient(capability, query, key, value):
        bias = _bias(attn_mask, query, key)
        keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
        )
        return out[0]  # type: ignore[no-any-return]
    return _aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale
    )[0]


def _flash(capability: tuple[int, int], query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and capability >= FLASH_CAPABILITY
        and attn_mask is None
        and query.dim() == 4
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] <= FLASH_MAX_HEAD
    )


def _efficient(capability: tuple[int, int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    multiple = 8 if query.dtype in (torch.float16, torch.bfloat16) else 4
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and query.dim() == 4
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and (query.dtype is not torch.bfloat16 or capability >= FLASH_CAPABILITY)
        and query.shape[1] == key.shape[1]
        and query.shape[-1] % multiple == 0
        and value.shape[-1] % multiple == 0
    )


def _repeated(query: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    times = query.shape[-3] // tensor.shape[-3]
    return tensor.repeat_interleave(times, -3) if times > 1 else tensor


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """A mask as the kernel wants it: additive, expanded, its rows aligned to 16 elements."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    mask = _aligned(mask, 16)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _aligned(mask: torch.Tensor, multiple: int) -> torch.Tensor:
    length = mask.shape[-1]
    missing = -length % multiple
    return torch.nn.functional.pad(mask, (0, missing))[..., :length] if missing else mask
