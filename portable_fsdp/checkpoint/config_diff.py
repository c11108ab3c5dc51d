"""What differs between the run that saved a checkpoint and the run that resumes from it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from portable_fsdp.checkpoint.format import BaseFingerprint, Manifest, run_name
from portable_fsdp.config.describe import default_of, plain_values, shortened_apart
from portable_fsdp.config.schema import Lora
from portable_fsdp.runtime.errors import CheckpointError, ConfigError, table

_CURVE_SECTIONS = ("model", "data", "optim", "precision")
_CURVE_KEYS = ("run.seed", "train.global_batch", "train.steps", "train.epochs", "train.max_grad_norm")
"""What changes the loss curve. All else (devices, sharding, memory, micro_batch, logging) doesn't."""

_BASE = "model.base"

_IGNORED = ("run.name", "run.dir", "run.peer_timeout_s", "train.stop_at", "checkpoint")
"""Where a run lies, when it saves and how long it waits."""


class Difference(NamedTuple):
    """A key of the config with both values; or `data.rows`, `data.tokenizer`, `model.base` (their content), and
    `config` itself, which an import doesn't have."""

    name: str
    saved: Any
    now: Any
    makes_curve: bool

    def __str__(self) -> str:
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """`optim.lr: 0.1, now 0.2`; for mappings one line per key that differs."""
        return [f"{name}: {saved}, now {now}" for name, saved, now in self.rows()]

    def rows(self) -> list[tuple[str, str, str]]:
        """The same in columns. Long values are cut around the first place where they differ."""
        values = changed({self.name: self.saved}, {self.name: self.now})
        return [(name, *shortened_apart(json.dumps(saved), json.dumps(now))) for name, (saved, now) in values.items()]


def differences(
    manifest: Manifest,
    config: Mapping[str, Any],
    rows: str | None,
    tokenizer: str | None,
    base: BaseFingerprint | None = None,
    *,
    is_own: bool,
) -> list[Difference]:
    """All differences but tensors, those that change the curve first. Equal rows and tokenizer make equal data, and an
    equal base an equal `model.pretrained`.

    `is_own`: it lies among this run's own checkpoints, and must have its name.
    """
    if config and not manifest.config:
        return [Difference("config", "not known to an import", "this run's", True)]
    changes = {
        name: Difference(name, old, new, name in _CURVE_KEYS or name.split(".")[0] in _CURVE_SECTIONS)
        for name, old, new in _config_differences(manifest.config, config)
    }
    contents = (("data.rows", manifest.data.rows, rows), ("data.tokenizer", manifest.data.tokenizer, tokenizer))
    if all(old == new and old is not None for _, old, new in contents):
        changes = {name: change for name, change in changes.items() if not name.startswith("data.")}
    else:
        for name, old, new in contents:
            if None not in (old, new) and old != new:
                changes.setdefault(name, Difference(name, old, new, True))
    if base is not None and manifest.base is not None:
        changes.pop("model.pretrained", None)
        changes.pop("model.gguf_file", None)
        if base.fingerprint != manifest.base.fingerprint:
            changes[_BASE] = Difference(_BASE, str(manifest.base), str(base), True)
    if is_own and run_name(manifest.config) != run_name(config):
        changes["run.name"] = Difference("run.name", run_name(manifest.config), run_name(config), True)
    return sorted(changes.values(), key=lambda change: not change.makes_curve)


def require_same_base(changes: Iterable[Difference], allow: Sequence[str], checkpoint: str) -> None:
    """Raises CheckpointError where the checkpoint leaves out another base than this run's, unless allowed."""
    for change in changes:
        if change.name == _BASE and not _is_allowed(_BASE, allow):
            raise CheckpointError(
                f"checkpoint {checkpoint}: expected the base that its adapters were trained on, which it leaves out:\n"
                f"    {change.saved}\n  found another in model.pretrained:\n    {change.now}\n"
                "  Bring that one back and name it in model.pretrained, wherever it lies (of the hub: "
                f"org/name@revision).\n  To use the other one: checkpoint.allow='[{_BASE}]'."
            )


def require_allowed(changes: Iterable[Difference], allow: Sequence[str], checkpoint: str) -> None:
    """Raises CheckpointError with a table of the changes to the curve that `checkpoint.allow` doesn't name."""
    refused = [change for change in changes if change.makes_curve and not _is_allowed(change.name, allow)]
    if not refused:
        return
    rows = [("", "saved", "now"), *(row for change in refused for row in change.rows())]
    shown, names = table(rows, indent="    "), ", ".join(change.name for change in refused)
    raise CheckpointError(
        f"checkpoint {checkpoint}: expected the config of the run that saved it, found another:\n{shown}\n"
        f"  If you mean it, allow it by name: checkpoint.allow='[{names}]'.\n"
        "  To start anew from its weights, name it, and a new folder: checkpoint.load=weights_only\n"
        "  checkpoint.resume=FOLDER run.dir=ANOTHER."
    )


def check_allow(allow: Sequence[str], config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name in `checkpoint.allow` that is no section or key that changes the curve."""
    keys = [f"{section}.{key}" for section in _CURVE_SECTIONS for key in config.get(section, {})]
    others = ("data.rows", "data.tokenizer", _BASE, "run.name", "config", "replicas")
    unknown = [name for name in allow if name not in {*_CURVE_SECTIONS, *_CURVE_KEYS, *keys, *others}]
    if unknown:
        raise ConfigError(
            f"checkpoint.allow: expected names of settings that make the loss curve ({', '.join(_CURVE_SECTIONS)}: a "
            f"section or one of its keys; {', '.join(_CURVE_KEYS)}), found {', '.join(unknown)}.\n"
            "  Other settings may change without being named."
        )


def changed(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """Dotted key -> both values, where they differ; None stands for an absent key."""
    values: dict[str, list[Any]] = {}
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            values |= changed(cast(dict[str, Any], left), cast(dict[str, Any], right), f"{prefix}{key}.")
        elif left != right:
            values[f"{prefix}{key}"] = [left, right]
    return values


def _is_allowed(name: str, allow: Sequence[str]) -> bool:
    return any(name == allowed or name.startswith(f"{allowed}.") for allowed in allow)


def _config_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Key, saved value, present value. A key of another release has its default where it is missing."""
    ours, theirs = _settings(now), _settings(saved)
    names = (name for name in dict.fromkeys([*ours, *theirs]) if name not in _IGNORED)
    values = ((name, _value(theirs, name), _value(ours, name)) for name in names)
    return [(name, old, new) for name, old, new in values if old != new]


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """`section.key` -> value."""
    sections = ((name, keys) for name, keys in config.items() if isinstance(keys, dict) and name not in _IGNORED)
    return {f"{name}.{key}": value for name, keys in sections for key, value in cast(dict[str, Any], keys).items()}


def _value(settings: Mapping[str, Any], name: str) -> Any:
    value = settings[name] if name in settings else plain_values(default_of(name))
    if name == "model.lora" and isinstance(value, dict):
        return {**Lora().model_dump(mode="json"), **value}
    return value
