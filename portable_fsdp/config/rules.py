"""Rules that no engine owns: configs that contradict themselves, and options that every engine treats alike.

Each engine's own rules are in `backends/<engine>/options.py`; `backends/support.py` checks a config against both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from portable_fsdp.config.describe import yaml_value
from portable_fsdp.config.schema import Config, Optim

Kind = Literal["honoured", "delegated", "refused"]


class Deployment(NamedTuple):
    """Where a config will run. A count of None is unknown: rules that depend on it don't apply."""

    engine: str
    device: str
    devices: int | None = None  # in all
    hosts: int | None = None


@dataclass(frozen=True)
class Rule:
    """A case in which an option is refused; `when` is None where only the built model can decide.

    Each way out is one or more settings (`section.key=value`, `--backend=...`), joined by " and ".
    """

    option: str
    case: str
    when: Callable[[Config, Deployment], bool] | None
    reason: str
    ways: tuple[str, ...] | Callable[[Config, Deployment], tuple[str, ...]] = ()


@dataclass(frozen=True)
class Effect:
    """What an engine does with options: with every value, or with one (`section.key=value`)."""

    options: tuple[str, ...]
    what: str
    kind: Kind = "honoured"


# ------------------------------------------------------------------------------------------ conditions and ways out


def is_hybrid(config: Config) -> bool:
    return config.sharding.strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _within(config: Config) -> str:
    """The strategy inside a replica of a hybrid strategy."""
    return "FULL_SHARD" if config.sharding.strategy == "HYBRID_SHARD" else "SHARD_GRAD_OP"


def _replicas(config: Config, deployment: Deployment) -> int | None:
    """Copies of the model under a hybrid strategy."""
    return config.sharding.replicas or deployment.hosts


def _replicas_that_fit(_: Config, deployment: Deployment) -> tuple[str, ...]:
    fitting = [2] if deployment.devices is None else parts(deployment.devices)
    best = [deployment.hosts] if deployment.hosts in fitting else fitting[:1]
    return tuple(f"sharding.replicas={count}" for count in best)


def _strategy(config: Config, strategy: str) -> str:
    """The settings for a strategy that is not hybrid."""
    return f"sharding.strategy={strategy}" + ("" if config.sharding.replicas is None else " and sharding.replicas=null")


def _instead_of_hybrid(config: Config, deployment: Deployment) -> tuple[str, ...]:
    return (*_replicas_that_fit(config, deployment), _strategy(config, _within(config)))


def dtypes(config: Config) -> set[str]:
    """The dtypes that weights are cast to at use."""
    return {config.precision.compute, *config.precision.modules.values()}


def _modules_without_float16(config: Config, _: Deployment) -> tuple[str, ...]:
    modules = config.precision.modules.items()
    replaced = {name: "bfloat16" if dtype == "float16" else dtype for name, dtype in modules}
    return (f"precision.modules={yaml_value(replaced)}",)


def _modules_without_float32(config: Config, _: Deployment) -> tuple[str, ...]:
    kept = {name: dtype for name, dtype in config.precision.modules.items() if dtype != "float32"}
    return ("precision.master=float32", f"precision.modules={yaml_value(kept)}")


def is_selective(config: Config) -> bool:
    return config.memory.gradient_checkpointing == "selective"


def shards_of_a_replica(config: Config, deployment: Deployment) -> int | None:
    """Devices that share one copy of the model; None where unknown, or where replicas don't divide the devices."""
    if deployment.devices is None or not is_hybrid(config):
        return deployment.devices
    replicas = _replicas(config, deployment)
    return None if replicas is None or deployment.devices % replicas else deployment.devices // replicas


def parts(whole: int | None) -> list[int]:
    """The divisors of `whole`, without 1 and itself."""
    return [part for part in range(2, whole or 0) if (whole or 0) % part == 0]


# ------------------------------------------------------------------------------------------------ refused everywhere

_NO_LOSS_SCALING = "float16 needs loss scaling, which is not built: small gradients would become 0"

RULES = (
    Rule(
        "model.attention",
        "for a model with its own attention (ALiBi)",
        None,
        "this attention can't be replaced; model.attention=auto keeps it",
    ),
    Rule("model.experts", "other than auto for a dense model", None, "there are no experts"),
    Rule(
        "model.freeze",
        "with a pattern that matches nothing, or patterns that match everything",
        None,
        "some weights must be frozen, and some must train",
    ),
    Rule("optim.groups", "with a pattern that matches no trained weight", None, "each must match one"),
    Rule(
        "sharding.strategy",
        "on one device",
        lambda c, p: is_hybrid(c) and p.devices == 1,
        "sharded replicas need four devices or more",
        lambda c, p: (_strategy(c, _within(c)),),
    ),
    Rule(
        "sharding.replicas",
        "without a hybrid strategy",
        lambda c, p: c.sharding.replicas is not None and not is_hybrid(c),
        "only HYBRID_SHARD and HYBRID_SHARD_ZERO2 have replicas of a sharded model",
        ("sharding.replicas=null", "sharding.strategy=HYBRID_SHARD"),
    ),
    Rule(
        "sharding.replicas",
        "with a hybrid strategy and one replica",
        lambda c, p: is_hybrid(c) and p.devices != 1 and _replicas(c, p) == 1,
        "one replica (null: one per host) is FULL_SHARD, or SHARD_GRAD_OP for HYBRID_SHARD_ZERO2",
        _instead_of_hybrid,
    ),
    Rule(
        "sharding.replicas",
        "with a hybrid strategy and one replica per device",
        lambda c, p: is_hybrid(c) and p.devices is not None and 1 < p.devices == _replicas(c, p),
        "a replica on one device is not sharded: that is NO_SHARD",
        lambda c, p: (*_replicas_that_fit(c, p), _strategy(c, "NO_SHARD")),
    ),
    Rule(
        "sharding.replicas",
        "that do not divide the devices",
        lambda c, p: (
            is_hybrid(c) and p.devices is not None and p.devices > 1 and p.devices % (_replicas(c, p) or 1) > 0
        ),
        "all replicas (null: one per host) have the same number of devices",
        _instead_of_hybrid,
    ),
    Rule(
        "sharding.wrap",
        "for a model that names no layers (biogpt)",
        None,
        "name them in sharding.wrap_classes",
    ),
    Rule(
        "sharding.wrap_classes",
        "with a class that the model lacks, or whose modules don't run or have no parameters",
        None,
        "the error lists the model's classes",
    ),
    Rule("sharding.wrap_modules", "with a pattern that matches no module", None, "each must match one"),
    *(
        Rule(
            f"sharding.{key}",
            "with one of two modules that share a weight",
            None,
            "a tied weight belongs to one unit that holds both modules, or to the root",
        )
        for key in ("wrap_classes", "wrap_modules")
    ),
    Rule(
        "sharding.min_num_params",
        "without sharding.wrap=SIZE_BASED_WRAP",
        lambda c, p: c.sharding.min_num_params is not None and c.sharding.wrap != "SIZE_BASED_WRAP",
        "only SIZE_BASED_WRAP chooses units by size",
        ("sharding.min_num_params=null", "sharding.wrap=SIZE_BASED_WRAP"),
    ),
    Rule(
        "sharding.min_num_params",
        "with sharding.wrap=SIZE_BASED_WRAP",
        lambda c, p: c.sharding.min_num_params is None and c.sharding.wrap == "SIZE_BASED_WRAP",
        "SIZE_BASED_WRAP needs the smallest size of a unit; torch's policy uses 100000000",
        ("sharding.min_num_params=100000000", "sharding.wrap=TRANSFORMER_BASED_WRAP"),
    ),
    Rule(
        "sharding.backward_prefetch_units",
        "without sharding.backward_prefetch=BACKWARD_PRE",
        lambda c, p: c.sharding.backward_prefetch_units > 1 and c.sharding.backward_prefetch != "BACKWARD_PRE",
        "BACKWARD_POST gathers one unit ahead, NO_PREFETCH none",
        ("sharding.backward_prefetch_units=1", "sharding.backward_prefetch=BACKWARD_PRE"),
    ),
    Rule(
        "optim.momentum",
        "with optim.name=adamw",
        lambda c, p: bool(c.optim.momentum) and c.optim.name == "adamw",
        "AdamW has betas instead",
        ("optim.momentum=0.0", "optim.name=sgd and optim.betas=[0.9, 0.95] and optim.eps=1e-8"),
    ),
    *(
        Rule(
            f"optim.{key}",
            "with optim.name=sgd",
            lambda c, p, key=key: c.optim.name == "sgd" and getattr(c.optim, key) != Optim.model_fields[key].default,
            "SGD has momentum instead",
            (f"optim.{key}={default}", "optim.name=adamw and optim.momentum=0.0"),
        )
        for key, default in (("betas", "[0.9, 0.95]"), ("eps", "1e-8"))
    ),
    Rule(
        "optim.decay_ratio",
        "without optim.schedule=wsd",
        lambda c, p: c.optim.schedule != "wsd" and c.optim.decay_ratio != Optim.model_fields["decay_ratio"].default,
        "only wsd has a separate decay",
        ("optim.decay_ratio=0.2", "optim.schedule=wsd"),
    ),
    Rule(
        "optim.min_lr_ratio",
        "with optim.schedule=constant",
        lambda c, p: (
            c.optim.schedule == "constant" and c.optim.min_lr_ratio != Optim.model_fields["min_lr_ratio"].default
        ),
        "a constant learning rate has no floor",
        ("optim.min_lr_ratio=0.1", "optim.schedule=cosine"),
    ),
    Rule(
        "precision.master",
        "with precision.compute=float32",
        lambda c, p: c.precision.master == "bfloat16" and c.precision.compute == "float32",
        "bfloat16 weights hold no more digits to compute with",
        ("precision.master=float32", "precision.compute=bfloat16"),
    ),
    Rule(
        "precision.frozen",
        "where all weights train",
        lambda c, p: c.precision.frozen != "auto" and not c.model.freeze and c.model.lora is None,
        "it applies to weights that model.freeze or model.lora freezes",
        ("precision.frozen=auto",),
    ),
    Rule(
        "precision.compute",
        "without loss scaling",
        lambda c, p: c.precision.compute == "float16",
        _NO_LOSS_SCALING,
        ("precision.compute=bfloat16",),
    ),
    Rule(
        "precision.modules",
        "with float16",
        lambda c, p: "float16" in c.precision.modules.values(),
        _NO_LOSS_SCALING,
        _modules_without_float16,
    ),
    Rule(
        "precision.modules",
        "with precision.master=bfloat16",
        lambda c, p: c.precision.master == "bfloat16" and "float32" in c.precision.modules.values(),
        "bfloat16 weights hold no more digits to compute with",
        _modules_without_float32,
    ),
    Rule("precision.modules", "with a pattern that matches no module", None, "each must match one"),
    Rule(
        "precision.modules",
        "with two dtypes for nested modules or for a tied weight",
        None,
        "a weight is cast to one dtype",
    ),
    Rule(
        "precision.reduce",
        "with precision.compute=float32",
        lambda c, p: c.precision.reduce == "bfloat16" and c.precision.compute == "float32",
        "the reduction would drop digits of float32 gradients",
        ("precision.reduce=auto", "precision.compute=bfloat16"),
    ),
    Rule(
        "precision.output",
        "with precision.compute=float32",
        lambda c, p: c.precision.output == "bfloat16" and dtypes(c) == {"float32"},
        "the loss would use fewer digits than the model computes",
        ("precision.output=auto", "precision.compute=bfloat16"),
    ),
    Rule(
        "memory.gradient_checkpointing",
        "without memory.every and memory.save_ops",
        lambda c, p: is_selective(c) and c.memory.every is None and not c.memory.save_ops,
        "selective recomputes by layer (every) or by operation (save_ops)",
        ("memory.every=2", "memory.gradient_checkpointing=full"),
    ),
    Rule(
        "memory.every",
        "without gradient_checkpointing=selective",
        lambda c, p: c.memory.every is not None and not is_selective(c),
        "full means every layer, none means none",
        ("memory.every=null", "memory.gradient_checkpointing=selective and memory.save_ops=[]"),
    ),
    Rule(
        "memory.every",
        "that is more than the number of layers",
        None,
        "the model has fewer layers",
    ),
    Rule(
        "memory.every",
        "together with memory.save_ops",
        lambda c, p: is_selective(c) and c.memory.every is not None and bool(c.memory.save_ops),
        "selective picks layers or operations, not both",
        ("memory.save_ops=[]", "memory.every=null"),
    ),
    Rule(
        "memory.save_ops",
        "without gradient_checkpointing=selective",
        lambda c, p: bool(c.memory.save_ops) and not is_selective(c),
        "full recomputes every operation, none keeps all",
        ("memory.save_ops=[]", "memory.gradient_checkpointing=selective and memory.every=null"),
    ),
    Rule(
        "train.eval_every",
        "without data.eval_split",
        lambda c, p: c.train.eval_every is not None and c.data.eval_split is None,
        "there is no validation set",
        ("data.eval_split=5%", "train.eval_every=null"),
    ),
    *(
        Rule(
            f"train.{key}",
            "without train.eval_every",
            lambda c, p, key=key: bool(getattr(c.train, key)) and c.train.eval_every is None,
            "without eval_every the run never evaluates",
            (f"train.{key}={default}",),
        )
        for key, default in (("eval_on_start", "false"), ("eval_batches", "null"), ("patience", "null"))
    ),
    Rule(
        "checkpoint.keep_every",
        "without checkpoint.keep",
        lambda c, p: c.checkpoint.keep_every is not None and c.checkpoint.keep is None,
        "without keep, every checkpoint is kept",
        ("checkpoint.keep_every=null", "checkpoint.keep=1"),
    ),
    Rule(
        "checkpoint.load",
        "without a checkpoint in checkpoint.resume",
        lambda c, p: c.checkpoint.load == "weights_only" and c.checkpoint.resume in ("auto", "none"),
        "auto resumes all of the run's own state",
        ("checkpoint.load=all", "checkpoint.resume=PATH"),
    ),
    Rule(
        "checkpoint.export",
        "of adapters whose base is model.architecture or model.gguf_file",
        lambda c, p: (
            c.checkpoint.export
            and c.model.lora is not None
            and not c.checkpoint.merge_adapters
            and (c.model.pretrained is None or c.model.gguf_file is not None)
        ),
        "peft needs a base in Hugging Face format",
        ("checkpoint.merge_adapters=true", "checkpoint.export=false"),
    ),
    Rule(
        "checkpoint.merge_adapters",
        "without model.lora",
        lambda c, p: c.checkpoint.merge_adapters and c.model.lora is None,
        "there are no adapters to merge",
        ("checkpoint.merge_adapters=false",),
    ),
)

# ---------------------------------------------------------------------------------------- alike on every engine

EFFECTS = (
    Effect(("run.dir",), "holds everything that the run writes; process 0 writes"),
    Effect(("run.name",), "written into events.jsonl"),
    Effect(("run.seed",), "weights are a function of (seed, name), rows of (seed, epoch, position)"),
    Effect(
        ("model.architecture", "model.pretrained", "model.gguf_file", "model.allow"),
        "built on meta; each process initializes or reads its slices",
    ),
    Effect(("model.freeze",), "no gradient, no optimizer state"),
    Effect(("model.lora",), "peft's layers; adapters are sharded, trained and saved like other weights"),
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
        "the same documents on every engine",
    ),
    Effect(("data.tokenizer", "data.seq_len", "data.packing"), "the same rows on every engine"),
    Effect(("data.on_error",), "applies while documents are read and packed, before the first step"),
    Effect(("data.cache_dir",), "one process per host tokenizes, the others map its files"),
    Effect(("train.steps", "train.epochs", "train.stop_at"), "the same steps on every engine"),
    Effect(("train.global_batch",), "the same rows in each step on any number of devices"),
    Effect(("train.micro_batch",), "each device processes this many rows at a time"),
    Effect(("train.max_grad_norm",), "norm of all gradients over all devices, computed on the device"),
    Effect(("train.log_every",), "metrics.jsonl gets every step, the console every n-th"),
    Effect(
        ("train.eval_every", "train.eval_on_start", "train.eval_batches"),
        "forward only, on the same rows on every engine; the best checkpoint is kept",
    ),
    Effect(("train.patience",), "all processes see each evaluation and stop after the same step"),
    Effect(("optim.name", "optim.betas", "optim.eps", "optim.momentum"), "torch's optimizer on the shards"),
    Effect(("optim.weight_decay", "optim.groups"), "optimizer groups by name and shape"),
    Effect(
        ("optim.lr", "optim.schedule", "optim.warmup_steps", "optim.min_lr_ratio", "optim.decay_ratio"),
        "the learning rate of each step, computed on the host",
    ),
    Effect(("checkpoint.merge_adapters",), "W + alpha / r * B A on the host, from the checkpoint"),
    Effect(("checkpoint.every", "checkpoint.resume", "checkpoint.export"), "one format for all engines"),
    Effect(("checkpoint.dir",), "the commit: a rename on file systems, the manifest in object stores"),
    Effect(("checkpoint.every_minutes",), "process 0's clock decides; the others follow at the next step"),
    Effect(("checkpoint.async_save",), "a thread writes host copies of this process's shards"),
    Effect(("checkpoint.keep", "checkpoint.keep_every"), "process 0 deletes after a newer commit"),
    Effect(("checkpoint.load", "checkpoint.allow", "checkpoint.verify"), "the same checks on every engine"),
    Effect(("model.attention",), "our function of static arguments (static); transformers' own (sdpa, eager)"),
    Effect(("model.attention=auto",), "static where the model takes it, else the model's own"),
    Effect(("model.experts",), "all experts on all tokens (dense); the chosen weights gathered (batched_mm)"),
    Effect(("model.experts=auto",), "dense"),
    Effect(("sharding.replicas",), "copies of the model under HYBRID_SHARD*; null: one per host"),
    Effect(("sharding.reshard_after_forward=null",), "as the strategy does"),
    Effect(("sharding.wrap=NO_WRAP",), "only wrap_modules are units; the root holds the rest"),
    Effect(("sharding.wrap_modules=[]",), "no units by name"),
    Effect(("sharding.min_num_params=null",), "units are not chosen by size"),
    Effect(
        ("sharding.wrap_classes",),
        "layers instead of the model's own: recomputed, compiled, scanned; units under TRANSFORMER_BASED_WRAP",
    ),
    Effect(("precision.master",), "dtype of weights and optimizer state at rest"),
    Effect(("precision.frozen",), "dtype at rest of frozen weights"),
    Effect(("precision.frozen=auto",), "as precision.master"),
    Effect(("precision.output",), "casts the logits before the loss; auto: no cast"),
    Effect(("memory.gradient_checkpointing=none",), "activations are kept"),
    Effect(("memory.cpu_offload=false",), "everything stays in device memory"),
    Effect(("compile.scan_layers=false",), "one copy of the program per layer"),
)
