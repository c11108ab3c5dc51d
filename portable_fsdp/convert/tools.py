"""Which tool a file is for, and what that tool makes of a key: some it reads beside others only, some not at all.

A key that its own tool doesn't read sets nothing here either, and `explain` says why. Keys that the tool's own pages
document are used all the same, with a remark: whoever wrote them followed the manual.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from portable_fsdp.convert.table import ENVIRONMENT, FSDP, MIXED, TRAINER, ForeignKey, bare_name, key_table
from portable_fsdp.convert.values import NO, OFF, YES

BY_ACCELERATE, BY_TRAINER = "accelerate", "Trainer"

_WITH_XLA = {"transformer_layer_cls_to_wrap", "min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"}
_AXOLOTL = ("base_model", "sequence_len", "micro_batch_size", "num_epochs", "lr_scheduler")
_PREFETCH = ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch")
_DEFAULT_VERSION = {BY_ACCELERATE: 1, BY_TRAINER: 2}


@dataclass(frozen=True)
class Tool:
    """The tool that a file is for, and the values of its keys, by their names in the table (of two, the first)."""

    name: str  # "": the keys don't tell, or tell axolotl's, which gives them names of its own
    values: Mapping[str, str]

    @property
    def version(self) -> int | None:
        """Of FSDP: the file's, or the tool's default."""
        text = self.values.get("fsdp_version", "")
        return int(text) if text in ("1", "2") else _DEFAULT_VERSION.get(self.name)

    @property
    def makes_units_by_size(self) -> bool:
        """Whether min_num_params counts without a policy."""
        return not self.name or self.on_xla

    @property
    def on_xla(self) -> bool:
        """Whether the file is for torch_xla."""
        return self._is("xla", YES) or self._is("distributed_type", ("xla", "tpu"))

    def unread(self, row: ForeignKey, key: str) -> str:
        """Why the tool doesn't read a key as it is written; empty where it does, or where the tool is unknown."""
        place, name = row.in_file.place, row.in_file.name
        if place in (FSDP, MIXED):
            return self._unread_by_name(row, bare_name(FSDP, key)) or self._unread_beside(name)
        if place == "xla_fsdp_settings":
            return self._unread_without_xla() or "xla_fsdp_v2 reads none of these" * self._is("xla_fsdp_v2", YES)
        if place == "fp8_config" and self.values.get("mixed_precision", "no") != "fp8" and self.name:
            return "accelerate reads it with mixed_precision: fp8 only"
        if place == "dynamo_config" and name != "dynamo_backend" and self.name and self._is("dynamo_backend", OFF):
            return "accelerate reads it beside a dynamo_backend only"
        if name == "downcast_bf16" and "distributed_type" in self.values and not self.on_xla:
            return "accelerate reads it on TPUs only"
        return ""

    def remark(self, row: ForeignKey, key: str) -> str:
        """The remark on a key that is used although its tool doesn't read it."""
        place, name = row.in_file.place, row.in_file.name
        documented = key_table().documented.get(self.name, frozenset())
        if self.name == BY_ACCELERATE and (place == "xla_fsdp_settings" or bare_name(FSDP, key) in documented):
            return "documented, though accelerate 1.15 doesn't read it"
        if self.name == BY_TRAINER and name in _PREFETCH and "fsdp_version" not in self.values:
            return "Trainer's default, version 2, has no such setting"
        return ""

    def _unread_by_name(self, row: ForeignKey, name: str) -> str:
        """By the name alone: `offload_params` is accelerate's, `cpu_offload` Trainer's."""
        table = key_table()
        read = table.reads.get(self.name)
        if read is None or row.place == ENVIRONMENT or name in read | table.documented.get(self.name, frozenset()):
            return ""
        others = (other for alias in (row.name, *row.aliases) if (other := bare_name(FSDP, alias)) in read)
        return "; its key is ".join((f"{self.name} doesn't read it", *list(others)[:1]))

    def _unread_beside(self, name: str) -> str:
        """By what else the file says."""
        if name in ("xla_fsdp_v2", "xla_fsdp_grad_ckpt"):
            return self._unread_without_xla()
        if self.name == BY_TRAINER and self._is("xla", YES) and bare_name(FSDP, name) not in _WITH_XLA:
            return "Trainer doesn't read it beside xla: true"
        if name == "fsdp_reshard_after_forward" and self.name == BY_ACCELERATE and self.version == 1:
            is_strategy = self.values[name] == "1" or not self._is(name, (*YES, *NO))
            return "" if is_strategy else "accelerate reads it with fsdp_version 2 only"
        if self.values.get("fsdp_version") != "2":
            return ""
        if name == "fsdp_sharding_strategy":
            return "fsdp_version 2 doesn't read it; reshard_after_forward sets it"
        return "fsdp_version 2 has no such setting" if name in _PREFETCH else ""

    def _unread_without_xla(self) -> str:
        is_off = self._is("xla", NO) or (self.name and not self._is("xla", YES))
        return "counts beside xla: true only" if is_off else ""

    def _is(self, key: str, words: Iterable[str]) -> bool:
        return self.values.get(key, "") in words


def tool_of(kind: str, keys: Iterable[tuple[ForeignKey, str, str]]) -> Tool:
    """The tool of a file by its keys: row, name and value as written. `kind`: the place that most at the top are of."""
    values: dict[str, str] = {}
    places, names = set[str](), set[str]()
    for row, key, text in keys:
        values.setdefault(row.in_file.name, text.strip().lower())
        places.add(row.place)
        names.add(key)
    if ENVIRONMENT in places or not names.isdisjoint(("distributed_type", "compute_environment")):
        return Tool(BY_ACCELERATE, values)
    of_trainer = (TRAINER in places or kind == FSDP) and names.isdisjoint(_AXOLOTL)
    return Tool(BY_TRAINER if of_trainer else "", values)
