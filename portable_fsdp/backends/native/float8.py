"""Float8 products of linear layers, by torchao. Names, masters and checkpoints don't change (`units.local_part`).

Under `float8` a shard is cast before the gather, with the scale of the whole weight. One all-reduce after each step
computes the scales of all weights.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.weight_uses import eight_bit_layers, uses_by_block, weight_uses
from portable_fsdp.runtime.errors import ConfigError

log = logging.getLogger("portable_fsdp")


def use_float8(model: nn.Module, policy: ShardPolicy, device: torch.device, shards: int) -> Callable[[], None]:
    """Convert the model before anything is wrapped; return the function to call when weights have changed. Raises
    ConfigError without torchao."""
    try:
        import torchao.float8 as float8
    except ImportError as error:
        raise ConfigError(
            f"precision.products={policy.products}: can't import the package torchao: {error}.\n"
            "  pip install torchao (with torch 2.9: pip install 'torchao<0.18'), or set precision.products=auto."
        ) from None
    is_gpu, torchao = device.type == "cuda", cast(Any, float8)
    is_emulated = not is_gpu or torch.cuda.get_device_capability(device) < (8, 9)
    if is_gpu and is_emulated:
        log.warning("precision.products: %s has no float8: emulating it, which is slow", torch.cuda.get_device_name())
    names = frozenset(eight_bit_layers(model, policy))
    # gloo can't gather float8; together with weights of another dtype FSDP2 gathers bytes.
    linear = {*map(model.get_submodule, names)}
    alone = any(
        uses and all(use.module in linear for use in uses if use.dtype == policy.compute)
        for uses in uses_by_block(weight_uses(model, policy), policy.units).values()
    )
    gathers = policy.products == "float8" and shards > 1 and (is_gpu or not alone)
    recipe = torchao.Float8LinearConfig.from_recipe_name("tensorwise" if policy.products == "float8" else "rowwise")
    # Float8 products sum over a multiple of 16 elements; for a weight's gradient these are tokens.
    settings = dataclasses.replace(
        recipe, emulate=is_emulated, enable_fsdp_float8_all_gather=gathers, pad_inner_dim=not is_emulated
    )
    torchao.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=settings)
    return lambda: torchao.precompute_float8_dynamic_scale_for_fsdp(model) if gathers else None
