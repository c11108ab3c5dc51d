"""Which dropouts of a transformers model apply: not those that no mask by row and position can draw."""

from typing import Any, cast

from torch import nn

from portable_fsdp.attach import switch_off_attention_dropout
from portable_fsdp.config import schema
from portable_fsdp.models.attention import FLEX, STATIC
from portable_fsdp.runtime.errors import ConfigError


def choose_dropouts(model: nn.Module, section: schema.Model, rates: dict[str, float]) -> str:
    """Switch off the dropout of attention whose kernels can't draw, unless model.attention=static; describe the rest.

    `rates`: of `architecture.set_dropout`. Raises ConfigError for a number that sets nothing.
    """
    has_kernels = cast(Any, model).config._attn_implementation in (STATIC, FLEX) and section.attention != "static"
    if has_kernels:
        switch_off_attention_dropout(model)
    whole = [key for key, rate in rates.items() if not rate]
    undrawn = [key for key in rates if has_kernels and any(word in key for word in ("attention", "attn"))]
    by_rate: dict[float, list[str]] = {}
    for key, rate in rates.items():
        if key not in (*undrawn, *whole):
            by_rate.setdefault(rate, []).append(key)
    if section.dropout and section.dropout != "published" and not by_rate:
        fix = "model.attention=static" if undrawn else "model.dropout=null; adapters have model.lora.dropout"
        found = f"only {', '.join(undrawn)}, which attention kernels can't apply" if undrawn else "none"
        raise ConfigError(
            f"model.dropout={section.dropout:g}: expected a dropout in {type(model).__name__}, found {found}.\n"
            f"  Set {fix}."
        )
    origin = "published: " if section.resolved_dropout == "published" else ""
    text = "; ".join(f"{rate:g} ({origin}{', '.join(keys)})" for rate, keys in by_rate.items()) or "0"
    kernels = f"; {', '.join(undrawn)}: 0, since no kernel draws; model.attention=static does" if undrawn else ""
    layers = f"; {', '.join(whole)}: 0, since masks leave out no whole layers" if whole else ""
    return f"model.dropout: {text}{kernels}{layers}"
