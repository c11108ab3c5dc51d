"""The sizes of a model from which `metrics/flops.py` counts the FLOPs of a step."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from portable_fsdp.runtime.errors import ConfigError


@dataclass(frozen=True)
class ModelSize:
    parameters: int  # a tied weight once
    embedding_parameters: int  # of tables that are only looked up
    frozen_parameters: int  # without those tables
    trained_parameters: int
    layers: int
    hidden: int  # attention heads * head_dim
    has_experts: bool  # not every weight meets every token


def size_of(model: Any) -> ModelSize:
    """The sizes of a transformers model. Raises ConfigError where its config has no layers of one width."""
    tables = {id(table.weight): table.weight for table in model.modules() if isinstance(table, nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        tables.pop(id(head.weight), None)
    config = model.config.get_text_config()
    if missing := [key for key in ("hidden_size", "num_hidden_layers") if not hasattr(config, key)]:
        raise ConfigError(
            f"model: {type(model).__name__}: expected a stack of layers of one width, found a config without "
            f"{missing[0]}, whose parts have configs of their own.\n  Take another model."
        )
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        frozen_parameters=sum(weight.numel() for weight in frozen if id(weight) not in tables),
        trained_parameters=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        embedding_parameters=sum(table.numel() for table in tables.values()),
        layers=config.num_hidden_layers,
        hidden=_attention_width(config),
        has_experts=any(getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")),
    )


def _attention_width(config: Any) -> int:
    """Heads * head_dim; where layers differ (Gemma 4), their mean."""
    layers = getattr(config, "per_layer_config", None)
    each = [layers[index] for index in range(config.num_hidden_layers)] if layers else [config]
    heads = [getattr(layer, "num_attention_heads", 1) for layer in each]
    widths = [getattr(layer, "head_dim", None) or layer.hidden_size // n for layer, n in zip(each, heads, strict=True)]
    return sum(n * width for n, width in zip(heads, widths, strict=True)) // len(each)
