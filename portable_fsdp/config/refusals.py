"""What is refused: by every engine, because it contradicts itself, or by an engine that can't do it.

One table, REFUSALS; above it, what its conditions and ways out ask of a config. `support.py` judges by it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from portable_fsdp.config.describe import yaml_value
from portable_fsdp.config.schema import Compile, Config, Optim, XlaFsdp1

NATIVE, XLA, FSDP1 = ("native",), ("xla",), ("xla_fsdp1",)
EITHER_XLA = (*XLA, *FSDP1)
EVERY = (*NATIVE, *EITHER_XLA)

ENGINES_ON = {"cpu": EVERY, "cuda": NATIVE, "tpu": EVERY}
"""The engines of a device; native on TPUs needs TorchTPU."""


def usual_engine(device: str) -> str:
    """What `--backend=auto` is on a device."""
    return "xla" if device == "tpu" and find_spec("torch_tpu") is None else "native"


class Place(NamedTuple):
    """Where a config is to run. A count of None isn't known yet: what depends on it is not judged."""

    engine: str
    device: str
    devices: int | None = None  # in all
    hosts: int | None = None


@dataclass(frozen=True)
class Refusal:
    """A case in which an option is refused; `when` is None where only the model itself can tell.

    Each way out is one or more settings (`section.key=value`, `--backend=...`), joined by " and ", after which the
    case is no more.
    """

    option: str
    engines: tuple[str, ...]
    case: str
    when: Callable[[Config, Place], bool] | None
    reason: str
    ways: tuple[str, ...] | Callable[[Config, Place], tuple[str, ...]] = ()

    def ways_out(self, config: Config, place: Place) -> tuple[str, ...]:
        """Those that lead somewhere on this device."""
        ways = self.ways(config, place) if callable(self.ways) else self.ways
        absent = {f"--backend={engine}" for engine in EVERY if engine not in ENGINES_ON[place.device]}
        if place.device == "tpu":
            absent.add("--backend=native")  # of use only to those who have TorchTPU, and they know
        return tuple(way for way in ways if way not in absent)


# ------------------------------------------------------------------------------- what the conditions below ask


def _is_hybrid(config: Config) -> bool:
    return config.sharding.strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _within(config: Config) -> str:
    """The strategy that a hybrid one has within a replica."""
    return "FULL_SHARD" if config.sharding.strategy == "HYBRID_SHARD" else "SHARD_GRAD_OP"


def _replicas(config: Config, place: Place) -> int | None:
    """Copies of the model under a hybrid strategy."""
    return config.sharding.replicas or place.hosts


def _shards(config: Config, place: Place) -> int | None:
    """Devices that share one copy of the model under a strategy that shards; None too for wrong replicas."""
    if place.devices is None or not _is_hybrid(config):
        return place.devices
    replicas = _replicas(config, place)
    return None if replicas is None or place.devices % replicas else place.devices // replicas


def _parts(whole: int | None) -> list[int]:
    """The divisors of a number of devices, without 1 and itself."""
    return [part for part in range(2, whole or 0) if (whole or 0) % part == 0]


def _replicas_that_fit(_: Config, place: Place) -> tuple[str, ...]:
    fitting = [2] if place.devices is None else _parts(place.devices)
    best = [place.hosts] if place.hosts in fitting else fitting[:1]
    return tuple(f"sharding.replicas={count}" for count in best)


def _strategy(config: Config, strategy: str) -> str:
    """The settings for a strategy that isn't hybrid."""
    return f"sharding.strategy={strategy}" + ("" if config.sharding.replicas is None else " and sharding.replicas=null")


def _instead_of_hybrid(config: Config, place: Place) -> tuple[str, ...]:
    return (*_replicas_that_fit(config, place), _strategy(config, _within(config)))


def _reshards(config: Config) -> bool:
    return config.sharding.strategy in ("FULL_SHARD", "HYBRID_SHARD")


def _reshard_does_not_fit(config: Config, place: Place) -> bool:
    wanted, shards = config.sharding.reshard_after_forward, _shards(config, place)
    return wanted is not None and _reshards(config) and shards is not None and wanted not in _parts(shards)


def _reshard_that_fits(config: Config, place: Place) -> tuple[str, ...]:
    wanted = config.sharding.reshard_after_forward or 0
    parts = sorted(_parts(_shards(config, place)), key=lambda part: abs(part - wanted))
    return tuple(f"sharding.reshard_after_forward={count}" for count in (*parts[:1], "null"))


def _dtypes(config: Config) -> set[str]:
    """All that weights are cast to at use."""
    return {config.precision.compute, *config.precision.modules.values()}


def _modules_without_float16(config: Config, _: Place) -> tuple[str, ...]:
    modules = config.precision.modules.items()
    replaced = {name: "bfloat16" if dtype == "float16" else dtype for name, dtype in modules}
    return (f"precision.modules={yaml_value(replaced)}",)


def _modules_without_float32(config: Config, _: Place) -> tuple[str, ...]:
    kept = {name: dtype for name, dtype in config.precision.modules.items() if dtype != "float32"}
    return ("precision.master=float32", f"precision.modules={yaml_value(kept)}")


def _own(config: Config, key: str) -> object:
    return getattr(config.xla_fsdp1, key)


def _own_default(key: str) -> object:
    return XlaFsdp1.model_fields[key].default


def _selective(config: Config) -> bool:
    return config.memory.gradient_checkpointing == "selective"


# -------------------------------------------------------------------------------------------------- what is refused

REFUSALS = (
    # --- model
    Refusal(
        "model.attention",
        EITHER_XLA,
        "on XLA",
        lambda c, p: c.model.attention in ("sdpa", "eager"),
        "transformers then reads a mask on the host in every step, which is a second program and a wait",
        ("model.attention=auto", "--backend=native"),
    ),
    Refusal(
        "model.attention",
        EITHER_XLA,
        "on XLA",
        lambda c, p: c.model.attention == "flex",
        "torch has no kernel of flex_attention for it",
        ("model.attention=auto", "--backend=native"),
    ),
    Refusal(
        "model.attention",
        NATIVE,
        "on another device than cuda",
        lambda c, p: c.model.attention == "flex" and p.device != "cuda",
        "torch has no backward of flex_attention there",
        ("model.attention=auto",),
    ),
    Refusal(
        "model.attention",
        NATIVE,
        "with another compile.backend than inductor",
        lambda c, p: c.model.attention == "flex" and c.compile.enabled and c.compile.backend != "inductor",
        "without inductor's kernel all scores would be in memory",
        ("compile.backend=inductor", "model.attention=auto"),
    ),
    Refusal(
        "model.attention",
        NATIVE,
        "with memory.save_ops",
        lambda c, p: c.model.attention == "flex" and bool(c.memory.save_ops),
        "what is compiled shows torch no operators to choose from",
        (
            "memory.save_ops=[] and memory.gradient_checkpointing=full and memory.every=null",
            "model.attention=auto",
        ),
    ),
    Refusal(
        "model.attention",
        EVERY,
        "for a model with an attention of its own (ALiBi)",
        None,
        "the model's attention can't be replaced; model.attention=auto leaves it as it is",
    ),
    Refusal(
        "model.attention",
        NATIVE,
        "flex for a model that doesn't give its layers what forward is told (stablelm), or has no attention (mamba2)",
        None,
        "the masks of a forward would not reach the layers; model.attention=auto",
    ),
    Refusal(
        "model.experts",
        EITHER_XLA,
        "on XLA",
        lambda c, p: c.model.experts == "grouped_mm",
        "it sorts tokens by expert: shapes that are known only while the step runs, and XLA compiles before",
        ("model.experts=auto", "--backend=native"),
    ),
    Refusal("model.experts", EVERY, "other than auto for a dense model", None, "there are no experts"),
    Refusal(
        "model.freeze",
        EVERY,
        "with a pattern that names nothing, or patterns that name all",
        None,
        "something must be frozen, and something train",
    ),
    # --- optim
    Refusal("optim.groups", EVERY, "with a pattern that names nothing that trains", None, "each must name something"),
    # --- sharding
    Refusal(
        "sharding.strategy",
        EVERY,
        "on one device",
        lambda c, p: _is_hybrid(c) and p.devices == 1,
        "replicas that are sharded need four devices or more",
        lambda c, p: (_strategy(c, _within(c)),),
    ),
    Refusal(
        "sharding.replicas",
        EVERY,
        "without a hybrid strategy",
        lambda c, p: c.sharding.replicas is not None and not _is_hybrid(c),
        "only HYBRID_SHARD and HYBRID_SHARD_ZERO2 have replicas of a sharded model",
        ("sharding.replicas=null", "sharding.strategy=HYBRID_SHARD"),
    ),
    Refusal(
        "sharding.replicas",
        EVERY,
        "with a hybrid strategy, which makes one replica",
        lambda c, p: _is_hybrid(c) and p.devices != 1 and _replicas(c, p) == 1,
        "one replica (null: one a host) is FULL_SHARD, or SHARD_GRAD_OP for HYBRID_SHARD_ZERO2",
        _instead_of_hybrid,
    ),
    Refusal(
        "sharding.replicas",
        EVERY,
        "with a hybrid strategy, which makes a replica of each device",
        lambda c, p: _is_hybrid(c) and p.devices is not None and 1 < p.devices == _replicas(c, p),
        "a replica of one device is not sharded: that is NO_SHARD",
        lambda c, p: (*_replicas_that_fit(c, p), _strategy(c, "NO_SHARD")),
    ),
    Refusal(
        "sharding.replicas",
        EVERY,
        "that do not divide the devices",
        lambda c, p: (
            _is_hybrid(c) and p.devices is not None and p.devices > 1 and p.devices % (_replicas(c, p) or 1) > 0
        ),
        "all replicas (null: one a host) have the same number of devices",
        _instead_of_hybrid,
    ),
    Refusal(
        "sharding.reshard_after_forward",
        EITHER_XLA,
        "on XLA",
        lambda c, p: c.sharding.reshard_after_forward is not None,
        "weights are sharded over all devices of a replica, or gathered, and nothing between",
        ("sharding.reshard_after_forward=null", "--backend=native"),
    ),
    Refusal(
        "sharding.reshard_after_forward",
        NATIVE,
        "with a strategy that keeps weights gathered after forward",
        lambda c, p: c.sharding.reshard_after_forward is not None and not _reshards(c),
        "only FULL_SHARD and HYBRID_SHARD shard them again after forward",
        lambda c, p: (
            "sharding.reshard_after_forward=null",
            f"sharding.strategy={'HYBRID_SHARD' if _is_hybrid(c) else 'FULL_SHARD'}",
        ),
    ),
    Refusal(
        "sharding.reshard_after_forward",
        NATIVE,
        "that does not divide the devices of a replica, or is all of them",
        _reshard_does_not_fit,
        "after forward each group of so many devices keeps the whole model between them",
        _reshard_that_fits,
    ),
    Refusal(
        "sharding.wrap",
        EVERY,
        "for a model that names no layers of its own (biogpt)",
        None,
        "sharding.wrap_classes names them then",
    ),
    Refusal(
        "sharding.wrap_classes",
        EVERY,
        "with a class that the model doesn't have, or whose modules don't run or hold no parameters",
        None,
        "the error lists those it has",
    ),
    Refusal("sharding.wrap_modules", EVERY, "with a pattern that names no module", None, "each must name something"),
    *(
        Refusal(
            f"sharding.{key}",
            EVERY,
            "with one of two modules that share a weight",
            None,
            "a tied weight belongs to one unit, which holds both, or to the root",
        )
        for key in ("wrap_classes", "wrap_modules")
    ),
    Refusal(
        "sharding.min_num_params",
        EVERY,
        "with another wrap than SIZE_BASED_WRAP",
        lambda c, p: c.sharding.min_num_params is not None and c.sharding.wrap != "SIZE_BASED_WRAP",
        "units are not told by their size",
        ("sharding.min_num_params=null", "sharding.wrap=SIZE_BASED_WRAP"),
    ),
    Refusal(
        "sharding.min_num_params",
        EVERY,
        "with sharding.wrap=SIZE_BASED_WRAP",
        lambda c, p: c.sharding.min_num_params is None and c.sharding.wrap == "SIZE_BASED_WRAP",
        "it has to say from how many parameters on a module is a unit; 100000000 is the default of torch's policy",
        ("sharding.min_num_params=100000000", "sharding.wrap=TRANSFORMER_BASED_WRAP"),
    ),
    Refusal(
        "sharding.backward_prefetch_units",
        EVERY,
        "with another backward_prefetch than BACKWARD_PRE",
        lambda c, p: c.sharding.backward_prefetch_units > 1 and c.sharding.backward_prefetch != "BACKWARD_PRE",
        "BACKWARD_POST gathers one unit ahead, NO_PREFETCH none",
        ("sharding.backward_prefetch_units=1", "sharding.backward_prefetch=BACKWARD_PRE"),
    ),
    # --- optim
    Refusal(
        "optim.momentum",
        EVERY,
        "with optim.name=adamw",
        lambda c, p: bool(c.optim.momentum) and c.optim.name == "adamw",
        "AdamW has betas instead",
        ("optim.momentum=0.0", "optim.name=sgd and optim.betas=[0.9, 0.95] and optim.eps=1e-8"),
    ),
    *(
        Refusal(
            f"optim.{key}",
            EVERY,
            "with optim.name=sgd",
            lambda c, p, key=key: c.optim.name == "sgd" and getattr(c.optim, key) != Optim.model_fields[key].default,
            "SGD has momentum instead",
            (f"optim.{key}={default}", "optim.name=adamw and optim.momentum=0.0"),
        )
        for key, default in (("betas", "[0.9, 0.95]"), ("eps", "1e-8"))
    ),
    Refusal(
        "optim.decay_ratio",
        EVERY,
        "with another schedule than wsd",
        lambda c, p: c.optim.schedule != "wsd" and c.optim.decay_ratio != Optim.model_fields["decay_ratio"].default,
        "only wsd has a decay that begins at a share of the steps",
        ("optim.decay_ratio=0.2", "optim.schedule=wsd"),
    ),
    Refusal(
        "optim.min_lr_ratio",
        EVERY,
        "with optim.schedule=constant",
        lambda c, p: (
            c.optim.schedule == "constant" and c.optim.min_lr_ratio != Optim.model_fields["min_lr_ratio"].default
        ),
        "a constant learning rate has no floor to come down to",
        ("optim.min_lr_ratio=0.1", "optim.schedule=cosine"),
    ),
    # --- precision
    Refusal(
        "precision.master",
        EVERY,
        "with precision.compute=float32",
        lambda c, p: c.precision.master == "bfloat16" and c.precision.compute == "float32",
        "weights that rest in bfloat16 have no more digits to compute with",
        ("precision.master=float32", "precision.compute=bfloat16"),
    ),
    Refusal(
        "precision.master",
        FSDP1,
        "on xla_fsdp1",
        lambda c, p: c.precision.master == "bfloat16" and c.precision.compute != "float32",
        "XlaFullyShardedDataParallel takes float32 weights only",
        ("precision.master=float32", "--backend=xla"),
    ),
    Refusal(
        "precision.frozen",
        EVERY,
        "where all weights train",
        lambda c, p: c.precision.frozen != "auto" and not c.model.freeze and c.model.lora is None,
        "it is about weights that model.freeze or model.lora keeps from training",
        ("precision.frozen=auto",),
    ),
    Refusal(
        "precision.frozen",
        FSDP1,
        "on xla_fsdp1",
        lambda c, p: c.precision.frozen == "bfloat16" and bool(c.model.freeze or c.model.lora),
        "XlaFullyShardedDataParallel takes float32 weights only",
        ("precision.frozen=auto", "--backend=xla"),
    ),
    Refusal(
        "precision.compute",
        EVERY,
        "without loss scaling",
        lambda c, p: c.precision.compute == "float16",
        "small gradients become 0 in float16 unless the loss is scaled, which is not built",
        ("precision.compute=bfloat16",),
    ),
    Refusal(
        "precision.modules",
        EVERY,
        "with float16",
        lambda c, p: "float16" in c.precision.modules.values(),
        "small gradients become 0 in float16 unless the loss is scaled, which is not built",
        _modules_without_float16,
    ),
    Refusal(
        "precision.modules",
        EVERY,
        "with weights that rest in bfloat16",
        lambda c, p: c.precision.master == "bfloat16" and "float32" in c.precision.modules.values(),
        "weights that rest in bfloat16 have no more digits to compute with",
        _modules_without_float32,
    ),
    Refusal("precision.modules", EVERY, "with a pattern that names no module", None, "each must name something"),
    Refusal(
        "precision.modules",
        EVERY,
        "with modules inside one another, or of a tied weight, in two dtypes",
        None,
        "a weight is cast to one dtype",
    ),
    Refusal(
        "precision.modules",
        XLA,
        "of some layers only, with scan_layers",
        None,
        "all turns of the loop run one program, with one dtype for each weight",
    ),
    Refusal(
        "precision.modules",
        FSDP1,
        "on xla_fsdp1",
        lambda c, p: bool(c.precision.modules),
        "XlaFullyShardedDataParallel casts a whole unit to one compute dtype",
        ("precision.modules={}", "--backend=xla"),
    ),
    Refusal(
        "precision.reduce",
        EVERY,
        "with precision.compute=float32",
        lambda c, p: c.precision.reduce == "bfloat16" and c.precision.compute == "float32",
        "gradients would lose on the way between devices the digits that they were computed with",
        ("precision.reduce=auto", "precision.compute=bfloat16"),
    ),
    Refusal(
        "precision.reduce",
        XLA,
        "with weights that rest in bfloat16",
        lambda c, p: c.precision.reduce == "float32" and c.precision.master == "bfloat16",
        "a gradient has the dtype of its weight",
        ("precision.reduce=auto", "precision.master=float32", "--backend=native"),
    ),
    Refusal(
        "precision.reduce",
        XLA,
        "with scan_layers and a lower compute dtype",
        lambda c, p: c.precision.reduce == "float32" and c.compile.scan_layers and _dtypes(c) != {"float32"},
        "the loop's gradients have the dtype of the copies that it takes",
        ("precision.reduce=auto", "compile.scan_layers=false"),
    ),
    Refusal(
        "precision.reduce",
        XLA,
        "for weights in a lower dtype of other layers than linear ones and embeddings",
        None,
        "XLA sums a gradient in the dtype in which it is computed; precision.modules gives those layers float32",
    ),
    Refusal(
        "precision.reduce",
        XLA,
        "with modules in float32",
        lambda c, p: c.precision.reduce == "bfloat16" and "float32" in c.precision.modules.values(),
        "XLA sums the gradients of those modules in their compute dtype",
        ("precision.reduce=auto", "precision.modules={}"),
    ),
    Refusal(
        "precision.output",
        EVERY,
        "with precision.compute=float32",
        lambda c, p: c.precision.output == "bfloat16" and _dtypes(c) == {"float32"},
        "the loss would be taken of logits with fewer digits than the model computes",
        ("precision.output=auto", "precision.compute=bfloat16"),
    ),
    # --- memory
    Refusal(
        "memory.gradient_checkpointing",
        EVERY,
        "without saying which",
        lambda c, p: _selective(c) and c.memory.every is None and not c.memory.save_ops,
        "selective needs memory.every (layers) or memory.save_ops (operations)",
        ("memory.every=2", "memory.gradient_checkpointing=full"),
    ),
    Refusal(
        "memory.every",
        EVERY,
        "without gradient_checkpointing=selective",
        lambda c, p: c.memory.every is not None and not _selective(c),
        "full means every layer, none means none",
        ("memory.every=null", "memory.gradient_checkpointing=selective and memory.save_ops=[]"),
    ),
    Refusal(
        "memory.every",
        EVERY,
        "that is more than the number of layers",
        None,
        "the model has fewer layers",
    ),
    Refusal(
        "memory.every",
        EVERY,
        "together with memory.save_ops",
        lambda c, p: _selective(c) and c.memory.every is not None and bool(c.memory.save_ops),
        "selective picks layers or operations, not both",
        ("memory.save_ops=[]", "memory.every=null"),
    ),
    Refusal(
        "memory.save_ops",
        EVERY,
        "without gradient_checkpointing=selective",
        lambda c, p: bool(c.memory.save_ops) and not _selective(c),
        "full recomputes every operation, none keeps all",
        ("memory.save_ops=[]", "memory.gradient_checkpointing=selective and memory.every=null"),
    ),
    Refusal(
        "memory.save_ops",
        EITHER_XLA,
        "on XLA",
        lambda c, p: bool(c.memory.save_ops),
        "torch_xla's checkpoint recomputes all of a layer",
        ("memory.save_ops=[] and memory.gradient_checkpointing=full and memory.every=null", "--backend=native"),
    ),
    Refusal(
        "train.eval_every",
        EVERY,
        "without data.eval_split",
        lambda c, p: c.train.eval_every is not None and c.data.eval_split is None,
        "nothing is held out to evaluate over",
        ("data.eval_split=5%", "train.eval_every=null"),
    ),
    Refusal(
        "train.eval_on_start",
        EVERY,
        "without train.eval_every",
        lambda c, p: c.train.eval_on_start and c.train.eval_every is None,
        "without eval_every there is no evaluation",
        ("train.eval_on_start=false",),
    ),
    Refusal(
        "train.eval_batches",
        EVERY,
        "without train.eval_every",
        lambda c, p: c.train.eval_batches is not None and c.train.eval_every is None,
        "without eval_every there is no evaluation",
        ("train.eval_batches=null",),
    ),
    Refusal(
        "train.patience",
        EVERY,
        "without train.eval_every",
        lambda c, p: c.train.patience is not None and c.train.eval_every is None,
        "without eval_every there is no evaluation",
        ("train.patience=null",),
    ),
    Refusal(
        "checkpoint.keep_every",
        EVERY,
        "without checkpoint.keep",
        lambda c, p: c.checkpoint.keep_every is not None and c.checkpoint.keep is None,
        "without keep, every checkpoint is kept",
        ("checkpoint.keep_every=null", "checkpoint.keep=1"),
    ),
    Refusal(
        "checkpoint.load",
        EVERY,
        "weights_only without a checkpoint that resume names",
        lambda c, p: c.checkpoint.load == "weights_only" and c.checkpoint.resume in ("auto", "none"),
        "auto goes on with all of the run's own state",
        ("checkpoint.load=all", "checkpoint.resume=PATH"),
    ),
    Refusal(
        "memory.cpu_offload",
        EITHER_XLA,
        "on XLA",
        lambda c, p: c.memory.cpu_offload,
        "torch_xla keeps parameters and optimizer state in device memory",
        ("memory.cpu_offload=false", "--backend=native"),
    ),
    # --- compile
    Refusal(
        "compile.backend",
        NATIVE,
        "without compile.enabled",
        lambda c, p: not c.compile.enabled and c.compile.backend != Compile.model_fields["backend"].default,
        "nothing is compiled by it",
        ("compile.backend=inductor", "compile.enabled=true"),
    ),
    Refusal(
        "compile.backend",
        NATIVE,
        "on cpu",
        lambda c, p: c.compile.enabled and c.compile.backend == "inductor" and p.device == "cpu",
        "inductor would build C++ for this host, which is neither tried nor fast",
        ("compile.backend=aot_eager", "compile.enabled=false"),
    ),
    Refusal(
        "compile.scan_layers",
        NATIVE,
        "on native",
        lambda c, p: c.compile.scan_layers,
        "a loop over layers is a program of XLA's; torch.compile shares one program between equal layers by itself",
        ("compile.scan_layers=false", "--backend=xla"),
    ),
    Refusal(
        "compile.scan_layers",
        FSDP1,
        "on xla_fsdp1",
        lambda c, p: c.compile.scan_layers,
        "a unit's weights are gathered by its own module, one layer after the other",
        ("compile.scan_layers=false", "--backend=xla"),
    ),
    Refusal(
        "compile.scan_layers",
        XLA,
        "with gradient_checkpointing=selective",
        lambda c, p: c.compile.scan_layers and _selective(c),
        "all turns of the loop run one program: all layers are recomputed, or none",
        (
            "memory.gradient_checkpointing=full and memory.every=null and memory.save_ops=[]",
            "compile.scan_layers=false",
        ),
    ),
    Refusal(
        "compile.scan_layers",
        XLA,
        "with units by size",
        lambda c, p: c.compile.scan_layers and c.sharding.wrap == "SIZE_BASED_WRAP",
        "the loop gathers a layer as one unit",
        ("sharding.wrap=TRANSFORMER_BASED_WRAP and sharding.min_num_params=null", "compile.scan_layers=false"),
    ),
    Refusal(
        "compile.scan_layers",
        XLA,
        "with units by name",
        lambda c, p: c.compile.scan_layers and bool(c.sharding.wrap_modules),
        "the loop gathers a layer as one unit",
        ("sharding.wrap_modules=[]", "compile.scan_layers=false"),
    ),
    Refusal(
        "compile.scan_layers",
        XLA,
        "for layers that don't follow one another in a list of the model, or hold units (sharding.wrap_classes)",
        None,
        "a turn of the loop is a layer, gathered as one unit",
    ),
    Refusal("compile.scan_layers", XLA, "for layers that differ (gemma2)", None, "all turns run one program"),
    # --- checkpoint
    Refusal(
        "checkpoint.export",
        EVERY,
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
    Refusal(
        "checkpoint.merge_adapters",
        EVERY,
        "without model.lora",
        lambda c, p: c.checkpoint.merge_adapters and c.model.lora is None,
        "there are no adapters to add in",
        ("checkpoint.merge_adapters=false",),
    ),
    # --- one engine's own
    *(
        Refusal(
            f"xla_fsdp1.{key}",
            (*NATIVE, *XLA),
            "on another engine than xla_fsdp1",
            lambda c, p, key=key: _own(c, key) != _own_default(key),
            "no other engine has this setting",
            lambda c, p, key=key: (f"xla_fsdp1.{key}={yaml_value(_own_default(key))}", "--backend=xla_fsdp1"),
        )
        for key in ("flatten_parameters", "shard_param_on_dim_0", "pin_layout_in_collective_ops", "buffer_dtype")
    ),
    Refusal(
        "xla_fsdp1.flatten_parameters",
        FSDP1,
        "with weight decay or optimizer groups",
        lambda c, p: c.xla_fsdp1.flatten_parameters and bool(c.optim.weight_decay or c.optim.groups),
        "a unit's parameters are one tensor, which has one weight decay and one learning rate",
        ("xla_fsdp1.flatten_parameters=false", "optim.weight_decay=0 and optim.groups=[]"),
    ),
    Refusal(
        "xla_fsdp1.shard_param_on_dim_0",
        FSDP1,
        "with flatten_parameters",
        lambda c, p: c.xla_fsdp1.flatten_parameters and bool(c.xla_fsdp1.shard_param_on_dim_0),
        "the joined parameters of a unit have no rows; torch_xla would ignore it",
        ("xla_fsdp1.shard_param_on_dim_0=null", "xla_fsdp1.flatten_parameters=false"),
    ),
    Refusal(
        "xla_fsdp1.shard_param_on_dim_0",
        FSDP1,
        "for a model with a parameter of no dimensions",
        None,
        "it has no rows to cut; false cuts each parameter flat",
    ),
)
