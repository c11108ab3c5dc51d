"""The verdict of an engine on each option: honoured, delegated, or refused with the reason and the fixes.

Options of numerics and memory are honoured or refused. Options that concern speed alone, or how long to wait for a lost
process, may be delegated: the engine decides. A backend calls `require_supported` while it opens; `explain` shows
`verdicts`. The rules below hold for all engines; each adds its own in its `options.py`. Imports no engine and no torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain, takewhile
from typing import Literal, NamedTuple

from portable_fsdp.backends.open import ENGINES, spec_of
from portable_fsdp.config.describe import (
    default_of,
    description_of,
    needs_of,
    option_names,
    shortened,
    value_of,
    with_value,
    yaml_value,
)
from portable_fsdp.config.schema import Config, Needs
from portable_fsdp.layout import INNER_AXES, devices_per_row, split_batch
from portable_fsdp.runtime.errors import BackendError, ConfigError


class Deployment(NamedTuple):
    """The target of a config. A count of None, or an empty generation, is unknown: rules that need it don't apply."""

    engine: str
    device: str
    devices: int | None = None  # total
    hosts: int | None = None
    generation: str = ""  # of a TPU, as libtpu names slices: v5p


When = Callable[[Config, Deployment], bool]
Fixes = tuple[str, ...] | Callable[[Config, Deployment], tuple[str, ...]]


@dataclass(frozen=True)
class Rule:
    """A case in which an option is refused; `when` is None if only the built model can decide.

    Each fix is one or more settings (`section.key=value`, `--backend=...`), joined by " and ".
    """

    head: str  # the option and the case: `sharding.strategy on one device`
    reason: str
    when: When | None = None
    fixes: Fixes = ()
    takes_default_alone: bool = False  # refuses all other values, in every case

    @property
    def option(self) -> str:
        return self.head.partition(" ")[0]

    @property
    def case(self) -> str:
        return self.head.partition(" ")[2]


def refused(head: str, reason: str, *fixes: str, when: When | None = None) -> tuple[Rule, ...]:
    """Return rules that refuse all values of options but the defaults, which are the first fixes; `when`: only then.

    The head names one or more options before the case: `section.key` refuses all values but the default,
    `section.key=word|word` only these words.
    """
    options = list(takewhile(lambda word: word.partition("=")[0] in option_names(), head.split()))
    case = head.split(" ", len(options))[-1]

    def rule(option: str) -> Rule:
        option, _, words = option.partition("=")
        default = default_of(option)

        def is_refused(config: Config, place: Deployment) -> bool:
            value = value_of(config, option)
            is_other = value in words.split("|") if words else value != default
            return is_other and (when is None or when(config, place))

        all_fixes = (f"{option}={yaml_value(default)}", *fixes)
        return Rule(f"{option} {case}", reason, is_refused, all_fixes, takes_default_alone=not words and when is None)

    return tuple(map(rule, options))


def refused_each(case: str, reasons: Mapping[str, str], *fixes: str, when: When | None = None) -> tuple[Rule, ...]:
    """Return rules as `refused` does, for one case in which each of several options has its own reason."""
    rules = (refused(f"{options} {case}", reason, *fixes, when=when) for options, reason in reasons.items())
    return tuple(chain.from_iterable(rules))


def _of_needs(option: str, needs: Needs) -> tuple[Rule, ...]:
    """Return the rule of an option that the schema says needs another setting."""
    default = default_of(needs.key)

    def is_missing(config: Config, _: Deployment) -> bool:
        value = value_of(config, needs.key)
        return yaml_value(value) not in needs.words if needs.words else value == default

    setting = f"{needs.key}={'|'.join(needs.words)}" if needs.words else needs.key
    fixes = filter(None, [needs.fix])
    return refused(f"{option} without {setting}", "it applies only with that", *fixes, when=is_missing)


def excluded_by(key: str, reasons: Mapping[str, str], *fixes: str) -> tuple[Rule, ...]:
    """Return rules for options that another value of `key` than the default excludes, each with its reason."""
    default = default_of(key)
    fixes += (f"{key}={yaml_value(default)}",)
    return refused_each(f"with {key}", reasons, *fixes, when=lambda c, p: value_of(c, key) != default)


# ---------------------------------------------------------------------------------------------- conditions and fixes


def _within(config: Config) -> str:
    """The strategy inside a replica of a hybrid strategy."""
    return "FULL_SHARD" if config.sharding.strategy == "HYBRID_SHARD" else "SHARD_GRAD_OP"


def _replicas(config: Config, place: Deployment) -> int | None:
    """Copies of the model under a hybrid strategy."""
    return config.sharding.replicas or place.hosts


def _replicas_that_fit(config: Config, place: Deployment) -> tuple[str, ...]:
    shards = _groups(config, place.devices)
    fitting = [2] if shards is None else divisors(shards)
    best = [place.hosts] if place.hosts in fitting else fitting[:1]
    return tuple(f"sharding.replicas={count}" for count in best)


def _strategy(config: Config, strategy: str) -> str:
    """The settings for a strategy that is not hybrid."""
    return f"sharding.strategy={strategy}" + ("" if config.sharding.replicas is None else " and sharding.replicas=null")


def _instead_of_hybrid(config: Config, place: Deployment) -> tuple[str, ...]:
    return (*_replicas_that_fit(config, place), _strategy(config, _within(config)))


def modules_without_float16(config: Config, _: Deployment) -> tuple[str, ...]:
    modules = config.precision.modules.items()
    replaced = {name: "bfloat16" if dtype == "float16" else dtype for name, dtype in modules}
    return (f"precision.modules={yaml_value(replaced)}",)


def _modules_without_float32(config: Config, _: Deployment) -> tuple[str, ...]:
    kept = {name: dtype for name, dtype in config.precision.modules.items() if dtype != "float32"}
    return ("precision.master=float32", f"precision.modules={yaml_value(kept)}")


def only_largest_bucket(config: Config, _: Deployment) -> tuple[str, ...]:
    """Fixes for buckets of several sizes."""
    largest = {key: sizes[-1:] for key, sizes in config.data.buckets.items()}
    return (f"data.buckets={yaml_value(largest)}", "--backend=native")


def is_selective(config: Config) -> bool:
    return config.memory.gradient_checkpointing == "selective"


def recomputes_modules(config: Config) -> bool:
    return config.memory.gradient_checkpointing in ("full", "selective")


def shards_of_a_replica(config: Config, place: Deployment) -> int | None:
    """Devices over which FSDP shards a copy of the model; None if unknown, or if replicas don't divide the devices."""
    devices = _groups(config, place.devices)
    replicas = _replicas(config, place) if config.sharding.is_hybrid else 1
    if devices is None or replicas is None or devices % replicas:
        return None
    return devices // replicas * config.sharding.expert * config.sharding.context


def _groups(config: Config, devices: int | None) -> int | None:
    """Devices along the axes `replicate` and `shard`."""
    return None if devices is None else devices // math.prod(_inner_axes(config).values())


def _inner_axes(config: Config) -> dict[str, int]:
    return {axis: getattr(config.sharding, axis) for axis in INNER_AXES}


def _axis_rule(axis: str) -> Rule:
    """The rule of an axis of neighbouring devices: all these axes together divide the devices."""

    def is_wrong(config: Config, place: Deployment) -> bool:
        """Names the axes that don't divide the devices; if each does, but not all together, the last one."""
        sizes, devices = _inner_axes(config), place.devices
        if devices is None or devices % math.prod(sizes.values()) == 0:
            return False
        alone = [other for other, size in sizes.items() if devices % size]
        return axis in (alone or [other for other, size in sizes.items() if size > 1][-1:])

    def fixes(config: Config, place: Deployment) -> tuple[str, ...]:
        share = (place.devices or 1) // math.prod((_inner_axes(config) | {axis: 1}).values())
        return tuple(f"sharding.{axis}={count}" for count in dict.fromkeys((1, *divisors(share), max(1, share))))

    return Rule(
        f"sharding.{axis} that does not divide the devices",
        "the devices form groups of this size, times those of the other axes",
        is_wrong,
        fixes,
    )


def _row_lengths(config: Config) -> tuple[int, ...]:
    return tuple(config.data.buckets.get("input_ids", ())) or (config.data.seq_len,)


def _near(length: int, part: int) -> list[int]:
    """The multiples of `part` next to `length`."""
    return [size for size in (length // part * part, -(-length // part) * part) if size]


def divisors(whole: int | None) -> list[int]:
    """Divisors of `whole` except 1 and itself, ascending; none for None."""
    return [part for part in range(2, whole or 0) if (whole or 0) % part == 0]


# -------------------------------------------------------------------------------------------- refused by every engine

SMALL_STEPS = "a bias is the sum of small steps, which bfloat16 would round away"
_NO_MORE_DIGITS = "bfloat16 weights hold no more digits to compute with"
_TIED = "a tied weight belongs to one unit that holds both modules, or to the root"
_WHOLE_MATRICES = {
    "optim.name=adafactor|muon|adamw8bit": "it reads whole matrices or blocks, and a device holds a part",
    "optim.factory": "your optimizer may read whole matrices, and a device holds a part",
}

RULES = (
    Rule("model.attention for a model with its own attention (ALiBi)", "it can't be replaced; auto keeps it"),
    Rule("model.experts other than auto for a dense model", "there are no experts"),
    Rule(
        "model.freeze or model.train_only with a pattern that matches nothing, or if no weight is left to train",
        "some weights must match, and some must train",
    ),
    *refused(
        "model.train_only with model.freeze or model.lora",
        "each says what trains (adapters: lora.train_whole adds modules)",
        when=lambda c, p: bool(c.model.freeze) or c.model.lora is not None,
    ),
    Rule("optim.groups with a pattern that matches no trained weight", "each must match one"),
    Rule("sharding.wrap for a model that names no layers (biogpt)", "name them in sharding.wrap_classes"),
    Rule(
        "sharding.wrap_classes with a class that the model lacks, or whose modules don't run, have no parameters, or "
        "share a weight",
        f"the error lists the classes; {_TIED}",
    ),
    Rule(
        "sharding.wrap_modules with a pattern that matches no module, or one of two modules that share a weight",
        f"each must match one; {_TIED}",
    ),
    Rule(
        "precision.modules with a pattern that matches no module, or two dtypes for nested modules or for a tied "
        "weight",
        "each must match one, and a weight is cast to one dtype",
    ),
    Rule(
        "optim.factory with float16, for an optimizer that can't skip a step on the device",
        "docs/optimizers.md lists what it needs",
    ),
    Rule(
        "precision.products for layers without linear layers whose sizes are multiples of 16",
        "there is nothing to convert",
    ),
    Rule("memory.every above the number of layers", "the model has fewer layers"),
    Rule("memory.classes that the model doesn't have", "no module is an instance of them"),
    # --- sharding
    Rule(
        "sharding.strategy on one device",
        "sharded replicas need four devices or more",
        lambda c, p: c.sharding.is_hybrid and _groups(c, p.devices) == 1,
        lambda c, p: (_strategy(c, _within(c)),),
    ),
    Rule(
        "sharding.replicas with a hybrid strategy and one replica",
        "one replica (null: one per host) is FULL_SHARD, or SHARD_GRAD_OP for HYBRID_SHARD_ZERO2",
        lambda c, p: c.sharding.is_hybrid and p.devices != 1 and _replicas(c, p) == 1,
        _instead_of_hybrid,
    ),
    Rule(
        "sharding.replicas with a hybrid strategy and one replica per device",
        "a replica on one device is not sharded: that is NO_SHARD",
        lambda c, p: (
            c.sharding.is_hybrid
            and 1 < (_groups(c, p.devices) or 0) == _replicas(c, p)
            and shards_of_a_replica(c, p) == 1
        ),
        lambda c, p: (*_replicas_that_fit(c, p), _strategy(c, "NO_SHARD")),
    ),
    Rule(
        "sharding.replicas that do not divide the devices",
        "all replicas (null: one per host) have the same number of devices",
        lambda c, p: (
            c.sharding.is_hybrid and (shards := _groups(c, p.devices) or 0) > 1 and shards % (_replicas(c, p) or 1) > 0
        ),
        _instead_of_hybrid,
    ),
    Rule(
        "sharding.min_num_params with sharding.wrap=SIZE_BASED_WRAP",
        "SIZE_BASED_WRAP needs the smallest size of a unit; torch's policy uses 100000000",
        lambda c, p: c.sharding.min_num_params is None and c.sharding.wrap == "SIZE_BASED_WRAP",
        ("sharding.min_num_params=100000000", "sharding.wrap=TRANSFORMER_BASED_WRAP"),
    ),
    # --- tensor parallelism
    *(_axis_rule(axis) for axis in ("tensor", "context", "expert")),
    *excluded_by(
        "sharding.tensor",
        _WHOLE_MATRICES
        | {"precision.products=float8|float8_rowwise": "their scales would be those of a part of a weight"},
    ),
    # --- context and expert parallelism
    *refused(
        "sharding.context sharding.expert with sharding.strategy=NO_SHARD",
        "their devices divide one copy of the model",
        "sharding.strategy=FULL_SHARD",
        when=lambda c, p: c.sharding.strategy == "NO_SHARD",
    ),
    *excluded_by(
        "sharding.context",
        {"model.attention=sdpa|eager|flex": "its devices exchange keys and values in the static attention"},
    ),
    Rule(
        "train.task with sharding.context",
        "only a causal language model's rows are split",
        lambda c, p: c.sharding.context > 1 and c.train.task != "causal_lm",
        ("sharding.context=1", "train.task=causal_lm"),
    ),
    Rule(
        "sharding.context that does not divide the tokens of a row",
        "each device takes two pieces of a row, one from each end",
        lambda c, p: c.sharding.context > 1 and any(size % (2 * c.sharding.context) for size in _row_lengths(c)),
        lambda c, p: (
            *(f"data.seq_len={size}" for size in _near(c.data.seq_len, 2 * c.sharding.context) if not c.data.buckets),
            "sharding.context=1",
        ),
    ),
    Rule("sharding.context for a model with its own attention, or layers without any", "the error names the layer"),
    *excluded_by(
        "sharding.expert",
        {
            "model.experts": "the axis needs products by groups",
            "model.lora": "adapters aren't split over the axis",
        }
        | _WHOLE_MATRICES,
    ),
    *excluded_by(
        "model.router_bias_rate",
        {
            "precision.buffers=bfloat16": SMALL_STEPS,
            "model.lora": "the biases belong to the base, which checkpoints of adapters leave out",
        },
    ),
    Rule("model.router_bias_rate for a model whose routers have no bias buffer", "the error names what is missing"),
    Rule("sharding.expert for a model without experts, or whose experts it doesn't divide", "the error says what fits"),
    Rule(
        "sharding.tensor for a model without a tensor-parallel plan, whose plan has an unknown word, or whose sizes it "
        "doesn't divide",
        "the error names the module and the sizes that fit; sharding.plan changes a plan",
    ),
    # --- optimizer
    *excluded_by(
        "optim.factory", {"optim.name optim.momentum optim.betas optim.eps": "the factory makes the optimizer"}
    ),
    Rule(
        "optim.momentum of Muon",
        "without momentum Muon would orthogonalize each step's gradient alone",
        lambda c, p: (c.optim.name, c.optim.factory, c.optim.momentum) == ("muon", None, 0.0),
        ("optim.momentum=0.95", "optim.name=adamw"),
    ),
    # --- precision
    *refused(
        "precision.master with precision.compute=float32 or float16",
        _NO_MORE_DIGITS,
        "precision.compute=bfloat16",
        when=lambda c, p: c.precision.compute != "bfloat16",
    ),
    *refused(
        "precision.frozen where all weights train",
        "it applies to weights that model.freeze, train_only or lora freezes (QLoRA: add model.lora={})",
        when=lambda c, p: not c.model.freezes,
    ),
    *refused(
        "precision.products with quantised weights (precision.frozen)",
        "products in 8 bits take weights in 16 or 32 bits",
        "precision.frozen=bfloat16",
        when=lambda c, p: c.precision.scheme is not None,
    ),
    Rule(
        "precision.frozen with model.lora.dora",
        "DoRA reads the norms of whole weights in each step, and a base in 4 or 8 bits has none",
        lambda c, p: c.precision.scheme is not None and c.model.lora is not None and c.model.lora.dora,
        ("precision.frozen=bfloat16",),
    ),
    Rule(
        "precision.frozen in 4 or 8 bits for a model whose layers have no frozen linear layer, or whose devices would "
        "split rows of a table",
        "the error names the weight and what fits",
    ),
    *refused(
        "precision.loss_scale precision.loss_scale_window where nothing computes in float16",
        "only float16 needs loss scaling",
        when=lambda c, p: "float16" not in c.precision.dtypes,
    ),
    *refused(
        "optim.name=adafactor|muon|adamw8bit where something computes in float16",
        "its step counts are on the host, which would wait for the device to report an overflow",
        when=lambda c, p: "float16" in c.precision.dtypes,
    ),
    *refused(
        "sharding.tensor with model.lora.dora",
        "a device has no whole weight, whose norms DoRA scales",
        when=lambda c, p: c.model.lora is not None and c.model.lora.dora,
    ),
    *refused("precision.products with model.lora", "peft has its own layers", when=lambda c, p: bool(c.model.lora)),
    Rule(
        "precision.modules with precision.master=bfloat16",
        _NO_MORE_DIGITS,
        lambda c, p: c.precision.master == "bfloat16" and "float32" in c.precision.modules.values(),
        _modules_without_float32,
    ),
    *refused(
        "precision.reduce=bfloat16 with precision.compute=float32",
        "the reduction would drop digits of float32 gradients",
        "precision.compute=bfloat16",
        when=lambda c, p: c.precision.compute == "float32",
    ),
    *refused(
        "precision.output=bfloat16 with precision.compute=float32",
        "the loss would use fewer digits than the model",
        "precision.compute=bfloat16",
        when=lambda c, p: c.precision.dtypes == {"float32"},
    ),
    # --- memory
    Rule(
        "memory.gradient_checkpointing without memory.every and memory.save_ops",
        "selective recomputes by layer (every) or by operation (save_ops)",
        lambda c, p: is_selective(c) and c.memory.every is None and not c.memory.save_ops,
        ("memory.every=2", "memory.gradient_checkpointing=full"),
    ),
    Rule(
        "memory.every together with memory.save_ops",
        "selective picks layers or operations, not both",
        lambda c, p: is_selective(c) and c.memory.every is not None and bool(c.memory.save_ops),
        ("memory.save_ops=[]", "memory.every=null"),
    ),
    # --- tasks and the user's own models
    Rule(
        "train.task of transformers other than causal_lm, without data.factory",
        "text has no labels but the next tokens",
        lambda c, p: c.data.factory is None and c.train.task != "causal_lm" and ":" not in c.train.task,
        ("data.factory=MODULE:FUNCTION", "train.task=causal_lm"),
    ),
    Rule(
        "train.task causal_lm with model.factory",
        "it needs a transformers model",
        lambda c, p: c.model.factory is not None and c.train.task == "causal_lm",
        ("train.task=MODULE:FUNCTION", "train.task=image_classification and data.factory=MODULE:FUNCTION"),
    ),
    *refused_each(
        "with model.factory",
        {
            "model.attention": "the model brings its attention",
            "model.experts": "the model brings its experts",
            "model.router_bias_rate": "only the routers of transformers models are known",
            "model.lora": "adapters need a transformers model",
            "sharding.tensor": "the plan comes from a transformers model",
            "sharding.context": "only the attention of transformers models is known",
            "sharding.expert": "only the experts of transformers models are known",
        },
        when=lambda c, p: c.model.factory is not None,
    ),
    Rule(
        "train.sample_every without text",
        "samples need a causal language model and its tokenizer",
        lambda c, p: c.train.sample_every is not None and (c.train.task != "causal_lm" or c.data.factory is not None),
        ("train.sample_every=null and train.sample_prompts=[]",),
    ),
    # --- checkpoints
    *refused(
        "checkpoint.load without a checkpoint in checkpoint.resume",
        "auto resumes all of the run's own state",
        "checkpoint.resume=PATH",
        when=lambda c, p: c.checkpoint.resume in ("auto", "none"),
    ),
    Rule(
        "checkpoint.export of adapters whose base is model.architecture or model.gguf_file",
        "peft needs a base in Hugging Face format",
        lambda c, p: (
            (c.checkpoint.export and c.model.lora is not None and not c.checkpoint.merge_adapters)
            and (c.model.pretrained is None or c.model.gguf_file is not None)
        ),
        ("checkpoint.merge_adapters=true", "checkpoint.export=false"),
    ),
)


@cache
def rules_of(engine: str) -> tuple[Rule, ...]:
    """All rules of an engine: the common ones, one for each key that needs another setting, its own, and one for each
    setting of another engine's section."""
    needing = (_of_needs(option, needs) for option in option_names() if (needs := needs_of(option)))
    rules = [*RULES, *chain.from_iterable(needing), *spec_of(engine).rules]
    for owner in ENGINES:
        if owner != engine and owner in Config.model_fields:
            options = " ".join(option for option in option_names() if option.startswith(f"{owner}."))
            head = f"{options} on an engine other than {owner}"
            rules += refused(head, "no other engine has this setting", f"--backend={owner}")
    return tuple(rules)


@cache
def _rules_about(engine: str, option: str) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules_of(engine) if rule.option == option)


# ----------------------------------------------------------------------------------------------------- of one config


def refusals(config: Config, place: Deployment) -> tuple[Rule, ...]:
    """The rules that refuse an option of `config` at `place`."""
    return tuple(rule for rule in rules_of(place.engine) if rule.when is not None and rule.when(config, place))


def require_supported(config: Config, place: Deployment) -> None:
    """Raise BackendError with all options that the engine can't honour at `place`.

    A global batch that the devices can't split comes first in the message; alone it raises ConfigError.
    """
    where = f"backend {place.engine} on {place.device}"
    where += f" ({place.devices} device(s) of {place.hosts} host(s))" if place.devices is not None else ""
    problems = [
        f"{where}: {rule.option}={shortened(yaml_value(value_of(config, rule.option)))} {rule.case}: "
        + _reason(rule, config, place, "\n  ")
        for rule in refusals(config, place)
    ]
    if batch := _batch_problem(config, place.devices):
        raise (BackendError if problems else ConfigError)("\n".join([batch, *problems]))
    if problems:
        raise BackendError("\n".join(problems))


def _reason(rule: Rule, config: Config, place: Deployment, gap: str) -> str:
    return f"{rule.reason}.{gap}Set {', or '.join(fixes_of(rule, config, place))}."


def _batch_problem(config: Config, devices: int | None) -> str | None:
    """The error message of `split_batch`; None if it passes."""
    try:
        if devices is not None:
            is_auto = config.train.micro_batch == "auto"  # it picks a divisor, and every number of devices has one
            row_shards = max(1, devices // devices_per_row(config))
            split_batch(with_value(config, "train.micro_batch", 1) if is_auto else config, row_shards)
    except ConfigError as error:
        return str(error)
    return None


def fixes_of(rule: Rule, config: Config, place: Deployment) -> tuple[str, ...]:
    """The fixes of a refusal, without engines that the device doesn't usually have. Another rule may refuse what a fix
    sets beside other settings of the config; the next refusal then names its fixes."""
    fixes = rule.fixes(config, place) if callable(rule.fixes) else rule.fixes
    packages = {engine: spec_of(engine).packages.get(place.device) for engine in ENGINES}
    elsewhere = {f"--backend={name}" for name, package in packages.items() if package is None or not package.is_usual}
    return tuple(fix for fix in fixes if fix not in elsewhere)


# ---------------------------------------------------------------------------------------------------------- verdicts


class Verdict(NamedTuple):
    """An engine's verdict on an option: on its value in a config, or on one case in the option's table."""

    option: str  # `section.key`
    kind: Literal["honoured", "delegated", "refused"]
    text: str  # what the engine does, or the reason; for a config also the fixes
    case: str = ""  # a value, or when a rule applies


def verdicts(config: Config, place: Deployment) -> tuple[Verdict, ...]:
    """A verdict for each option of the config, in the schema's order."""
    reasons: dict[str, list[str]] = {}
    for rule in refusals(config, place):
        reasons.setdefault(rule.option, []).append(f"{rule.case}: {_reason(rule, config, place, ' ')}")
    if batch := _batch_problem(config, place.devices):
        option, _, text = " ".join(batch.split()).partition(": ")
        reasons[option] = [text]
    return tuple(
        Verdict(option, "refused", " ".join(reasons[option]))
        if option in reasons
        else _accepted(config, place.engine, option)
        for option in option_names()
    )


def _accepted(config: Config, engine: str, option: str) -> Verdict:
    value = value_of(config, option)
    accepted = {line.case: line for line in lines_of(engine, option) if line.kind != "refused"}
    line = (accepted.get(yaml_value(value) if len(accepted) > 1 else "") or accepted[""])._replace(case="")
    later = [rule.case for rule in _rules_about(engine, option) if rule.when is None]
    if value == default_of(option) or not later:
        return line
    cases = "; ".join(f"refused {case}" for case in later)
    return line._replace(text=f"{line.text}; {cases}: checked when the model is built")


@cache
def lines_of(engine: str, option: str) -> tuple[Verdict, ...]:
    """The table of an option: how the engine treats any value, particular values, and the cases that it refuses."""
    spec, rules = spec_of(engine), _rules_about(engine, option)
    text = spec.delegated.get(option) or spec.notes.get(option) or description_of(option)
    if option not in {**spec.delegated, **spec.notes} and any(rule.takes_default_alone for rule in rules):
        text = f"{yaml_value(default_of(option))} is the only value"
    values = [(key.partition("=")[2], text) for key, text in spec.notes.items() if key.startswith(f"{option}=")]
    return (
        Verdict(option, "delegated" if option in spec.delegated else "honoured", text),
        *(Verdict(option, "honoured", text, value) for value, text in values),
        *(
            Verdict(option, "refused", rule.reason + " (checked when the model is built)" * (not rule.when), rule.case)
            for rule in rules
        ),
    )
