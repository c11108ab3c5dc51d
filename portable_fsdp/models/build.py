"""Build the model on the meta device, with the source of its weights.

Read `build_model` and `PASSES` first. A model of `model.factory` comes from `factory.py`; transformers models are built
here. A new technique is a pass: a function of the built model and what is known about it, which returns the next one.

`build_model` returns a model whose parameters hold no memory, and a `fill(fqn, slices)` (`weights.py`) that creates any
piece of any weight on the host. A backend requests the pieces that its devices need, one at a time, so that no host
holds the model twice.
"""

import copy
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from portable_fsdp.config import schema
from portable_fsdp.config.describe import matching
from portable_fsdp.models.architecture import (
    config_to_json,
    last_line,
    mapping_of,
    read_architecture,
    set_dropout,
    text_config,
)
from portable_fsdp.models.attention import (
    FLEX,
    STATIC,
    STATIC_TYPES,
    register_masked_attention,
    register_static_attention,
)
from portable_fsdp.models.experts import DENSE, choose_experts, register_experts, takes_implementation
from portable_fsdp.models.loss import DocumentArguments, LogitSteps, Loss, attach_loss, trace_logits
from portable_fsdp.models.tasks import CAUSAL_LM, Task, is_decoder_only
from portable_fsdp.models.weights import (
    DTYPES,
    BuiltModel,
    RandomWeights,
    TensorFile,
    fill_buffers,
    size_of,
)
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.factory import call_factory
from portable_fsdp.runtime.hub import before_transformers

if TYPE_CHECKING:  # a run of a text model doesn't load it
    from portable_fsdp.models.multimodal import Published

log = logging.getLogger("portable_fsdp")


@dataclass(frozen=True)
class _Asked:
    """The arguments of `build_model`."""

    model: schema.Model
    precision: schema.Precision
    seed: int
    seq_len: int
    vocabulary: int
    eager: bool = True
    loss: Loss | None = None
    keeps_ids: Callable[[], bool] = lambda: False
    packs_documents: bool = False
    context: int = 1
    task: Task = CAUSAL_LM
    seq_len_key: str = "data.seq_len"
    compiler: str | None = None
    blocks: bool = False

    @property
    def master(self) -> torch.dtype:
        return DTYPES[self.precision.master]


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
    context: int = 1,
    task: Task = CAUSAL_LM,
    seq_len_key: str = "data.seq_len",
    compiler: str | None = None,
    blocks: bool = False,
) -> BuiltModel:
    """Build the model that the config names, ready to be sharded.

    Args:
        model, precision: the config's sections. Weights are kept in `master`, frozen ones in `frozen`, and the loss
            takes logits in `output`; the backend decides the rest.
        seed: of the initial weights; not used with `model.pretrained`.
        seq_len: tokens per row, at most the positions of a causal model.
        vocabulary: number of ids of the tokenizer, at most the rows of the model's embedding; 0: no tokenizer.
        eager: operations run one by one, not as one compiled step: compute the loss by chunks, and a mask once.
        loss: replaces `loss.cross_entropy_sum`.
        keeps_ids: whether the tokenizer has all tokens of `model.pretrained`'s own under the same ids, so that the
            model may grow. Called only if the tokenizer has more ids.
        packs_documents: several documents share a row; forward gets their `positions` and `segments`.
        context: number of devices that split the tokens of a row.
        task: selects the transformers class for a config, and the loss: a causal model computes it in its forward.
        seq_len_key: the config key of `seq_len`, for messages.
        compiler: see `loss.attach_loss`.
        blocks: the engine computes attention over blocks fast: `model.attention=auto` uses it where it saves a mask.

    Raises ConfigError if no model fits the config, a pattern matches nothing in it, the model doesn't keep packed
    documents apart, or devices can't split its rows.
    """
    given = precision or schema.Precision(), seed, seq_len, vocabulary, eager, loss, keeps_ids, packs_documents
    asked = _Asked(model, *given, context, task, seq_len_key, compiler, blocks)
    if model.factory is not None:
        return _of_factory(asked)
    before_transformers()
    opened = _open_model(asked)
    bare = opened.made.model
    drawn = RandomWeights(opened.made.twin, seed, asked.master)
    built = BuiltModel(bare, drawn, opened.config, size_of(bare))
    for run_pass in PASSES:
        built = run_pass(built, opened)
    return replace(built, size=size_of(built.model))


def _of_factory(asked: _Asked) -> BuiltModel:
    from portable_fsdp.models.factory import open_factory, plain_size

    model = asked.model
    make = partial(call_factory, "model.factory", str(model.factory))
    module, fill = open_factory(f"model.factory: {model.factory}", make, asked.seed, asked.master)
    built = BuiltModel(module, fill, {}, plain_size(module))
    built = with_frozen(built, model, DTYPES.get(asked.precision.frozen))
    return replace(built, size=plain_size(module))


class _Made(NamedTuple):
    make: Callable[[Any], Any]  # makes the model of a config
    model: Any  # on meta
    twin: Any
    steps: LogitSteps | None
    problem: str = ""  # why the model takes its own attention, not the static one


@dataclass(frozen=True)
class _Opened:
    """What passes read: what was asked for, and the model as transformers makes it."""

    asked: _Asked
    made: _Made
    config: dict[str, Any]  # as given, in JSON
    published: "Published | None"  # the multimodal model whose text this is, if files have it
    file: TensorFile | None
    rows_before: int | None  # of a vocabulary that grew
    rates: dict[str, float]  # of dropout
    documents: DocumentArguments | None


def _open_model(asked: _Asked) -> _Opened:
    """Read the config or the files of the model, and make it on meta with the attention that fits."""
    model, file = asked.model, None
    if model.pretrained is None:
        config = read_architecture(model.architecture or {}, asked.task.name, drops=model.resolved_dropout != 0)
    else:
        from portable_fsdp.models.pretrained import open_pretrained

        config, file = open_pretrained(model, asked.task.name)
        if file.scheme not in (None, asked.precision.frozen):
            raise ConfigError(
                f"model.pretrained: {file.where}: its weights are quantised: expected precision.frozen={file.scheme}, "
                f"found {asked.precision.frozen}.\n  Set it to {file.scheme}, or use the model's unquantised folder."
            )
    text = text_config(config, asked.task.name)
    rows_before = None if file is None else _grow(text, asked, file)
    whole = None
    if text is not config:
        from portable_fsdp.models.multimodal import open_published

        whole = open_published(config, text, file)
        log.info("model: the text of %s trains; its other parts are left out", type(whole.model).__name__)
    _check_config(text, asked)
    as_given = config_to_json(text)
    _switch_off(text)
    rates = set_dropout(text, model.resolved_dropout)
    made = _with_attention(text, asked)
    if made.problem:
        name = type(made.model).__name__
        log.warning("model: %s takes its own attention (eager), not the static one: %s", name, made.problem)
    whole = None if whole is None or file is None else whole.holding(made.twin)
    return _Opened(asked, made, as_given, whole, file, rows_before, rates, _documents(made, asked))


def _with_attention(config: Any, asked: _Asked) -> _Made:
    """Make the model with the attention of `model.attention`; on an engine that compiles it must read no values."""
    attention = asked.model.attention
    if attention == "auto" and asked.blocks and asked.context == 1 and _wants_blocks(config, asked):
        attention = "flex"
    made = _make_with(attention, config, asked)
    if made.problem and not asked.eager and _reads_host(made.twin, asked.seq_len):
        raise ConfigError(
            f"model.attention: {type(made.model).__name__} needs its own attention ({made.problem}), which reads "
            "values on the host in each step.\n  Train it on native."
        )
    return made


def _documents(made: _Made, asked: _Asked) -> DocumentArguments | None:
    """Return what the forward makes of the documents in a row. Raises ConfigError for a model that doesn't keep them
    apart, or whose rows devices can't split."""
    attention = made.model.config._attn_implementation
    if asked.context > 1:
        from portable_fsdp.models.trials import require_rows_that_split

        require_rows_that_split(made.model, made.make, asked.seq_len, asked.context)
    if not (asked.packs_documents or attention == FLEX or asked.context > 1):
        return None
    from portable_fsdp.models.document_masks import document_arguments, windows_of

    windows = windows_of(made.twin, asked.seq_len) if attention == FLEX else ()
    if asked.packs_documents:
        from portable_fsdp.models.trials import find_crossing

        if problem := find_crossing(made.model, made.make, eager=asked.eager):
            raise ConfigError(
                f"data.packing=documents: {problem}.\n  Set data.packing=none (one document per row, padded)."
            )
    kinds = {"eager": asked.eager, "packs": asked.packs_documents, "splits_rows": asked.context > 1}
    return document_arguments(attention, DTYPES[asked.precision.compute], **kinds, windows=windows)


def documents_problem(model: schema.Model, seq_len: int) -> str:
    """Say how a causal model of transformers lets documents of one row affect each other; empty if it doesn't.

    Reads only the model's config, and says the same on every engine. Raises ConfigError if no such model can be built.
    """
    before_transformers()
    if model.pretrained is None:
        drops = model.resolved_dropout != 0
        config = read_architecture(model.architecture or {}, drops=drops, logs=False)
    else:
        from portable_fsdp.models.pretrained import open_config

        config = open_config(model)
    config = text_config(config)
    _switch_off(config)
    set_dropout(config, model.resolved_dropout)
    made = _with_attention(config, _Asked(model, schema.Precision(), seed=0, seq_len=seq_len, vocabulary=0))
    from portable_fsdp.models.trials import find_crossing

    return find_crossing(made.model, made.make, eager=True)


# ------------------------------------------------------------------------------------------------------- the passes


def _dropouts(built: BuiltModel, opened: _Opened) -> BuiltModel:
    model = opened.asked.model
    if not (opened.rates or model.dropout):
        return built
    from portable_fsdp.models.dropout import choose_dropouts

    has_kernels = opened.made.model.config._attn_implementation in (STATIC, FLEX) and model.attention != "static"
    return replace(built, dropout=choose_dropouts(built.model, model, opened.rates, has_kernels=has_kernels))


def _experts(built: BuiltModel, opened: _Opened) -> BuiltModel:
    compute = DTYPES[opened.asked.precision.compute]
    choose_experts(built.model, opened.asked.model.experts, compute.itemsize, eager=opened.asked.eager)
    return built


def _loss(built: BuiltModel, opened: _Opened) -> BuiltModel:
    asked = opened.asked
    if asked.task.name == CAUSAL_LM.name:
        output = DTYPES.get(asked.precision.output)  # None: "auto", which changes nothing
        of_model = opened.documents, opened.made.steps, asked.compiler
        attach_loss(built.model, output, asked.eager, asked.loss, *of_model)
    built.model.train()
    return built


def _adapters(built: BuiltModel, opened: _Opened) -> BuiltModel:
    asked = opened.asked
    if asked.model.lora is None:
        return built
    from portable_fsdp.models.lora import with_adapters

    grows = opened.rows_before is not None
    return with_adapters(built, asked.model.lora, asked.seed, asked.master, opened.file, grows=grows)


def _frozen(built: BuiltModel, opened: _Opened) -> BuiltModel:
    return with_frozen(built, opened.asked.model, DTYPES.get(opened.asked.precision.frozen))


def _base(built: BuiltModel, opened: _Opened) -> BuiltModel:
    asked = opened.asked
    if asked.model.lora is None and asked.precision.scheme is None:
        return built
    from portable_fsdp.models.lora import with_base, with_norms

    built = built if asked.model.lora is None else with_norms(built, asked.model.lora)
    return built if opened.file is None else with_base(built, asked.model, opened.file)


def _values(built: BuiltModel, opened: _Opened) -> BuiltModel:
    """Create real buffers, and weights in the master dtype; use the values that the file has."""
    model, drawn, file, twin = built.model, cast(RandomWeights, built.fill), opened.file, opened.made.twin
    unset = fill_buffers(model, twin)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(opened.asked.master)
    if file is not None:
        from portable_fsdp.models.pretrained import PretrainedWeights

        weights = PretrainedWeights(
            file,
            model,
            twin,
            drawn,
            allow=opened.asked.model.allow,
            rows_before=opened.rows_before,
            published=opened.published,
        )
        stored = {name: buffer for name, buffer in model.named_buffers() if weights.holds(name)}
        for name, buffer in stored.items():
            buffer.copy_(weights(name, tuple(slice(0, size) for size in buffer.shape)))
        for name, parameter in model.named_parameters():
            if weights.holds(name):  # from_pretrained trains all, also tables that a new model freezes (Marian)
                parameter.requires_grad_(True)
        built, unset = replace(built, fill=weights, weights=weights), unset - set(stored)
    if unset:
        raise ConfigError(
            f"model: {type(model).__name__}: transformers can't recompute the buffer {sorted(unset)[0]}: it only "
            "creates it with the model.\n  Start from a folder that has it (model.pretrained), or use another model."
        )
    return built


def with_frozen(built: BuiltModel, model: schema.Model, dtype: torch.dtype | None) -> BuiltModel:
    """Freeze the weights that `model.freeze` matches, or those that `model.train_only` doesn't, and keep them in
    `dtype`. A tied weight matches under any of its FQNs, one of a multimodal model also under its published name."""
    parameters = dict(built.model.named_parameters(remove_duplicate=False))
    names = parameters | {built.published_name(name): weight for name, weight in parameters.items()}
    key, patterns = ("model.train_only", model.train_only) if model.train_only else ("model.freeze", model.freeze)
    matched = {id(names[name]) for pattern in patterns for name in matching(key, pattern, names)}
    for parameter in parameters.values():
        if (id(parameter) in matched) != bool(model.train_only):
            parameter.requires_grad_(False)
    frozen = {fqn: parameter for fqn, parameter in parameters.items() if not parameter.requires_grad}
    if len(frozen) == len(parameters):
        raise ConfigError(
            f"{key}: {list(patterns)} freeze all {len(parameters)} parameters, but one must train.\n  Name others."
        )
    if dtype is None:
        return built
    for parameter in frozen.values():
        parameter.data = parameter.data.to(dtype)
    fill = built.fill
    return replace(built, fill=lambda fqn, at: fill(fqn, at).to(dtype) if fqn in frozen else fill(fqn, at))


PASSES = (_dropouts, _experts, _values, _loss, _adapters, _frozen, _base)
"""What makes a transformers model ready to be sharded, in order: adapters hold the weights that files have, what is
frozen includes the base of adapters, and DoRA's norms are those of the base in its final dtype."""


# ------------------------------------------------------------------------------------------------ the architecture


def _grow(config: Any, asked: _Asked, file: TensorFile) -> int | None:
    """Grow the model to one row per id of an extended tokenizer; return its rows before, or None if it doesn't grow."""
    before, vocabulary = getattr(config, "vocab_size", None), asked.vocabulary
    if not isinstance(before, int) or before >= vocabulary or not asked.keeps_ids():
        return None
    config.vocab_size = vocabulary
    log.info(
        f"model.pretrained: {file.where}: the tokenizer has {vocabulary:,} ids, the model rows for {before:,}: "
        f"embedding and head grow by {vocabulary - before:,} rows, each the mean of the old ones"
    )
    return before


def _check_config(config: Any, asked: _Asked) -> None:
    positions, ids = (getattr(config, name, None) for name in ("max_position_embeddings", "vocab_size"))
    if isinstance(positions, int) and 0 < positions < asked.seq_len:
        raise ConfigError(
            f"{asked.seq_len_key}: expected at most {positions} (positions of the model), found {asked.seq_len}.\n"
            f"  Lower {asked.seq_len_key}, or use a model with more positions."
        )
    heads, kv_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"model: expected num_key_value_heads that divides num_attention_heads={heads}, found {kv_heads}."
        )
    vocabulary = asked.vocabulary
    if isinstance(ids, int) and ids < vocabulary:
        raise ConfigError(
            f"model: expected vocab_size of at least {vocabulary} (the ids of data.tokenizer), found {ids}.\n"
            f"  Set model.architecture.vocab_size={vocabulary}, or name the model's own tokenizer in data.tokenizer.\n"
            "  A pretrained model grows only with a tokenizer that has all of its own tokens under the same ids."
        )
    if getattr(config, "z_loss_coefficient", None):
        raise ConfigError(
            "model: expected z_loss_coefficient=0, found "
            f"{config.z_loss_coefficient}: this loss of logits isn't supported.\n"
            "  Set it to 0 in model.architecture (in a folder: in its config.json)."
        )


def _switch_off(config: Any) -> None:
    """Switch off what training doesn't read: the key-value cache, and router logits, whose loss `routers.py` adds."""
    config.use_cache = False
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False


def make_model(config: Any, attention: str, task: Task) -> Any:
    """Make the model from a copy of its transformers config, with experts in static shapes.

    `attention`: a value of `model.attention`. Raises ConfigError for one that the model can't have.
    """
    from transformers.models.auto import modeling_auto

    register_experts()
    register_static_attention()
    if attention == "flex":
        from transformers import AttentionInterface

        from portable_fsdp.models.document_masks import block_attention

        AttentionInterface.register(FLEX, block_attention)
    kind: Any = getattr(modeling_auto, mapping_of(task.name))[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    chosen = {"attn_implementation": _attention(kind, attention), "experts_implementation": DENSE}
    model = kind._from_config(copy.deepcopy(config), **chosen, dtype=torch.float32)
    if task.name == CAUSAL_LM.name or is_decoder_only(model):
        return model
    if attention in ("static", "flex"):
        raise ConfigError(
            f"model.attention: {attention} needs causal attention, which {kind.__name__} doesn't have.\n"
            "  Set model.attention=auto."
        )
    if attention == "auto":
        chosen["attn_implementation"] = register_masked_attention() if kind._supports_sdpa else "eager"
        model = kind._from_config(copy.deepcopy(config), **chosen, dtype=torch.float32)
    return model


def _make_with(attention: str, config: Any, asked: _Asked) -> _Made:
    """Make the model with `attention`, or with its own where the static one can't run or computes something else.

    Raises ConfigError if the attention that the config names isn't the model's.
    """
    try:
        made = _make(config, attention, asked)
        chosen = made.model.config
        if chosen._attn_implementation not in (STATIC, FLEX) or chosen.model_type in STATIC_TYPES:
            return made
        from portable_fsdp.models.trials import find_difference

        if not (problem := find_difference(made.model, partial(make_model, task=asked.task))):
            return made
        own = _make(config, "eager", asked)
    except _MisfitError as error:
        if attention not in ("auto", "static"):
            raise
        try:
            own = _make(config, "eager", asked)
        except _MisfitError:
            raise error from None
        problem = str(error).partition("\n")[0].removeprefix("model: ")
    name = type(own.model).__name__
    if asked.model.attention != "auto":
        raise ConfigError(
            f"model.attention={attention}: it isn't that of {name}: {problem}.\n  Set model.attention=auto."
        )
    return own._replace(problem=problem)


def _make(config: Any, attention: str, asked: _Asked) -> _Made:
    """Make the model on meta, and run a row through its twin."""
    make = partial(make_model, attention=attention, task=asked.task)
    bare, twin = _on_meta(config, make), _on_meta(config, make)
    steps = None
    if asked.task.name == CAUSAL_LM.name:
        _check_causal(bare, asked.task)
        steps = _check_forward(twin, asked)
    return _Made(make, bare, twin, steps)


def _on_meta(config: Any, make: Callable[[Any], Any]) -> Any:
    try:
        with torch.device("meta"):
            return make(config)
    except ConfigError:
        raise
    except Exception as error:  # an activation's name, heads of 0: each fails in its own way
        raise _misfit(f"{type(config).__name__}: can't build a model from it", error) from error


class _MisfitError(ConfigError):
    """transformers can't build the model, or run a row through it."""


def _misfit(problem: str, error: Exception) -> ConfigError:
    return _MisfitError(
        f"model: {problem}: {type(error).__name__}: {last_line(error)}\n"
        "  Compare its sizes with those of an existing model, or use another model."
    )


def _check_forward(model: Any, asked: _Asked) -> LogitSteps | None:
    """Run a row through a model on meta: sizes that don't fit each other fail here, not in step 1.

    Returns the steps from the head's output to the logits, see `trace_logits`; None if unknown. If the model reads
    values (transformers looks for padding), the run ends there without an error, except for experts that choose their
    tokens on the host.
    """
    try:
        with torch.no_grad(), torch.device("meta"):
            return trace_logits(model, torch.zeros(1, asked.seq_len, dtype=torch.int64))
    except Exception as error:
        if "meta tensors" not in str(error) and not isinstance(error, NotImplementedError):
            row = f"a row of {asked.seq_len} tokens ({asked.seq_len_key})"
            raise _misfit(f"{type(model).__name__} can't run {row}", error) from error
        running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        for name, module in model.named_modules():
            if "Experts" not in type(module).__name__ or takes_implementation(module):
                continue
            block = model.get_submodule(name.rpartition(".")[0])  # with its router
            if any(each is module or each is block for each in running):
                raise ConfigError(
                    f"model: {type(model).__name__}: the experts {name} don't run in static shapes: they read on the "
                    "host which tokens they got.\n  Use a model whose experts implementation can be set in "
                    "transformers (mixtral, qwen3_moe, deepseek_v3, gpt_oss, ...)."
                ) from error
        return None


def _reads_host(model: Any, seq_len: int) -> bool:
    """Whether a forward of this model on meta reads a value, which only the host could know."""
    try:
        with torch.no_grad(), torch.device("meta"):
            model(input_ids=torch.zeros(1, seq_len, dtype=torch.int64), use_cache=False)
    except Exception as error:  # torch raises several; other problems are those of `_check_forward`
        return "meta tensors" in str(error) or isinstance(error, NotImplementedError)
    return False


def _check_causal(model: nn.Module, task: Task) -> None:
    """Raise ConfigError for an encoder: transformers lists some as causal, but they see the tokens to predict."""
    flags = [flag for module in model.modules() if isinstance(flag := getattr(module, "is_causal", None), bool)]
    if not flags or any(flags):
        return
    from portable_fsdp.models.trials import is_causal

    # A mask that the model makes may be causal all the same (GIT, BigBird-Pegasus).
    if not is_causal(model, partial(make_model, task=task)):
        raise ConfigError(
            f"model: {type(model).__name__} is configured as an encoder, but its attention must be causal.\n"
            "  Set model.architecture.is_decoder=true (in a folder: in its config.json), or use another model."
        )


def _wants_blocks(config: Any, asked: _Asked) -> bool:
    """Whether attention over blocks saves a mask of seq x seq in this model: packed documents, windows and sinks.

    A plain causal kernel is as fast, so other models keep it. So do those that attention over blocks can't express:
    narrow heads, dropout of attention, layers that get no arguments of the forward.
    """
    from portable_fsdp.models.document_masks import windows_of

    try:
        model = _on_meta(config, partial(make_model, attention="flex", task=asked.task))
        windows = windows_of(model, asked.seq_len)
    except (ConfigError, ValueError):
        return False
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    return asked.packs_documents or has_sinks or any(window is not None for window in windows)


def _attention(kind: Any, requested: str) -> str:
    """Return the attention's name in transformers. `auto`: static, except for models with their own (ALiBi: Bloom,
    Falcon)."""
    # Private: the flag is missing in models that accept any all the same (stablelm, qwen3_next).
    takes_any = bool(getattr(kind, "_supports_attention_backend", False)) or kind._can_set_attn_implementation()
    if requested in ("static", "flex") and not takes_any:
        raise ConfigError(f"model.attention: {kind.__name__} has an attention of its own; set model.attention=auto.")
    if requested in ("sdpa", "eager"):
        return requested
    if takes_any:
        return FLEX if requested == "flex" else STATIC
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
