"""Attention over blocks: torch's flex_attention, which skips the blocks of scores that no position sees.

A position sees those up to itself, of its own document, within a window. A `BlockMask` says which blocks of 128 by 128
scores to compute, and has a function of two positions for blocks seen in part. A forward makes its masks before the
first layer, one for each window, and passes them to the layers as `block_masks`. The kernel applies softcap; sinks come
after it, so nothing holds the scores.

transformers' own `flex_attention` asks the host in every forward whether a row has several documents, and computes
sinks in the compute dtype.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

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
    """Attend causally. Takes what transformers' `AttentionInterface` passes, as `attention.static_attention` does.

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
