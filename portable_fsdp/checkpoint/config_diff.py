"""What differs between the run that saved a checkpoint and the run that would go on from it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from portable_fsdp.checkpoint.format import BaseFingerprint, Manifest, run_name
from portable_fsdp.checkpoint.tables import table
from portable_fsdp.config.describe import default_of, shortened_apart
from portable_fsdp.config.schema import Lora
from portable_fsdp.runtime.errors import CheckpointError, ConfigError

_CURVE_SECTIONS = ("model", "data", "optim", "precision")
_CURVE_KEYS = ("run.seed", "train.global_batch", "train.steps", "train.epochs", "train.max_grad_norm")
"""What makes the loss curve. All else (devices, sharding, memory, micro_batch, logging) leaves it as it is."""

_BASE = "model.base"

_NEVER_TOLD = ("run.name", "run.dir", "run.peer_timeout_s", "train.stop_at", "checkpoint")
"""Where a run lies, when it saves and how long it waits; not worth a line."""


class Difference(NamedTuple):
    """A key of the config, or `data.rows`, `data.tokenizer`, `model.base` (their content), with both values; `config`
    itself where an import has none."""

    name: str
    saved: Any
    now: Any
    makes_curve: bool

    def __str__(self) -> str:
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """`optim.lr: 0.1, now 0.2`; of mappings one line for each key whose values differ."""
        return [f"{name}: {saved}, now {now}" for name, saved, now in self.rows()]

    def rows(self) -> list[tuple[str, str, str]]:
        """The same in columns. Long values are cut so that the first place where they differ stays."""
        found = changed({self.name: self.saved}, {self.name: self.now})
        return [(name, *shortened_apart(json.dumps(saved), json.dumps(now))) for name, (saved, now) in found.items()]


def differences(
    manifest: Manifest,
    config: Mapping[str, Any],
    rows: str | None,
    tokenizer: str | None,
    base: BaseFingerprint | None = None,
    *,
    is_own: bool,
) -> list[Difference]:
    """All that differs but for tensors, those that make the curve first. Equal rows and tokenizer make equal data, and
    an equal base an equal `model.pretrained`.

    `is_own`: it lies among this run's own checkpoints, and must bear its name.
    """
    if not manifest.config:
        return [Difference("config", "not known to an import", "this run's", True)]
    found = [
        Difference(name, old, new, name in _CURVE_KEYS or name.split(".")[0] in _CURVE_SECTIONS)
        for name, old, new in _config_differences(manifest.config, config)
    ]
    contents = (("data.rows", manifest.data.rows, rows), ("data.tokenizer", manifest.data.tokenizer, tokenizer))
    if all(old == new and old is not None for _, old, new in contents):
        found = [one for one in found if not one.name.startswith("data.")]
    else:
        known = {one.name for one in found}
        found += [
            Difference(name, old, new, True)
            for name, old, new in contents
            if None not in (old, new) and old != new and name not in known
        ]
    if base is not None and manifest.base is not None:
        found = [one for one in found if one.name not in ("model.pretrained", "model.gguf_file")]
        if base.fingerprint != manifest.base.fingerprint:
            found.append(Difference(_BASE, str(manifest.base), str(base), True))
    if is_own and run_name(manifest.config) != run_name(config):
        found.append(Difference("run.name", run_name(manifest.config), run_name(config), True))
    return sorted(found, key=lambda one: not one.makes_curve)


def require_same_base(found: Iterable[Difference], allow: Sequence[str], checkpoint: str) -> None:
    """Raises CheckpointError where the checkpoint leaves out another base than this run's, unless `allow` says so."""
    for one in found:
        if one.name == _BASE and not any(_covers(name, _BASE) for name in allow):
            raise CheckpointError(
                f"checkpoint {checkpoint}: expected the base that its adapters were trained on, which it leaves out:\n"
                f"    {one.saved}\n  found another in model.pretrained:\n    {one.now}\n"
                "  Bring that one back and name it in model.pretrained, wherever it lies (of the hub: "
                "org/name@revision).\n"
                f"  If you mean the other one, allow it by name: checkpoint.allow='[{_BASE}]'. Nothing was started."
            )


def require_allowed(found: Iterable[Difference], allow: Sequence[str], checkpoint: str) -> None:
    """Raises CheckpointError with a table of what makes another curve and isn't named in `checkpoint.allow`."""
    refused = [one for one in found if one.makes_curve and not any(_covers(name, one.name) for name in allow)]
    if not refused:
        return
    rows = [("", "saved", "now"), *(row for one in refused for row in one.rows())]
    shown, names = table(rows, indent="    "), ", ".join(one.name for one in refused)
    raise CheckpointError(
        f"checkpoint {checkpoint}: expected the config of the run that saved it, found another:\n{shown}\n"
        f"  If you mean it, allow it by name: checkpoint.allow='[{names}]'.\n"
        "  To start anew from its weights, name it, and a new folder: checkpoint.load=weights_only\n"
        "  checkpoint.resume=FOLDER run.dir=ANOTHER. Nothing was started."
    )


def check_allow(allow: Sequence[str], config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name in `checkpoint.allow` that is no section or key of those that make the curve."""
    keys = [f"{section}.{key}" for section in _CURVE_SECTIONS for key in config.get(section, {})]
    others = ("data.rows", "data.tokenizer", _BASE, "run.name", "config", "replicas")
    known = {*_CURVE_SECTIONS, *_CURVE_KEYS, *keys, *others}
    unknown = [name for name in allow if name not in known]
    if unknown:
        raise ConfigError(
            f"checkpoint.allow: expected names of settings that make the loss curve ({', '.join(_CURVE_SECTIONS)}: a "
            f"section or one of its keys; {', '.join(_CURVE_KEYS)}), found {', '.join(unknown)}.\n"
            "  Other settings may change without being named. Nothing was started."
        )


def changed(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """Dotted key -> both values, of what differs; None stands for a key that is absent."""
    found: dict[str, list[Any]] = {}
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found |= changed(cast(dict[str, Any], left), cast(dict[str, Any], right), f"{prefix}{key}.")
        elif left != right:
            found[f"{prefix}{key}"] = [left, right]
    return found


def _covers(allowed: str, name: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


def _config_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Key, saved value, present value. A key that one side doesn't have, of another release, has its default there."""
    return [
        (f"{section}.{key}", old, new)
        for section in dict.fromkeys([*now, *saved])
        if section not in _NEVER_TOLD
        for key in dict.fromkeys([*_keys(now, section), *_keys(saved, section)])
        if f"{section}.{key}" not in _NEVER_TOLD
        for old, new in [(_value(saved, section, key), _value(now, section, key))]
        if old != new
    ]


def _keys(config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    keys = config.get(section)
    return keys if isinstance(keys, dict) else {}


def _value(config: Mapping[str, Any], section: str, key: str) -> Any:
    keys = _keys(config, section)
    value = keys[key] if key in keys else default_of(section, key)
    if (section, key) == ("model", "lora") and isinstance(value, dict):
        return {**Lora().model_dump(mode="json"), **value}
    return value
