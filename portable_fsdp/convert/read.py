"""Read a config, with other tools' files and the environment of `accelerate launch` as defaults beneath our own keys.

Each key of such a file is looked up in the table. A key that its own tool doesn't read (`read_by`) sets nothing; a key
outside its section is used, with a remark; an unknown key is a problem that names the nearest key.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from portable_fsdp.config.describe import Key, nearest, yaml_value
from portable_fsdp.config.load import MAX_PROBLEMS, LayeredValues, Loaded, Origin, ProblemsOf, loaded, parse_file
from portable_fsdp.config.schema import Config
from portable_fsdp.config.yaml_text import NULL_TAG
from portable_fsdp.convert.facts import ForeignFacts, Import, KeyEntry
from portable_fsdp.convert.recipes import combine_recipe
from portable_fsdp.convert.rules import combine
from portable_fsdp.convert.table import (
    ACCELERATE,
    ENVIRONMENT,
    MIXED,
    SCRIPT,
    TOP,
    TRAINER,
    KeyOutcome,
    KeyRow,
    Raw,
    UnreadableValue,
    find,
    find_anywhere,
    key_table,
    nearest_key,
    nested_place,
    option_meant,
    outcome_of,
    recipe_of,
    torch_hint,
)
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.launchers import is_by_accelerate

_LAUNCHER = "accelerate launch"
_SECRET = ("hub_token", "aws_access_key_id", "aws_secret_access_key")  # messages and translations repeat values
_NUMBERS = {"num_processes": "WORLD_SIZE", "num_machines": "GROUP_WORLD_SIZE"}
"""The launcher's numeric facts, and the variables in which `accelerate launch` passes them."""

_NEEDED = (("model.pretrained", "model.architecture", "FOLDER"), ("train.steps", "train.epochs", 100))
"""Options without a default, the alternative of each, and an example."""

_ALTERNATIVES = {one: other for first, second, _ in _NEEDED for one, other in ((first, second), (second, first))}
"""Options that exclude each other: an override of one also replaces the imported value of the other."""

_EXPECTED = "expected a mapping of accelerate or Trainer keys (distributed_type, fsdp_config, ...)"


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    imports: Sequence[str | Path] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read a YAML file and apply `section.key=value` overrides; the last override of a key counts.

    Values of overrides are YAML; `model.architecture.hidden_size=64` sets a key inside that mapping. An empty section
    has all defaults. `imports` are accelerate or Trainer configs that supply defaults and may not contradict our file;
    `path` may be one itself. `environ` (os.environ, or None) supplies further defaults if `accelerate launch` started
    this process; it may not contradict an accelerate file. Raises ConfigError with all problems in one message.
    """
    return read_config(path, overrides, imports, environ).config


def read_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    imports: Sequence[str | Path] = (),
    environ: Mapping[str, str] | None = None,
    problems_of: ProblemsOf = lambda config: (),
    devices: int | None = None,
) -> Loaded:
    """Like `load_config`, with the origin of each option and the imports.

    `problems_of` finds further problems where some keys are wrong; the error has both. `devices`: of the run, where
    the flags or the launcher say it; a recipe's batch depends on it.
    """
    layers, environ = LayeredValues(Path(path)), environ or {}
    node, values = _parsed(layers.path)
    is_config = not _is_ours(node) and _is_foreign(node)
    if not is_config:
        layers.add_file(node, values)
    files = [(layers.path, node)] * is_config + [_read_import(Path(name)) for name in imports]
    for text in overrides:
        layers.override(text)
    launched = _numbers({fact: environ.get(name, "") for fact, name in _NUMBERS.items() if is_by_accelerate(environ)})
    numbers = ({} if devices is None else {"num_processes": devices}) | launched
    for _, root in reversed(files):  # the first file counts
        numbers |= _numbers({str(key.value): str(v.value) for key, v in _pairs(root) if isinstance(v, ScalarNode)})
    results = [_lay_file(layers, file, root, numbers) for file, root in files]
    results += _lay_environment(layers, environ, results, launched)
    for result in results:
        _lay_defaults(layers, result)
    if is_config:
        _require_the_rest(layers, results[0])
    return loaded(layers, tuple(results), _hint, problems_of)


def _is_ours(node: MappingNode) -> bool:
    """Return whether a key is one of our sections; `optim: adamw_torch` is a key of Trainer."""
    return any(
        str(key.value) in Config.model_fields and (not isinstance(value, ScalarNode) or value.tag == NULL_TAG)
        for key, value in _pairs(node)
    )


def _is_foreign(node: MappingNode) -> bool:
    """Return whether the table has a key of this file. Call it for files without our sections."""
    keys = [str(key.value) for key, _ in _pairs(node) if isinstance(key, ScalarNode)]
    return any(nested_place("", key) or any(find(place, key) for place in TOP) for key in keys)


def _parsed(path: Path, holds: str = "") -> tuple[MappingNode, dict[str, Any]]:
    node, values = parse_file(path, holds)
    if not {"zero_optimization", "train_micro_batch_size_per_gpu"}.isdisjoint(values):
        raise ConfigError(
            f"{path}: DeepSpeed's own JSON is not supported.\n  Use an accelerate file with zero_stage and offload "
            "keys in deepspeed_config, and set the rest by our own keys or Trainer's."
        )
    if any(isinstance(value, dict) and "_component_" in value for value in values.values()):
        raise ConfigError(
            f"{path}: a config of torchtune, which isn't read: its values name parts of its code.\n  Write our own "
            "(docs/foreign_configs.md)."
        )
    return node, values


def _read_import(path: Path) -> tuple[Path, MappingNode]:
    node, values = _parsed(path, f"nothing to import: {_EXPECTED}")
    if not values:
        raise ConfigError(f"{path}: nothing to import: {_EXPECTED}, found an empty mapping.")
    if _is_ours(node):
        raise ConfigError(f"{path}: {_EXPECTED}, found our own sections.\n  Pass our own files by --config.")
    return path, node


def _hint(key: Key) -> str:
    """Return a hint for an unknown key of our config."""
    *sections, name = key
    if len(sections) < 2 and (hint := torch_hint(name)):
        return hint
    if len(key) == 1 and (find(ACCELERATE, key[0]) or nested_place(ACCELERATE, key[0])):
        return "a key of accelerate: pass its file by --import=FILE"
    option = option_meant(name) if len(sections) < 2 else ""
    return nearest(tuple(option.split(".")) if option else key)


# ---------------------------------------------------------------------------------------- imports beneath our own keys


def _lay_file(layers: LayeredValues, path: Path, root: MappingNode, numbers: Mapping[str, int]) -> Import:
    given = layers.given()
    overridden = _with_alternatives({".".join(key[:2]) for key, origin in layers.origins.items() if origin.is_override})
    keys = [str(key.value) for key, _ in _pairs(root)]
    recipe = recipe_of(keys)
    if reason := key_table().recipes[recipe].refuse if recipe else "":
        raise ConfigError(
            f"{path}: a config of {recipe}, which isn't read: {reason}.\n  Write our own (docs/foreign_configs.md)."
        )
    imported = Import(path, recipe or max(TOP, key=lambda place: sum(find(place, key) is not None for key in keys)))
    _read_entries(_entries(root, imported.kind, imported), ForeignFacts(imported, given, overridden, numbers))
    _add(layers, imported, given, overridden)
    return imported


def _lay_environment(
    layers: LayeredValues, environ: Mapping[str, str], imports: Sequence[Import], numbers: Mapping[str, int]
) -> list[Import]:
    """Read the environment that `accelerate launch` passes to its processes; an unknown variable is a problem.

    Our own file, overrides and TrainingArguments take precedence, the latter as in Trainer itself.
    """
    if not is_by_accelerate(environ):
        return []
    given = layers.given()
    imported_options = {
        option
        for imported in imports
        for option, setting in imported.settings.items()
        if imported.kind != TRAINER and layers.where(option) == setting.origin
    }
    first = _with_alternatives({option for option in given if option not in imported_options})
    result = Import(Path(_LAUNCHER), ENVIRONMENT)
    prefixes = tuple(key_table().families)
    variables = {name: environ[name] for name in sorted(environ) if name.startswith(prefixes)}
    # accelerate passes lists as Python prints them: ['A', 'B'].
    texts = {name: re.sub(r"[\[\]'\"]", "", text) if text.startswith("[") else text for name, text in variables.items()}
    entries = [KeyEntry(ENVIRONMENT, name, text, 0, _LAUNCHER) for name, text in texts.items()]
    result.problems += [(0, text) for text in _without_switch(variables)]
    _read_entries(entries, ForeignFacts(result, given, first, numbers))
    for option in [option for option in result.settings if option in first]:
        setting = result.settings.pop(option)
        result.ignore(setting, f"{layers.where(option)} takes precedence")
    _add(layers, result, given, first)
    return [result]


def _numbers(texts: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers of processes and machines among the top-level keys of a file, or the launcher's variables."""
    return {fact: int(texts[fact]) for fact in _NUMBERS if texts.get(fact, "").isdecimal()}


def _without_switch(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each family of variables whose switch is off, so that accelerate doesn't read them."""
    for prefix in key_table().families:
        flag = f"USE_{prefix.removeprefix('ACCELERATE_').rstrip('_')}"
        names = [name for name in variables if name.startswith(prefix)]
        switch = variables.get(f"ACCELERATE_{flag}", "none")
        if names and find(ENVIRONMENT, f"ACCELERATE_{flag}") and switch.lower() not in ("true", "1"):
            text = f"accelerate reads it only with ACCELERATE_{flag}=true, found {switch}.\n"
            text += f"  Start with {_LAUNCHER} --{flag.lower()}, or unset {', '.join(names)}."
            yield f"{_LAUNCHER}: {names[0]}: {text}"


def _with_alternatives(options: set[str]) -> set[str]:
    return options | {_ALTERNATIVES[option] for option in options if option in _ALTERNATIVES}


def _add(layers: LayeredValues, imported: Import, given: Mapping[str, object], overridden: set[str]) -> None:
    """Set options without a value so far; a value that differs from a given one is a problem, unless overridden."""
    for line, text in imported.problems:
        layers.problems.setdefault(text, Origin(False, line, "", None))
    for option, setting in imported.settings.items():
        if setting.is_default:
            continue
        alternative = _ALTERNATIVES.get(option, option)
        rival = alternative if given.get(alternative) is not None else option
        if option in overridden:
            continue
        if rival not in given:
            layers.add_default(option, setting.value, Origin(False, setting.line, setting.origin, setting.text))
        elif rival != option or given[option] != setting.value:
            imported_text = f"{setting.quote} sets {option}={yaml_value(setting.value)}"
            own_text = f"{layers.where(rival)} sets {rival}={yaml_value(given[rival])}"
            text = f"{imported_text}, but {own_text}.\n  Keep one, or override it: {rival}=..."
            layers.problems.setdefault(text, Origin(False, setting.line, "", None))


def _lay_defaults(layers: LayeredValues, imported: Import) -> None:
    """Set the tool's own defaults beneath everything that a file, an override or the environment sets."""
    for option in [option for option, setting in imported.settings.items() if setting.is_default]:
        setting, given = imported.settings[option], layers.given()
        is_given = option in given or given.get(_ALTERNATIVES.get(option, option)) is not None
        # Trainer's floor goes with Trainer's default schedule.
        if is_given or (option == "optim.min_lr_ratio" and layers.where("optim.schedule") != setting.origin):
            del imported.settings[option]
        else:
            layers.add_default(option, setting.value, Origin(False, 0, setting.origin, setting.text))


def _require_the_rest(layers: LayeredValues, imported: Import) -> None:
    """Add a problem if another tool's file is the config, and nothing sets the model or the length of the run."""
    missing = [needed for needed in _NEEDED if layers.given().keys().isdisjoint(needed[:2])]
    for option, _, example in missing:  # else the schema would report it again
        layers.add_default(option, example, None)
    if missing:
        needed = " and ".join(f"{option} (or {other})" for option, other, _ in missing)
        text = f"has only keys of {imported.kind}; a run also needs {needed}.\n  Add it, and data.source, as overrides,"
        text += f" or import the file into your own config: --config=YOURS.yaml --import={imported.path}."
        layers.add_problem(Origin(False, 0, str(imported.path), None), (), text)


# ------------------------------------------------------------------------------------------------- the keys of a file


def _entries(node: MappingNode, place: str, result: Import) -> Iterator[KeyEntry]:
    for key_node, value in _pairs(node):
        line = cast(int, key_node.start_mark.line) + 1
        key = str(key_node.value) if isinstance(key_node, ScalarNode) else "?"
        entry = KeyEntry(place, key, _raw(value), line, f"{result.path}:{line}")
        inside = nested_place(place, key)
        if key == "<<":
            result.add_problem(entry, "YAML merge keys are not supported here; write the keys out.")
        elif inside and isinstance(value, MappingNode):
            yield from _entries(value, inside, result)
        elif inside and inside != MIXED and not entry.raw:
            result.ignore(entry, "empty")
        elif inside and inside != MIXED:  # Trainer also takes JSON in quotes and the path of a file
            text = f"expected a mapping, found {entry.text}.\n  Write JSON without quotes around it; import a file by"
            result.add_problem(entry, f"{text} itself, by --import, and leave {key} out.")
        elif entry.raw and key in _SECRET:
            # TrainingArguments.to_dict writes <HUB_TOKEN>, with or without a token.
            yield entry._replace(raw=None if entry.raw == f"<{key.upper()}>" else "(hidden)")
        else:
            yield entry


def _pairs(node: MappingNode) -> list[tuple[Node, Node]]:
    return cast(list[tuple[Node, Node]], node.value)


def _raw(node: Node) -> Raw:
    if isinstance(node, ScalarNode):
        return None if node.tag == NULL_TAG else str(node.value)
    if isinstance(node, SequenceNode):
        return [_raw(item) for item in cast(list[Node], node.value)]
    return {str(key.value): _raw(value) for key, value in _pairs(cast(MappingNode, node))}


_JOINED = {"~lora": "model.lora", "~bits": "precision.frozen"}
"""Prefixes of facts -> the option that they set together."""

_NEAREST = {
    **_JOINED,
    "~eval_steps": "train.eval_every",
    "~min_num_params": "sharding.min_num_params",
    "~mixed": "precision.compute",
    "~recompute": "memory.gradient_checkpointing",
    "~reshard": "sharding.strategy",
    "~reshard_word": "sharding.strategy",
    "~strategy": "sharding.strategy",
}
"""Facts, or prefixes of them -> the option to name if such a key has no effect."""


def _read_entries(entries: Iterable[KeyEntry], facts: ForeignFacts) -> None:
    """Read the keys one by one, then combine them into options; keys that set none are listed as not needed."""
    rows = [(find_anywhere(entry.place, entry.key), entry) for entry in entries]
    facts.choose_tool([(row, entry) for row, entry in rows if row])
    for row, entry in rows:
        if row is None:
            _read_unknown(entry, facts.result)
        else:
            _read(facts, row, entry)
    for entry in facts.absent_defaults():
        row = cast(KeyRow, find_anywhere(entry.place, entry.key))
        options = outcome_of(row, entry.raw).options
        if facts.is_read(row, row) and facts.keys.keys().isdisjoint(options):
            facts.keys |= {option: entry._replace(option=option, value=value) for option, value in options.items()}
    facts.numbers = {**facts.numbers, **{fact: number for fact in _NUMBERS if (number := facts.result.number(fact))}}
    facts.options.update({name: setting for name, setting in facts.keys.items() if not name.startswith("~")})
    combine(facts)
    combine_recipe(facts)
    used = {(setting.line, setting.key) for setting in facts.options.values()}
    joined = {fact for fact, option in _JOINED.items() if option in facts.options}
    reasons = key_table().unused
    for setting in (setting for setting in facts.keys.values() if not setting.is_default):
        family = setting.option.partition(".")[0]  # `~lora` of `~lora.r`
        if (setting.line, setting.key) not in used and family not in joined:
            reason = reasons.get(setting.option) or reasons.get(family)
            reason = reason or "another key or an override decides, or sets the same value"
            option = _nearest(setting.option)
            is_decided = {option, _ALTERNATIVES.get(option, option)} & (facts.options.keys() | facts.given.keys())
            is_lost = bool(option and setting.value and not is_decided)
            facts.result.ignore(setting._replace(option=option), reason, is_lost)


def _read(facts: ForeignFacts, row: KeyRow, entry: KeyEntry) -> None:
    """Read one key; keys that set the same option must agree."""
    outcome = _outcome(facts, row, entry)
    if outcome is None:
        return
    if not facts.is_read(row, outcome):
        option, value = next(iter(outcome.options.items()), (outcome.override, None))
        unread = entry._replace(option=_nearest(option), value=value)
        facts.result.ignore(unread, "its tool doesn't read it here", is_lost=outcome.kind in ("set", "refuse"))
        return
    if outcome.kind != "set":
        _compare_with_earlier(facts, row, entry)
    facts.rows.append((row, entry))
    match outcome.kind:
        case "set":
            in_place = row.place in (entry.place, SCRIPT) or entry.place in (ENVIRONMENT, *key_table().recipes)
            remarks = (outcome.remark, "" if in_place else f"a key of {row.place}, found in {entry.place}")
            setting = entry._replace(place=row.place, remark="; ".join(filter(None, remarks)))
            for option, value in outcome.options.items():
                _set(facts, setting._replace(option=option, value=value))
        case "ignore":
            facts.result.ignore(entry, str(outcome.ignore))
        case "launcher":
            facts.result.launcher.append(entry._replace(remark=str(outcome.launcher), fact=outcome.fact))
        case _:
            if outcome.override not in facts.overridden:
                problem = f"{entry.text} can't be honoured: {outcome.refuse}.\n  Fix: {outcome.fixes}."
                facts.result.add_problem(entry, problem)
                facts.failed.add(row.name)


def _nearest(option: str) -> str:
    """Return our option for an option or fact; empty if there is none."""
    return _NEAREST.get(option.partition(".")[0], "") if option.startswith("~") else option


def _outcome(facts: ForeignFacts, row: KeyRow, entry: KeyEntry) -> KeyOutcome | None:
    """Return the outcome of a key; None for an unreadable value, which becomes a problem. Null sets nothing."""
    try:
        if entry.raw is not None:
            return outcome_of(row, entry.raw)
    except UnreadableValue as expected:
        if not (isinstance(entry.raw, str) and entry.raw.lower() in ("", "none", "null")):
            facts.result.add_problem(entry, f"expected {expected}, found {entry.text}.")
            facts.failed.add(row.name)
            return None
    return KeyOutcome(ignore="null")


def _set(facts: ForeignFacts, setting: KeyEntry) -> None:
    first = facts.keys.setdefault(setting.option, setting)
    if first is not setting and first.value == setting.value:
        facts.result.ignore(setting, f"agrees with {first.key} ({first.where})")
    elif first.value != setting.value:
        facts.contradiction(setting.option, first, setting)


def _compare_with_earlier(facts: ForeignFacts, row: KeyRow, entry: KeyEntry) -> None:
    """Compare duplicates of a key, also under another name; keys that set options are compared by option."""
    if "*" in row.name:  # a row of many keys
        return
    first = next((first for earlier, first in facts.rows if earlier is row and first.place == entry.place), None)
    if first is not None and first.text.lower() != entry.text.lower():
        facts.contradiction("", first, entry)


def _read_unknown(entry: KeyEntry, result: Import) -> None:
    if entry.key.startswith(("_", "#", "//", "$")) or entry.key.lower() in ("comment", "comments", "notes"):
        result.ignore(entry, "a comment")
        return
    near = nearest_key(entry.place, entry.key) if len(result.problems) < MAX_PROBLEMS else ""
    kind = "variable" if entry.place == ENVIRONMENT else f"key of {entry.place}"
    hint = f"nearest: {near}." if near else "No known name is similar; leave it out."
    result.add_problem(entry, f"unknown {kind}.\n  {hint}")
