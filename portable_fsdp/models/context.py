"""A trial that devices can split the tokens of a model's rows (`sharding.context`).

Each token must depend on others through the static attention alone: it gathers keys and values. So the trial runs a
small copy on a row, and again on the tokens of one device with the keys and values of the first run: the outputs of
each layer must be equal. It detects recurrent states, convolutions, and models that count positions themselves, or
whose rotary embeddings depend on the length of a row.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from portable_fsdp.attach import set_row_parts
from portable_fsdp.config.schema import Sharding
from portable_fsdp.layout import RowParts
from portable_fsdp.models.attention import STATIC
from portable_fsdp.models.document_masks import try_small_copies
from portable_fsdp.models.wrap import find_layers
from portable_fsdp.runtime.errors import ConfigError

_TOKENS, _VOCABULARY = 16, 64
_LIMITS = ("original_max_position_embeddings", "floor_scale")
"""Numbers of tokens from which models compute otherwise (longrope, Llama 4); small copies do from _LIMIT."""
_LIMIT = 12  # one of two devices sees more
_BOUND = 1e-4  # relative to the largest output: a hundred times float32's rounding


def require_rows_that_split(model: Any, build: Callable[[Any], Any], seq_len: int, devices: int) -> None:
    """Raise ConfigError if `devices` can't split rows of `seq_len` tokens of `model`.

    `build(config)` returns a model of that transformers config on the host, in float32.
    """
    ids = torch.randint(_VOCABULARY, (1, _TOKENS), generator=torch.Generator().manual_seed(0))

    def limit(config: Any) -> None:
        for values in (vars(config), getattr(config, "rope_parameters", None) or {}):
            values.update({key: _LIMIT for key in _LIMITS if values.get(key) and values[key] < seq_len})

    def run(copied: Any) -> Tensor:
        return copied(input_ids=ids, use_cache=False).logits

    if seq_len % (2 * devices):
        problem = f"{devices} devices can't split rows of {seq_len} tokens into two equal pieces each"
    elif model.config._attn_implementation != STATIC:
        problem = "it has its own attention"
    else:
        problem = try_small_copies(model, build, run, lambda copied, _: _difference(copied, ids), limit)
    if problem:
        raise ConfigError(f"sharding.context: {type(model).__name__}: {problem}.\n  Set sharding.context=1.")


def _difference(model: nn.Module, ids: Tensor) -> str:
    """Name the first layer whose outputs for the tokens of one device differ from those for the whole row."""
    rows: list[Tensor] = []  # keys and values of each call of attention

    def keep(tokens: Tensor) -> Tensor:
        rows.append(tokens)
        return tokens

    try:
        whole = _outputs(model, ids, RowParts(0, 1, keep))
        for index in (0, 1):
            kept = iter(rows)
            part = RowParts(index, 2, lambda _, kept=kept: next(kept))
            own = part.positions(_TOKENS)
            for name, out in _outputs(model, ids[:, own], part).items():
                if not (whole[name][:, own] - out).abs().max() < _BOUND * whole[name].abs().max():
                    return f"{name}: tokens depend on others by more than the static attention"
    except Exception as error:
        return f"{error}" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"
    return ""


def _outputs(model: Any, ids: Tensor, parts: RowParts) -> dict[str, Tensor]:
    """Return name -> output `[1, tokens, ...]` of each layer, and of the model's logits."""
    set_row_parts(model, parts)
    outputs: dict[str, Tensor] = {}
    layers = {name: model.get_submodule(name) for name in find_layers(model, Sharding())}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: tree_leaves(out)[0]}))
        for name, layer in layers.items()
    ]
    logits = model(input_ids=ids, position_ids=torch.tensor([parts.positions(_TOKENS)]), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return {**outputs, "its logits": cast(Tensor, logits)}
