"""What an engine does with each option: honoured, delegated, or refused with the reason and the way out.

Numerics and memory are honoured or refused. An engine may decide by itself what concerns speed alone, and how long it
waits for a lost process: that is delegated. A backend calls `require_supported` while it opens, `explain` shows
`verdicts`. Imports no engine and no torch.
"""

from functools import cache
from typing import Any, Literal, NamedTuple

from portable_fsdp.backends.open import ENGINES, options_of
from portable_fsdp.config.describe import (
    default_of,
    description_of,
    option_names,
    section_model,
    value_of,
    with_value,
    yaml_value,
)
from portable_fsdp.config.rules import RULES, Deployment, Refused, Rule
from portable_fsdp.config.schema import Config
from portable_fsdp.config.yaml_text import parse
from portable_fsdp.layout import check_batch
from portable_fsdp.runtime.errors import BackendError, ConfigError

Kind = Literal["honoured", "delegated", "refused"]


class Verdict(NamedTuple):
    """What an engine does with an option: with the value of a config, or in the case of a table's line."""

    option: str  # `section.key`
    kind: Kind
    text: str  # what the engine does, or the reason, and in a config the way out
    case: str = ""  # a value, or when a rule applies


def verdicts(config: Config, deployment: Deployment) -> tuple[Verdict, ...]:
    """One for each option of the config, in the schema's order."""
    refused: dict[str, list[str]] = {}
    for rule in refusals(config, deployment):
        refused.setdefault(rule.option, []).append(f"{rule.case}: {reason_of(rule, config, deployment, ' ')}")
    if batch := batch_problem(config, deployment.devices):
        refused["train.global_batch"] = [" ".join(batch.removeprefix("train.global_batch: ").split())]
    return tuple(
        Verdict(option, "refused", " ".join(refused[option]))
        if option in refused
        else _taken(config, deployment.engine, option)
        for option in option_names()
    )


def _taken(config: Config, engine: str, option: str) -> Verdict:
    value, lines = value_of(config, option), lines_of(engine, option)
    taken = {line.case: line for line in lines if line.kind != "refused"}
    line = (taken.get(yaml_value(value) if len(taken) > 1 else "") or taken[""])._replace(case="")
    if value == default_of(option):
        return line
    later = [rule.case for rule in rules_of(engine) if rule.option == option and rule.when is None]
    cases = "; ".join(f"refused {case}" for case in later)
    return line._replace(text=f"{line.text}; {cases}: checked when the model is built") if later else line


@cache
def lines_of(engine: str, option: str) -> tuple[Verdict, ...]:
    """What an engine does with any value of an option, with some values, and in the cases in which it refuses it."""
    options, rules = options_of(engine), [rule for rule in rules_of(engine) if rule.option == option]
    only = next((f"{rule.only} is the only value" for rule in rules if rule.only), "")
    delegated, note = options.delegated.get(option), options.notes.get(option)
    text = delegated or note or only or description_of(option)
    values = [(key.partition("=")[2], text) for key, text in options.notes.items() if key.startswith(f"{option}=")]
    return (
        Verdict(option, "delegated" if delegated else "honoured", text),
        *(Verdict(option, "honoured", text, value) for value, text in values),
        *(
            Verdict(option, "refused", rule.reason + " (checked when the model is built)" * (not rule.when), rule.case)
            for rule in rules
        ),
    )


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
