"""Rules that no engine owns: configs that contradict themselves.

Each engine's own rules are in `backends/<engine>/options.py`; `backends/support.py` checks a config against both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from portable_fsdp.config.describe import default_of, value_of, yaml_value
from portable_fsdp.config.schema import Compile, Config, Optim


class Deployment(NamedTuple):
    """Where a config will run. A count of None, or no generation, is unknown: rules that depend on it don't apply."""

    engine: str
    device: str
    devices: int | None = None  # in all
    hosts: int | None = None
    generation: str = ""  # of a TPU, as libtpu names slices: v5p


When = Callable[[Config, Deployment], bool]


@dataclass(frozen=True)
class Rule:
    """A case in which an option is refused; `when` is None where only the built model can decide.

    Each way out is one or more settings (`section.key=value`, `--backend=...`), joined by " and ".
    """

    option: str
    case: str
    when: When | None
    reason: str
    ways: tuple[str, ...] | Callable[[Config, Deployment], tuple[str, ...]] = ()
    only: str = ""  # the one value that is left; empty: more than one


class Refused(Rule):
    """A rule whose first way out is the option's default.

    It refuses every other value of `section.key`, or only words of it (`section.key=word|word`); with `when`, in that
    case alone.
    """

    def __init__(self, option: str, case: str, reason: str, *other_ways: str, when: When | None = None) -> None:
        option, _, words = option.partition("=")
        default = default_of(option)
        text = yaml_value(default)

        def is_refused(config: Config, place: Deployment) -> bool:
            value = value_of(config, option)
            is_other = value in words.split("|") if words else value != default
            return is_other and (when is None or when(config, place))

        only = "" if words or when else text
        super().__init__(option, case, is_refused, reason, (f"{option}={text}", *other_ways), only)


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


def modules_without_float16(config: Config, _: Deployment) -> tuple[str, ...]:
    modules = config.precision.modules.items()
    replaced = {name: "bfloat16" if dtype == "float16" else dtype for name, dtype in modules}
    return (f"precision.modules={yaml_value(replaced)}",)


def _modules_without_float32(config: Config, _: Deployment) -> tuple[str, ...]:
    kept = {name: dtype for name, dtype in config.precision.modules.items() if dtype != "float32"}
    return ("precision.master=float32", f"precision.modules={yaml_value(kept)}")


def without_compiler(config: Config) -> Config:
    """The same steps without torch.compile and scan, and so without what needs them: every layer runs by itself."""
    memory = config.memory
    if memory.gradient_checkpointing == "budget":
        memory = memory.model_copy(update={"gradient_checkpointing": "none", "budget": default_of("memory.budget")})
    if config.compile.scan_layers:  # XLA offloads inputs of scanned layers alone
        memory = memory.model_copy(update={"offload": "none"})
    return config.model_copy(update={"compile": Compile(), "memory": memory})


def is_selective(config: Config) -> bool:
    return config.memory.gradient_checkpointing == "selective"


def shards_of_a_replica(config: Config, deployment: Deployment) -> int | None:
    """Devices that share one copy of the model; None where unknown, or where replicas don't divide the devices."""
    if deployment.devices is None or not is_hybrid(config):
        return deployment.devices
    replicas = _replicas(config, deployment)
    return None if replicas is None or deployment.devices % replicas else deployment.devices // replicas


def only_largest_bucket(config: Config, _: Deployment) -> tuple[str, ...]:
    """The way out of several sizes."""
    largest = {key: sizes[-1:] for key, sizes in config.data.buckets.items()}
    return (f"data.buckets={yaml_value(largest)}", "--backend=native")


def parts(whole: int | None) -> list[int]:
    """The divisors of `whole`, without 1 and itself."""
    return [part for part in range(2, whole or 0) if (whole or 0) % part == 0]


# ------------------------------------------------------------------------------------------------ refused everywhere

_NO_MORE_DIGITS = "bfloat16 weights hold no more digits to compute with"


class _Without(Refused):
    """For an option that counts only with `setting`: `key=value`, or with any value of a key whose default is null.

    `beside`: what the way out by that setting needs too.
    """

    def __init__(self, option: str, setting: str, reason: str, beside: str = "") -> None:
        needed, _, value = setting.partition("=")
        takes_any, default = default_of(needed) is None, default_of(option)

        def is_refused(config: Config, _: Deployment) -> bool:
            actual = value_of(config, needed)
            is_missing = actual is None if takes_any else actual != value
            return is_missing and value_of(config, option) != default

        ways = [setting + beside] if value else []
        super().__init__(option, f"without {needed if takes_any else setting}", reason, *ways, when=is_refused)


class _OfOptimizers(Refused):
    """For an option that only these optimizers read."""

    def __init__(self, option: str, *names: str) -> None:
        def is_refused(config: Config, _: Deployment) -> bool:
            return config.optim.factory is not None or config.optim.name not in names

        case = f"with another optimizer than {', '.join(names)}"
        super().__init__(option, case, "no other optimizer has it", when=is_refused)


_NEEDS = (
    _Without("sharding.min_num_params", "sharding.wrap=SIZE_BASED_WRAP", "only SIZE_BASED_WRAP chooses units by size"),
    _Without(
        "sharding.backward_prefetch_units",
        "sharding.backward_prefetch=BACKWARD_PRE",
        "BACKWARD_POST gathers one unit ahead, NO_PREFETCH none",
    ),
    _OfOptimizers("optim.momentum", "sgd", "muon"),
    _OfOptimizers("optim.betas", "adamw", "adam", "lion", "muon", "adamw8bit"),
    _OfOptimizers("optim.eps", "adamw", "adam", "muon", "adamw8bit"),
    _Without("optim.decay_ratio", "optim.schedule=wsd", "only wsd has a separate decay"),
    _Without(
        "memory.every",
        "memory.gradient_checkpointing=selective",
        "no other mode goes by the number of a layer",
        " and memory.save_ops=[]",
    ),
    _Without(
        "memory.save_ops",
        "memory.gradient_checkpointing=selective",
        "full recomputes every operation, none keeps all",
        " and memory.every=null",
    ),
    Refused(
        "memory.classes",
        "without gradient checkpointing of modules",
        "nothing is recomputed by class",
        "memory.gradient_checkpointing=full",
        when=lambda c, p: c.memory.gradient_checkpointing not in ("full", "selective"),
    ),
    _Without("memory.budget", "memory.gradient_checkpointing=budget", "no other mode keeps to a budget"),
    _Without("precision.products", "precision.compute=bfloat16", "8 bits round what is computed in bfloat16"),
    _Without("train.eval_every", "data.eval_split=5%", "there is no validation set"),
    _Without("train.eval_on_start", "train.eval_every", "without eval_every the run never evaluates"),
    _Without("train.eval_batches", "train.eval_every", "without eval_every the run never evaluates"),
    _Without("train.patience", "train.eval_every", "without eval_every the run never evaluates"),
    _Without("train.sample_prompts", "train.sample_every", "without sample_every the run never samples"),
    _Without("train.sample_tokens", "train.sample_every", "without sample_every the run never samples"),
    _Without("checkpoint.keep_every", "checkpoint.keep=1", "without keep, every checkpoint is kept"),
    _Without("checkpoint.merge_adapters", "model.lora", "there are no adapters to merge"),
)

_OF_THE_MODEL = (
    ("model.attention", "for a model with its own attention (ALiBi)", "it can't be replaced; auto keeps it"),
    ("model.experts", "other than auto for a dense model", "there are no experts"),
    (
        "model.freeze",
        "with a pattern that matches nothing, or patterns that match everything",
        "some weights must be frozen, and some must train",
    ),
    ("optim.groups", "with a pattern that matches no trained weight", "each must match one"),
    ("sharding.wrap", "for a model that names no layers (biogpt)", "name them in sharding.wrap_classes"),
    (
        "sharding.wrap_classes",
        "with a class that the model lacks, or whose modules don't run, have no parameters, or share a weight",
        "the error lists the classes; a tied weight belongs to one unit that holds both modules, or to the root",
    ),
    (
        "sharding.wrap_modules",
        "with a pattern that matches no module, or one of two modules that share a weight",
        "each must match one; a tied weight belongs to one unit that holds both modules, or to the root",
    ),
    (
        "precision.modules",
        "with a pattern that matches no module, or two dtypes for nested modules or for a tied weight",
        "each must match one, and a weight is cast to one dtype",
    ),
    (
        "optim.factory",
        "with float16, for an optimizer that can't skip a step on the device",
        "docs/optimizers.md says what it takes",
    ),
    ("precision.products", "for layers without linear ones whose sizes 16 divides", "there is nothing to convert"),
    ("memory.every", "that is more than the number of layers", "the model has fewer layers"),
    ("memory.classes", "that the model doesn't have", "no module is one of them"),
)
"""Option, a case that only the built model shows, and the reason."""

RULES = (
    *(Rule(option, case, None, reason) for option, case, reason in _OF_THE_MODEL),
    Rule(
        "sharding.strategy",
        "on one device",
        lambda c, p: is_hybrid(c) and p.devices == 1,
        "sharded replicas need four devices or more",
        lambda c, p: (_strategy(c, _within(c)),),
    ),
    Refused(
        "sharding.replicas",
        "without a hybrid strategy",
        "only HYBRID_SHARD and HYBRID_SHARD_ZERO2 have replicas of a sharded model",
        "sharding.strategy=HYBRID_SHARD",
        when=lambda c, p: c.sharding.replicas is not None and not is_hybrid(c),
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
        lambda c, p: is_hybrid(c) and (p.devices or 0) > 1 and (p.devices or 0) % (_replicas(c, p) or 1) > 0,
        "all replicas (null: one per host) have the same number of devices",
        _instead_of_hybrid,
    ),
    Rule(
        "sharding.min_num_params",
        "with sharding.wrap=SIZE_BASED_WRAP",
        lambda c, p: c.sharding.min_num_params is None and c.sharding.wrap == "SIZE_BASED_WRAP",
        "SIZE_BASED_WRAP needs the smallest size of a unit; torch's policy uses 100000000",
        ("sharding.min_num_params=100000000", "sharding.wrap=TRANSFORMER_BASED_WRAP"),
    ),
    Refused(
        "optim.name",
        "with optim.factory",
        "the factory makes the optimizer",
        "optim.factory=null",
        when=lambda c, p: c.optim.factory is not None,
    ),
    Rule(
        "optim.momentum",
        "of Muon",
        lambda c, p: (c.optim.name, c.optim.factory, c.optim.momentum) == ("muon", None, 0.0),
        "without momentum Muon would orthogonalize each step's gradient alone",
        ("optim.momentum=0.95", "optim.name=adamw"),
    ),
    Refused(
        "optim.min_lr_ratio",
        "with optim.schedule=constant",
        "a constant learning rate has no floor",
        "optim.schedule=cosine",
        when=lambda c, p: c.optim.schedule == "constant" and c.optim.min_lr_ratio != Optim().min_lr_ratio,
    ),
    Refused(
        "precision.master",
        "with precision.compute=float32 or float16",
        _NO_MORE_DIGITS,
        "precision.compute=bfloat16",
        when=lambda c, p: c.precision.master == "bfloat16" and c.precision.compute != "bfloat16",
    ),
    Refused(
        "precision.frozen",
        "where all weights train",
        "it applies to weights that model.freeze or model.lora freezes",
        when=lambda c, p: c.precision.frozen != "auto" and not c.model.freeze and c.model.lora is None,
    ),
    *(
        Refused(
            f"precision.{key}",
            "where nothing computes in float16",
            "only float16 needs loss scaling",
            "precision.compute=float16",
            when=lambda c, p: "float16" not in dtypes(c),
        )
        for key in ("loss_scale", "loss_scale_window")
    ),
    Refused(
        "optim.name=adafactor|muon|adamw8bit",
        "where something computes in float16",
        "its step counts lie on the host, which would wait for the device to learn of an overflow",
        when=lambda c, p: "float16" in dtypes(c),
    ),
    Refused("precision.products", "with model.lora", "peft has its own layers", when=lambda c, p: bool(c.model.lora)),
    Rule(
        "precision.modules",
        "with precision.master=bfloat16",
        lambda c, p: c.precision.master == "bfloat16" and "float32" in c.precision.modules.values(),
        _NO_MORE_DIGITS,
        _modules_without_float32,
    ),
    Refused(
        "precision.reduce",
        "with precision.compute=float32",
        "the reduction would drop digits of float32 gradients",
        "precision.compute=bfloat16",
        when=lambda c, p: c.precision.reduce == "bfloat16" and c.precision.compute == "float32",
    ),
    Refused(
        "precision.output",
        "with precision.compute=float32",
        "the loss would use fewer digits than the model computes",
        "precision.compute=bfloat16",
        when=lambda c, p: c.precision.output == "bfloat16" and dtypes(c) == {"float32"},
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
        "together with memory.save_ops",
        lambda c, p: is_selective(c) and c.memory.every is not None and bool(c.memory.save_ops),
        "selective picks layers or operations, not both",
        ("memory.save_ops=[]", "memory.every=null"),
    ),
    Rule(
        "train.task",
        "of transformers' own tasks but causal_lm, without data.factory",
        lambda c, p: c.data.factory is None and c.train.task != "causal_lm" and ":" not in c.train.task,
        "text has no labels but the next tokens",
        ("data.factory=MODULE:FUNCTION", "train.task=causal_lm"),
    ),
    Rule(
        "train.task",
        "causal_lm with model.factory",
        lambda c, p: c.model.factory is not None and c.train.task == "causal_lm",
        "it needs a model of transformers",
        ("train.task=MODULE:FUNCTION", "train.task=image_classification"),
    ),
    *(
        Refused(option, "with model.factory", reason, when=lambda c, p: c.model.factory is not None)
        for option, reason in (
            ("model.attention", "the model brings its attention"),
            ("model.experts", "the model brings its experts"),
            ("model.lora", "adapters are put into models of transformers"),
        )
    ),
    Refused(
        "precision.output",
        "with a task other than causal_lm",
        "the task's own function makes the loss of the logits",
        when=lambda c, p: c.train.task != "causal_lm",
    ),
    Refused(
        "train.sample_every",
        "without text",
        "samples continue texts, by a causal language model and its tokenizer",
        when=lambda c, p: c.train.task != "causal_lm" or c.data.factory is not None,
    ),
    Refused(
        "train.sample_every",
        "without train.sample_prompts",
        "there is no text to continue",
        "train.sample_prompts=['The ']",
        when=lambda c, p: not c.train.sample_prompts,
    ),
    Refused(
        "checkpoint.load",
        "without a checkpoint in checkpoint.resume",
        "auto resumes all of the run's own state",
        "checkpoint.resume=PATH",
        when=lambda c, p: c.checkpoint.load == "weights_only" and c.checkpoint.resume in ("auto", "none"),
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
    *_NEEDS,
)
