"""Masks of documents that share a row: the arguments that keep them apart in attention, attention over blocks, and a
trial that the model applies them.

The trial runs a small copy of the model, so no list of architectures is needed. It detects a state that carries over
from one document to the next (Mamba), a model's own attention (Bloom), and positions that the model counts itself.
"""

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from portable_fsdp.attach import draws_attention
from portable_fsdp.models.attention import FLEX, STATIC, document_bias
from portable_fsdp.models.loss import DocumentArguments
from portable_fsdp.runtime.errors import ConfigError

_LENGTHS, _PADDING = (5, 8), 3  # tokens of the trial's documents, and after them
_WINDOW = 3  # tokens: shorter than the documents, so that it matters
_LAYERS, _WIDTH, _VOCABULARY = 4, 32, 64  # maxima of the small model
_BOUND = 1e-4  # relative to the largest logit: a hundred times float32's rounding
_SIZES_INSIDE = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim")


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


def require_documents_apart(model: Any, build: Callable[[Any], Any], *, eager: bool) -> None:
    """Raise ConfigError if a small copy of `model` lets documents of one row see each other.

    `build(config)` returns a model of that transformers config on the host, in float32.
    """

    def alone(copied: Any) -> Tensor:
        """The logits of each document in its own row, one after the other."""
        return torch.cat([copied(input_ids=ids, use_cache=False).logits for ids in _documents()], dim=1)

    if problem := try_small_copies(model, build, alone, partial(_difference, eager=eager)):
        raise ConfigError(
            f"data.packing=documents: {type(model).__name__} doesn't keep the documents of a row apart: {problem}.\n"
            "  Set data.packing=none (one document per row, padded)."
        )


def _difference(model: Any, alone: Tensor, *, eager: bool) -> str:
    """Describe how the logits of both documents in one row differ from `alone`; empty if they don't."""
    attention, windows = model.config._attn_implementation, (None, _WINDOW)
    make = document_arguments(attention, torch.float32, eager=eager, packs=True, windows=windows)
    numbers = [*(number for number, length in enumerate(_LENGTHS, 1) for _ in range(length)), *[0] * _PADDING]
    positions = [place for length in (*_LENGTHS, _PADDING) for place in range(length)]
    ids = torch.cat([*_documents(), torch.zeros(1, _PADDING, dtype=torch.int64)], dim=1)
    try:
        arguments = make(ids, torch.tensor([positions]), torch.tensor([numbers])) if make else {}
        packed = model(input_ids=ids, use_cache=False, **arguments).logits
    except Exception as error:
        return f"it accepts no mask of documents ({type(error).__name__}: {error})"
    difference = float((packed[:, : sum(_LENGTHS)] - alone).abs().max() / alone.abs().max())
    return "" if difference < _BOUND else f"logits differ by {difference:.2g} of the largest, more than {_BOUND:g}"


def _documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, _VOCABULARY, (1, length), generator=generator) for length in _LENGTHS]


def try_small_copies(
    model: Any,
    build: Callable[[Any], Any],
    run: Callable[[Any], Tensor],
    compare: Callable[[Any, Tensor], str],
    change: Callable[[Any], object] = lambda config: None,
) -> str:
    """Return `compare(copy, run(copy))` of the first small copy of `model` that runs, or why none does.

    `build(config)` returns a model on the host, in float32; `change(config)` adapts each config in place. Weights get
    random values, large enough that a position seen by mistake changes the outputs.
    """
    problem = ""
    with torch.no_grad(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # On the CPU attention over blocks runs uncompiled, and torch warns.
        warnings.filterwarnings("ignore", message=r"flex_attention called without torch\.compile", category=UserWarning)
        for narrow in (True, False):
            torch.manual_seed(0)
            try:
                config = _small_config(model.config, narrow)
                change(config)
                copied = build(config).eval()
                for weight in copied.parameters():
                    scale = 1 / math.sqrt(weight.shape[-1]) if weight.dim() > 1 else 0.1
                    weight.add_(torch.randn(weight.shape) * scale)
                result = run(copied)
            except Exception as error:  # this model refuses the sizes
                problem = f"a small copy can't run ({type(error).__name__}: {error})"
            else:
                return compare(copied, result)
    return problem


def _small_config(config: Any, narrow: bool) -> Any:
    """Return a config to try; `narrow`: with fewer heads of the same width, else of the model's own width."""
    whole = copy.deepcopy(config)
    small = whole.get_text_config(decoder=True)
    _cut_layers(small, _LAYERS)
    small.vocab_size = _VOCABULARY
    for key in _SIZES_INSIDE:
        if isinstance(size := getattr(small, key, None), int):
            setattr(small, key, min(size, _WIDTH))
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):  # outside the small vocabulary
        try:
            setattr(small, key, None)
        except StrictDataclassFieldValidationError:  # the class takes numbers only
            setattr(small, key, _VOCABULARY - 1)
    for key in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(small, key, None), int):
            setattr(small, key, _WINDOW)
    if narrow:
        _cut_heads(small)
    return whole


def _cut_layers(config: Any, most: int) -> None:
    """Keep the first `most` layers, or more until there is one of each kind."""
    layers = config.num_hidden_layers
    lists = {key: value for key, value in config.to_dict().items() if isinstance(value, list) and len(value) == layers}
    kinds = {key: value for key, value in lists.items() if all(isinstance(kind, str | int) for kind in value)}
    firsts = [value.index(kind) + 1 for value in kinds.values() for kind in set(value)]
    kept = min(layers, max([most, *firsts]))
    for key, value in kinds.items():
        setattr(config, key, value[:kept])
    config.num_hidden_layers = kept


def _cut_heads(config: Any) -> None:
    """Keep one or two groups of heads, with the same width."""
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(groups, int):
        return
    share = groups // 2 if groups % 2 == 0 else groups
    if heads % share or config.hidden_size % share:
        return
    for key in ("num_attention_heads", "num_key_value_heads", "num_kv_heads", "hidden_size", "word_embed_proj_dim"):
        if isinstance(size := getattr(config, key, None), int) and size % share == 0:
            setattr(config, key, size // share)


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
