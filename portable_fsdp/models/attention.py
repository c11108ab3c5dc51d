"""Attention for all engines, with static arguments and shapes only. Attention over blocks is in `document_masks.py`.

transformers' own paths build a mask by reading a tensor on the host, which costs XLA a second program and a wait in
every step. This attention needs no mask: causality, sliding window, softcap and sinks are known when it is traced, and
numbers distinguish the documents that share a row.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from portable_fsdp.attach import draws_attention, row_parts_of
from portable_fsdp.layout import RowParts

STATIC = "portable_fsdp_static"
FLEX = "portable_fsdp_flex"  # attention over blocks, `document_masks.block_attention`
MASKED = "portable_fsdp_masked"  # transformers' own SDPA under masks that are made without a read on the host

STATIC_TYPES = frozenset(
    {"deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama", "mistral", "mixtral"}
    | {"olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"}
)
"""Types of models whose own attention is equal to the static one: they need no trial. A test runs it for each."""

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
    """Attend causally. Takes the arguments of transformers' `AttentionInterface`.

    Args:
        module: the attention layer; its `is_causal` applies if the argument is None.
        query: `[batch, heads, seq, head_dim]`; key and value `[batch, kv_heads, seq, head_dim]`, kv_heads | heads.
        attention_mask: None; `[batch, 1, seq, seq]` bool (True = attend) for the positions up to each; an additive
            bias that includes causality; or `[batch, 1, 1, seq]` integers: the document of each position, which sees
            only that document. A window narrows all of them.
        sliding_window: number of tokens that a position sees, itself included; None: all before it.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv 2408.00118).
        s_aux: `[heads]` sink logits: an extra column of the softmax that holds no value (gpt-oss).

    Where an engine splits rows (`layout.RowParts`), `seq` is that of this device, and documents are of whole rows.

    Returns: `[batch, seq, heads, head_dim]`, and None for the weights.
    """
    if position_bias is not None:
        raise NotImplementedError(f"static attention doesn't support the position bias of {type(module).__name__}")
    query, key = query.to(value.dtype), key.to(value.dtype)
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    parts = row_parts_of(module)
    length = query.shape[-2] * (1 if parts is None else parts.count)
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    documents = attention_mask if attention_mask is not None and _is_documents(attention_mask) else None
    mask = attention_mask if documents is None else None
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "sinks": s_aux}
    options |= {"scale": scaling, "dropout": dropout if draws_attention(module) else 0.0}
    if parts is None:
        out = attend(query, key, value, mask, documents, **options)
    else:
        out = attend_by_pieces(parts, query, key, value, mask, documents, **options)
    return out.transpose(1, 2).contiguous(), None


def attend(query: Tensor, key: Tensor, value: Tensor, *masks: Tensor | None, **options: Any) -> Tensor:
    """Run `formula`, or an engine's kernel instead: the engine intercepts the call in a `TorchFunctionMode`."""
    if has_torch_function((query,)):
        return handle_torch_function(attend, (query,), query, key, value, *masks, **options)
    return formula(query, key, value, *masks, **options)


def attend_by_pieces(
    parts: RowParts,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    **options: Any,
) -> Tensor:
    """Run `formula` for each piece of a row that this device has, with the keys of all devices that the piece sees.

    Raises NotImplementedError for attention that isn't causal, and for masks other than documents.
    """
    if mask is not None or not causal:
        raise NotImplementedError("its attention " + ("isn't causal" if mask is None else "adds its own mask"))
    row = parts.gather(torch.cat([key, value], dim=-1).movedim(2, 0)).movedim(0, 2)  # before grouped heads are repeated
    key, value = row.split([key.shape[-1], value.shape[-1]], dim=-1)
    out: list[Tensor] = []
    for number, (piece, own) in enumerate(zip(parts.pieces, query.chunk(2, dim=2), strict=True)):
        stop = (piece + 1) * own.shape[2]
        start = 0 if window is None else max(0, stop - own.shape[2] - window + 1)
        narrow = window if window is not None and window < stop - start else None
        near = None if documents is None else documents[..., start:stop]
        seen = key[:, :, start:stop], value[:, :, start:stop]
        at = number, piece * own.shape[2], start
        out.append(formula(own, *seen, None, near, causal=True, window=narrow, piece=at, **options))
    return torch.cat(out, dim=2)


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
    piece: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    """Attend with torch's functions; returns `[batch, heads, seq, head_dim]`.

    Arguments as of `static_attention`, with the numbers of documents separate from other masks. Under causality there
    may be fewer queries than keys: those of the last positions. `piece`: its number, and the positions of its first
    query and key.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    mask = mask if documents is None else documents
    is_explicit, keep = softcap is not None or sinks is not None or dropout > 0, None
    is_last = causal and queries < keys and mask is None and window is None and not is_explicit
    if is_last and can_run_flash(query, value):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, 0.0, is_causal=True, scale=scale)[0]  # stores no mask
    if is_explicit or mask is not None or window is not None or is_last:
        # Kernels with a mask support no grouped heads: torch would choose its formula, with all scores in memory.
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        bias = _bias(queries, keys, causal, window, mask, query.device)
        if is_explicit:  # SDPA can't express these, or draws by itself: float32 scores in memory
            scores = (query @ key.transpose(-1, -2)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
            scores = (scores if softcap is None else torch.tanh(scores / softcap) * softcap) + bias
            if sinks is not None:
                column = sinks.float().reshape(1, -1, 1, 1).expand(scores.shape[0], -1, queries, 1)
                scores = torch.cat([scores, column], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., :keys].to(value.dtype)
            if dropout:
                from portable_fsdp.models.dropout import drop  # other runs don't load it

                weights = drop(weights, dropout, (0, *piece[1:]), is_new=piece[0] == 0)
            return weights @ value
        keep = bias.to(query.dtype)
    if window is None and (is_last or documents is not None):  # one byte per value
        keep = _keep(queries, keys, causal, None, query.device)
        keep = keep if documents is None else keep & _same_document(documents, queries)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=keep,
        is_causal=causal and keep is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def can_run_flash(query: Tensor, value: Tensor) -> bool:
    """Whether flash attention of a GPU takes these. Its causality aligns the last query with the last key; the argument
    `is_causal` of torch's function aligns the first ones."""
    width = query.shape[-1]
    is_kind = query.dtype in (torch.float16, torch.bfloat16) and width == value.shape[-1] <= 256 and width % 8 == 0
    return is_kind and has_flash(query.device)


def has_flash(device: torch.device) -> bool:
    """Whether the device has torch's flash attention."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def register_static_attention() -> str:
    """Register `static_attention` in transformers; return its name, for `attn_implementation` of a model's config.

    A factory that builds a causal transformers model needs it on XLA: transformers' own read a mask on the host.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(STATIC, static_attention)
    return STATIC


def register_masked_attention() -> str:
    """Register an attention for encoders in transformers; return its name.

    Its masks are transformers' own, with windows both ways, as biases. transformers' SDPA leaves a mask out if a read
    on the host shows that nothing is padded.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        kwargs["allow_is_bidirectional_skip"] = attention_mask is None  # known without a host read
        return eager_mask(*args, attention_mask=attention_mask, **kwargs)

    AttentionInterface.register(MASKED, sdpa_attention_forward)
    AttentionMaskInterface.register(MASKED, mask)
    return MASKED


def document_bias(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive bias `[batch, 1, seq, seq]`: each position sees its own document, up to itself.

    `segments`: `[batch, seq]`, the document of each position; padding has a number of its own.
    """
    documents = segments[:, None, None]
    length = segments.shape[-1]
    return _bias(length, length, True, None, documents, segments.device).to(dtype)


def _is_documents(mask: Tensor) -> bool:
    return not mask.is_floating_point() and mask.dtype != torch.bool


def _same_document(documents: Tensor, queries: int) -> Tensor:
    """`[batch, 1, queries, keys]` bool from `[batch, 1, 1, keys]`, for the last queries."""
    return documents[..., -queries:].transpose(-1, -2) == documents


def _keep(queries: int, keys: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """`[queries, keys]` bool: the positions that the last ones see, by distance alone; a constant to a compiler."""
    row = torch.arange(keys - queries, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None]
    keep = column <= row if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    return keep if window is None else keep & (column > row - window)


def _bias(
    queries: int, keys: int, causal: bool, window: int | None, mask: Tensor | None, device: torch.device
) -> Tensor:
    """Additive bias: float32 `[queries, keys]`, or with a caller's mask `[batch, 1, queries, keys]`."""
    if mask is not None and mask.is_floating_point():
        return mask if window is None else mask.masked_fill(~_keep(queries, keys, causal, window, device), _MASKED)
    keep = _keep(queries, keys, causal, window, device)
    if mask is not None:
        keep = keep & (_same_document(mask, queries) if _is_documents(mask) else mask)
    return torch.zeros(keep.shape, device=device).masked_fill(~keep, _MASKED)
