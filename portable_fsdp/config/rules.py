"""What no engine takes, because a config contradicts itself, and what becomes of an option on every engine alike.

What one engine does with an option is in its own `backends/<engine>/options.py`; `backends/support.py` judges a config
by both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from portable_fsdp.config.describe import yaml_value
from portable_fsdp.config.schema import Config, Optim

Kind = Literal["honoured", "delegated", "refused"]


class Deployment(NamedTuple):
    """Where a config is to run. A count of None isn't known yet: what depends on it is not judged."""

    engine: str
    device: str
    devices: int | None = None  # in all
    hosts: int | None = None


@dataclass(frozen=True)
class Rule:
    """A case in which an option is refused; `when` is None where only the model itself can tell.

    Each way out is one or more settings (`section.key=value`, `--backend=...`), joined by " and ", after which the
    case is no more.
    """

    option: str
    case: str
    when: Callable[[Config, Deployment], bool] | None
    reason: str
    ways: tuple[str, ...] | Callable[[Config, Deployment], tuple[str, ...]] = ()


@dataclass(frozen=True)
class Effect:
    """What an engine does with options: with each value of theirs, or with one (`section.key=value`)."""

    options: tuple[str, ...]
    what: str
    kind: Kind = "honoured"


# ---------------------------------------------------------------------------------- what conditions ask of a config


def is_hybrid(config: Config) -> bool:
    return config.sharding.strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _within(config: Config) -> str:
    """The strategy that a hybrid one has within a replica."""
    return "FULL_SHARD" if config.sharding.strategy == "HYBRID_SHARD" else "SHARD_GRAD_OP"


def _replicas(config: Config, place: Deployment) -> int | None:
    """Copies of the model under a hybrid strategy."""
    return config.sharding.replicas or place.hosts


def _replicas_that_fit(_: Config, place: Deployment) -> tuple[str, ...]:
    fitting = [2] if place.devices is None else parts(place.devices)
    best = [place.hosts] if place.hosts in fitting else fitting[:1]
    return tuple(f"sharding.replicas={count}" for count in best)


def _strategy(config: Config, strategy: str) -> str:
    """The settings for a strategy that isn't hybrid."""
    return f"sharding.strategy={strategy}" + ("" if config.sharding.replicas is None else " and sharding.replicas=null")


def _instead_of_hybrid(config: Config, place: Deployment) -> tuple[str, ...]:
    return (*_replicas_that_fit(config, place), _strategy(config, _within(config)))


def dtypes(config: Config) -> set[str]:
    """All that weights are cast to at use."""
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


def shards_of_a_replica(config: Config, place: Deployment) -> int | None:
    """Devices that share one copy of the model under a strategy that shards; None too for wrong replicas."""
    if place.devices is None or not is_hybrid(config):
        return place.devices
    replicas = _replicas(config, place)
    return None if replicas is None or place.devices % replicas else place.devices // replicas


def parts(whole: int | None) -> list[int]:
    """The divisors of a number of devices, without 1 and itself."""
    return [part for part in range(2, whole or 0) if (whole or 0) % part == 0]


# ---------------------------------------------------------------------------------------------- what no engine takes

RULES = (
    Rule(
        "model.attention",
        "for a model with an attention of its own (ALiBi)",
        None,
        "the model's attention can't be replaced; model.attention=auto leaves it as it is",
    ),
    Rule("model.experts", "other than auto for a dense model", None, "there are no experts"),
    Rule(
        "model.freeze",
        "with a pattern that names nothing, or patterns that name all",
        None,
        "something must be frozen, and something train",
    ),
    Rule("optim.groups", "with a pattern that names nothing that trains", None, "each must name something"),
    Rule(
        "sharding.strategy",
        "on one device",
        lambda c, p: is_hybrid(c) and p.devices == 1,
        "replicas that are sharded need four devices or more",
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
        "with a hybrid strategy, which makes one replica",
        lambda c, p: is_hybrid(c) and p.devices != 1 and _replicas(c, p) == 1,
        "one replica (null: one a host) is FULL_SHARD, or SHARD_GRAD_OP for HYBRID_SHARD_ZERO2",
        _instead_of_hybrid,
    ),
    Rule(
        "sharding.replicas",
        "with a hybrid strategy, which makes a replica of each device",
        lambda c, p: is_hybrid(c) and p.devices is not None and 1 < p.devices == _replicas(c, p),
        "a replica of one device is not sharded: that is NO_SHARD",
        lambda c, p: (*_replicas_that_fit(c, p), _strategy(c, "NO_SHARD")),
    ),
    Rule(
        "sharding.replicas",
        "that do not divide the devices",
        lambda c, p: (
            is_hybrid(c) and p.devices is not None and p.devices > 1 and p.devices % (_replicas(c, p) or 1) > 0
        ),
        "all replicas (null: one a host) have the same number of devices",
        _instead_of_hybrid,
    ),
    Rule(
        "sharding.wrap",
        "for a model that names no layers of its own (biogpt)",
        None,
        "sharding.wrap_classes names them then",
    ),
    Rule(
        "sharding.wrap_classes",
        "with a class that the model doesn't have, or whose modules don't run or hold no parameters",
        None,
        "the error lists those it has",
    ),
    Rule("sharding.wrap_modules", "with a pattern that names no module", None, "each must name something"),
    *(
        Rule(
            f"sharding.{key}",
            "with one of two modules that share a weight",
            None,
            "a tied weight belongs to one unit, which holds both, or to the root",
        )
        for key in ("wrap_classes", "wrap_modules")
    ),
    Rule(
        "sharding.min_num_params",
        "with another wrap than SIZE_BASED_WRAP",
        lambda c, p: c.sharding.min_num_params is not None and c.sharding.wrap != "SIZE_BASED_WRAP",
        "units are not told by their size",
        ("sharding.min_num_params=null", "sharding.wrap=SIZE_BASED_WRAP"),
    ),
    Rule(
        "sharding.min_num_params",
        "with sharding.wrap=SIZE_BASED_WRAP",
        lambda c, p: c.sharding.min_num_params is None and c.sharding.wrap == "SIZE_BASED_WRAP",
        "it has to say from how many parameters on a module is a unit; 100000000 is the default of torch's policy",
        ("sharding.min_num_params=100000000", "sharding.wrap=TRANSFORMER_BASED_WRAP"),
    ),
    Rule(
        "sharding.backward_prefetch_units",
        "with another backward_prefetch than BACKWARD_PRE",
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
        "with another schedule than wsd",
        lambda c, p: c.optim.schedule != "wsd" and c.optim.decay_ratio != Optim.model_fields["decay_ratio"].default,
        "only wsd has a decay that begins at a share of the steps",
        ("optim.decay_ratio=0.2", "optim.schedule=wsd"),
    ),
    Rule(
        "optim.min_lr_ratio",
        "with optim.schedule=constant",
        lambda c, p: (
            c.optim.schedule == "constant" and c.optim.min_lr_ratio != Optim.model_fields["min_lr_ratio"].default
        ),
        "a constant learning rate has no floor to come down to",
        ("optim.min_lr_ratio=0.1", "optim.schedule=cosine"),
    ),
    Rule(
        "precision.master",
        "with precision.compute=float32",
        lambda c, p: c.precision.master == "bfloat16" and c.precision.compute == "float32",
        "weights that rest in bfloat16 have no more digits to compute with",
        ("precision.master=float32", "precision.compute=bfloat16"),
    ),
    Rule(
        "precision.frozen",
        "where all weights train",
        lambda c, p: c.precision.frozen != "auto" and not c.model.freeze and c.model.lora is None,
        "it is about weights that model.freeze or model.lora keeps from training",
        ("precision.frozen=auto",),
    ),
    Rule(
        "precision.compute",
        "without loss scaling",
        lambda c, p: c.precision.compute == "float16",
        "small gradients become 0 in float16 unless the loss is scaled, which is not built",
        ("precision.compute=bfloat16",),
    ),
    Rule(
        "precision.modules",
        "with float16",
        lambda c, p: "float16" in c.precision.modules.values(),
        "small gradients become 0 in float16 unless the loss is scaled, which is not built",
        _modules_without_float16,
    ),
    Rule(
        "precision.modules",
        "with weights that rest in bfloat16",
        lambda c, p: c.precision.master == "bfloat16" and "float32" in c.precision.modules.values(),
        "weights that rest in bfloat16 have no more digits to compute with",
        _modules_without_float32,
    ),
    Rule("precision.modules", "with a pattern that names no module", None, "each must name something"),
    Rule(
        "precision.modules",
        "with modules inside one another, or of a tied weight, in two dtypes",
        None,
        "a weight is cast to one dtype",
    ),
    Rule(
        "precision.reduce",
        "with precision.compute=float32",
        lambda c, p: c.precision.reduce == "bfloat16" and c.precision.compute == "float32",
        "gradients would lose on the way between devices the digits that they were computed with",
        ("precision.reduce=auto", "precision.compute=bfloat16"),
    ),
    Rule(
        "precision.output",
        "with precision.compute=float32",
        lambda c, p: c.precision.output == "bfloat16" and dtypes(c) == {"float32"},
        "the loss would be taken of logits with fewer digits than the model computes",
        ("precision.output=auto", "precision.compute=bfloat16"),
    ),
    Rule(
        "memory.gradient_checkpointing",
        "without saying which",
        lambda c, p: is_selective(c) and c.memory.every is None and not c.memory.save_ops,
        "selective needs memory.every (layers) or memory.save_ops (operations)",
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
        "nothing is held out to evaluate over",
        ("data.eval_split=5%", "train.eval_every=null"),
    ),
    Rule(
        "train.eval_on_start",
        "without train.eval_every",
        lambda c, p: c.train.eval_on_start and c.train.eval_every is None,
        "without eval_every there is no evaluation",
        ("train.eval_on_start=false",),
    ),
    Rule(
        "train.eval_batches",
        "without train.eval_every",
        lambda c, p: c.train.eval_batches is not None and c.train.eval_every is None,
        "without eval_every there is no evaluation",
        ("train.eval_batches=null",),
    ),
    Rule(
        "train.patience",
        "without train.eval_every",
        lambda c, p: c.train.patience is not None and c.train.eval_every is None,
        "without eval_every there is no evaluation",
        ("train.patience=null",),
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
        "weights_only without a checkpoint that resume names",
        lambda c, p: c.checkpoint.load == "weights_only" and c.checkpoint.resume in ("auto", "none"),
        "auto goes on with all of the run's own state",
        ("checkpoint.load=all", "checkpoint.resume=PATH"),
    ),
    Rule(
        "checkpoint.export",
        "of adapters alone, over a base from model.architecture or model.gguf_file",
        lambda c, p: (
            c.checkpoint.export
            and c.model.lora is not None
            and not c.checkpoint.merge_adapters
            and (c.model.pretrained is None or c.model.gguf_file is not None)
        ),
        "peft opens adapters with the base that they name, a Hugging Face folder",
        ("checkpoint.merge_adapters=true", "checkpoint.export=false"),
    ),
    Rule(
        "checkpoint.merge_adapters",
        "without model.lora",
        lambda c, p: c.checkpoint.merge_adapters and c.model.lora is None,
        "there are no adapters to add in",
        ("checkpoint.merge_adapters=false",),
    ),
)

# ------------------------------------------------------------------------------------- what all engines do alike

EFFECTS = (
    Effect(("run.dir",), "everything that the run writes goes there; process 0 writes"),
    Effect(("run.name",), "written into events.jsonl"),
    Effect(("run.seed",), "weights are a function of (seed, name), rows of (seed, epoch, position)"),
    Effect(
        ("model.architecture", "model.pretrained", "model.gguf_file", "model.allow"),
        "built on meta; each process makes or reads its slices",
    ),
    Effect(("model.freeze",), "no gradient, no optimizer state"),
    Effect(("model.lora",), "peft's layers; adapters are sharded, trained and saved like all weights"),
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
    Effect(("data.on_error",), "decided while documents are read and packed, before the first step"),
    Effect(("data.cache_dir",), "one process of a host tokenizes, the others map its files"),
    Effect(("train.steps", "train.epochs", "train.stop_at"), "the same steps on every engine"),
    Effect(("train.global_batch",), "the same rows in each step, however many devices share them"),
    Effect(("train.micro_batch",), "a device's share of the global batch is taken in so many rows at a time"),
    Effect(("train.max_grad_norm",), "the norm of all gradients over all devices, computed on the device"),
    Effect(("train.log_every",), "every step is written to metrics.jsonl; so often one goes to the console"),
    Effect(
        ("train.eval_every", "train.eval_on_start", "train.eval_batches"),
        "the forward alone, on the same rows on every engine; the best checkpoint is kept",
    ),
    Effect(("train.patience",), "all processes know each evaluation, and end after the same step"),
    Effect(("optim.name", "optim.betas", "optim.eps", "optim.momentum"), "torch's optimizer over the shards"),
    Effect(("optim.weight_decay", "optim.groups"), "optimizer groups, told by name and shape"),
    Effect(
        ("optim.lr", "optim.schedule", "optim.warmup_steps", "optim.min_lr_ratio", "optim.decay_ratio"),
        "the learning rate of each step, computed on the host",
    ),
    Effect(("checkpoint.merge_adapters",), "W + alpha / r * B A, on the host, from the checkpoint"),
    Effect(("checkpoint.every", "checkpoint.resume", "checkpoint.export"), "one format for all engines"),
    Effect(("checkpoint.dir",), "renamed into place on a file system; in an object store the manifest is the commit"),
    Effect(("checkpoint.every_minutes",), "the clock of process 0 decides, all learn of it with the next step"),
    Effect(("checkpoint.async_save",), "a thread writes host copies of this process's shards"),
    Effect(("checkpoint.keep", "checkpoint.keep_every"), "process 0 deletes after the newer commit"),
    Effect(("checkpoint.load", "checkpoint.allow", "checkpoint.verify"), "the same checks on every engine"),
    Effect(("model.attention",), "a function of static arguments (static); transformers' own (sdpa, eager)"),
    Effect(("model.attention=auto",), "static where the model takes it, else the model's own"),
    Effect(("model.experts",), "all on all tokens (dense), or the chosen weights gathered (batched_mm)"),
    Effect(("model.experts=auto",), "dense"),
    Effect(("sharding.replicas",), "copies of the model under HYBRID_SHARD*; null: one a host"),
    Effect(("sharding.reshard_after_forward=null",), "as the strategy says"),
    Effect(("sharding.wrap=NO_WRAP",), "no units but those of wrap_modules; the rest is the root's"),
    Effect(("sharding.wrap_modules=[]",), "none by name"),
    Effect(("sharding.min_num_params=null",), "units are not told by their size"),
    Effect(
        ("sharding.wrap_classes",),
        "the layers, instead of the model's own: recomputed, compiled, scanned; units under TRANSFORMER_BASED_WRAP",
    ),
    Effect(("precision.master",), "dtype of weights and optimizer state at rest"),
    Effect(("precision.frozen",), "dtype at rest of weights that don't train"),
    Effect(("precision.frozen=auto",), "as precision.master"),
    Effect(("precision.output",), "logits are cast before the loss; auto: as the head gives them"),
    Effect(("memory.gradient_checkpointing=none",), "activations are kept"),
    Effect(("memory.cpu_offload=false",), "all rests in device memory"),
    Effect(("compile.scan_layers=false",), "a copy of the program for each layer"),
)
