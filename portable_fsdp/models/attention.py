"""Attention for all engines, made of static arguments only: torch's SDPA, or its flex_attention over blocks.

transformers' own paths build a mask by reading a tensor on the host, which costs XLA a second program and a wait in
every step. This function needs no mask: tracing knows causality, sliding window, softcap and sinks, and numbers tell
apart the documents that share a row.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.overrides import handle_torch_function, has_torch_function

STATIC = "portable_fsdp_static"
FLEX = "portable_fsdp_flex"  # attention over blocks, `block_attention`
MASKED = "portable_fsdp_masked"  # transformers' own SDPA under masks that are made without a read on the host

_MASKED = -1e30  # far below any score, and finite: a fully masked row gives no NaN


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
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally. Takes what transformers' `AttentionInterface` passes.

    Args:
        module: the attention layer; its `is_causal` counts where the argument is None.
        query: `[batch, heads, seq, head_dim]`; key and value `[batch, kv_heads, seq, head_dim]`, kv_heads | heads.
        attention_mask: None; `[batch, 1, seq, seq]` bool (True = attend) for the positions up to each; an additive
            bias that includes causality; or `[batch, 1, 1, seq]` integers: the document of each position, outside of
            which it sees nothing. A window narrows all of them.
        sliding_window: tokens that a position sees, itself included; None: all before it.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv 2408.00118).
        s_aux: `[heads]` sink logits: an extra column of the softmax that holds no value (gpt-oss).

    Returns: `[batch, seq, heads, head_dim]`, and None for the weights.
    """
    if position_bias is not None:
        raise NotImplementedError(f"{type(module).__name__} adds a bias by position, which static attention has not")
    query, key = query.to(value.dtype), key.to(value.dtype)
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    window = sliding_window if sliding_window is not None and sliding_window < query.shape[-2] else None
    documents = attention_mask if attention_mask is not None and _is_documents(attention_mask) else None
    mask = attention_mask if documents is None else None
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "sinks": s_aux}
    out = attend(query, key, value, mask, documents, **options, scale=scaling, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


def attend(query: Tensor, key: Tensor, value: Tensor, *masks: Tensor | None, **options: Any) -> Tensor:
    """`formula`, in whose place an engine may run a kernel: it catches the call in a `TorchFunctionMode`."""
    if has_torch_function((query,)):
        return handle_torch_function(attend, (query,), query, key, value, *masks, **options)
    return formula(query, key, value, *masks, **options)


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Attention as torch has it: `[batch, heads, seq, head_dim]`.

    Arguments as of `static_attention`, with the numbers of documents apart from other masks.
    """
    length = query.shape[-2]
    mask = mask if documents is None else documents
    if softcap is not None or sinks is not None:
        bias = _bias(length, causal, window, mask, query.device)
        return _explicit(query, key, value, bias, dropout, scale, softcap, sinks)
    keep = None
    if mask is not None or window is not None:
        # Kernels that take a mask take no grouped heads: torch would choose its formula, with all scores in memory.
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        keep = _bias(length, causal, window, mask, query.device).to(query.dtype)
    if documents is not None and window is None:
        keep = _keep(length, causal, None, query.device) & _same_document(documents)  # a byte each
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=keep,
        dropout_p=dropout,
        is_causal=causal and keep is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def register_static_attention() -> str:
    """Make `static_attention` known to transformers; returns its name, for `attn_implementation` of a model's config.

    A factory that builds a causal model of transformers needs it on XLA: transformers' own read a mask on the host.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(STATIC, static_attention)
    return STATIC


def register_masked_attention() -> str:
    """Make an attention for encoders known to transformers; returns its name.

    Its masks are transformers' own too, with windows both ways, as biases. transformers' SDPA leaves a mask out where a
    read on the host shows that nothing is padded.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        kwargs["allow_is_bidirectional_skip"] = attention_mask is None  # known without a read
        return eager_mask(*args, attention_mask=attention_mask, **kwargs)

    AttentionInterface.register(MASKED, sdpa_attention_forward)
    AttentionMaskInterface.register(MASKED, mask)
    return MASKED


def document_bias(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive bias `[batch, 1, seq, seq]`: each position sees those of its own document, up to itself.

    `segments`: `[batch, seq]`, the document of each position, or a number of its own for padding.
    """
    documents = segments[:, None, None]
    return _bias(segments.shape[-1], True, None, documents, segments.device).to(dtype)


def _is_documents(mask: Tensor) -> bool:
    return not mask.is_floating_point() and mask.dtype != torch.bool


def _same_document(documents: Tensor) -> Tensor:
    """`[batch, 1, seq, seq]` bool from `[batch, 1, 1, seq]`."""
    return documents.transpose(-1, -2) == documents


def _keep(length: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """`[seq, seq]` bool: the positions that each sees by distance alone; a constant to a compiler."""
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None]
    keep = column <= row if causal else torch.ones(length, length, dtype=torch.bool, device=device)
    return keep if window is None else keep & (column > row - window)


def _bias(length: int, causal: bool, window: int | None, mask: Tensor | None, device: torch.device) -> Tensor:
    """Additive bias: float32 `[seq, seq]`, or with a caller's mask `[batch, 1, seq, seq]`."""
    if mask is not None and mask.is_floating_point():
        return mask if window is None else mask.masked_fill(~_keep(length, causal, window, device), _MASKED)
    keep = _keep(length, causal, window, device)
    if mask is not None:
        keep = keep & (_same_document(mask) if _is_documents(mask) else mask)
    return torch.zeros(keep.shape, device=device).masked_fill(~keep, _MASKED)


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
    """Attention with its scores in memory, float32, for options that SDPA can't express."""
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
    return F.dropout(weights, dropout) @ value


# ----------------------------------------------------------------------------------------------- attention over blocks


# torch's flex_attention skips the blocks of scores that no position sees. A `BlockMask` says which blocks of 128 by 128
# scores to compute, and has a function of two positions for blocks seen in part. A forward makes its masks before the
# first layer, one for each window, and passes them to the layers as `block_masks`. The kernel applies softcap; sinks
# come after it, so nothing holds the scores. transformers' own `flex_attention` asks the host in every forward whether
# a row has several documents, and computes sinks in the compute dtype.

LEAST_WIDTH = 16  # of a head, in inductor's kernel

Masks = dict[int | None, BlockMask]
"""By window, in tokens that a position sees, itself included; None: all before it."""


def block_attention(
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
    block_masks: Masks | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally. Takes what transformers' `AttentionInterface` passes, as `static_attention` does.

    Args:
        attention_mask: None; `block_masks` takes its place.
        block_masks: one for each window of the layers; None: a row is one document, and this layer makes its mask.

    Returns: `[batch, seq, heads, head_dim]`, and None for the weights; on meta only a shape. Raises ValueError for
    options that it can't apply, and KeyError for a window without a mask.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    if attention_mask is not None or dropout or not causal:
        raise ValueError("model.attention=flex: expected causal attention, no dropout and no mask of the model's own")
    if (width := min(query.shape[-1], value.shape[-1])) < LEAST_WIDTH:
        raise ValueError(f"model.attention=flex: expected heads of at least {LEAST_WIDTH} numbers, found {width}")
    length = query.shape[-2]
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    mask = None if block_masks is None else block_masks[window]
    if value.is_meta:
        return value.new_empty(query.shape[0], length, query.shape[1], value.shape[-1]), None
    if mask is None:
        mask = make_masks([window], length, value.device)[window]
    result = _for_device(flex_attention, value.device)(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if s_aux is None else AuxRequest(lse=True),
    )
    out = result if s_aux is None else _with_sinks(result[0], result[1].lse, s_aux)
    return out.transpose(1, 2).contiguous(), None


def make_masks(
    windows: Iterable[int | None], length: int, device: torch.device, segments: Tensor | None = None
) -> Masks:
    """The masks of rows of `length` positions, made without a read on the host.

    `segments`: int64 `[batch, length]`, the document of each position; None: each row is one document.
    """
    rows = None if segments is None else segments.shape[0]
    make = _for_device(create_block_mask, device)
    return {window: make(_seen(window, segments), rows, None, length, length, device) for window in windows}


def windows_of(model: nn.Module, length: int) -> tuple[int | None, ...]:
    """The windows that a forward of this model on meta looks up, in rows of `length`; () where it passes no masks on.

    Configs name windows in several ways, so the layers themselves are asked.
    """
    looked_up: dict[int | None, None] = defaultdict(lambda: None)
    with torch.no_grad(), torch.device("meta"):
        model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False, block_masks=looked_up)
    return tuple(looked_up)


def _for_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compiled, as torch requires; plain on the CPU (for trials) and inside a layer that is compiled itself."""
    return function if device.type == "cpu" or torch.compiler.is_compiling() else _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`fullgraph`: a graph break raises, instead of running with all scores in memory."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def _seen(window: int | None, segments: Tensor | None) -> Callable[..., Tensor]:
    def seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        keep = key <= query
        if window is not None:
            keep = keep & (key > query - window)
        return keep if segments is None else keep & (segments[row, query] == segments[row, key])

    return seen


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The softmax with one more column, e^sink: all weights shrink by e^lse / (e^lse + e^sink).

    `out`: `[batch, heads, seq, head_dim]`; `lse`: log of the sum of e^score, float32 `[batch, heads, seq]`; `sinks`:
    `[heads]`.
    """
    return (out * torch.sigmoid(lse - sinks.float()[:, None])[..., None]).to(out.dtype)
