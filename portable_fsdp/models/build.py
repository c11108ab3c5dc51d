"""Builds the model on the meta device and says where its weights come from.

Read `build_model` first. A model of `model.factory` comes from `factory.py`; those of transformers are made here.

`build_model` gives a model whose parameters hold no memory and a `fill(fqn, slices)` (`weights.py`) that makes any
piece of any weight on the host. A backend pulls the pieces that its devices need, one at a time, so that no host holds
the model twice.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from portable_fsdp.config import schema
from portable_fsdp.config.describe import matching
from portable_fsdp.models.architecture import config_to_json, last_line, mapping_of, read_architecture
from portable_fsdp.models.attention import (
    DENSE,
    FLEX,
    STATIC,
    choose_experts,
    dense_experts,
    register_masked_attention,
    register_static_attention,
    takes_implementation,
)
from portable_fsdp.models.loss import DocumentArguments, LogitSteps, Loss, attach_loss, trace_logits
from portable_fsdp.models.tasks import CAUSAL_LM, Task, is_decoder_only
from portable_fsdp.models.weights import ModelSize, RandomWeights, TensorFile, WeightFill, fill_buffers, size_of
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.factory import call_factory
from portable_fsdp.runtime.hub import before_transformers

if TYPE_CHECKING:  # a run without model.pretrained loads neither
    from portable_fsdp.models.pretrained import Base, Pretrained

log = logging.getLogger("portable_fsdp")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BuiltModel:
    """A model on meta (its buffers are real, on the host), its weights, and its transformers config.

    The config is as it was given: with the dropout and the cache that training switches off. It is JSON, of which
    `config_from_json` makes an equal config. Empty: a model of `model.factory`, not of transformers.
    """

    model: nn.Module
    fill: WeightFill
    config: dict[str, Any]
    size: ModelSize
    base: "Base | None" = None  # of `model.lora`, where it comes from `model.pretrained`


def build_model(
    model: schema.Model,
    precision: schema.Precision | None = None,
    *,
    seed: int,
    seq_len: int,
    vocabulary: int,
    eager: bool = True,
    loss: Loss | None = None,
    keeps_ids: Callable[[], bool] = lambda: False,
    packs_documents: bool = False,
    task: Task = CAUSAL_LM,
    seq_len_key: str = "data.seq_len",
    compiler: str | None = None,
) -> BuiltModel:
    """Build the model that the config names, ready to be sharded.

    Args:
        model, precision: the config's sections. Weights rest in `master`, those that don't train in `frozen`, and the
            loss takes logits in `output`; what happens between is the backend's.
        seed: of the initial weights; not used with `model.pretrained`.
        seq_len: tokens in a row, which a causal model's positions must hold.
        vocabulary: ids of the tokenizer, which the model's embedding must hold; 0 where there is none.
        eager: operations run one by one, not as one compiled step: the loss goes by chunks, and a mask is made once.
        loss: in place of `loss.cross_entropy_sum`.
        keeps_ids: whether the tokenizer has all tokens of `model.pretrained`'s own under their ids, so that the model
            may grow where the tokenizer has more. Called only then.
        packs_documents: several documents share a row; forward gets their `positions` and `segments`.
        task: says which model of transformers a config means, and who computes the loss: of a causal model it is part
            of the forward.
        seq_len_key: the key that `seq_len` comes from, for messages.
        compiler: see `loss.attach_loss`.

    Raises ConfigError for a config that names no model that fits, a pattern that names nothing in it, and a model that
    wouldn't keep packed documents apart.
    """
    precision = precision or schema.Precision()
    if model.factory is not None:
        return _of_factory(model, precision, seed)
    before_transformers()
    pretrained = None
    if model.pretrained is not None:
        from portable_fsdp.models.pretrained import open_pretrained

        pretrained = open_pretrained(model, task.name)
    config = read_architecture(model.architecture or {}, task.name) if pretrained is None else pretrained.config
    rows_before = None if pretrained is None else _grow(config, vocabulary, pretrained.file, keeps_ids)
    _check_config(config, seq_len, vocabulary, seq_len_key)
    as_given = config_to_json(config)
    _switch_off(config)
    make = partial(_made, attention=model.attention, task=task)
    bare, twin = _on_meta(config, make), _on_meta(config, make)
    steps = None
    if is_causal_lm := task.name == CAUSAL_LM.name:
        _check_causal(bare)
        steps = _check_forward(twin, seq_len, seq_len_key)
    master, compute = DTYPES[precision.master], DTYPES[precision.compute]
    documents = None
    if packs_documents or model.attention == "flex":
        documents = _documents(bare, twin, make, seq_len, compute, eager=eager, packs=packs_documents)

    built = BuiltModel(bare, RandomWeights(twin, seed, master), as_given, size_of(bare))
    choose_experts(bare, model.experts, compute.itemsize)
    built = with_values(built, twin, master, pretrained, model.allow, rows_before)
    # DTYPES has no "auto", which changes nothing.
    if is_causal_lm:
        attach_loss(bare, DTYPES.get(precision.output), eager, loss, documents, steps, compiler)
    built.model.train()
    if model.lora is not None:
        built = with_adapters(built, model.lora, seed, master, pretrained, rows_before is not None)
    built = with_frozen(built, model.freeze, DTYPES.get(precision.frozen))
    if model.lora is not None and pretrained is not None:
        built = with_base(built, model, pretrained)
    return replace(built, size=size_of(built.model))


def _of_factory(model: schema.Model, precision: schema.Precision, seed: int) -> BuiltModel:
    from portable_fsdp.models.factory import open_factory, plain_size

    make = partial(call_factory, "model.factory", str(model.factory))
    module, fill = open_factory(f"model.factory: {model.factory}", make, seed, DTYPES[precision.master])
    built = BuiltModel(module, fill, {}, plain_size(module))
    built = with_frozen(built, model.freeze, DTYPES.get(precision.frozen))
    return replace(built, size=plain_size(module))


# ---------------------------------------------------------------------------------------------- the transformations


def with_values(
    built: BuiltModel,
    twin: Any,
    master: torch.dtype,
    pretrained: "Pretrained | None",
    allow: tuple[str, ...],
    rows_before: int | None,
) -> BuiltModel:
    """Real buffers, weights in the master dtype, and of both what `pretrained` has."""
    model, drawn = built.model, cast(RandomWeights, built.fill)
    unset = fill_buffers(model, twin)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(master)
    if pretrained is not None:
        from portable_fsdp.models.pretrained import PretrainedWeights

        weights = PretrainedWeights(pretrained.file, model, twin, drawn, allow=allow, rows_before=rows_before)
        stored = {name: buffer for name, buffer in model.named_buffers() if weights.holds(name)}
        for name, buffer in stored.items():
            buffer.copy_(weights(name, tuple(slice(0, size) for size in buffer.shape)))
        built, unset = replace(built, fill=weights), unset - set(stored)
    if unset:
        raise ConfigError(
            f"model: {type(model).__name__}: expected buffers that transformers can compute again, found "
            f"{sorted(unset)[0]}, which it only makes with the model.\n  Start from a folder that holds it "
            "(model.pretrained), or take another model."
        )
    return built


def with_adapters(
    built: BuiltModel, lora: schema.Lora, seed: int, master: torch.dtype, pretrained: "Pretrained | None", grows: bool
) -> BuiltModel:
    """From then on only adapters train. The base must be one that others have: no file would hold what is made here."""
    from portable_fsdp.models.lora import add_adapters, start_from
    from portable_fsdp.models.pretrained import PretrainedWeights

    drawn = built.fill.drawn if isinstance(built.fill, PretrainedWeights) else []
    if pretrained is not None and (drawn or grows):
        missing = f"{drawn[0]}, which it lacks (model.allow)" if drawn else "rows for new tokens in its embedding"
        raise ConfigError(
            f"model.lora: expected a base that is whole in {pretrained.file.where}, found {missing}: it would be made "
            "here, and no adapter trains it.\n  Take the model's own tokenizer and all of its weights, or train "
            "without model.lora."
        )
    fill = add_adapters(built.model, lora, seed, master, built.fill)
    return replace(built, fill=fill if lora.start_from is None else start_from(lora, built.model, fill))


def with_frozen(built: BuiltModel, patterns: tuple[str, ...], dtype: torch.dtype | None) -> BuiltModel:
    """A tied weight is frozen in all its places, by any of its names. Weights that don't train rest in `dtype`."""
    parameters = dict(built.model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        for name in matching("model.freeze", pattern, parameters):
            parameters[name].requires_grad_(False)
    frozen = {fqn: parameter for fqn, parameter in parameters.items() if not parameter.requires_grad}
    if len(frozen) == len(parameters):
        raise ConfigError(
            f"model.freeze: expected at least one parameter that trains, found all {len(parameters)} frozen by "
            f"{list(patterns)}.\n  Name fewer of them."
        )
    if dtype is None:
        return built
    for parameter in frozen.values():
        parameter.data = parameter.data.to(dtype)
    fill = built.fill
    return replace(built, fill=lambda fqn, at: fill(fqn, at).to(dtype) if fqn in frozen else fill(fqn, at))


def with_base(built: BuiltModel, model: schema.Model, pretrained: "Pretrained") -> BuiltModel:
    """Names what checkpoints of adapters leave out."""
    from portable_fsdp.models.lora import is_adapter
    from portable_fsdp.models.pretrained import Base, stored_tensors

    names = frozenset(name for name in stored_tensors(built.model) if not is_adapter(name))
    return replace(built, base=Base(str(model.pretrained), model.gguf_file, pretrained.file, names, built.fill))


# ------------------------------------------------------------------------------------------------ the architecture


def _grow(config: Any, vocabulary: int, file: TensorFile, keeps_ids: Callable[[], bool]) -> int | None:
    """Give the model a row for each id of a tokenizer that has grown; returns how many it had, or None."""
    before = getattr(config, "vocab_size", None)
    if not isinstance(before, int) or before >= vocabulary or not keeps_ids():
        return None
    config.vocab_size = vocabulary
    log.info(
        f"model.pretrained: {file.where}: the tokenizer has {vocabulary:,} ids, the model rows for {before:,}: "
        f"embedding and head grow by {vocabulary - before:,} rows, each the mean of the old ones"
    )
    return before


def _int(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def _check_config(config: Any, seq_len: int, vocabulary: int, seq_len_key: str) -> None:
    positions, ids = _int(config, "max_position_embeddings"), _int(config, "vocab_size")
    heads, kv_heads = _int(config, "num_attention_heads"), _int(config, "num_key_value_heads")
    if positions is not None and 0 < positions < seq_len:
        raise ConfigError(
            f"{seq_len_key}: expected at most {positions} (positions of the model), found {seq_len}.\n"
            f"  Lower {seq_len_key}, or take a model with more positions."
        )
    if heads is not None and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"model: expected num_key_value_heads that divides num_attention_heads={heads}, found {kv_heads}."
        )
    if ids is not None and ids < vocabulary:
        raise ConfigError(
            f"model: expected vocab_size of at least {vocabulary} (the ids of data.tokenizer), found {ids}.\n"
            f"  Set model.architecture.vocab_size={vocabulary}, or name the model's own tokenizer in data.tokenizer.\n"
            "  A pretrained model grows only with a tokenizer that has all tokens of its own, by their ids, and more."
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            "model: expected output_router_logits=false, found true: the router's auxiliary loss is not built yet.\n"
            "  Set it to false in model.architecture (in a folder: in its config.json)."
        )


def _switch_off(config: Any) -> None:
    """No dropout, and no key-value cache, which training doesn't read."""
    config.use_cache = False
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, 0.0)


def _made(config: Any, attention: str, task: Task) -> Any:
    """The model of a copy of the config, its experts in static shapes."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.models.auto import modeling_auto

    ALL_EXPERTS_FUNCTIONS.register(DENSE, dense_experts)
    register_static_attention()
    if attention == "flex":
        from transformers import AttentionInterface

        from portable_fsdp.models.document_masks import block_attention

        AttentionInterface.register(FLEX, block_attention)
    kind: Any = getattr(modeling_auto, mapping_of(task.name))[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    chosen = {"attn_implementation": _attention(kind, attention), "experts_implementation": DENSE}
    made = kind._from_config(copy.deepcopy(config), **chosen, dtype=torch.float32)
    if task.name == CAUSAL_LM.name or is_decoder_only(made):
        return made
    if attention in ("static", "flex"):
        raise ConfigError(
            f"model.attention: expected a model whose attention is causal for {attention}, found {kind.__name__}.\n"
            "  Set model.attention=auto."
        )
    if attention == "auto":
        chosen["attn_implementation"] = register_masked_attention() if kind._supports_sdpa else "eager"
        made = kind._from_config(copy.deepcopy(config), **chosen, dtype=torch.float32)
    return made


def _on_meta(config: Any, make: Callable[[Any], Any]) -> Any:
    try:
        with torch.device("meta"):
            return make(config)
    except Exception as error:  # an activation's name, heads of 0: each fails in a way of its own
        raise _misfit(f"{type(config).__name__}: no model can be built from it", error) from error


def _misfit(problem: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model: {problem}: {type(error).__name__}: {last_line(error)}\n"
        "  Compare the sizes in model.architecture with a model that exists."
    )


def _check_forward(model: Any, seq_len: int, seq_len_key: str) -> LogitSteps | None:
    """Run a row through a model that holds no memory: sizes that don't fit each other show here, not in step 1.

    Returns what it does with its logits, see `trace_logits`; None where that isn't known.

    A third of a second for 80 layers. What the model reads from its values (transformers looks for padding) can't be
    followed and isn't refused, save in experts that choose their tokens on the host.
    """
    try:
        with torch.no_grad(), torch.device("meta"):
            return trace_logits(model, torch.zeros(1, seq_len, dtype=torch.int64))
    except Exception as error:
        if "meta tensors" not in str(error) and not isinstance(error, NotImplementedError):
            raise _misfit(
                f"{type(model).__name__} can't run a row of {seq_len} tokens ({seq_len_key})", error
            ) from error
        for name, module in model.named_modules():
            if "Experts" in type(module).__name__ and not takes_implementation(module):
                raise ConfigError(
                    f"model: {type(model).__name__}: expected experts that run in static shapes, found {name}, which "
                    "asks the host which tokens it got.\n  Take a model whose experts transformers lets us choose "
                    "(mixtral, qwen3_moe, deepseek_v3, gpt_oss, ...)."
                ) from error
        return None


def _documents(
    model: Any,
    twin: nn.Module,
    make: Callable[[Any], Any],
    seq_len: int,
    compute: torch.dtype,
    *,
    eager: bool,
    packs: bool,
) -> DocumentArguments | None:
    """Imports what a run of whole rows doesn't need."""
    from portable_fsdp.models.document_masks import document_arguments, require_documents_apart, windows_of

    attention = model.config._attn_implementation
    windows = windows_of(twin, seq_len) if attention == FLEX else ()
    if packs:
        require_documents_apart(model, make, eager=eager)
    return document_arguments(attention, compute, eager=eager, packs=packs, windows=windows)


def _check_causal(model: nn.Module) -> None:
    """Encoders count as causal models in transformers too, but see the tokens that they should predict."""
    flags = [flag for module in model.modules() if isinstance(flag := getattr(module, "is_causal", None), bool)]
    if flags and not any(flags):
        raise ConfigError(
            f"model: expected a model whose attention is causal, found {type(model).__name__} as an encoder.\n"
            "  Set model.architecture.is_decoder=true (in a folder: in its config.json), or take another model."
        )


def _attention(kind: Any, requested: str) -> str:
    """`auto` takes the static one, save for models with an attention of their own (ALiBi in Bloom and Falcon)."""
    # Private: the flag is missing in models that take any all the same (stablelm, qwen3_next).
    takes_any = bool(getattr(kind, "_supports_attention_backend", False)) or kind._can_set_attn_implementation()
    if requested in ("static", "flex") and not takes_any:
        raise ConfigError(f"model.attention: {kind.__name__} has an attention of its own; set model.attention=auto.")
    if requested in ("sdpa", "eager"):
        return requested
    if takes_any:
        return FLEX if requested == "flex" else STATIC
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
