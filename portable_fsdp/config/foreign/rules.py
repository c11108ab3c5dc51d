"""Rules over several keys: the strategy, the batch, dtypes and what else one foreign key doesn't say alone.

Settings whose name begins with `~` come in; options of ours come out, each with the line of the key that decided.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from portable_fsdp.config.foreign.keys_engines import DEEPSPEED, MEGATRON
from portable_fsdp.config.foreign.keys_fsdp import FSDP


class Setting(NamedTuple):
    """One option of ours (or `~name`), and the foreign key that sets it."""

    option: str
    value: object
    place: str
    key: str  # as typed
    typed: str
    line: int  # 0: a variable
    where: str  # file:line, or the launcher
    remark: str

    @property
    def origin(self) -> str:
        """`accelerate.yaml:12`, or `accelerate launch: FSDP_SHARDING_STRATEGY`."""
        return self.where if self.line else f"{self.where}: {self.key}"

    @property
    def said(self) -> str:
        return f"{self.where}: {self.key}: {self.typed}"


@dataclass
class Found:
    """What the keys of a file said so far, one by one; the rules turn it into options."""

    settings: dict[str, Setting]
    numbers: Mapping[str, int]  # the launcher's facts that are numbers: num_processes, num_machines
    sections: Mapping[str, tuple[int, str]]  # place -> line and where of its first key
    given: Mapping[str, object]  # options that our own file or an override sets
    overridden: set[str]
    problems: list[tuple[int, str]] = field(default_factory=lambda: [])

    def value(self, name: str) -> object:
        return self.settings[name].value if name in self.settings else None

    def set(self, option: str, value: object, source: Setting, remark: str = "") -> None:
        """An option that follows from `source`; what another key already said must be the same."""
        said = source._replace(option=option, value=value, remark="; ".join(filter(None, (source.remark, remark))))
        if option in self.settings and self.settings[option].value != value:
            self.contradiction(self.settings[option], said)
        self.settings.setdefault(option, said)

    def contradiction(self, first: Setting, second: Setting) -> None:
        if first.option not in self.overridden:
            self.problem(
                second,
                f"{second.typed} contradicts {first.key}: {first.typed} ({first.where}); keep one.",
            )

    def problem(self, at: Setting, text: str) -> None:
        self.problems.append((at.line, f"{at.where}: {at.key}: {text}"))


def combine(found: Found) -> dict[str, Setting]:
    """The options of ours that the keys set together; contradictions are added to `found.problems`."""
    _sections(found)
    _strategy(found)
    _units(found)
    _precision(found)
    _recompute(found)
    _offload(found)
    _batch(found)
    _steps(found)
    _optimizer(found)
    _data(found)
    return {name: setting for name, setting in found.settings.items() if not name.startswith("~")}


def silent(found: Found, options: Mapping[str, Setting]) -> list[tuple[Setting, str]]:
    """The keys that act with others and set nothing of their own in the end, each with the reason."""
    heard = {(setting.line, setting.key) for setting in options.values()}
    quiet = [setting for setting in found.settings.values() if (setting.line, setting.key) not in heard]
    return [(setting, _SILENT.get(setting.option, "agrees with another key")) for setting in quiet]


_SILENT = {
    "~version": "the keys of either version are read",
    "~distributed": "says which section counts; the strategy stands there",
    "~xla": "--device=tpu says it",
    "~fsdp": "sharding.strategy says it",
    "~spmd": "SPMD is the usual engine of a TPU: --backend=xla",
    "~auto_wrap": "units are the model's layers, unless fsdp_auto_wrap_policy says otherwise",
    "~min_num_params": "counts only where units are made by size",
    "~beta2": "optim.betas has both",
    "~accumulate": "train.global_batch says it",
}

# ------------------------------------------------------------------------------------------------------------- sharding

_SECTIONS = {"FSDP": {FSDP}, "XLA": {FSDP}, "DEEPSPEED": {DEEPSPEED}, "MEGATRON_LM": {MEGATRON}}
_FREED = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False}
_HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
_WHOLE = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def _sections(found: Found) -> None:
    """A section that distributed_type leaves unread in accelerate: which of the two was meant?"""
    kind, fsdp = found.settings.get("~distributed"), found.settings.get("~fsdp")
    if fsdp is not None and not fsdp.value and FSDP in found.sections:
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
    word = _said_strategy(found)
    kind = found.settings.get("~distributed")
    replicas, shards = found.settings.get("~replicas"), found.settings.get("~shard_size")
    if word is None and kind is not None and kind.value not in ("NO", "DEEPSPEED", "MEGATRON_LM"):
        sharded = kind.value == "FSDP" or FSDP in found.sections
        word = kind._replace(value="FULL_SHARD" if sharded else "NO_SHARD")
    if word is None and (replicas or shards):
        word = cast(Setting, replicas or shards)._replace(value="FULL_SHARD")
    if word is None:
        return
    strategy, remark = str(word.value), ""
    if replicas is not None and replicas.value != 1:
        if found.value("~shard_size") == 1:
            strategy, remark = "NO_SHARD", f"{replicas.key}: {replicas.typed} copies of one shard"
        elif strategy == "NO_SHARD":
            found.problem(replicas, f"{replicas.typed} contradicts {word.key}: {word.typed} ({word.where}); keep one.")
        else:
            strategy = _HYBRID.get(strategy, strategy)
            found.set("sharding.replicas", replicas.value, replicas)
    elif strategy in _WHOLE and (replicas or _is_one_machine(found)) and "sharding.replicas" not in found.given:
        strategy, remark = _WHOLE[strategy], "one machine is one copy of the model"
    _sizes(found)
    found.set("sharding.strategy", strategy, word, remark)


def _is_one_machine(found: Found) -> bool:
    return found.numbers.get("num_machines") == 1


def _said_strategy(found: Found) -> Setting | None:
    """The strategy by name, by what is freed after forward, or by both where they agree."""
    word, inside = found.settings.get("~strategy"), found.settings.get("~reshard_word")
    if inside is not None and inside.typed.isdecimal() and inside.typed != "1" and found.value("~version") == 2:
        found.problem(inside, f"expected true | false with fsdp_version 2, found {inside.typed}.")
        inside = None
    if word is not None and inside is not None and word.value != inside.value:
        found.contradiction(word._replace(option="sharding.strategy"), inside)
    word = word or inside
    freed = found.settings.get("~reshard")
    if freed is None:
        return word
    if word is None:
        return freed._replace(value="FULL_SHARD" if freed.value else "SHARD_GRAD_OP")
    if _FREED.get(str(word.value), False) != freed.value:
        found.contradiction(word._replace(option="sharding.strategy"), freed)
    return word


def _sizes(found: Found) -> None:
    replicas, shards = found.settings.get("~replicas"), found.settings.get("~shard_size")
    processes = found.numbers.get("num_processes")
    if replicas is None or shards is None or processes is None:
        return
    product = cast(int, replicas.value) * cast(int, shards.value)
    if product != processes:
        found.problem(
            shards,
            f"expected {replicas.key} * {shards.key} = num_processes = {processes}, found {replicas.typed} * "
            f"{shards.typed} = {product}.",
        )


def _units(found: Found) -> None:
    """min_num_params counts where units are made by size, or nothing else says how."""
    least, wrap = found.settings.get("~min_num_params"), found.settings.get("sharding.wrap")
    if least is not None and (wrap is None or wrap.value == "SIZE_BASED_WRAP"):
        if wrap is None and "sharding.wrap_classes" in found.settings:
            return
        found.set("sharding.wrap", "SIZE_BASED_WRAP", least)
        found.set("sharding.min_num_params", least.value, least)


# ------------------------------------------------------------------------------------------------- numerics and memory


def _precision(found: Found) -> None:
    """accelerate's FSDP sums gradients in the dtype that it computes in; its other types sum them in float32."""
    mixed = found.settings.get("~mixed")
    if mixed is None:
        return
    found.set("precision.compute", mixed.value, mixed)
    fsdp = found.value("~distributed") == "FSDP" or (FSDP in found.sections and not found.value("~xla"))
    fsdp = fsdp or bool(found.value("~fsdp"))
    computes = found.given.get("precision.compute", mixed.value)  # an override of that dtype is one of this, too
    if mixed.value == computes == "bfloat16" and fsdp and "precision.reduce" not in found.settings:
        found.set("precision.reduce", "bfloat16", mixed, "FSDP sums gradients in this dtype there, and so here")


def _recompute(found: Found) -> None:
    said = [setting for name, setting in found.settings.items() if name.startswith("~recompute.")]
    if said:
        source = next((setting for setting in said if setting.value), said[0])
        found.set("memory.gradient_checkpointing", "full" if source.value else "none", source)


def _offload(found: Found) -> None:
    """DeepSpeed's two halves are one setting of ours."""
    said = [setting for name, setting in found.settings.items() if name.startswith("~offload.")]
    if not said or "memory.cpu_offload" in found.overridden:
        return
    offloaded = [setting for setting in said if setting.value]
    if offloaded and len(offloaded) < 2:
        found.problem(
            offloaded[0],
            "parameters and optimizer state are offloaded together, or not at all.\n"
            "  Set both devices to cpu, or both to none.",
        )
    else:
        found.set("memory.cpu_offload", bool(offloaded), said[0])


# ------------------------------------------------------------------------------------------- batch, steps, optimizer


def _batch(found: Found) -> None:
    """global_batch = rows of a device * accumulation * devices, where the file says all three."""
    rows, times = found.settings.get("train.micro_batch"), found.settings.get("~accumulate")
    source = times or rows
    if source is None or "train.global_batch" in found.overridden:
        return
    devices = found.numbers.get("num_processes")
    if rows is not None and found.value("~spmd"):
        return _batch_of_spmd(found, rows, cast(int, times.value) if times else 1, devices)
    micro = found.given.get("train.micro_batch", rows.value if rows else None)
    if times is not None and times.value == 1 and rows is None:
        return
    if isinstance(micro, int) and devices is not None:
        size = micro * (cast(int, times.value) if times else 1) * devices
        found.set("train.global_batch", size, source, f"{micro} * {times.typed if times else 1} * {devices} processes")
    elif "train.global_batch" not in found.given:
        found.problem(
            source,
            "expected the number of devices too (num_processes) and per_device_train_batch_size, which make the batch "
            "of a step.\n  Set train.global_batch: rows of a device * accumulation * devices.",
        )


def _batch_of_spmd(found: Found, rows: Setting, times: int, devices: int | None) -> None:
    """Under xla_fsdp_v2 one process feeds all devices: what Trainer calls the batch of a device is that of them all."""
    size = cast(int, rows.value)
    found.settings.pop("train.micro_batch")
    found.set("train.global_batch", size * times, rows, "of all devices together, under xla_fsdp_v2")
    if devices and size % devices == 0:
        found.set("train.micro_batch", size // devices, rows, f"of one of {devices} devices, under xla_fsdp_v2")
    elif "train.micro_batch" not in found.given:
        text = f"under xla_fsdp_v2 these {size} rows are those of all devices together."
        found.problem(rows, f"{text}\n  Set train.micro_batch: rows of one device.")


def _steps(found: Found) -> None:
    steps = found.settings.get("train.steps")
    if steps is not None and "train.epochs" in found.settings:  # as Trainer has it: max_steps goes first
        epochs = found.settings.pop("train.epochs")
        found.settings["train.steps"] = steps._replace(
            remark=f"goes before {epochs.key}: {epochs.typed}, as in Trainer"
        )
    warmup, ratio = found.settings.get("~warmup"), found.settings.get("~warmup_ratio")
    if warmup is not None and not 0 < cast(float, warmup.value) < 1:
        found.set("optim.warmup_steps", int(cast(float, warmup.value)), warmup)
        if warmup.value:
            return  # as Trainer has it: steps go before a share of them
    else:
        ratio = warmup or ratio
    if ratio is None or "optim.warmup_steps" in found.overridden:
        return
    total = found.given.get("train.steps", found.value("train.steps"))
    if not isinstance(total, int):
        found.problem(ratio, "a share of the steps needs their number.\n  Set optim.warmup_steps, or max_steps.")
        return
    found.settings.pop("optim.warmup_steps", None)
    found.set("optim.warmup_steps", math.ceil(cast(float, ratio.value) * total), ratio, f"of {total} steps")


def _optimizer(found: Found) -> None:
    first, second = found.settings.get("~beta1"), found.settings.get("~beta2")
    if source := first or second:
        betas = [first.value if first else 0.9, second.value if second else 0.999]
        found.set("optim.betas", betas, source, "" if first and second else "the other one: Trainer's default")
    if saves := found.settings.get("~no_saves"):
        found.settings.pop("checkpoint.every", None)
        found.set("checkpoint.every", None, saves)


def _data(found: Found) -> None:
    if source := found.settings.get("~train_file"):
        found.set("data.source", "text", source)
        found.set("data.path", source.value, source)
