"""What an engine does with each option of a config: honoured, delegated, or refused, as `explain` shows it.

Numerics and memory are honoured or refused. An engine may decide by itself what concerns speed alone, and how long it
waits for a lost process: that is delegated. Imports no engine and no torch.
"""

from functools import cache
from typing import Any, NamedTuple

from portable_fsdp.backends.open import options_of
from portable_fsdp.backends.support import batch_problem, options_of_others, reason_of, refusals, rules_of
from portable_fsdp.config.describe import default_of, option_names, value_of, yaml_value
from portable_fsdp.config.rules import EFFECTS, Deployment, Effect, Kind, effects
from portable_fsdp.config.schema import Config


class Verdict(NamedTuple):
    """What becomes of one option in one deployment."""

    option: str  # `section.key`
    value: Any  # of the config
    kind: Kind
    text: str  # what the engine does, or the reason and the way out


def verdicts(config: Config, deployment: Deployment) -> tuple[Verdict, ...]:
    """One for each option of the config, in the schema's order."""
    refused: dict[str, list[str]] = {}
    for rule in refusals(config, deployment):
        refused.setdefault(rule.option, []).append(f"{rule.case}: {reason_of(rule, config, deployment, ' ')}")
    if batch := batch_problem(config, deployment.devices):
        refused["train.global_batch"] = [" ".join(batch.removeprefix("train.global_batch: ").split())]
    return tuple(_verdict(config, deployment.engine, option, refused.get(option)) for option in option_names())


def _verdict(config: Config, engine: str, option: str, reasons: list[str] | None) -> Verdict:
    value = value_of(config, option)
    if reasons:
        return Verdict(option, value, "refused", " ".join(reasons))
    rows = _rows(engine)[option]
    effect = rows[""] if rows.keys() == {""} else rows.get(yaml_value(value)) or rows[""]
    known_later = [rule for rule in rules_of(engine) if rule.option == option and rule.when is None]
    cases = "; ".join(f"refused {rule.case}" for rule in known_later if value != default_of(option))
    later = f"; {cases}: checked when the model is built" if cases else ""
    return Verdict(option, value, effect.kind, effect.what + later)


@cache
def _rows(engine: str) -> dict[str, dict[str, Effect]]:
    """Option -> value as YAML -> what the engine does with it; the value "" stands for any other."""
    rows: dict[str, dict[str, Effect]] = {}
    for effect in effects_of(engine):
        for words in effect.options:
            option, _, value = words.partition("=")
            rows.setdefault(option, {})[value] = effect
    return rows


@cache
def effects_of(engine: str) -> tuple[Effect, ...]:
    """What the engine does with each option that it takes."""
    others = [
        Effect((option,), f"the default; only {owner} has another") for owner, option in options_of_others(engine)
    ]
    options = options_of(engine)
    own = (*effects(EFFECTS), *effects(options.effects), *effects(options.delegated, "delegated"))
    return (*own, *others)
