"""Products of linear layers in float8, by torchao: scales are taken anew in each product; no weight changes.

The layers keep their names. Under `float8` over several shards a weight becomes torchao's tensor around the master: a
shard is cast before it is gathered, by the scale of the whole weight, which one all-reduce after each step finds for
all weights. Optimizers and checkpoints see the master (`units.local_part`).
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from portable_fsdp.backends.base import ShardPolicy
from portable_fsdp.runtime.errors import ConfigError

log = logging.getLogger("portable_fsdp")

OLDEST_GPU = (8, 9)
"""Compute capability with float8 products: Ada, Hopper and newer."""


def use_float8(model: nn.Module, policy: ShardPolicy, device: torch.device, *, gathers: bool) -> Callable[[], None]:
    """Convert `policy.eight_bits`, before anything is wrapped; returns what to call when weights have changed.

    `gathers`: whether weights are sharded. Raises ConfigError without torchao.
    """
    try:
        import torchao.float8 as float8
    except ImportError as error:
        raise ConfigError(
            f"precision.products={policy.products}: expected the package torchao, found {error}.\n"
            "  pip install torchao (with torch 2.9: pip install 'torchao<0.18'), or set precision.products=auto."
        ) from None
    is_rowwise = policy.products == "float8_rowwise"
    is_emulated = device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST_GPU
    if is_emulated and device.type == "cuda":
        log.warning("precision.products: %s has no float8 products: emulated, and slower", torch.cuda.get_device_name())
    recipe = cast(Any, float8).Float8LinearConfig.from_recipe_name("rowwise" if is_rowwise else "tensorwise")
    scales_ahead = gathers and not is_rowwise
    settings = dataclasses.replace(recipe, emulate=is_emulated, enable_fsdp_float8_all_gather=scales_ahead)
    names = frozenset(policy.eight_bits)
    cast(Any, float8).convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=settings)
    if not scales_ahead:
        return lambda: None
    return lambda: cast(Any, float8).precompute_float8_dynamic_scale_for_fsdp(model)
