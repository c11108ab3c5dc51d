"""Build the parts of a run from its config, in order: the training (`PASSES`), its checkpoints, its batches.

The trainer, the planner, the tests and custom loops (examples/own_loop.py) use these functions.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from portable_fsdp.backends.contract import Backend, Fill, ShardPolicy
from portable_fsdp.backends.nested import floats_in
from portable_fsdp.backends.state import dropouts
from portable_fsdp.checkpoint.manager import Checkpoints, Fingerprint, Resumed
from portable_fsdp.config.describe import each_value
from portable_fsdp.config.schema import Config
from portable_fsdp.data.batches import Batches, MakeKeys
from portable_fsdp.data.build import Corpus
from portable_fsdp.data.packing import ENDLESS, Rows, count_labels, count_values, tokens_of
from portable_fsdp.data.tokenize import Tokenizer, keeps_ids, require_own_ids
from portable_fsdp.layout import BatchSplit, no_padding, split_batch, split_note, weight_spec
from portable_fsdp.models.architecture import architecture_mapping
from portable_fsdp.models.attention import FLEX, attend
from portable_fsdp.models.build import build_model, make_model
from portable_fsdp.models.experts import OneDevice, expert_layouts, expert_modules
from portable_fsdp.models.loss import Loss
from portable_fsdp.models.tasks import CAUSAL_LM, SINGLE_LABEL, Task, find_task, is_decoder_only, with_problem
from portable_fsdp.models.weights import DTYPES, BuiltModel, names_of_weights
from portable_fsdp.models.wrap import find_layers, find_units, modules_of_own_dtype, recomputed_layers, table_weights
from portable_fsdp.optim.optimizer import check_schedule, make_optimizer, parameter_groups
from portable_fsdp.runtime.errors import ConfigError, without_passwords
from portable_fsdp.runtime.factory import call_user
from portable_fsdp.runtime.host import in_units
from portable_fsdp.runtime.hub import is_hub_id
from portable_fsdp.train.evaluate import Evaluator, Sampler
from portable_fsdp.train.memory_need import memory_need, require_memory
from portable_fsdp.train.preflight import checkpoint_folder
from portable_fsdp.train.step import TrainStep, train_step

if TYPE_CHECKING:  # a run loads those that it needs
    from portable_fsdp.models.dropout import Draws
    from portable_fsdp.models.routers import Routers
    from portable_fsdp.models.weights import Base
    from portable_fsdp.quantised import ByteTable
    from portable_fsdp.train.row_trial import RowTrial

log = logging.getLogger("portable_fsdp")


@dataclass(frozen=True)
class Training:
    """The model, optimizer and step, laid out on the engine."""

    built: BuiltModel
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: TrainStep
    task: Task
    trial: "RowTrial | None"  # for `data.factory`
    rows: int  # of a row shard in a micro batch
    accumulation: int  # micro batches per step
    ties: dict[str, str]  # FQN -> the first FQN of the same weight

    @property
    def keys(self) -> MakeKeys | None:
        """Makes the keys of dropout, a further tensor of each batch."""
        return None if self.step.draws is None else self.step.draws.keys


def build_training(
    config: Config,
    backend: Backend,
    vocabulary: Tokenizer | int | None,
    *,
    fill: bool = True,
    loss: Loss | None = None,
    rows: Rows | None = None,
) -> Training:
    """Build model, optimizer and step; writes no files. *collective*

    `vocabulary`: the corpus's tokenizer (None: no tokenizer), or the number of its ids if there is no model.pretrained
    with its own ids. Without `fill` the weights are placeholders without memory. `loss` replaces the causal model's
    loss, see `build_model`. `rows`: the corpus's rows; the first are tried on the model, except for text. Raises
    ConfigError if the model or the devices don't support the config, DataError if the task can't use the rows.
    """
    split, eager = split_batch(config, backend.row_shards), backend.expected_compilations == 0
    size, tokenizer = _ids(config, vocabulary, fill=fill)
    if fill and config.model.pretrained is not None:
        from portable_fsdp.models.tensor_files import require_intact

        require_intact(config, backend)
    task, seq_len, first_rows = find_task(config.train.task, eager=eager), config.data.seq_len, None
    if rows is not None and (config.data.factory is not None or not task.counts_labels):
        first_rows = rows.of_each_shape(np.arange(config.train.resolved_micro_batch) % len(rows))
        seq_len = tokens_of(first_rows[-1])
    built = build_model(
        config.model,
        config.precision,
        seed=config.run.seed,
        seq_len=seq_len,
        vocabulary=size,
        eager=eager,
        loss=loss,
        keeps_ids=lambda: tokenizer is not None and keeps_ids(config.model, config.data.tokenizer, tokenizer),
        packs_documents=config.data.factory is None and config.data.resolved_packing == "documents",
        context=config.sharding.context,
        task=task,
        seq_len_key="data.buckets" if config.data.buckets else "data.seq_len",
        compiler=config.compile.compiler,
        blocks=backend.runs_blocks,
    )
    context = _Context(config, backend, split, fill, loss, first_rows, seq_len)
    draft = _Draft(built, task, shard_policy(config, built.model, built.base))
    for run_pass in PASSES:
        draft = run_pass(draft, context)
    return _lay_out(draft, context)


def _ids(config: Config, vocabulary: Tokenizer | int | None, *, fill: bool) -> tuple[int, Tokenizer | None]:
    """Return the number of the tokenizer's ids, and the tokenizer if it is known."""
    if isinstance(vocabulary, int):
        if fill and config.model.pretrained is not None:
            raise TypeError("build_training: needs corpus.tokenizer, to compare its ids with those of model.pretrained")
        return vocabulary, None
    if vocabulary is None:
        return 0, None
    require_own_ids(config.model, config.data.tokenizer, vocabulary)
    return vocabulary.vocab_size, vocabulary


@dataclass(frozen=True)
class _Context:
    """What passes read."""

    config: Config
    backend: Backend
    split: BatchSplit
    fill: bool
    loss: Loss | None
    first_rows: list[dict[str, Tensor]] | None  # one batch of each shape, if the model is tried on them
    seq_len: int

    @property
    def tells(self) -> bool:
        """Whether this process logs what the run is: not one of a plan."""
        return self.fill and self.backend.process.index == 0


@dataclass(frozen=True)
class _Draft:
    """A training before it is laid out. Each pass returns the next one."""

    built: BuiltModel
    task: Task
    policy: ShardPolicy
    trial: "RowTrial | None" = None
    routers: "Routers | None" = None
    draws: "Draws | None" = None


def _pad_token(draft: _Draft, context: _Context) -> _Draft:
    takes_last = draft.task.name == "sequence_classification" and is_decoder_only(draft.built.model)
    if context.config.data.buckets and takes_last and draft.built.config.get("pad_token_id") != 0:
        raise ConfigError(
            "data.buckets: pads input_ids with 0, but this model classifies the last token that isn't pad_token_id.\n"
            "  Set model.architecture.pad_token_id=0 if 0 is no token of the rows, or pad the rows yourself."
        )
    return draft


def _casts(draft: _Draft, context: _Context) -> _Draft:
    _cast_buffers(context.config, draft.built.model)
    if draft.task.name != CAUSAL_LM.name:  # whose forward returns its loss
        _cast_outputs(context.config, draft.built.model)
    return draft


def _tables(draft: _Draft, context: _Context) -> _Draft:
    if not (draft.policy.tables and context.fill):
        return draft
    from portable_fsdp.models.quantised import with_tables

    return replace(draft, built=with_tables(draft.built, draft.policy.tables, context.config))


def _row_trial(draft: _Draft, context: _Context) -> _Draft:
    if context.first_rows is None:
        return draft
    from portable_fsdp.train.row_trial import try_rows

    task = with_problem(draft.task, draft.built.model, context.first_rows[-1])
    is_fixed = context.backend.expected_compilations > 0
    trial = try_rows(context.first_rows, draft.built.model, task, has_fixed_shapes=is_fixed, policy=draft.policy)
    return replace(draft, task=task, trial=trial)


def _routers(draft: _Draft, context: _Context) -> _Draft:
    return replace(draft, routers=routers_of(context.config, draft.built, draft.task, draft.policy))


def _padding(draft: _Draft, context: _Context) -> _Draft:
    if context.split.padding:
        _require_paddable(context.config, context.backend, draft.built, context.loss)
    return draft


def _notes(draft: _Draft, context: _Context) -> _Draft:
    config = context.config
    if context.tells:
        if context.backend.device.type == "cuda":
            _warn_of_masks(config, draft.built, context.split.rows)
        if note := split_note(config, context.backend.row_shards):
            log.warning(note)
        if draft.built.dropout:
            log.info(draft.built.dropout)
    return draft


def _keyed_draws(draft: _Draft, context: _Context) -> _Draft:
    config, model, policy = context.config, draft.built.model, draft.policy
    drawing, drops = dropouts(model), False
    if config.model.factory is not None:
        from portable_fsdp.train.row_trial import require_rows_first

        tokens: tuple[tuple[int, ...], torch.dtype] = (context.seq_len,), torch.int64
        row = draft.trial.row if draft.trial else {"input_ids": tokens, "labels": tokens}
        drops = require_rows_first(model, draft.task, row, policy)
    if drawing and policy.tensor is not None and config.memory.classes:
        raise ConfigError(
            f"memory.classes: with sharding.tensor={config.sharding.tensor} only whole layers can be recomputed, "
            f"since {drawing[0]} has dropout.\n  Set memory.classes=[], or model.dropout=0."
        )
    if not (drawing or drops):
        return draft
    from portable_fsdp.models.dropout import Draws

    draws = Draws(model, config.run.seed, sorted({*policy.layers, *policy.recompute}))
    return replace(draft, draws=draws, policy=replace(policy, draws=draws))


PASSES = (_pad_token, _casts, _tables, _row_trial, _routers, _padding, _notes, _keyed_draws)
"""What turns a built model into a training, in order. The trial of rows runs the model before dropout draws by keys."""


def _lay_out(draft: _Draft, context: _Context) -> Training:
    config, backend, built, split = context.config, context.backend, draft.built, context.split
    ties = _ties(built.model)
    model, optimizer = _laid_out(config, backend, built.model, draft.policy, built.fill if context.fill else None, ties)
    if draft.draws is not None:
        draft.draws.attach()
    step = train_step(
        backend,
        model,
        optimizer,
        accumulation=split.accumulation,
        max_grad_norm=config.train.max_grad_norm,
        task=draft.task,
        draws=draft.draws,
        routers=draft.routers,
    )
    return Training(built, model, optimizer, step, draft.task, draft.trial, split.rows, split.accumulation, ties)


def check_model(config: Config, backend: Backend) -> None:
    """Raise ConfigError, before minutes of tokenizing, for an axis or router biases that the model can't have. Checks
    no model of the hub, which would be downloaded first, and no rows of `data.factory`, whose length isn't known."""
    model, context = config.model, config.sharding.context
    has_either = max(config.sharding.expert, context) > 1 or model.router_bias_rate
    if not has_either or is_hub_id(model.pretrained or "") or config.data.factory is not None:
        return
    eager, seq_len, precision = backend.expected_compilations == 0, config.data.seq_len, config.precision
    task = find_task(config.train.task, eager=eager)
    built = build_model(
        model, precision, seed=0, seq_len=seq_len, vocabulary=0, eager=eager, context=context, task=task
    )
    routers_of(config, built, task, shard_policy(config, built.model, built.base))


def _warn_of_masks(config: Config, built: BuiltModel, rows: int) -> None:
    """Warn of a mask of seq x seq for packed documents."""
    name = getattr(getattr(built.model, "config", None), "_attn_implementation", FLEX)
    if config.data.factory is None and config.data.resolved_packing == "documents" and name != FLEX:
        size = rows * config.data.seq_len**2 * DTYPES[config.precision.compute].itemsize
        log.warning(
            "data.packing=documents: attention reads a mask of %s in each layer. compile.enabled=auto computes only "
            "the blocks of scores that documents have.",
            in_units(size),
        )


def _require_paddable(config: Config, backend: Backend, built: BuiltModel, loss: Loss | None) -> None:
    """Raise ConfigError if rows whose labels don't count would change the step of this model."""
    if loss is not None:
        reason = "the loss that build_training got may count padding"
    elif built.config.get("output_router_logits"):
        reason = "output_router_logits=true would count the choices of padding"
    elif norms := _batch_norms(built.model):
        reason = f"batch norm ({norms[0]}) would see padding"
    else:
        return
    raise no_padding(config, backend.row_shards, reason)


def routers_of(config: Config, built: BuiltModel, task: Task, policy: ShardPolicy) -> "Routers | None":
    """Return what counts the choices of a transformers model's routers, and balances them; None: nothing does. Raises
    ConfigError for a router loss or biases that the model, the task or compiled layers can't have."""
    has_loss, compiles = bool(built.config.get("output_router_logits")), config.compile
    # A loop over layers would keep the counts of its trace.
    counts_loads = not compiles.scan_layers and built.config and expert_modules(built.model)
    if not (has_loss or config.model.router_bias_rate or counts_loads):
        return None
    from portable_fsdp.models.routers import Routers

    if has_loss and (task.name != CAUSAL_LM.name or compiles.enabled or compiles.scan_layers):
        reason, fix = f"train.task={task.name} has no router loss", ""
        if task.name == CAUSAL_LM.name:
            reason = "the layers' compiled backward can't read counts that are known only after the forward"
            fix = "compile.enabled=false and compile.scan_layers=false, or "
        raise ConfigError(
            f"model: output_router_logits=true: {reason}.\n"
            f"  Set {fix}output_router_logits=false in model.architecture (in a folder: in its config.json)."
        )
    rate, drops = config.model.router_bias_rate, config.sharding.expert_capacity is not None
    return Routers(built.model, policy.tensor, rate, has_loss=has_loss, drops=drops)


def shard_model(make: Callable[[], nn.Module], config: Config, backend: Backend) -> nn.Module:
    """Shard your own module, as `shard`, for optimizers of your own (`Backend.shard_optimizer`). *collective*"""
    module, fill = _own_module("shard_model", make, config)
    policy = shard_policy(config, module)
    _warn_of_draws(module, policy)
    require_memory(config, backend, memory_need(module, make_optimizer(config.optim), [], eager=True, tables={}))
    return backend.shard_model(module, policy, fill)


def shard(make: Callable[[], nn.Module], config: Config, backend: Backend) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard your own module and make its optimizer, by `sharding`, `precision`, `memory` and `optim`. *collective*

    `make` returns the module. It runs on the meta device; its operations on a weight run again for each piece of that
    weight where the piece is needed, seeded by run.seed and the weight's name. Raises ConfigError if the model or the
    devices don't support the config.
    """
    module, fill = _own_module("shard", make, config)
    return _laid_out(config, backend, module, shard_policy(config, module), fill, _ties(module))


def _own_module(caller: str, make: Callable[[], nn.Module], config: Config) -> tuple[nn.Module, Fill]:
    from portable_fsdp.models.factory import open_factory

    name, master = f"{caller}: {getattr(make, '__name__', 'make')}", DTYPES[config.precision.master]
    if isinstance(make, nn.Module):
        raise ConfigError(
            f"{caller}: expected a function that returns the module, found a {type(make).__name__}.\n  Pass the class, "
            f"or a function that makes it: {caller}(lambda: {type(make).__name__}(...), config, engine)."
        )
    for axis in ("context", "expert"):
        if getattr(config.sharding, axis) > 1:
            raise ConfigError(
                f"{name}: sharding.{axis} needs a transformers model that the config names.\n  Set sharding.{axis}=1."
            )
    module, fill = open_factory(name, partial(call_user, name, make), config.run.seed, master)
    _cast_buffers(config, module)
    _cast_outputs(config, module)
    return module, fill


def _cast_buffers(config: Config, model: nn.Module) -> None:
    dtype = DTYPES.get(config.precision.buffers)  # None: "auto"
    for buffer in model.buffers():
        if dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)  # in place: a buffer with several names stays one tensor


def _cast_outputs(config: Config, model: nn.Module) -> None:
    """Make the model return its floating point tensors in `precision.output`, in whatever objects they are."""
    dtype = DTYPES.get(config.precision.output)  # None: "auto"
    if dtype is not None:
        model.register_forward_hook(lambda _, __, output: floats_in(dtype)(output))


def _laid_out(
    config: Config, backend: Backend, model: nn.Module, policy: ShardPolicy, fill: Fill | None, ties: dict[str, str]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Lay out a meta model on the engine and make its optimizer. Without `fill` neither uses memory."""
    if fill is not None:
        _warn_of_draws(model, policy)
    shapes = {fqn: tuple(weight.shape) for fqn, weight in model.named_parameters() if weight.requires_grad}
    frozen = [fqn for fqn, weight in model.named_parameters() if not weight.requires_grad]
    groups = parameter_groups(shapes, config.optim, ties=ties, frozen=frozen, tables=table_weights(model))
    make = make_optimizer(config.optim, DTYPES[config.precision.compute])
    if fill is not None:  # the planner has other hardware
        eager = backend.expected_compilations == 0
        need = memory_need(model, make, groups, eager=eager, tables=policy.tables)
        require_memory(config, backend, need)
    if policy.tables:
        from portable_fsdp.quantised import place

        place(model, policy.tables)
    sharded = backend.shard_model(model, policy, fill)
    return sharded, backend.build_optimizer(make, groups, sharded)


def _warn_of_draws(model: nn.Module, policy: ShardPolicy) -> None:
    if drawing := [*dropouts(model, by_keys=policy.draws is not None), *_batch_norms(model)]:
        log.warning(
            "model: %s%s: dropout and batch norm make losses depend on the number of devices (docs/any_model.md)",
            ", ".join(drawing[:3]),
            ", ..." * (len(drawing) > 3),
        )


def _batch_norms(model: nn.Module) -> list[str]:
    kind = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]  # SyncBatchNorm too
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def _ties(model: nn.Module) -> dict[str, str]:
    return {fqn: first for first, *others in names_of_weights(model).values() for fqn in others}


def shard_policy(config: Config, model: nn.Module, base: "Base | None" = None) -> ShardPolicy:
    """Convert the config to plain values for this model. `base`: where its frozen weights come from. Raises ConfigError
    for a name that the model doesn't have."""
    sharding, precision, memory = config.sharding, config.precision, config.memory
    layers = find_layers(model, sharding)
    tensor = trial = None
    if sharding.tensor > 1:
        from portable_fsdp.models.parallel import tensor_plan
        from portable_fsdp.models.trials import require_plan

        tensor = tensor_plan(model, config)
        trial = partial(require_plan, model, config, tensor, make_model)
    experts = expert_modules(model) if config.model.experts == "auto" else ()
    units = find_units(model, sharding)
    if config.model.lora is not None:
        from portable_fsdp.models.lora import check_adapters

        check_adapters(config, model, units)
    layouts = {fqn: weight_spec(weight.dim()) for fqn, weight in model.named_parameters()}
    if sharding.expert > 1:
        layouts |= expert_layouts(model, sharding.expert)
    if tensor is not None:
        layouts = {fqn: tensor.layout(fqn, spec) for fqn, spec in layouts.items()}
    modules = {name: DTYPES[dtype] for name, dtype in modules_of_own_dtype(model, precision).items()}
    tables: Mapping[str, ByteTable] = {}
    if precision.scheme is not None:
        from portable_fsdp.models.quantised import quantised_tables, table_layouts

        tables = quantised_tables(model, precision.scheme, layers, modules, layouts, tensor, base)
        layouts, tensor = table_layouts(tables, layouts, tensor)
    return ShardPolicy(
        units=units,
        layouts=layouts,
        tables=tables,
        tensor=tensor,
        require_plan=trial,
        experts=experts,
        process_experts=OneDevice,
        expert_capacity=sharding.expert_capacity,
        layers=layers,
        compute=DTYPES[precision.compute],
        cast_inputs=precision.cast_inputs,
        reduce=DTYPES["float32" if precision.reduce == "auto" else precision.reduce],
        modules=modules,
        products=precision.products,
        recompute=recomputed_layers(model, layers, memory),
        save_ops=memory.save_ops,
        reshard_after_forward=sharding.reshard_after_forward
        or sharding.strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"),
        forward_prefetch=sharding.forward_prefetch,
        backward_prefetch=sharding.backward_prefetch,
        backward_prefetch_units=sharding.backward_prefetch_units,
        cpu_offload=memory.cpu_offload,
        offload_activations=memory.offload == "activations",
        compile_backend=config.compile.compiler,
        scan_layers=config.compile.scan_layers,
        attention=attend,
    )


def total_steps(config: Config, rows: int) -> int:
    """Return the optimizer updates of the whole run: train.steps, or the full steps in train.epochs over `rows` rows.
    Raises ConfigError if the epochs don't fill one step, or the schedule doesn't fit into the steps."""
    train = config.train
    if train.steps is None and rows >= ENDLESS:
        raise ConfigError(
            "train.epochs: the dataset of data.factory is a stream without a length.\n"
            "  Set train.steps and train.epochs=null."
        )
    # Use the decimal as written: 0.29 epochs of 100 rows are 29 rows; binary floats would give 28.
    steps = train.steps or math.floor(Fraction(str(train.epochs)) * rows / train.global_batch)
    if steps < 1:
        raise ConfigError(
            f"train.epochs: expected at least one step of train.global_batch={train.global_batch} sequences, "
            f"found {train.epochs:g} epochs of {rows} sequences.\n"
            "  Raise train.epochs, lower train.global_batch or data.seq_len, or add more text."
        )
    check_schedule(config.optim, steps)
    return steps


def build_evaluator(config: Config, backend: Backend, training: Training, corpus: Corpus) -> Evaluator | None:
    """Build the evaluator for `data.eval_split`; None without `train.eval_every`."""
    if corpus.eval_rows is None:
        return None
    if config.train.eval_every is None:
        log.warning("data.eval_split: %d rows are held out but not used; set train.eval_every", len(corpus.eval_rows))
        return None
    return Evaluator(backend, training.model, corpus.eval_rows, config.train, training.task)


def build_sampler(config: Config, backend: Backend, training: Training, tokenizer: Tokenizer | None) -> Sampler | None:
    """Build the sampler; None without `train.sample_every`. Raises ConfigError for a prompt that doesn't fit."""
    if config.train.sample_every is None or tokenizer is None:  # a rule refuses samples without text
        return None
    return Sampler(backend, training.model, tokenizer, config.train, config.data.seq_len)


def open_checkpoints(config: Config, backend: Backend, training: Training, corpus: Corpus) -> Checkpoints:
    """Open the run's checkpoints in `checkpoint.dir` or run.dir; the caller closes them."""
    return Checkpoints(
        checkpoint_folder(config),
        backend,
        config=saved_config(config),
        model_config=training.built.saved_config or None,
        settings=config.checkpoint,
        data=Fingerprint(*corpus.fingerprint),
        ties=training.ties,
        base=training.built.base,
    )


def open_batches(
    config: Config, backend: Backend, training: Training, corpus: Corpus, resumed: Resumed | None = None
) -> Batches:
    """Open this process's batches, from the position of `resumed`; the caller closes them (or uses `with`)."""
    epoch, samples = resumed.position if resumed else (0, 0)
    of_labels = count_labels if training.task.problem == SINGLE_LABEL else count_values
    return Batches(
        corpus.rows,
        seed=config.run.seed,
        global_batch=config.train.global_batch,
        shard=(backend.data_shard.index, backend.data_shard.count),
        accumulation=training.accumulation,
        parts=backend.row_shards // backend.data_shard.count,
        start=epoch * len(corpus.rows) + samples,
        check=training.trial.check if training.trial else None,
        count_losses=of_labels if training.task.counts_labels else None,
        keys=training.keys,
        data=config.data,
    )


def saved_config(config: Config) -> dict[str, Any]:
    """Return the config for checkpoints: JSON values, with the content of the file in `model.architecture`, which may
    change before the run is resumed, and without passwords, since checkpoints are copied."""

    def as_json(value: object) -> object:  # as transformers does: JSON has no infinities
        is_infinite = isinstance(value, float) and math.isinf(value)
        return {"__float__": "Infinity" if value == math.inf else "-Infinity"} if is_infinite else value

    values = config.model_dump(mode="json")
    if config.model.architecture is not None:
        values["model"]["architecture"] = each_value(architecture_mapping(config.model.architecture), as_json)
    return json.loads(without_passwords(json.dumps(values)))
