"""Builds the model on the meta device and says where its weights come from.

`build_model` gives a model whose parameters hold no memory and a `fill(fqn, slices)` (`weights.py`) that makes any
piece of any weight on the host. A backend pulls the pieces that its devices need, one at a time, so that no host holds
the model twice.
"""

import dataclasses
import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from portable_fsdp.config import schema
from portable_fsdp.config.patterns import matching
from portable_fsdp.models.attention import register
from portable_fsdp.models.loss import attach_loss
from portable_fsdp.models.weights import PretrainedWeights, RandomWeights, Slices, fill_buffers
from portable_fsdp.runtime.errors import ConfigError


@dataclass(frozen=True)
class ModelSize:
    """What the FLOPs of a step are counted from."""

    parameters: int  # a tied weight once
    embedding_parameters: int  # of tables that are only looked up
    layers: int
    hidden: int  # attention heads * head_dim
    has_experts: bool  # not every weight meets every token


@dataclass(frozen=True)
class BuiltModel:
    """A model on meta (its buffers are real, on the host), its weights, and its transformers config.

    The config is as it was given: with the dropout and the cache that training switches off.
    """

    model: nn.Module
    fill: Callable[[str, Slices], Tensor]
    config: dict[str, Any]
    size: ModelSize


def build_model(
    model: schema.Model,
    precision: schema.Precision | None = None,
    *,
    seed: int,
    seq_len: int,
    vocabulary: int,
) -> BuiltModel:
    """Build the causal language model that the config names, ready to be sharded.

    Args:
        model: the config's section.
        precision: the config's section; None: its defaults. Weights rest in `master`, and the loss takes logits in
            `output`; what happens between is the backend's.
        seed: of the initial weights; not used with `model.pretrained`.
        seq_len: tokens in a row, which the model's positions must hold.
        vocabulary: ids of the tokenizer, which the model's embedding must hold.

    Parameters that `model.freeze` names have no `requires_grad`. Raises ConfigError where the config doesn't name a
    model that fits, or a pattern names nothing in it.
    """
    # transformers and accelerate would import torch_xla wherever it is installed; we choose the engine ourselves.
    os.environ.setdefault("USE_TORCH_XLA", "0")
    config = _pretrained_config(model.pretrained) if model.pretrained is not None else _config(model.architecture or {})
    _check_sizes(config, seq_len, vocabulary)
    as_given = cast(dict[str, Any], config.to_dict())
    _switch_off(config)
    built = _on_meta(config, model.attention)
    _check_causal(built)
    twin = _on_meta(config, model.attention)  # keeps its meta parameters while the backend replaces the model's
    fill_buffers(built, twin)
    if model.pretrained is None:
        weights = RandomWeights(twin, seed)
    else:
        weights = PretrainedWeights(Path(model.pretrained), twin)
        for name, buffer in built.named_buffers():
            if weights.holds(name):
                buffer.copy_(weights(name, tuple(slice(0, size) for size in buffer.shape)))
    attach_loss(built)
    built.train()
    for pattern in model.freeze:
        for name in matching("model.freeze", pattern, [name for name, _ in built.named_parameters()]):
            built.get_parameter(name).requires_grad_(False)
    return BuiltModel(built, weights, as_given, _size(built))


# ------------------------------------------------------------------------------------------------ the architecture


def _config(architecture: dict[str, Any]) -> Any:
    """The transformers config of `model.architecture`, refusing what its class doesn't know."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    arguments = dict(architecture)
    model_type = str(arguments.pop("model_type"))
    causal = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if model_type not in causal:
        near = difflib.get_close_matches(model_type, causal, n=3)
        raise ConfigError(
            f"model.architecture.model_type: expected a causal language model of transformers, found {model_type!r}."
            + (f"\n  nearest: {', '.join(near)}." if near else "")
        )
    kind = type(AutoConfig.for_model(model_type))
    known = {item.name for item in dataclasses.fields(kind)} | set(kind.attribute_map) | {"rope_theta", "rope_scaling"}
    for key, value in arguments.items():
        if "drop" in key and isinstance(value, int | float) and value:
            raise ConfigError(
                f"model.architecture.{key}: expected 0, found {value}: dropout is not built yet.\n"
                "  Leave it out. Nothing was started."
            )
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise ConfigError(
                f"model.architecture.{key}: unknown key of {kind.__name__}."
                + (f"\n  nearest: {near[0]}." if near else f"\n  It has: {', '.join(sorted(known))}.")
            )
    try:
        return AutoConfig.for_model(model_type, **arguments)
    except Exception as error:  # transformers validates with exceptions of many classes, all about these values
        raise ConfigError(
            f"model.architecture: transformers refuses it: {_last_line(error)}\n"
            "  Change the key that it names. Nothing was started."
        ) from error


def _pretrained_config(folder: str) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.pretrained: expected a Hugging Face folder with config.json, found "
            f"{'none in it' if path.is_dir() else 'no such folder'}: {folder}\n  Download the model first; the path is "
            "taken from the folder that the run starts in."
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"model.pretrained: {path / 'config.json'}: {_last_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model.pretrained: {path / 'config.json'}: expected a causal language model of transformers, found "
            f"model_type {config.model_type!r}."
        )
    return config


def _check_sizes(config: Any, seq_len: int, vocabulary: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < seq_len:
        raise ConfigError(
            f"data.seq_len: expected at most {positions} (the model's max_position_embeddings), found {seq_len}.\n"
            "  Lower data.seq_len, or take a model with more positions."
        )
    heads, kv_heads = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"model: expected num_key_value_heads that divides num_attention_heads={heads}, found {kv_heads}."
        )
    ids = getattr(config, "vocab_size", None)
    if isinstance(ids, int) and ids < vocabulary:
        raise ConfigError(
            f"model: expected vocab_size of at least {vocabulary} (the ids of data.tokenizer), found {ids}.\n"
            f"  Set model.architecture.vocab_size={vocabulary}, or name the model's own tokenizer in data.tokenizer."
        )


def _switch_off(config: Any) -> None:
    """No dropout, and no key-value cache, which training doesn't read."""
    config.use_cache = False
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, 0.0)


def _on_meta(config: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=_attention(kind, attention), dtype=torch.float32
            )
    except Exception as error:  # an activation's name, heads of 0: each fails in a way of its own
        raise ConfigError(
            f"model: {kind.__name__} can't be built from this config: {type(error).__name__}: {_last_line(error)}\n"
            "  Compare the sizes in model.architecture with a model that exists. Nothing was started."
        ) from error


def _check_causal(model: nn.Module) -> None:
    """Encoders count as causal models in transformers too, but see the tokens that they should predict."""
    flags = [flag for module in model.modules() if isinstance(flag := getattr(module, "is_causal", None), bool)]
    if flags and not any(flags):
        raise ConfigError(
            f"model: expected a model whose attention is causal, found {type(model).__name__} as an encoder.\n"
            "  Set model.architecture.is_decoder=true (in a folder: in its config.json), or take another model."
        )


def _attention(kind: Any, wanted: str) -> str:
    """`auto` takes the static one, save for models with an attention of their own (ALiBi in Bloom and Falcon)."""
    takes_any = bool(getattr(kind, "_supports_attention_backend", False))
    if wanted == "static" and not takes_any:
        raise ConfigError(f"model.attention: {kind.__name__} has an attention of its own; set model.attention=auto.")
    if wanted in ("sdpa", "eager"):
        return wanted
    if takes_any:
        return register()
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def _size(model: Any) -> ModelSize:
    tables = {id(table.weight): table.weight for table in model.modules() if isinstance(table, nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        tables.pop(id(head.weight), None)
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding_parameters=sum(table.numel() for table in tables.values()),
        layers=config.num_hidden_layers,
        hidden=heads * width,
        has_experts=any(getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")),
    )


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
