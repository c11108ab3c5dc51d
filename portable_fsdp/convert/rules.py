"""Rules over several keys: the strategy, the batch, dtypes and what else one foreign key doesn't say alone.

A row of the table sets an option of ours where its key says one alone, else a `~name`: a fact for a rule of this file
or of `rules_training.py`. So `fsdp_sharding_strategy: HYBRID_SHARD` is `~strategy`, of which `num_machines: 1` makes
FULL_SHARD. A rule is a function of `Found`: it reads what the keys said (`found.said`, which stays as it is) and writes
`found.options`, each with the key that decided. No rule reads what another one wrote, so their order means nothing.
Keys that set no option in the end are told with a reason (`silent`).
"""

from portable_fsdp.convert.found import Found, Setting
from portable_fsdp.convert.keys_engines import DEEPSPEED, MEGATRON
from portable_fsdp.convert.keys_fsdp import FSDP
from portable_fsdp.convert.rules_training import combine_training
from portable_fsdp.convert.tools import BY_ACCELERATE


def combine(found: Found) -> dict[str, Setting]:
    """The options of ours that the keys set together; contradictions are added to `found.problems`."""
    _sections(found)
    _strategy(found)
    _units(found)
    _precision(found)
    _recompute(found)
    _offload(found)
    combine_training(found)
    return found.options


def silent(found: Found) -> list[tuple[Setting, str]]:
    """The keys that act with others and set nothing of their own in the end, each with the reason."""
    heard = {(setting.line, setting.key) for setting in found.options.values()}
    quiet = [setting for setting in found.said.values() if (setting.line, setting.key) not in heard]
    return [(setting, _SILENT.get(setting.option) or _goes_first(found, setting)) for setting in quiet]


def _goes_first(found: Found, setting: Setting) -> str:
    """The key that decided instead, and whether it came to the same."""
    if setting.option.startswith("~warmup") and "optim.warmup_steps" not in found.options and found.value("~constant"):
        return "lr_scheduler_type: constant has no warmup; constant_with_warmup has one"
    option = next(result for name, result in _RESULTS.items() if setting.option.startswith(name))
    if option in found.overridden or option not in found.options:
        return f"{option} goes first, as it is set elsewhere"
    by = found.options[option]
    meant = {"~reshard": _FREED.get(str(by.value), False), "~recompute": by.value == "full"}
    agrees = setting.value == meant.get(setting.option.partition(".")[0], by.value)
    return f"agrees with {by.key}: {by.typed}" if agrees else f"{by.key}: {by.typed} goes first"


_SILENT = {
    "~version": "the keys of either version are read",
    "~distributed": "says which section counts; sharding.strategy says what is sharded",
    "~xla": "--device says it",
    "~fsdp": "whether Trainer itself shards; here sharding.strategy says it, by default FULL_SHARD",
    "~replicas": "sharding.strategy says it",
    "~shard_size": "devices / sharding.replicas are the devices of a shard: compared with this size",
    "~spmd": "SPMD is the usual engine of a TPU: --backend=xla",
    "~auto_wrap": "units are the model's layers, unless fsdp_auto_wrap_policy says otherwise",
    "~min_num_params": "counts only where units are made by size",
    "sharding.wrap_classes": "counts only where units are layers",
    "~beta2": "optim.betas has both",
    "~accumulate": "train.global_batch goes first",
    "~evaluates": "eval_steps says how often",
    "~eval_steps": "counts only where eval_strategy is steps, and train.eval_every isn't set elsewhere",
    "~eval_delay": "counts only where eval_strategy is steps",
    "~do_eval": "train.eval_every says when",
    "~best": "the best by its evaluation is saved anyhow, and is what checkpoint.export writes",
    "train.epochs": "train.steps goes first, as in Trainer",
    "checkpoint.every": "save_strategy saves none by steps",
}
_RESULTS = {
    "~strategy": "sharding.strategy",
    "~reshard": "sharding.strategy",
    "~mixed": "precision.compute",
    "~weights": "precision.compute",
    "~recompute.": "memory.gradient_checkpointing",
    "~offload.": "memory.cpu_offload",
    "~warmup": "optim.warmup_steps",
    "": "the option",
}
"""What facts make, for those that may lose to another key; by the beginnings of their names."""

# ------------------------------------------------------------------------------------------------------------- sharding

_SECTIONS = {"FSDP": {FSDP}, "XLA": {FSDP}, "DEEPSPEED": {DEEPSPEED}, "MEGATRON_LM": {MEGATRON}}
_FREED = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False}
_HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
_WHOLE = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def _sections(found: Found) -> None:
    """A section that distributed_type leaves unread in accelerate: which of the two was meant?"""
    kind, fsdp = found.said.get("~distributed"), found.said.get("~fsdp")
    says = any(setting.place == FSDP and setting.value for setting in found.said.values())  # Trainer dumps what is off
    if fsdp is not None and not fsdp.value and says:
        text = f"expected true, found {fsdp.typed!r}, under which Trainer doesn't read fsdp_config.\n"
        found.problem(fsdp, f"{text}  Set fsdp: true, or leave fsdp_config out.")
    if kind is None:
        return
    for place in (FSDP, DEEPSPEED, MEGATRON):
        if place in found.sections and place not in _SECTIONS.get(str(kind.value), set[str]()):
            line, where = found.sections[place]
            word = {FSDP: "FSDP", DEEPSPEED: "DEEPSPEED", MEGATRON: "MEGATRON_LM"}[place]
            text = (
                f"{where}: {place}: expected distributed_type: {word}, found {kind.typed} ({kind.where}), under which "
                f"accelerate doesn't read it.\n  Set distributed_type: {word}, or leave {place} out."
            )
            found.problems.append((line, text))


def _strategy(found: Found) -> None:
    word = _named_strategy(found) or _implied_strategy(found)
    if word is None:
        _require_strategy(found)
        return
    strategy, remark = str(word.value), ""
    replicas = found.said.get("~replicas")
    one_machine = found.numbers.get("num_machines") == 1
    if replicas is not None and replicas.value != 1:
        if found.value("~shard_size") == 1:
            strategy, remark = "NO_SHARD", f"{replicas.key}: {replicas.typed} copies of one shard"
        elif strategy == "NO_SHARD":
            found.contradiction("sharding.strategy", word, replicas)
        else:
            strategy = _HYBRID.get(strategy, strategy)
            found.set("sharding.replicas", replicas.value, replicas)
    elif strategy in _WHOLE and (replicas or one_machine) and "sharding.replicas" not in found.given:
        strategy, remark = _WHOLE[strategy], "one machine is one copy of the model"
    found.set("sharding.strategy", strategy, word, remark)
    if "sharding.strategy" not in found.overridden:
        _sizes(found, strategy, word)


def _require_strategy(found: Found) -> None:
    """An engine without a word of what it shards: neither DeepSpeed's default nor Megatron's is ours."""
    kind = found.said.get("~distributed")
    if kind is None or kind.value not in _STAGES or "sharding.strategy" in found.given:
        return
    if not found.failed.isdisjoint(("zero_stage", "megatron_lm_use_distributed_optimizer")):
        return
    found.problem(
        kind,
        f"expected {_STAGES[str(kind.value)]} too, which says what is sharded, found {kind.typed} alone.\n"
        "  Add it, or set sharding.strategy.",
    )


_STAGES = {
    "DEEPSPEED": "zero_stage in deepspeed_config",
    "MEGATRON_LM": "megatron_lm_use_distributed_optimizer: true in megatron_lm_config",
}


def _named_strategy(found: Found) -> Setting | None:
    """The strategy by name, by what is freed after forward, or by both where they agree.

    Where they don't, the tools choose: accelerate reads names under version 1 alone, and `reshard_after_forward` under
    version 2, as Trainer does.
    """
    word, inside = found.said.get("~strategy"), found.said.get("~reshard_word")
    if inside is not None and inside.typed.isdecimal() and inside.typed != "1" and found.value("~version") == 2:
        found.problem(inside, f"expected true | false with fsdp_version 2, found {inside.typed}.")
        inside = None
    if word is not None and found.tool.name == BY_ACCELERATE and found.tool.version == 1:
        return word
    if word is not None and inside is not None and word.value != inside.value:
        found.contradiction("sharding.strategy", word, inside)
    word = word or inside
    freed = found.said.get("~reshard")
    if freed is None:
        return word
    if word is None or (found.tool.version == 2 and word.value in _HYBRID):
        return freed._replace(value="FULL_SHARD" if freed.value else "SHARD_GRAD_OP")
    if _FREED.get(str(word.value), False) != freed.value:
        found.contradiction("sharding.strategy", word, freed)
    return word


def _implied_strategy(found: Found) -> Setting | None:
    """The strategy by the kind of run, or by sizes alone."""
    kind = found.said.get("~distributed")
    if kind is not None and kind.value not in ("NO", "DEEPSPEED", "MEGATRON_LM"):
        sharded = kind.value == "FSDP" or FSDP in found.sections
        return kind._replace(value="FULL_SHARD" if sharded else "NO_SHARD")
    sizes = found.said.get("~replicas") or found.said.get("~shard_size")
    return sizes and sizes._replace(value="FULL_SHARD")


_SIZES = (
    "num_processes",
    *(f"parallelism_config_{what}_size" for what in ("dp_replicate", "dp_shard", "tp", "cp", "sp")),
)


def _sizes(found: Found, strategy: str, word: Setting) -> None:
    """Copies * devices of a shard are all devices, as in accelerate; those that nobody said are 1."""
    shards = found.said.get("~shard_size")
    if not found.failed.isdisjoint(_SIZES):
        return
    if shards is None or (strategy == "NO_SHARD" and found.said.get("~replicas") is None and shards.value == 1):
        return
    if strategy == "NO_SHARD" and shards.value != 1:
        return found.contradiction("sharding.strategy", word, shards)
    replicas = found.said.get("~replicas")
    product = (found.whole("~replicas") or 1) * (found.whole("~shard_size") or 1)
    processes = found.numbers.get("num_processes")
    factors = f"{replicas.key} * {shards.key}" if replicas else shards.key
    typed = f"{replicas.typed} * {shards.typed} = {product}" if replicas else shards.typed
    if processes is not None and product != processes:
        found.problem(shards, f"expected {factors} = num_processes = {processes}, found {typed}.")
    found.total = (shards._replace(key=factors, typed=typed), product)
    return None


def _units(found: Found) -> None:
    """Classes count where units are layers, min_num_params where they are made by size, or nothing else says how."""
    least, wrap, classes = (found.said.get(name) for name in ("~min_num_params", "sharding.wrap", _CLASSES))
    policy = found.given.get("sharding.wrap", wrap and wrap.value)
    if classes is not None and policy not in (None, "TRANSFORMER_BASED_WRAP"):
        del found.options[_CLASSES]
    elif classes is not None and policy is None and found.tool.name == BY_ACCELERATE:
        remark = "accelerate reads it beside fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP only; taken at its word"
        found.options[_CLASSES] = classes._replace(remark=remark)
    by_size = classes is None and found.tool.makes_units_by_size if policy is None else policy == "SIZE_BASED_WRAP"
    if least is not None and by_size:
        found.set("sharding.wrap", "SIZE_BASED_WRAP", least)
        found.set("sharding.min_num_params", least.value, least)


_CLASSES = "sharding.wrap_classes"


# ------------------------------------------------------------------------------------------------- numerics and memory


def _precision(found: Found) -> None:
    """accelerate's FSDP sums gradients in the dtype that it computes in; its other types sum them in float32."""
    mixed, loaded = found.said.get("~mixed"), found.said.get("~weights")
    if mixed is None:
        if loaded is not None:
            found.set("precision.compute", loaded.value, loaded)
        return
    if loaded is not None and loaded.value != mixed.value:
        found.contradiction("precision.compute", mixed, loaded)
    found.set("precision.compute", mixed.value, mixed)
    fsdp = found.value("~distributed") == "FSDP" or FSDP in found.sections or bool(found.value("~fsdp"))
    fsdp = fsdp and not found.value("~xla")
    computes = found.given.get("precision.compute", mixed.value)  # an override of that dtype is one of this, too
    if mixed.value == computes == "bfloat16" and fsdp and "precision.reduce" not in found.said:
        found.set("precision.reduce", "bfloat16", mixed, "FSDP sums gradients in this dtype there, and so here")


def _recompute(found: Found) -> None:
    said = [setting for name, setting in found.said.items() if name.startswith("~recompute.")]
    if said:
        source = next((setting for setting in said if setting.value), said[0])
        found.set("memory.gradient_checkpointing", "full" if source.value else "none", source)


def _offload(found: Found) -> None:
    """DeepSpeed's two halves are one setting of ours."""
    said = [setting for name, setting in found.said.items() if name.startswith("~offload.")]
    if not said or "memory.cpu_offload" in found.overridden:
        return
    offloaded = [setting for setting in said if setting.value]
    if not found.failed.isdisjoint(("offload_optimizer_device", "offload_param_device")):
        return
    if offloaded and len(offloaded) < 2:
        found.problem(
            offloaded[0],
            "parameters and optimizer state are offloaded together, or not at all.\n"
            "  Set both devices to cpu, or both to none.",
        )
    else:
        found.set("memory.cpu_offload", bool(offloaded), said[0])
