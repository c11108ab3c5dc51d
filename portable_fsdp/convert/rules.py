"""Rules over several keys: the strategy, dtypes, the batch, evaluations and other options that no key sets alone.

A row of the table sets our option if its key decides alone, else a fact (`~name`) for a rule. For example,
`fsdp_sharding_strategy: HYBRID_SHARD` sets `~strategy`, and with `num_machines: 1` the rule makes it FULL_SHARD. A rule
is a function of `ForeignFacts`: it reads `facts.keys` (unchanged) and writes `facts.options`, each with the key that
decided. No rule reads the output of another, so their order doesn't matter.
"""

import math
from typing import cast

from portable_fsdp.convert.facts import BY_ACCELERATE, BY_TRAINER, ForeignFacts, KeyEntry
from portable_fsdp.convert.table import AXOLOTL, DEEPSPEED, ENVIRONMENT, FSDP, MEGATRON

_FREED = ("FULL_SHARD", "HYBRID_SHARD")  # strategies that free the gathered weights after forward
_HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
_ONE_COPY = {_HYBRID[plain]: plain for plain in _HYBRID}
_SECTIONS = {"FSDP": FSDP, "DEEPSPEED": DEEPSPEED, "MEGATRON_LM": MEGATRON}
_NEEDED = {
    "DEEPSPEED": "zero_stage in deepspeed_config",
    "MEGATRON_LM": "megatron_lm_use_distributed_optimizer: true in megatron_lm_config",
}
"""Keys that state what these engines shard: we don't have their defaults."""
_CLASSES = "sharding.wrap_classes"
LOGGING_STEPS = 500
"""Trainer's default of `logging_steps`, also the default of `eval_steps`."""
_ROWS_SHARED = ("sharding.context", "sharding.tensor")  # axes whose devices get the same rows


def combine(facts: ForeignFacts) -> None:
    """Set the options that follow from several keys; contradictions become problems."""
    sharding = (_sections, _strategy, _units, _precision, _recompute, _offload)
    for rule in (*sharding, _adapters, _base_in_bits, _batch, _length, _warmup, _optimizer, _evaluations):
        rule(facts)


# ------------------------------------------------------------------------------------------------------------- sharding


def _sections(facts: ForeignFacts) -> None:
    """Report sections that Trainer or accelerate doesn't read under this `fsdp` or distributed_type."""
    kind, fsdp, sections = facts.keys.get("~distributed"), facts.keys.get("~fsdp"), facts.sections
    sets = any(setting.place == FSDP and setting.value for setting in facts.keys.values())  # Trainer dumps what is off
    if fsdp is not None and not fsdp.value and sets:
        text = f"Trainer reads fsdp_config only with fsdp: true, found {fsdp.text!r}.\n"
        facts.result.add_problem(fsdp, f"{text}  Set fsdp: true, or leave fsdp_config out.")
    for word, place in _SECTIONS.items():
        if kind is not None and place in sections and place != _SECTIONS.get(str(kind.value).replace("XLA", "FSDP")):
            text = f"accelerate doesn't read it under distributed_type: {kind.text} ({kind.where})."
            text += f"\n  Set distributed_type: {word}, or leave {place} out."
            facts.result.add_problem(sections[place]._replace(key=place), text)


def _strategy(facts: ForeignFacts) -> None:
    word = _named_strategy(facts) or _implied_strategy(facts)
    if word is None:
        _require_strategy(facts)
        return
    strategy, remark = str(word.value), ""
    replicas = facts.keys.get("~replicas")
    one_machine = facts.numbers.get("num_machines") == 1
    if replicas is not None and replicas.value != 1:
        if facts.value("~shard_size") == 1:
            strategy, remark = "NO_SHARD", f"{replicas.key}: {replicas.text} replicas of one shard"
        elif strategy == "NO_SHARD":
            facts.contradiction("sharding.strategy", word, replicas)
        else:
            strategy = _HYBRID.get(strategy, strategy)
            facts.set("sharding.replicas", replicas.value, replicas)
    elif strategy in _ONE_COPY and (replicas or one_machine) and "sharding.replicas" not in facts.given:
        strategy, remark = _ONE_COPY[strategy], "one machine is one replica of the model"
    facts.set("sharding.strategy", strategy, word, remark)
    if "sharding.strategy" not in facts.overridden:
        _sizes(facts, strategy, word)


def _require_strategy(facts: ForeignFacts) -> None:
    kind = facts.keys.get("~distributed")
    if kind is None or kind.value not in _NEEDED or "sharding.strategy" in facts.given:
        return
    if facts.can_read("zero_stage", "megatron_lm_use_distributed_optimizer"):
        text = f"{kind.text} also needs {_NEEDED[str(kind.value)]}, which sets what is sharded.\n"
        facts.result.add_problem(kind, f"{text}  Add it, or set sharding.strategy.")


def _named_strategy(facts: ForeignFacts) -> KeyEntry | None:
    """Return the strategy by name, by reshard_after_forward, or by both if they agree.

    If they don't, accelerate reads the name, which its launcher always sets, and Trainer reshard_after_forward.
    """
    word, inside = facts.keys.get("~strategy"), facts.keys.get("~reshard_word")
    version = facts.words.get("fsdp_version")
    if inside is not None and inside.text.isdecimal() and inside.text != "1" and version == "2":
        facts.result.add_problem(inside, f"expected true | false with fsdp_version 2, found {inside.text}.")
        inside = None
    if word is not None and facts.tool == BY_ACCELERATE and version == "1":
        is_default = facts.result.kind == ENVIRONMENT and word.value == "FULL_SHARD"
        return inside if inside and is_default else word
    if word is not None and inside is not None and word.value != inside.value:
        facts.contradiction("sharding.strategy", word, inside)
    word = word or inside
    freed = facts.keys.get("~reshard")
    if freed is None:
        return word
    is_version_2 = version == "2" or (version is None and facts.tool == BY_TRAINER)
    if word is None or (is_version_2 and word.value in _HYBRID):
        return freed._replace(value="FULL_SHARD" if freed.value else "SHARD_GRAD_OP")
    if (word.value in _FREED) != freed.value:
        facts.contradiction("sharding.strategy", word, freed)
    return word


def _implied_strategy(facts: ForeignFacts) -> KeyEntry | None:
    """Return the strategy that follows from distributed_type, or from sizes alone."""
    kind = facts.keys.get("~distributed")
    if kind is not None and kind.value not in ("NO", "DEEPSPEED", "MEGATRON_LM"):
        sharded = kind.value == "FSDP" or FSDP in facts.sections
        return kind._replace(value="FULL_SHARD" if sharded else "NO_SHARD")
    sizes = facts.keys.get("~replicas") or facts.keys.get("~shard_size")
    return sizes and sizes._replace(value="FULL_SHARD")


def _sizes(facts: ForeignFacts, strategy: str, word: KeyEntry) -> None:
    """Check that the product of replicas, devices of a shard and inner axes is all devices; an unset size is 1."""
    shards = facts.keys.get("~shard_size")
    if facts.failed or shards is None:  # one of the sizes may be among those that failed
        return
    if strategy == "NO_SHARD" and facts.keys.get("~replicas") is None and shards.value == 1:
        return
    if strategy == "NO_SHARD" and shards.value != 1:
        return facts.contradiction("sharding.strategy", word, shards)
    inner = [axis for axis in map(facts.keys.get, _ROWS_SHARED) if axis is not None and axis.value != 1]
    sizes = [size for size in (facts.keys.get("~replicas"), shards, *inner) if size is not None]
    product = math.prod(cast(int, size.value or 1) for size in sizes)
    processes = facts.numbers.get("num_processes")
    factors, text = (" * ".join(words) for words in zip(*((size.key, size.text) for size in sizes), strict=True))
    text = f"{text} = {product}" if len(sizes) > 1 else text
    if processes is not None and product != processes:
        facts.result.add_problem(shards, f"expected {factors} = num_processes = {processes}, found {text}.")


def _units(facts: ForeignFacts) -> None:
    """Use classes if units are layers; use min_num_params if units are made by size, or nothing else decides."""
    size, wrap, classes = (facts.keys.get(name) for name in ("~min_num_params", "sharding.wrap", _CLASSES))
    policy = facts.given.get("sharding.wrap", wrap and wrap.value)
    if classes is not None and policy not in (None, "TRANSFORMER_BASED_WRAP"):
        del facts.options[_CLASSES]
    on_xla = facts.value("~xla") or facts.value("~distributed") == "XLA"
    by_default = classes is None and (not facts.tool or on_xla)  # accelerate and Trainer: only with a policy
    if size is not None and (by_default if policy is None else policy == "SIZE_BASED_WRAP"):
        facts.set("sharding.wrap", "SIZE_BASED_WRAP", size)
        facts.set("sharding.min_num_params", size.value, size)


# ------------------------------------------------------------------------------------------------- numerics and memory


def _precision(facts: ForeignFacts) -> None:
    """Set the dtypes. accelerate's FSDP sums gradients in the compute dtype, its other types in float32."""
    mixed, loaded = facts.keys.get("~mixed"), facts.keys.get("~weights")
    if mixed is None:
        if loaded is not None:
            facts.set("precision.compute", loaded.value, loaded)
        return
    if loaded is not None and loaded.value != mixed.value:
        facts.contradiction("precision.compute", mixed, loaded)
    fsdp = facts.value("~distributed") == "FSDP" or FSDP in facts.sections or bool(facts.value("~fsdp"))
    fsdp = fsdp and not facts.value("~xla")
    in_float32 = fsdp and mixed.value == "float16" and "precision.reduce" not in facts.keys
    facts.set("precision.compute", mixed.value, mixed, "gradients are summed in float32" if in_float32 else "")
    computes = facts.given.get("precision.compute", mixed.value)  # an override of compute also overrides reduce
    if mixed.value == computes == "bfloat16" and fsdp and "precision.reduce" not in facts.keys:
        facts.set("precision.reduce", "bfloat16", mixed, "as accelerate does under FSDP")


def _recompute(facts: ForeignFacts) -> None:
    settings = [setting for name, setting in facts.keys.items() if name.startswith("~recompute.")]
    if settings:
        source = next((setting for setting in settings if setting.value), settings[0])
        facts.set("memory.gradient_checkpointing", "full" if source.value else "none", source)


def _offload(facts: ForeignFacts) -> None:
    """Combine DeepSpeed's two offload settings into memory.cpu_offload."""
    settings = [setting for name, setting in facts.keys.items() if name.startswith("~offload.")]
    readable = facts.can_read("offload_optimizer_device", "offload_param_device")
    if not settings or "memory.cpu_offload" in facts.overridden or not readable:
        return
    offloaded = [setting for setting in settings if setting.value]
    if offloaded and len(offloaded) < 2:
        text = "parameters and optimizer state can only be offloaded together."
        facts.result.add_problem(offloaded[0], f"{text}\n  Set both devices to cpu, or both to none.")
    else:
        facts.set("memory.cpu_offload", bool(offloaded), settings[0])


_IMPLY_ADAPTERS = {"lora_rank", "lora_target", "additional_target", "adapter_name_or_path"}
"""Keys of LLaMA-Factory, whose default finetuning_type is lora."""


def _adapters(facts: ForeignFacts) -> None:
    """Join the keys of adapters into model.lora; their tools read none if adapters are turned off."""
    switch = facts.keys.get("~lora")
    settings = {name.removeprefix("~lora."): key for name, key in facts.keys.items() if name.startswith("~lora.")}
    if (switch is not None and not switch.value) or not (settings or switch):
        return
    if switch is None and facts.result.kind == AXOLOTL:
        return
    if switch is None and not any(key.key in _IMPLY_ADAPTERS for key in settings.values()):
        facts.result.add_problem(
            next(iter(settings.values())),
            "its tool trains adapters only if told to.\n"
            "  Set adapter: lora (axolotl) or use_peft: true (TRL), or leave out the keys of adapters.",
        )
        return
    values = {name: key.value for name, key in settings.items() if name != "parameters"}
    if values.pop("linear", False):
        values["targets"] = ["all-linear", *cast(list[str], values.get("targets", []))]
    if parameters := facts.value("~lora.parameters"):
        values["targets"] = [*cast(list[str], values.get("targets", [])), *parameters]
    remark = ""
    if any(key.key in _IMPLY_ADAPTERS for key in settings.values()) and not {"r", "alpha"} <= values.keys():
        values = {"r": 8, "alpha": 2.0 * cast(int, values.get("r", 8)), **values}
        remark = "LLaMA-Factory's defaults: rank 8, alpha twice the rank"
    facts.set("model.lora", values, next(iter(settings.values()), switch) or facts.keys["~lora"], remark)
    ratio, lr = facts.keys.get("~loraplus"), facts.given.get("optim.lr", facts.value("optim.lr"))
    if ratio is not None and isinstance(lr, int | float):
        facts.set("optim.groups", [{"match": "*.lora_B.*", "lr": cast(float, ratio.value) * lr}], ratio)
    elif ratio is not None:
        facts.result.add_problem(ratio, "a ratio of learning rates needs learning_rate.\n  Set it, or optim.lr.")


def _base_in_bits(facts: ForeignFacts) -> None:
    """Set precision.frozen by the bits of the base. Scales of 4 bits are quantised too if a key says so, or the tool
    does it by default."""
    nested = facts.value("~bits.nested")
    for name in ("~bits", "~bits.4", "~bits.8"):
        if (key := facts.keys.get(name)) is not None:
            is_nested = nested or (nested is None and "~bits" in facts.keys)
            scheme = key.value if key.value == "int8" else "nf4_double" if is_nested else "nf4"
            facts.set("precision.frozen", scheme, key)


# ------------------------------------------------------------------------------------------------------- training


def _batch(facts: ForeignFacts) -> None:
    """Set global_batch = rows of a device * accumulation * devices, if the file sets all three."""
    rows, times = facts.keys.get("train.micro_batch"), facts.keys.get("~accumulate")
    accumulated = facts.value("~accumulate") or 1
    if (whole := facts.value("~rows_of_step")) and (times is None or times.is_default):  # axolotl's batch_size
        accumulated = max(1, whole // (facts.value("train.micro_batch") or 1))
    source = rows if rows is not None and (rows.is_default or times is None or times.is_default) else times
    if source is None or "train.global_batch" in facts.overridden or (rows is None and accumulated == 1):
        return
    devices = facts.numbers.get("num_processes")
    micro = facts.given.get("train.micro_batch", facts.value("train.micro_batch"))
    if rows is not None and facts.value("~spmd"):
        _batch_of_spmd(facts, rows, accumulated)
    elif isinstance(micro, int) and devices is not None:
        shared = math.prod(cast(int, facts.value(axis) or 1) for axis in _ROWS_SHARED)
        size, by = micro * accumulated * devices // shared, f" / {shared} that share rows" if shared > 1 else ""
        facts.set("train.global_batch", size, source, f"{micro} * {accumulated} * {devices} processes{by}")
    elif rows is not None and rows.is_default and accumulated == 1:
        facts.set("train.global_batch", micro if isinstance(micro, int) else rows.value, rows, "of one device")
    elif "train.global_batch" not in facts.given and facts.can_read("num_processes", "per_device_train_batch_size"):
        text = "the global batch also needs num_processes and per_device_train_batch_size.\n  Pass --num_devices=N, or "
        facts.result.add_problem(source, f"{text}set train.global_batch: rows of a device * accumulation * devices.")


def _batch_of_spmd(facts: ForeignFacts, rows: KeyEntry, accumulated: int) -> None:
    """Set the batch sizes under xla_fsdp_v2: one process feeds all devices, Trainer's per-device batch is for all."""
    size = facts.value("train.micro_batch") or 1
    devices = facts.numbers.get("num_processes")
    del facts.options["train.micro_batch"]
    facts.set("train.global_batch", size * accumulated, rows, "for all devices together, under xla_fsdp_v2")
    if devices and size % devices == 0:
        facts.set("train.micro_batch", size // devices, rows, f"for one of {devices} devices, under xla_fsdp_v2")
    elif "train.micro_batch" not in facts.given and not rows.is_default:
        text = f"under xla_fsdp_v2 these {size} rows are for all devices together."
        facts.result.add_problem(rows, f"{text}\n  Set train.micro_batch: rows of one device.")


def _length(facts: ForeignFacts) -> None:
    """Let max_steps take precedence over epochs, as in Trainer."""
    steps, epochs = facts.keys.get("train.steps"), facts.keys.get("train.epochs")
    if steps is not None and epochs is not None and epochs.is_default:
        del facts.options["train.epochs"]
    elif steps is not None and epochs is not None:
        remark = f"takes precedence over {epochs.key}: {epochs.text}, as in Trainer"
        facts.options["train.steps"] = steps._replace(remark=remark)
        del facts.options["train.epochs"]


def _warmup(facts: ForeignFacts) -> None:
    """Set the warmup as in Trainer: below 1 it is a share of the steps; steps > 0 take precedence over a share.

    The schedule `constant` has no warmup, `constant_with_warmup` does.
    """
    warmup, ratio = facts.keys.get("~warmup"), facts.keys.get("~warmup_ratio")
    steps = facts.value("~warmup") or 0
    if facts.value("~constant") and "optim.schedule" not in facts.overridden:
        return
    if warmup is not None and 0 < steps < 1:
        facts.set("optim.warmup_steps", f"{100 * steps:g}%", warmup)
    elif warmup is not None and (steps or ratio is None):
        facts.set("optim.warmup_steps", int(steps), warmup)
    elif ratio is not None:
        facts.set("optim.warmup_steps", f"{100 * (facts.value('~warmup_ratio') or 0):g}%", ratio)


def _optimizer(facts: ForeignFacts) -> None:
    first, second = facts.keys.get("~beta1"), facts.keys.get("~beta2")
    keys = sorted((key for key in (first, second) if key), key=lambda key: key.is_default)
    if keys:
        betas = [first.value if first else 0.9, second.value if second else 0.999]
        whole = len(keys) == 2 and keys[0].is_default == keys[1].is_default
        facts.set("optim.betas", betas, keys[0], "" if whole else "the other beta is Trainer's default")


def _evaluations(facts: ForeignFacts) -> None:
    """Set the evaluations as in Trainer: eval_steps, else logging_steps; below 1 it is a share of the steps."""
    strategy, interval = facts.keys.get("~evaluates"), facts.keys.get("~eval_steps")
    option, every = "train.eval_every", facts.value("~eval_steps") or 0
    if strategy is None:
        _evaluation_at_the_end(facts)
    elif interval is None or every == 0:
        steps, remark = facts.value("train.log_every"), "from logging_steps, since eval_steps isn't set"
        facts.set(option, steps or LOGGING_STEPS, interval or strategy, remark)
    elif every >= 1 and float(every).is_integer():
        facts.set(option, int(every), interval)
    elif every >= 1:
        facts.result.add_problem(interval, f"expected a whole number above 1, found {interval.text}.")
    elif isinstance(facts.steps, int) and option not in facts.overridden:
        facts.set(option, math.ceil(every * facts.steps), interval, f"of {facts.steps} steps")
    elif option not in facts.given and facts.can_read("max_steps"):
        facts.result.add_problem(interval, f"a share of the steps needs max_steps.\n  Set it, or {option}.")


def _evaluation_at_the_end(facts: ForeignFacts) -> None:
    """Handle a missing eval_strategy: do_eval evaluates after the last step; the best checkpoint needs evaluations."""
    after, best = facts.keys.get("~do_eval"), facts.keys.get("~best")
    if "train.eval_every" in facts.given or not facts.can_read("eval_strategy"):
        return
    if after is not None and isinstance(facts.steps, int):
        facts.set("train.eval_every", facts.steps, after, "one evaluation, after the last step")
    elif after is not None and facts.can_read("max_steps"):
        text = "an evaluation after the last step needs the number of steps."
        facts.result.add_problem(
            after, f"{text}\n  Set eval_strategy: steps, which also evaluates then, or train.eval_every."
        )
    if best is not None:
        text = "the best checkpoint needs evaluations, which eval_strategy turns off."
        facts.result.add_problem(best, f"{text}\n  Set eval_strategy: steps, or train.eval_every.")
