"""The options of a config that an engine refuses, each with the reason and the way out.

A backend calls `require_supported` while it opens; `verdicts.py` has what becomes of the other options. Imports no
engine and no torch.
"""

from functools import cache
from typing import Any

from portable_fsdp.backends.open import ENGINES, options_of
from portable_fsdp.config.describe import section_model, value_of, with_value, yaml_value
from portable_fsdp.config.layout import check_batch
from portable_fsdp.config.rules import RULES, Deployment, Refused, Rule
from portable_fsdp.config.schema import Config
from portable_fsdp.config.yaml_text import parse
from portable_fsdp.runtime.errors import BackendError, ConfigError


def require_supported(config: Config, deployment: Deployment) -> None:
    """Raise BackendError with all options that the engine can't honour there.

    The message begins with a batch that the devices don't divide; alone that is a ConfigError.
    """
    devices = deployment.devices
    where = f"backend {deployment.engine} on {deployment.device}"
    where += f" ({devices} device(s) of {deployment.hosts} host(s))" if devices is not None else ""
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
    return tuple(rule for rule in rules_of(deployment.engine) if _applies(rule, config, deployment))


def _applies(rule: Rule, config: Config, deployment: Deployment) -> bool:
    return rule.when is not None and rule.when(config, deployment)


def reason_of(rule: Rule, config: Config, deployment: Deployment, before_way: str = "\n  ") -> str:
    return f"{rule.reason}.{before_way}Set {', or '.join(ways_out(rule, config, deployment))}."


def batch_problem(config: Config, devices: int | None) -> str | None:
    """The message of `check_batch`, where it raises one."""
    try:
        if devices is not None:
            is_auto = config.train.micro_batch == "auto"  # then as many rows as divide; any number of devices has one
            check_batch(with_value(config, "train.micro_batch", 1) if is_auto else config, devices)
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
    """Those that no rule refuses in turn; if each is refused, all: the next refusal then says how to continue."""
    ways = rule.ways(config, deployment) if callable(rule.ways) else rule.ways
    packages = {engine: options_of(engine).packages.get(deployment.device) for engine in ENGINES}
    elsewhere = {f"--backend={name}" for name, package in packages.items() if package is None or not package.is_usual}
    ways = tuple(way for way in ways if way not in elsewhere)
    return tuple(way for way in ways if _leads_out(way, rule, config, deployment)) or ways


def _leads_out(way: str, rule: Rule, config: Config, deployment: Deployment) -> bool:
    """Whether then neither the rule's option nor a key that the way sets is refused."""
    settings = dict(_settings(way))
    deployment = deployment._replace(engine=settings.pop("--backend", deployment.engine))
    for key, value in settings.items():
        config = with_value(config, key, value)
    others = [other for other in rules_of(deployment.engine) if other.option in (rule.option, *settings)]
    return not any(_applies(other, config, deployment) for other in others)


@cache
def _settings(way: str) -> tuple[tuple[str, Any], ...]:
    parts = (setting.partition("=") for setting in way.split(" and "))
    return tuple((key, parse(text)[1]) for key, _, text in parts)


def options_of_others(engine: str) -> list[tuple[str, str]]:
    """(engine, `section.key`) of each section that bears another engine's name: only that engine has it."""
    others = [name for name in ENGINES if name != engine and name in Config.model_fields]
    return [(owner, f"{owner}.{key}") for owner in others for key in section_model(owner).model_fields]
