"""What an engine does with each option of a config: honoured, delegated, or refused with the reason and the way out.

Numerics and memory are honoured or refused; what only concerns speed, or how long a lost process is waited for, and the
engine decides by itself, is delegated. A backend calls `require_supported` while it opens; `explain` shows it all.
Imports no engine and no torch.
"""

from functools import cache
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from portable_fsdp.backends.open import ENGINES, options_of
from portable_fsdp.config.describe import option_names, value_of, yaml_value
from portable_fsdp.config.layout import check_batch
from portable_fsdp.config.rules import EFFECTS, RULES, Deployment, Effect, Kind, Rule
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import BackendError, ConfigError

_NOTHING_WAS_STARTED = " Nothing was started."


class Verdict(NamedTuple):
    """What becomes of one option in one place."""

    option: str  # `section.key`
    value: Any  # of the config
    kind: Kind
    text: str  # what the engine does, or the reason and the way out


def require_supported(config: Config, *, engine: str, device: str, devices: int | None, hosts: int | None) -> None:
    """Raise BackendError with all options that `engine` can't honour on these devices.

    `devices`: of all hosts together. A rule that depends on a None isn't checked. The message begins with a batch that
    the devices don't divide; alone that is a ConfigError.
    """
    place = Deployment(engine, device, devices, hosts)
    counted = f" ({devices} device(s) of {hosts} host(s))" if devices is not None else ""
    where = f"backend {engine} on {device}{counted}"
    found = [f"{where}: {_title(rule, config)}: {_reason(rule, config, place)}" for rule in refusals(config, place)]
    batch = _batch_problem(config, devices)
    if found:
        raise BackendError("\n".join([batch, *found] if batch else found) + _NOTHING_WAS_STARTED)
    if batch:
        raise ConfigError(batch + _NOTHING_WAS_STARTED)


def refusals(config: Config, place: Deployment) -> tuple[Rule, ...]:
    """The rules that apply."""
    return tuple(rule for rule in rules_of(place.engine) if rule.when is not None and rule.when(config, place))


def verdicts(config: Config, place: Deployment) -> tuple[Verdict, ...]:
    """One for each option of the config, in the schema's order."""
    refused: dict[str, list[str]] = {}
    for rule in refusals(config, place):
        refused.setdefault(rule.option, []).append(f"{rule.case}: {_reason(rule, config, place, ' ')}")
    if batch := _batch_problem(config, place.devices):
        refused["train.global_batch"] = [" ".join(batch.removeprefix("train.global_batch: ").split())]
    return tuple(_verdict(config, place.engine, option, refused.get(option)) for option in option_names())


def _verdict(config: Config, engine: str, option: str, reasons: list[str] | None) -> Verdict:
    value = value_of(config, option)
    if reasons:
        return Verdict(option, value, "refused", " ".join(reasons))
    effect = _effect(option, value, engine)
    cases = [f"refused {rule.case}" for rule in _told_by_the_model(option, engine)]
    later = f"; {'; '.join(cases)}: checked when the model is built" if cases and not _is_default(option, value) else ""
    return Verdict(option, value, effect.kind, effect.what + later)


def _told_by_the_model(option: str, engine: str) -> list[Rule]:
    return [rule for rule in rules_of(engine) if rule.option == option and rule.when is None]


def _is_default(option: str, value: object) -> bool:
    section, _, key = option.partition(".")
    return value == _section(section).model_fields[key].default


def _effect(option: str, value: object, engine: str) -> Effect:
    """The row for this very value, else the row for any."""
    rows = _rows(engine)
    return rows.get(f"{option}={yaml_value(value)}") or rows[option]


@cache
def _rows(engine: str) -> dict[str, Effect]:
    return {option: effect for effect in effects_of(engine) for option in effect.options}


def _title(rule: Rule, config: Config) -> str:
    """`memory.every=2 without gradient_checkpointing=selective`."""
    return f"{rule.option}={yaml_value(value_of(config, rule.option))} {rule.case}".strip()


def _reason(rule: Rule, config: Config, place: Deployment, before_way: str = "\n  ") -> str:
    return f"{rule.reason}.{before_way}Set {', or '.join(ways_out(rule, config, place))}."


def _batch_problem(config: Config, devices: int | None) -> str | None:
    """In the words of `check_batch`, without its last ones."""
    if devices is None:
        return None
    try:
        check_batch(config, devices)
    except ConfigError as error:
        return str(error).removesuffix(_NOTHING_WAS_STARTED)
    return None


# ------------------------------------------------------------------------------------------ the tables of an engine


@cache
def rules_of(engine: str) -> tuple[Rule, ...]:
    """All rules that hold on an engine: those of every engine, its own, and other engines' own sections."""
    others = [_set_in_vain(owner, key) for owner, key in _sections_of_others(engine)]
    return (*RULES, *options_of(engine).rules, *others)


@cache
def effects_of(engine: str) -> tuple[Effect, ...]:
    """What the engine does with each option that it takes."""
    others = [
        Effect((f"{options_of(owner).section}.{key}",), f"the default; only {owner} has another")
        for owner, key in _sections_of_others(engine)
    ]
    return (*EFFECTS, *options_of(engine).effects, *others)


def ways_out(rule: Rule, config: Config, place: Deployment) -> tuple[str, ...]:
    """Those that lead somewhere on this device."""
    ways = rule.ways(config, place) if callable(rule.ways) else rule.ways
    packages = {engine: options_of(engine).packages.get(place.device) for engine in ENGINES}
    # An engine that needs a package of which we have no extra is of use to those who have it, and they know.
    elsewhere = {
        f"--backend={engine}" for engine, package in packages.items() if package is None or not package.is_ours
    }
    return tuple(way for way in ways if way not in elsewhere)


def _sections_of_others(engine: str) -> list[tuple[str, str]]:
    """(engine, key) of each section that only that engine has."""
    sections = {owner: options_of(owner).section for owner in ENGINES if owner != engine}
    return [(owner, key) for owner, section in sections.items() if section for key in _section(section).model_fields]


@cache
def _set_in_vain(owner: str, key: str) -> Rule:
    section = cast(str, options_of(owner).section)
    default = _section(section).model_fields[key].default
    return Rule(
        f"{section}.{key}",
        f"on another engine than {owner}",
        lambda config, place: getattr(getattr(config, section), key) != default,
        "no other engine has this setting",
        (f"{section}.{key}={yaml_value(default)}", f"--backend={owner}"),
    )


def _section(name: str) -> type[BaseModel]:
    return cast(type[BaseModel], Config.model_fields[name].annotation)
