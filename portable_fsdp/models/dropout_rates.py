"""The rates of dropout of a transformers model: those of its config, and `model.dropout`."""

from typing import Any, cast

from torch import nn

from portable_fsdp.config import schema
from portable_fsdp.models.architecture import is_dropout
from portable_fsdp.models.attention import DRAWS, FLEX, STATIC

_UNDRAWN = ("layerdrop", "layer_drop", "drop_path", "path_drop", "droppath", "token_dropout")


def set_dropout(config: Any, rate: float | str) -> dict[str, float]:
    """Set the rates of a transformers config and its parts in place: `published` keeps them.

    Rates of whole layers and paths, and of tokens at experts, become 0: a mask by row and position can't draw them.
    Returns the rates above 0, and the latter.
    """
    rates: dict[str, float] = {}
    for key, value in config.to_dict().items():
        part = getattr(config, key, None)
        if key in config.sub_configs and hasattr(part, "sub_configs"):
            rates |= {f"{key}.{name}": each for name, each in set_dropout(part, rate).items()}
        elif is_dropout(key, value):
            new = 0.0 if any(word in key for word in _UNDRAWN) else float(value if rate == "published" else rate)
            if new != value:  # a class may take integers only
                setattr(config, key, new)
            rates |= {key: new} if new or (value and rate) else {}
    return rates


def choose_dropouts(model: nn.Module, section: schema.Model, rates: dict[str, float]) -> str:
    """Switch off the dropout of attention whose kernels can't draw, unless model.attention=static; describe the rest.

    `rates`: of `set_dropout`.
    """
    has_kernels = cast(Any, model).config._attn_implementation in (STATIC, FLEX) and section.attention != "static"
    for module in model.modules() if has_kernels else ():
        setattr(module, DRAWS, False)
    whole = [key for key, rate in rates.items() if not rate]
    undrawn = [key for key in rates if has_kernels and any(word in key for word in ("attention", "attn"))]
    by_rate: dict[float, list[str]] = {}
    for key, rate in rates.items():
        if key not in (*undrawn, *whole):
            by_rate.setdefault(rate, []).append(key)
    origin = "published: " if section.resolved_dropout == "published" else ""
    text = "; ".join(f"{rate:g} ({origin}{', '.join(keys)})" for rate, keys in by_rate.items()) or "0"
    kernels = f"; {', '.join(undrawn)}: 0, since no kernel draws; model.attention=static does" if undrawn else ""
    layers = f"; {', '.join(whole)}: 0, since masks leave out no whole layers" if whole else ""
    return f"model.dropout: {text}{kernels}{layers}"
