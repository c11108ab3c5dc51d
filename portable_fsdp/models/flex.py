"""Attention over blocks: torch's flex_attention, which leaves out the blocks of scores that nothing needs.

What a position sees (those up to itself, of its own document, within a window) is a `BlockMask`: which blocks of 128 by
128 scores there are to compute, and a function of two positions for those that are seen in part. The masks of a forward
are made before its first layer, one for each window, and reach the layers as the argument `block_masks`. Softcap is
taken inside the kernel and sinks behind it, so nothing holds the scores.

transformers' own `flex_attention` tells documents apart by their positions, but asks the host in every forward whether
a row has several, and takes what sinks need in the compute dtype.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

FLEX = "portable_fsdp_flex"
LEAST_WIDTH = 16  # of a head, in inductor's kernel

Masks = dict[int | None, BlockMask]
"""By window: tokens that a position sees, itself included; None: all before it."""


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
        attention_mask: None; what a position sees is in `block_masks`.
        block_masks: one for each window that the layers have; None: a row is one document, and this layer makes its
            mask itself.

    Returns: `[batch, seq, heads, head_dim]`, and None for the weights; on meta only a shape. Raises ValueError for what
    it would leave out, and KeyError for a window without a mask.
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
    found = _for_device(flex_attention, value.device)(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if s_aux is None else AuxRequest(lse=True),
    )
    out = found if s_aux is None else _with_sinks(found[0], found[1].lse, s_aux)
    return out.transpose(1, 2).contiguous(), None


def make_masks(
    windows: Iterable[int | None], length: int, device: torch.device, segments: Tensor | None = None
) -> Masks:
    """The masks of rows of `length` positions; nothing is read on the host.

    `segments`: int64 `[batch, length]`, the document of each position; None: each row is one.
    """
    rows = None if segments is None else segments.shape[0]
    make = _for_device(create_block_mask, device)
    return {window: make(_seen(window, segments), rows, None, length, length, device) for window in windows}


def windows_of(model: nn.Module, length: int) -> tuple[int | None, ...]:
    """Those that the layers of a model on meta ask for in rows of `length` positions; none where it passes no masks on.

    A forward of the model is run to see it: configs say it in several ways.
    """
    asked: dict[int | None, None] = defaultdict(lambda: None)
    with torch.no_grad(), torch.device("meta"):
        model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False, block_masks=asked)
    return tuple(asked)


def _for_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compiled, as torch asks; as it is on the CPU (a model is tried there) and in a layer that is compiled itself."""
    return function if device.type == "cpu" or torch.compiler.is_compiling() else _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`fullgraph`: where torch gives up it says so, and doesn't go on with all scores in memory."""
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
    """The softmax with one column more, e^sink: all weights shrink by e^lse / (e^lse + e^sink).

    `out`: `[batch, heads, seq, head_dim]`; `lse`: log of the sum of e^score, float32 `[batch, heads, seq]`; `sinks`:
    `[heads]`.
    """
    return (out * torch.sigmoid(lse - sinks.float()[:, None])[..., None]).to(out.dtype)


def register() -> str:
    """Make transformers know `block_attention`; returns the name to ask for."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLEX, block_attention)
    return FLEX
