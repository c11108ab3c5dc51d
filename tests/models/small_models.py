"""Small models of many families, and a built model given memory, so that it can be run without an engine."""

from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.backends.base import parameter_places, whole
from portable_fsdp.config.schema import Model
from portable_fsdp.models.build import BuiltModel, build_model

VOCABULARY, SEQ_LEN = 101, 24
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_COMMON = _SIZES | {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"model_type": "llama"},
    "llama_tied": _COMMON | {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": _COMMON | {"model_type": "qwen3", "head_dim": 16},
    "mistral_window": _COMMON | {"model_type": "mistral", "sliding_window": 5},
    # One layer with a window and one that sees all; softcaps of scores and of logits.
    "gemma2": _COMMON | {"model_type": "gemma2", "head_dim": 12, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    "gpt2": {key: _SIZES[key] for key in _SIZES}
    | {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {key: value for key, value in _COMMON.items() if key not in ("intermediate_size", "num_key_value_heads")}
    | {"model_type": "opt", "ffn_dim": 80, "word_embed_proj_dim": 48},
}


def build(name: str, seed: int = 0, **changes: Any) -> BuiltModel:
    section = Model(architecture=ARCHITECTURES[name] | changes)
    return build_model(section, seed=seed, seq_len=SEQ_LEN, vocabulary=VOCABULARY)


def whole_weight(built: BuiltModel, fqn: str) -> torch.Tensor:
    return built.fill(fqn, whole(built.model.get_parameter(fqn).shape))


def materialise(built: BuiltModel) -> Any:
    """Fill all parameters, ties kept; the model then runs on the host."""
    for fqn, places in parameter_places(built.model).items():
        parameter = nn.Parameter(whole_weight(built, fqn))
        for place in places:
            place.module._parameters[place.leaf] = parameter
    return built.model


def shake(model: nn.Module) -> None:
    """Move every weight off its initial value, so that biases and norms matter too."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def stock_model(architecture: dict[str, Any], attention: str = "eager") -> Any:
    """transformers' own model with its own random weights."""
    config = AutoConfig.for_model(**architecture)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def logits(model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Of a model whose forward gives a loss, too."""
    return cast(torch.Tensor, type(model).forward(model, input_ids=input_ids, use_cache=False, **arguments).logits)


def token_ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(1))
