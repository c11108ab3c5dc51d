"""Which tool a file is for, and what that tool makes of a key: some it reads beside others only, some not at all.

A key that its own tool doesn't read sets nothing here either, and `explain` says why. Taken at their word, with a
remark, are those that the tool's own pages or questions put there: whoever wrote them followed the manual.
Read from accelerate 1.15 (utils/launch.py, FullyShardedDataParallelPlugin) and transformers 5.23 (training_args.py,
integrations/tpu.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from portable_fsdp.convert.keys_accelerate import DYNAMO, FP8
from portable_fsdp.convert.keys_fsdp import FSDP, MIXED, XLA
from portable_fsdp.convert.keys_trainer import TRAINER
from portable_fsdp.convert.keys_variables import ENVIRONMENT, VARIABLES
from portable_fsdp.convert.rows import NO, OFF, YES, Row

BY_ACCELERATE, BY_TRAINER = "accelerate", "Trainer"

_OF_VERSION_1 = {"backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states"}
_OF_XLA = {"xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"}
_WITH_XLA = {"transformer_layer_cls_to_wrap", "min_num_params", *_OF_XLA}
READ = {
    BY_ACCELERATE: {
        *("version", "sharding_strategy", "reshard_after_forward", "offload_params", "auto_wrap_policy"),
        *("min_num_params", "transformer_layer_cls_to_wrap", "state_dict_type", "cpu_ram_efficient_loading"),
        *("activation_checkpointing", "activation_checkpointing_offload", "ignored_modules"),
        *_OF_VERSION_1,
    },
    BY_TRAINER: {
        *("version", "reshard_after_forward", "cpu_offload", "auto_wrap_policy", "state_dict_type"),
        *("cpu_ram_efficient_loading", "activation_checkpointing", "limit_all_gathers"),
        *_OF_VERSION_1,
        *_WITH_XLA,
    },
}
"""The keys of fsdp_config that a tool reads, without their prefix."""

_IN_ITS_MANUAL = {BY_ACCELERATE: {"backward_prefetch_policy", *_OF_XLA}}
"""What nothing of that tool reads, though its own pages (or transformers' page on FSDP) put it there."""

_AXOLOTL = ("base_model", "sequence_len", "micro_batch_size", "num_epochs", "lr_scheduler")
_PREFETCH = ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch")
_DEFAULT_VERSION = {BY_ACCELERATE: 1, BY_TRAINER: 2}


@dataclass(frozen=True)
class Tool:
    """The tool that a file is for, and what its keys say, by their names in the table (of two, the first)."""

    name: str  # "": the keys don't tell, or tell axolotl's, which gives them names of its own
    values: Mapping[str, str]

    @property
    def version(self) -> int | None:
        """Of FSDP: as the file says it, or the tool's default."""
        typed = self.values.get("fsdp_version", "")
        return int(typed) if typed in ("1", "2") else _DEFAULT_VERSION.get(self.name)

    @property
    def makes_units_by_size(self) -> bool:
        """Whether min_num_params counts without a policy."""
        return not self.name or self.on_xla

    @property
    def on_xla(self) -> bool:
        """Whether the file is for torch_xla."""
        return self._is("xla", YES) or self._is("distributed_type", ("xla", "tpu"))

    def unread(self, row: Row, key: str) -> str:
        """Why the tool doesn't read a key as it is typed; empty where it does, or where nobody knows the tool."""
        place, name = original(row)
        if place in (FSDP, MIXED):
            return self._unread_by_name(row, _bare(key)) or self._unread_beside(name)
        if place == XLA:
            return self._unread_without_xla() or "xla_fsdp_v2 reads none of these" * self._is("xla_fsdp_v2", YES)
        if place == FP8 and self.values.get("mixed_precision", "no") != "fp8" and self.name:
            return "accelerate reads it with mixed_precision: fp8 only"
        if place == DYNAMO and name != "dynamo_backend" and self.name and self._is("dynamo_backend", OFF):
            return "accelerate reads it beside a dynamo_backend only"
        if name == "downcast_bf16" and "distributed_type" in self.values and not self.on_xla:
            return "accelerate reads it on TPUs only"
        return ""

    def remark(self, row: Row, key: str) -> str:
        """What is to be said of a key that is taken at its word, though its tool doesn't do so."""
        place, name = original(row)
        if self.name == BY_ACCELERATE and (place == XLA or _bare(key) in _IN_ITS_MANUAL[BY_ACCELERATE]):
            return "documented, but accelerate 1.15 doesn't read it; taken at its word"
        if self.name == BY_TRAINER and name in _PREFETCH and "fsdp_version" not in self.values:
            return "Trainer's default, version 2, has no such setting; taken at its word"
        return ""

    def _unread_by_name(self, row: Row, name: str) -> str:
        """By the name alone: `offload_params` is accelerate's, `cpu_offload` Trainer's."""
        read = READ.get(self.name)
        if read is None or row.place == ENVIRONMENT or name in read or name in _IN_ITS_MANUAL.get(self.name, ()):
            return ""
        names = (other for other in map(_bare, (row.key, *row.aliases)) if other in read)
        return "; its key is ".join((f"{self.name} doesn't read it", *list(names)[:1]))

    def _unread_beside(self, name: str) -> str:
        """By what else the file says."""
        if name in ("xla_fsdp_v2", "xla_fsdp_grad_ckpt"):
            return self._unread_without_xla()
        if self.name == BY_TRAINER and self._is("xla", YES) and _bare(name) not in _WITH_XLA:
            return "Trainer doesn't read it beside xla: true"
        if name == "fsdp_reshard_after_forward" and self.name == BY_ACCELERATE and self.version == 1:
            is_word = self.values[name] == "1" or not self._is(name, (*YES, *NO))
            return "" if is_word else "accelerate reads it with fsdp_version 2 only"
        if self.values.get("fsdp_version") != "2":
            return ""
        if name == "fsdp_sharding_strategy":
            return "fsdp_version 2 doesn't read it; reshard_after_forward says it"
        return "fsdp_version 2 has no such setting" if name in _PREFETCH else ""

    def _unread_without_xla(self) -> str:
        is_off = self._is("xla", NO) or (self.name and not self._is("xla", YES))
        return "counts beside xla: true only" if is_off else ""

    def _is(self, key: str, words: Iterable[str]) -> bool:
        return self.values.get(key, "") in words


def original(row: Row) -> tuple[str, str]:
    """Place and key of a row in a file; a variable has those of the key that it is for."""
    return VARIABLES.get(row.key, (row.place, row.key)) if row.place == ENVIRONMENT else (row.place, row.key)


def tool_of(kind: str, keys: Iterable[tuple[Row, str, str]]) -> Tool:
    """The tool of a file by its keys: row, name and value as typed. `kind` is the place that most at the top are of."""
    values: dict[str, str] = {}
    places, names = set[str](), set[str]()
    for row, key, typed in keys:
        values.setdefault(original(row)[1], typed.strip().lower())
        places.add(row.place)
        names.add(key)
    if ENVIRONMENT in places or not names.isdisjoint(("distributed_type", "compute_environment")):
        return Tool(BY_ACCELERATE, values)
    of_trainer = (TRAINER in places or kind == FSDP) and names.isdisjoint(_AXOLOTL)
    return Tool(BY_TRAINER if of_trainer else "", values)


def _bare(key: str) -> str:
    return key.strip().lower().replace("-", "_").removeprefix("fsdp_")
