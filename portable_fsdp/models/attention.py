"""One attention for all engines, made of static arguments only.

transformers' own paths build a mask by reading a tensor on the host, which costs XLA a second program and a wait
in every step. This function needs no mask: causality, sliding window, softcap and sinks are all known while the
step is traced. It is registered under `STATIC` and chosen by `models.build`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STATIC = "portable_fsdp_static"

_MASKED = -1e30  # finite, so that a fully masked row gives no NaN; far below any score


def static_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally. Takes what transformers' `AttentionInterface` passes.

    Args:
        module: the attention layer; its `is_causal` counts where the argument is None.
        query: `[batch, heads, seq, head_dim]`; key and value `[batch, kv_heads, seq, head_dim]`, kv_heads | heads.
        attention_mask: None, or `[batch, 1, seq, seq]`: bool (True = attend) or an additive bias.
        sliding_window: tokens that a position sees, itself included; None: all before it.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv 2408.00118).
        s_aux: `[heads]` sink logits: an extra column of the softmax that holds no value (gpt-oss).

    Returns: `[batch, seq, heads, head_dim]`, and None for the weights.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    length = query.shape[-2]
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if window is None and attention_mask is None and softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=_is_grouped(query, key)
        )
        return out.transpose(1, 2).contiguous(), None
    bias = _bias(length, causal, window, attention_mask, query.device)
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias.to(query.dtype),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=_is_grouped(query, key),
        )
        return out.transpose(1, 2).contiguous(), None
    return _explicit(query, key, value, bias, dropout, scaling, softcap, s_aux), None


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]


def _bias(length: int, causal: bool, window: int | None, mask: Tensor | None, device: torch.device) -> Tensor:
    """Additive float32 bias `[seq, seq]`, or with a caller's mask `[batch, 1, seq, seq]`; a constant to a compiler."""
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None]
    keep = column <= row if causal else torch.ones(length, length, dtype=torch.bool, device=device)
    if window is not None:
        keep = keep & (column > row - window)
    bias = torch.zeros(length, length, device=device).masked_fill(~keep, _MASKED)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias + torch.zeros_like(mask, dtype=bias.dtype).masked_fill(~mask, _MASKED)
    return bias + mask.float()


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention with its scores in memory, float32: what SDPA can't express."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(-1, -2)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + bias
    if s_aux is not None:
        sinks = s_aux.float().reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[-2]].to(value.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()


def register() -> str:
    """Make transformers know `static_attention`; returns the name to ask for."""
    from transformers import AttentionInterface

    AttentionInterface.register(STATIC, static_attention)
    return STATIC
