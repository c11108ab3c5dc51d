"""The options of a config that an engine refuses, each with the reason and the way out.

A backend calls `require_supported` while it opens; `verdicts.py` has what becomes of the other options. Imports no
engine and no torch.
"""

from functools import cache
from typing import Any

from portable_fsdp.backends.open import ENGINES, options_of
from portable_fsdp.config.describe import section_model, value_of, with_value, yaml_value
from portable_fsdp.config.layout import check_batch, with_micro_batch
from portable_fsdp.config.rules import RULES, Deployment, Refused, Rule
from portable_fsdp.config.schema import Config
from portable_fsdp.config.yaml_text import parse
from portable_fsdp.runtime.errors import BackendError, ConfigError


def require_supported(
    config: Config, *, engine: str, device: str, devices: int | None, hosts: int | None, generation: str = ""
) -> None:
    """Raise BackendError with all options that `engine` can't honour on these devices.

    `devices`: of all hosts together; `generation`: of a TPU. A rule that depends on an unknown one isn't checked. The
    message begins with a batch that the devices don't divide; alone that is a ConfigError.
    """
    deployment = Deployment(engine, device, devices, hosts, generation)
    where = f"backend {engine} on {device}"
    where += f" ({devices} device(s) of {hosts} host(s))" if devices is not None else ""
    problems = [
        f"{where}: {rule.option}={yaml_value(value_of(config, rule.option))} {rule.case}: "
        + reason_of(rule, config, deployment)
        for rule in refusals(config, deployment)
    ]
    if batch := batch_problem(config, devices):
        raise (BackendError if problems else ConfigError)("\n".join([batch, *problems]))
    if problems:
        raise BackendError("\n".join(problems))


def refusals(config: Config, deployment: Deployment) -> tuple[Rule, ...]:
    """The rules that apply."""
    return tuple(
        rule for rule in rules_of(deployment.engine) if rule.when is not None and rule.when(config, deployment)
    )


def reason_of(rule: Rule, config: Config, deployment: Deployment, before_way: str = "\n  ") -> str:
    return f"{rule.reason}.{before_way}Set {', or '.join(ways_out(rule, config, deployment))}."


def batch_problem(config: Config, devices: int | None) -> str | None:
    """The message of `check_batch`, where it raises one."""
    try:
        if devices is not None:
            is_auto = config.train.micro_batch == "auto"  # then as many rows as divide; any number of devices has one
            check_batch(with_micro_batch(config, 1) if is_auto else config, devices)
    except ConfigError as error:
        return str(error)
    return None


# ------------------------------------------------------------------------------------------ the tables of an engine


@cache
def rules_of(engine: str) -> tuple[Rule, ...]:
    """All rules of an engine: those of every engine, its own, and one for each setting of another engine's section."""
    others = [
        Refused(option, f"on another engine than {owner}", "no other engine has this setting", f"--backend={owner}")
        for owner, option in options_of_others(engine)
    ]
    return (*RULES, *options_of(engine).rules, *others)


def ways_out(rule: Rule, config: Config, deployment: Deployment) -> tuple[str, ...]:
    """Those that lead somewhere on this device; where none does at once, each that other refusals lead on from."""
    ways = rule.ways(config, deployment) if callable(rule.ways) else rule.ways
    packages = {engine: options_of(engine).packages.get(deployment.device) for engine in ENGINES}
    elsewhere = {f"--backend={name}" for name, package in packages.items() if package is None or not package.is_usual}
    ways = tuple(way for way in ways if way not in elsewhere)
    return tuple(way for way in ways if _leads_out(way, rule, config, deployment)) or ways


def _leads_out(way: str, rule: Rule, config: Config, deployment: Deployment) -> bool:
    """Whether then neither the rule's option nor a key that the way sets is refused."""
    keys = {rule.option}
    for key, value in _settings(way):
        if key == "--backend":
            deployment = deployment._replace(engine=value)
            continue
        keys.add(key)
        config = with_value(config, key, value)
    others = (other for other in rules_of(deployment.engine) if other.option in keys)
    return not any(other.when and other.when(config, deployment) for other in others)


@cache
def _settings(way: str) -> tuple[tuple[str, Any], ...]:
    parts = (setting.partition("=") for setting in way.split(" and "))
    return tuple((key, parse(text)[1]) for key, _, text in parts)


def options_of_others(engine: str) -> list[tuple[str, str]]:
    """(engine, `section.key`) of each section that bears another engine's name: only that engine has it."""
    others = [name for name in ENGINES if name != engine and name in Config.model_fields]
    return [(owner, f"{owner}.{key}") for owner in others for key in section_model(owner).model_fields]
