"""Masks of documents that share a row: the arguments that keep them apart in attention, and attention over blocks.

`trials.find_crossing` tries that the model applies them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from portable_fsdp.attach import draws_attention
from portable_fsdp.models.attention import FLEX, STATIC, document_bias
from portable_fsdp.models.loss import DocumentArguments
from portable_fsdp.runtime.errors import ConfigError


def document_arguments(
    attention: str,
    dtype: torch.dtype,
    *,
    eager: bool,
    packs: bool,
    splits_rows: bool = False,
    windows: Iterable[int | None] = (),
) -> DocumentArguments | None:
    """Return a function that makes the arguments by which a forward keeps a row's documents apart; None: none needed.

    Args:
        attention: its name in transformers.
        dtype: compute dtype of attention.
        eager: use one additive bias for all layers. Else the numbers of the documents: a compiler fuses the mask
            computed from them into each layer's attention, and layers pass no `[seq, seq]` tensor on.
        packs: rows hold several documents. Else only attention over blocks needs an argument: its causal masks.
        splits_rows: devices split the tokens of a row (`sharding.context`), so a forward needs their positions.
        windows: those of the layers, for attention over blocks.
    """

    def blocks(input_ids: Tensor, positions: Tensor | None, segments: Tensor | None) -> dict[str, Any]:
        apart = segments if packs else None
        arguments: dict[str, Any] = {} if apart is None else {"position_ids": positions}
        return {"block_masks": make_masks(windows, input_ids.shape[-1], input_ids.device, apart), **arguments}

    def mask(_: Tensor, positions: Tensor | None, segments: Tensor | None) -> dict[str, Any]:
        places = {} if positions is None else {"position_ids": positions}
        if segments is None or not packs:
            return places
        is_bias = attention != STATIC or (eager and not splits_rows)
        return {"attention_mask": document_bias(segments, dtype) if is_bias else segments[:, None, None], **places}

    if attention == FLEX:
        return blocks
    return mask if packs or splits_rows else None


# ----------------------------------------------------------------------------------------------- attention over blocks

# torch's flex_attention skips the blocks of scores that no position sees. A `BlockMask` lists the blocks of 128 by 128
# scores to compute, and has a function of two positions for partly visible blocks. A forward makes its masks before the
# first layer, one for each window, and passes them to the layers as `block_masks`. The kernel applies softcap; sinks
# are applied after it, so nothing stores the scores. transformers' own `flex_attention` reads on the host in every
# forward whether a row has several documents, and computes sinks in the compute dtype.

LEAST_WIDTH = 16  # minimum head size of inductor's kernel

Masks = dict[int | None, BlockMask]
"""Window (number of tokens that a position sees, itself included; None: all before it) -> its mask."""


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
    """Attend causally. Takes the arguments of transformers' `AttentionInterface`, as `static_attention` does.

    Args:
        attention_mask: None; `block_masks` replaces it.
        block_masks: one for each window of the layers; None: a row is one document, and this layer makes its mask.

    Returns: `[batch, seq, heads, head_dim]`, and None for the weights; on meta only a shape. Raises ValueError for
    options that aren't supported, and KeyError for a window without a mask.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    if attention_mask is not None or (dropout and draws_attention(module)) or not causal:
        raise ValueError("model.attention=flex: needs causal attention, without dropout or a mask of the model")
    if (width := min(query.shape[-1], value.shape[-1])) < LEAST_WIDTH:
        raise ValueError(f"model.attention=flex: expected a head size of at least {LEAST_WIDTH}, found {width}")
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
        score_mod=None if softcap is None else lambda score, *_: softcap * torch.tanh(score / softcap),
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
    """Make the masks of rows of `length` positions, without a read on the host.

    `segments`: int64 `[batch, length]`, the document of each position; None: each row is one document.
    """
    rows = None if segments is None else segments.shape[0]
    make = _for_device(create_block_mask, device)
    return {window: make(_seen(window, segments), rows, None, length, length, device) for window in windows}


def windows_of(model: nn.Module, length: int) -> tuple[int | None, ...]:
    """Return the windows that a forward of this model on meta looks up, in rows of `length`.

    Configs name windows in several ways, so this runs the layers. Raises ConfigError for a model that passes no masks
    to its layers.
    """
    looked_up: dict[int | None, None] = defaultdict(lambda: None)
    with torch.no_grad(), torch.device("meta"):
        model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False, block_masks=looked_up)
    if not looked_up:
        raise ConfigError(
            f"model.attention=flex: {type(model).__name__} doesn't pass forward's arguments to its layers.\n"
            "  Set model.attention=auto."
        )
    return tuple(looked_up)


def _for_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile a function, as torch requires; not on the CPU (for trials) and not inside a compiled layer."""
    return function if device.type == "cpu" or torch.compiler.is_compiling() else _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with `fullgraph`: a graph break raises, instead of running with all scores in memory."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def _seen(window: int | None, segments: Tensor | None) -> Callable[..., Tensor]:
    def seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        keep = key <= query
        if window is not None:
            keep = keep & (key > query - window)
        return keep if segments is None else keep & (segments[row, query] == segments[row, key])

    return seen


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add a column e^sink to the softmax: all weights shrink by e^lse / (e^lse + e^sink).

    `out`: `[batch, heads, seq, head_dim]`; `lse`: log of the sum of e^score, float32 `[batch, heads, seq]`; `sinks`:
    `[heads]`.
    """
    return (out * torch.sigmoid(lse - sinks.float()[:, None])[..., None]).to(out.dtype)
