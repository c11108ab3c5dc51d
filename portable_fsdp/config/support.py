"""What each engine does with each option: honoured, delegated, or refused with the reason and the way out.

Two tables say it all: EFFECTS, below, what becomes of an option on an engine that takes it; REFUSALS, in refusals.py,
what no engine, or one of them, takes. Numerics and memory are honoured or refused; what only concerns speed, or how
long a lost process is waited for, and the engine decides by itself, is delegated. A backend calls `require_supported`
while it opens; `explain` shows it all.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple, cast

from pydantic import BaseModel

from portable_fsdp.config.describe import option_names, yaml_value
from portable_fsdp.config.load import check_batch
from portable_fsdp.config.refusals import EITHER_XLA, EVERY, FSDP1, NATIVE, REFUSALS, XLA, Place, Refusal
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import BackendError, ConfigError

_NOTHING_WAS_STARTED = " Nothing was started."

Kind = Literal["honoured", "delegated", "refused"]


class Verdict(NamedTuple):
    """What becomes of one option in one place."""

    option: str  # `section.key`
    value: Any  # of the config
    kind: Kind
    text: str  # what the engine does, or the reason and the way out


@dataclass(frozen=True)
class Effect:
    """What engines do with options: with each value of theirs, or with one (`section.key=value`)."""

    options: tuple[str, ...]
    engines: tuple[str, ...]
    what: str
    kind: Kind = "honoured"


def require_supported(config: Config, *, engine: str, device: str, devices: int | None, hosts: int | None) -> None:
    """Raise BackendError with all options that `engine` can't honour on so many devices of so many hosts.

    `devices` counts those of all hosts; what depends on a None isn't judged. A batch that they don't divide is said
    first; alone it is a ConfigError.
    """
    place = Place(engine, device, devices, hosts)
    counted = f" ({devices} device(s) of {hosts} host(s))" if devices is not None else ""
    where = f"backend {engine} on {device}{counted}"
    found = [f"{where}: {_title(rule, config)}: {_reason(rule, config, place)}" for rule in refusals(config, place)]
    batch = _batch_problem(config, devices)
    if found:
        raise BackendError("\n".join([batch, *found] if batch else found) + _NOTHING_WAS_STARTED)
    if batch:
        raise ConfigError(batch + _NOTHING_WAS_STARTED)


def refusals(config: Config, place: Place) -> tuple[Refusal, ...]:
    """The rows of REFUSALS that apply."""
    return tuple(
        rule for rule in REFUSALS if place.engine in rule.engines and rule.when is not None and rule.when(config, place)
    )


def verdicts(config: Config, place: Place) -> tuple[Verdict, ...]:
    """One for each option of the config, in the schema's order."""
    refused: dict[str, list[str]] = {}
    for rule in refusals(config, place):
        refused.setdefault(rule.option, []).append(f"{rule.case}: {_reason(rule, config, place, ' ')}")
    if batch := _batch_problem(config, place.devices):
        refused["train.global_batch"] = [" ".join(batch.removeprefix("train.global_batch: ").split())]
    return tuple(_verdict(config, place.engine, option, refused.get(option)) for option in option_names())


def _verdict(config: Config, engine: str, option: str, reasons: list[str] | None) -> Verdict:
    value = _value(config, option)
    if reasons:
        return Verdict(option, value, "refused", " ".join(reasons))
    effect = _effect(option, value, engine)
    cases = [f"refused {rule.case}" for rule in _told_by_the_model(option, engine)]
    later = f"; {'; '.join(cases)}: checked when the model is built" if cases and not _is_default(option, value) else ""
    return Verdict(option, value, effect.kind, effect.what + later)


def _told_by_the_model(option: str, engine: str) -> list[Refusal]:
    return [rule for rule in REFUSALS if rule.option == option and engine in rule.engines and rule.when is None]


def _is_default(option: str, value: object) -> bool:
    section, _, key = option.partition(".")
    model = cast(type[BaseModel], Config.model_fields[section].annotation)
    return value == model.model_fields[key].default


def _effect(option: str, value: object, engine: str) -> Effect:
    """The row for this very value, else the row for any."""
    by_value, any_value = _rows()
    if (option, engine) in by_value and (found := by_value[option, engine].get(yaml_value(value))):
        return found
    return any_value[option, engine]


@cache
def _rows() -> tuple[dict[tuple[str, str], dict[str, Effect]], dict[tuple[str, str], Effect]]:
    """(option, engine) -> value -> its row; (option, engine) -> the row for any other value."""
    by_value: dict[tuple[str, str], dict[str, Effect]] = {}
    any_value: dict[tuple[str, str], Effect] = {}
    for effect in EFFECTS:
        for (option, _, value), engine in product((name.partition("=") for name in effect.options), effect.engines):
            if value:
                by_value.setdefault((option, engine), {})[value] = effect
            else:
                any_value[option, engine] = effect
    return by_value, any_value


def _value(config: Config, option: str) -> Any:
    section, _, key = option.partition(".")
    return getattr(getattr(config, section), key)


def _title(rule: Refusal, config: Config) -> str:
    """`memory.every=2 without gradient_checkpointing=selective`."""
    return f"{rule.option}={yaml_value(_value(config, rule.option))} {rule.case}".strip()


def _reason(rule: Refusal, config: Config, place: Place, before_way: str = "\n  ") -> str:
    return f"{rule.reason}.{before_way}Set {', or '.join(rule.ways_out(config, place))}."


def _batch_problem(config: Config, devices: int | None) -> str | None:
    """In the words of `check_batch`, without its last ones."""
    if devices is None:
        return None
    try:
        check_batch(config, devices)
    except ConfigError as error:
        return str(error).removesuffix(_NOTHING_WAS_STARTED)
    return None


# --------------------------------------------------------------------------------- what engines do with the rest

EFFECTS = (
    # --- the same on every engine: decided before one is opened, or around it
    Effect(("run.dir",), EVERY, "everything that the run writes goes there; process 0 writes"),
    Effect(("run.name",), EVERY, "written into events.jsonl"),
    Effect(("run.seed",), EVERY, "weights are a function of (seed, name), rows of (seed, epoch, position)"),
    Effect(("run.peer_timeout_s",), NATIVE, "each process says that it lives, through the store where all met"),
    Effect(
        ("run.peer_timeout_s",),
        EITHER_XLA,
        "PJRT finds a lost process by its own timeouts, gloo after 30 minutes",
        "delegated",
    ),
    Effect(
        ("model.architecture", "model.pretrained", "model.gguf_file", "model.allow"),
        EVERY,
        "built on meta; each process makes or reads its slices",
    ),
    Effect(("model.freeze",), EVERY, "no gradient, no optimizer state"),
    Effect(("model.lora",), EVERY, "peft's layers; adapters are sharded, trained and saved like all weights"),
    Effect(
        (
            "data.source",
            "data.path",
            "data.split",
            "data.format",
            "data.columns",
            "data.chat_template_kwargs",
            "data.mixture",
            "data.eval_split",
        ),
        EVERY,
        "the same documents on every engine",
    ),
    Effect(("data.tokenizer", "data.seq_len", "data.packing"), EVERY, "the same rows on every engine"),
    Effect(
        ("data.packing=documents",),
        NATIVE,
        "the same rows on every engine; one mask a forward, which all layers share, keeps documents apart",
    ),
    Effect(
        ("data.packing=documents",),
        EITHER_XLA,
        "the same rows on every engine; layers compare the documents' numbers, which keeps documents apart",
    ),
    Effect(("data.on_error",), EVERY, "decided while documents are read and packed, before the first step"),
    Effect(("data.cache_dir",), EVERY, "one process of a host tokenizes, the others map its files"),
    Effect(("train.steps", "train.epochs", "train.stop_at"), EVERY, "the same steps on every engine"),
    Effect(("train.global_batch",), EVERY, "the same rows in each step, however many devices share them"),
    Effect(("train.micro_batch",), EVERY, "a device's share of the global batch is taken in so many rows at a time"),
    Effect(("train.max_grad_norm",), EVERY, "the norm of all gradients over all devices, computed on the device"),
    Effect(("train.log_every",), EVERY, "every step is written to metrics.jsonl; so often one goes to the console"),
    Effect(
        ("train.eval_every", "train.eval_on_start", "train.eval_batches"),
        EVERY,
        "the forward alone, on the same rows on every engine; the best checkpoint is kept",
    ),
    Effect(("train.patience",), EVERY, "all processes know each evaluation, and end after the same step"),
    Effect(("optim.name", "optim.betas", "optim.eps", "optim.momentum"), EVERY, "torch's optimizer over the shards"),
    Effect(("optim.weight_decay", "optim.groups"), EVERY, "optimizer groups, told by name and shape"),
    Effect(
        ("optim.lr", "optim.schedule", "optim.warmup_steps", "optim.min_lr_ratio", "optim.decay_ratio"),
        EVERY,
        "the learning rate of each step, computed on the host",
    ),
    Effect(("checkpoint.merge_adapters",), EVERY, "W + alpha / r * B A, on the host, from the checkpoint"),
    Effect(("checkpoint.every", "checkpoint.resume", "checkpoint.export"), EVERY, "one format for all engines"),
    Effect(
        ("checkpoint.dir",), EVERY, "renamed into place on a file system; in an object store the manifest is the commit"
    ),
    Effect(("checkpoint.every_minutes",), EVERY, "the clock of process 0 decides, all learn of it with the next step"),
    Effect(("checkpoint.async_save",), EVERY, "a thread writes host copies of this process's shards"),
    Effect(("checkpoint.keep", "checkpoint.keep_every"), EVERY, "process 0 deletes after the newer commit"),
    Effect(("checkpoint.load", "checkpoint.allow", "checkpoint.verify"), EVERY, "the same checks on every engine"),
    # --- model
    Effect(("model.attention",), EVERY, "a function of static arguments (static); transformers' own (sdpa, eager)"),
    Effect(("model.attention=auto",), EVERY, "static where the model takes it, else the model's own"),
    Effect(("model.attention=flex",), NATIVE, "torch's flex_attention, compiled; masks once a forward for each window"),
    Effect(("model.experts",), EVERY, "all on all tokens (dense), or the chosen weights gathered (batched_mm)"),
    Effect(("model.experts=auto",), EVERY, "dense"),
    Effect(("model.experts=grouped_mm",), NATIVE, "tokens sorted by expert"),
    # --- sharding
    Effect(
        ("sharding.strategy=FULL_SHARD",),
        NATIVE,
        "fully_shard over all devices: a unit is gathered in forward, and again in backward",
    ),
    Effect(
        ("sharding.strategy=SHARD_GRAD_OP",),
        NATIVE,
        "fully_shard over all devices: a unit is gathered in forward and kept until its backward",
    ),
    Effect(("sharding.strategy=NO_SHARD",), NATIVE, "a copy on each device; gradients are all-reduced"),
    Effect(
        ("sharding.strategy=HYBRID_SHARD", "sharding.strategy=HYBRID_SHARD_ZERO2"),
        NATIVE,
        "fully_shard on the mesh (replicate, shard): reduce-scatter within a replica, all-reduce across",
    ),
    Effect(
        ("sharding.strategy=FULL_SHARD",),
        XLA,
        "rows of each weight over all devices; a unit is gathered in forward, and again in backward",
    ),
    Effect(("sharding.strategy=SHARD_GRAD_OP",), XLA, "sharded at rest; one gathered compute copy a micro batch"),
    Effect(("sharding.strategy=NO_SHARD",), XLA, "replicated; gradients are all-reduced"),
    Effect(
        ("sharding.strategy=HYBRID_SHARD", "sharding.strategy=HYBRID_SHARD_ZERO2"),
        XLA,
        "the mesh (replicate, shard): weights over shard, rows of a batch over both",
    ),
    Effect(("sharding.strategy=FULL_SHARD",), FSDP1, "XlaFullyShardedDataParallel(reshard_after_forward=True)"),
    Effect(("sharding.strategy=SHARD_GRAD_OP",), FSDP1, "XlaFullyShardedDataParallel(reshard_after_forward=False)"),
    Effect(("sharding.strategy=NO_SHARD",), FSDP1, "a copy on each device; gradients are all-reduced"),
    Effect(
        ("sharding.strategy=HYBRID_SHARD", "sharding.strategy=HYBRID_SHARD_ZERO2"),
        FSDP1,
        "sharding_groups within a replica; gradients are all-reduced across",
    ),
    Effect(("sharding.replicas",), EVERY, "copies of the model under HYBRID_SHARD*; null: one a host"),
    Effect(("sharding.reshard_after_forward",), NATIVE, "fully_shard(reshard_after_forward=number)"),
    Effect(("sharding.reshard_after_forward=null",), EVERY, "as the strategy says"),
    Effect(
        ("sharding.wrap", "sharding.wrap_modules", "sharding.min_num_params"),
        NATIVE,
        "each unit is given to fully_shard, inner ones first, the whole model last",
    ),
    Effect(
        ("sharding.wrap", "sharding.wrap_modules", "sharding.min_num_params"),
        XLA,
        "each unit casts its weights, and splits its output by rows, so that it is gathered and freed by itself",
    ),
    Effect(
        ("sharding.wrap", "sharding.wrap_modules", "sharding.min_num_params"),
        FSDP1,
        "each unit is an XlaFullyShardedDataParallel, inner ones first, the whole model last",
    ),
    Effect(("sharding.wrap=NO_WRAP",), EVERY, "no units but those of wrap_modules; the rest is the root's"),
    Effect(("sharding.wrap_modules=[]",), EVERY, "none by name"),
    Effect(("sharding.min_num_params=null",), EVERY, "units are not told by their size"),
    Effect(
        ("sharding.wrap_classes",),
        EVERY,
        "the layers, instead of the model's own: recomputed, compiled, scanned; units under TRANSFORMER_BASED_WRAP",
    ),
    Effect(("sharding.forward_prefetch",), NATIVE, "set_modules_to_forward_prefetch, in the order of execution"),
    Effect(("sharding.forward_prefetch=0",), NATIVE, "FSDP2's own: the next gather is queued while a unit computes"),
    Effect(
        ("sharding.backward_prefetch", "sharding.backward_prefetch_units"),
        NATIVE,
        "units are gathered ahead in the reverse order of execution",
    ),
    Effect(("sharding.backward_prefetch=NO_PREFETCH",), NATIVE, "a unit is gathered in backward when it is needed"),
    Effect(
        ("sharding.forward_prefetch", "sharding.backward_prefetch", "sharding.backward_prefetch_units"),
        EITHER_XLA,
        "XLA's scheduler decides when a gather starts",
        "delegated",
    ),
    # --- precision
    Effect(("precision.master",), EVERY, "dtype of weights and optimizer state at rest"),
    Effect(("precision.frozen",), EVERY, "dtype at rest of weights that don't train"),
    Effect(("precision.frozen=auto",), EVERY, "as precision.master"),
    Effect(("precision.compute",), NATIVE, "MixedPrecisionPolicy(param_dtype); weights are cast unit by unit"),
    Effect(("precision.compute",), XLA, "weights are cast at use, inside their unit"),
    Effect(("precision.compute",), FSDP1, "XlaFullyShardedDataParallel(compute_dtype)"),
    Effect(("precision.reduce",), NATIVE, "MixedPrecisionPolicy(reduce_dtype)"),
    Effect(("precision.reduce=auto",), NATIVE, "float32"),
    Effect(("precision.reduce",), XLA, "gradients are summed in the compute dtype, which is this one"),
    Effect(("precision.reduce=float32",), XLA, "gradients are computed in float32, and so summed"),
    Effect(("precision.reduce=auto",), XLA, "the dtype that the weight is cast to at use"),
    Effect(("precision.reduce",), FSDP1, "gradients are cast to it before the reduce-scatter"),
    Effect(("precision.reduce=auto",), FSDP1, "float32"),
    Effect(("precision.output",), EVERY, "logits are cast before the loss; auto: as the head gives them"),
    Effect(
        ("precision.modules",), NATIVE, "a group of fully_shard with its own param_dtype; inputs and outputs are cast"
    ),
    Effect(("precision.modules",), XLA, "their weights and inputs are cast to it, their outputs back"),
    Effect(("precision.modules={}",), FSDP1, "one compute dtype for all"),
    Effect(("precision.matmul",), NATIVE, "torch.set_float32_matmul_precision, while the backend is open"),
    Effect(("precision.matmul",), EITHER_XLA, "XLA's matmul precision, while the backend is open"),
    # --- memory
    Effect(("memory.gradient_checkpointing=none",), EVERY, "activations are kept"),
    Effect(
        ("memory.gradient_checkpointing=full", "memory.gradient_checkpointing=selective", "memory.every"),
        NATIVE,
        "torch.utils.checkpoint around a layer's forward",
    ),
    Effect(
        ("memory.gradient_checkpointing=full", "memory.gradient_checkpointing=selective", "memory.every"),
        EITHER_XLA,
        "torch_xla's checkpoint around a layer's forward; XLA would undo torch's",
    ),
    Effect(("memory.save_ops",), NATIVE, "a selective checkpoint keeps the outputs of these operations"),
    Effect(("memory.save_ops=[]",), EITHER_XLA, "all of a recomputed layer is recomputed"),
    Effect(("memory.cpu_offload=true",), NATIVE, "CPUOffloadPolicy: the optimizer steps on the host"),
    Effect(("memory.cpu_offload=false",), EVERY, "all rests in device memory"),
    # --- compile
    Effect(("compile.enabled", "compile.backend"), NATIVE, "torch.compile of each layer"),
    Effect(("compile.enabled=false",), NATIVE, "layers run eagerly"),
    Effect(("compile.enabled", "compile.backend"), EITHER_XLA, "XLA compiles the whole step in any case", "delegated"),
    Effect(("compile.scan_layers=true",), XLA, "torch_xla's scan: one program for all layers"),
    Effect(("compile.scan_layers=false",), EVERY, "a copy of the program for each layer"),
    # --- one engine's own
    Effect(("xla_fsdp1.flatten_parameters",), FSDP1, "a unit's parameters are one tensor"),
    Effect(("xla_fsdp1.shard_param_on_dim_0",), FSDP1, "true: each parameter is cut by rows; false: flat"),
    Effect(("xla_fsdp1.shard_param_on_dim_0=null",), FSDP1, "by rows, but for flatten_parameters"),
    Effect(("xla_fsdp1.pin_layout_in_collective_ops",), FSDP1, "layouts of collectives are fixed; null: on TPUs"),
    Effect(("xla_fsdp1.buffer_dtype",), FSDP1, "dtype of floating buffers"),
    Effect(
        (
            "xla_fsdp1.flatten_parameters",
            "xla_fsdp1.shard_param_on_dim_0",
            "xla_fsdp1.pin_layout_in_collective_ops",
            "xla_fsdp1.buffer_dtype",
        ),
        (*NATIVE, *XLA),
        "the default; only xla_fsdp1 has another",
    ),
)
