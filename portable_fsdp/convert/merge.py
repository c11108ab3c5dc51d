"""Files and the environment of other tools under our own values: what they add, and where the two contradict."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from yaml.nodes import MappingNode

from portable_fsdp.config.describe import yaml_value
from portable_fsdp.config.layers import LayeredValues, Origin
from portable_fsdp.convert.facts import Import, ImportContext, KeyEntry
from portable_fsdp.convert.read import read_entries, read_foreign, stated_numbers
from portable_fsdp.convert.table import ACCELERATE, ENVIRONMENT, FSDP, SCRIPT, TRAINER, find, key_table
from portable_fsdp.runtime.process import is_by_accelerate

_LAUNCHER = "accelerate launch"

_ALTERNATIVES = {
    "train.steps": "train.epochs",
    "train.epochs": "train.steps",
    "model.architecture": "model.pretrained",
    "model.pretrained": "model.architecture",
}
"""Options that exclude one another: an override of one also replaces an imported other."""

_NEEDED = (("model.pretrained", "model.architecture", "FOLDER"), ("train.steps", "train.epochs", 100))
"""Options without a default, the alternative of each, and an example."""

_DATA = (("data.source", "text"), ("data.path", "FILES"), ("data.tokenizer", "FOLDER"))
"""What the data is, and examples: the defaults suit a first try, not a file of another tool."""

_KINDS = {
    ACCELERATE: "an accelerate config",
    TRAINER: "a file of TrainingArguments",
    FSDP: "an fsdp_config",
    SCRIPT: "a file of script arguments",
}


def lay_under(
    source: LayeredValues, files: Sequence[tuple[Path, MappingNode]], environ: Mapping[str, str], *, is_config: bool
) -> tuple[Import, ...]:
    """Add what the files and `accelerate launch` say where `source` has no value yet; problems go to `source`.

    `is_config`: the first file stands in place of a config of ours.
    """
    numbers = _launched_numbers(environ)
    for _, root in reversed(files):  # of two files that differ, the first counts here; the launcher is compared later
        numbers |= stated_numbers(root)
    imports = [_lay_file(source, path, root, numbers) for path, root in files]
    imports += _lay_environment(source, environ, imports)
    if is_config:
        _require_the_rest(source, imports[0])
    return tuple(imports)


def _lay_file(source: LayeredValues, path: Path, root: MappingNode, numbers: Mapping[str, int]) -> Import:
    given = source.given()
    overridden = _with_alternatives({".".join(key[:2]) for key, origin in source.origins.items() if origin.is_override})
    imported = read_foreign(path, root, ImportContext(given, overridden, numbers))
    _add(source, imported, given, overridden)
    return imported


def _lay_environment(source: LayeredValues, environ: Mapping[str, str], imports: Sequence[Import]) -> list[Import]:
    """Our own file and overrides go first, and so do a Trainer's arguments, as in Trainer itself."""
    given = source.given()
    theirs = {
        option
        for imported in imports
        for option, setting in imported.settings.items()
        if imported.kind != TRAINER and source.origin(tuple(option.split("."))).where == setting.origin
    }
    first = _with_alternatives({option for option in given if option not in theirs})
    imported = _read_environment(environ, ImportContext(given, first, _launched_numbers(environ)))
    if imported is None:
        return []
    for option in [option for option in imported.settings if option in first]:
        setting = imported.settings.pop(option)
        imported.ignore(setting, f"{source.origin(tuple(option.split('.'))).where} takes precedence")
    _add(source, imported, given, first)
    return [imported]


def _read_environment(environ: Mapping[str, str], context: ImportContext) -> Import | None:
    """What `accelerate launch` passes to the processes that it starts; None where it didn't start this one.

    Raises nothing: problems are in the result, an unknown variable with one of accelerate's prefixes among them.
    """
    if not is_by_accelerate(environ):
        return None
    result = Import(Path(_LAUNCHER), ENVIRONMENT)
    prefixes = tuple(key_table().families)
    variables = {name: environ[name] for name in sorted(environ) if name.startswith(prefixes)}
    # A list of a file arrives as Python writes it: ['A', 'B'].
    texts = {name: re.sub(r"[\[\]'\"]", "", text) if text.startswith("[") else text for name, text in variables.items()}
    entries = [KeyEntry(ENVIRONMENT, name, text, 0, _LAUNCHER) for name, text in texts.items()]
    result.problems += [(0, text) for text in _without_switch(variables)]
    read_entries(entries, result, context)
    return result


def _launched_numbers(environ: Mapping[str, str]) -> dict[str, int]:
    """Processes and machines that `accelerate launch` started; nothing where it didn't start this one."""
    if not is_by_accelerate(environ):
        return {}
    counts = {"num_processes": "WORLD_SIZE", "num_machines": "GROUP_WORLD_SIZE"}
    return {fact: int(environ[name]) for fact, name in counts.items() if environ.get(name, "").isdecimal()}


def _without_switch(variables: Mapping[str, str]) -> Iterator[str]:
    """A problem for each family of variables whose switch is off: accelerate doesn't read them."""
    for prefix in key_table().families:
        flag = f"USE_{prefix.removeprefix('ACCELERATE_').rstrip('_')}"
        names = [name for name in variables if name.startswith(prefix)]
        switch = variables.get(f"ACCELERATE_{flag}", "none")
        if names and find(ENVIRONMENT, f"ACCELERATE_{flag}") and switch.lower() not in ("true", "1"):
            text = f"expected ACCELERATE_{flag}=true, without which accelerate doesn't read it, found {switch}.\n"
            text += f"  Start with {_LAUNCHER} --{flag.lower()}, or unset {', '.join(names)}."
            yield f"{_LAUNCHER}: {names[0]}: {text}"


def _with_alternatives(options: set[str]) -> set[str]:
    return options | {_ALTERNATIVES[option] for option in options if option in _ALTERNATIVES}


def _add(source: LayeredValues, imported: Import, given: Mapping[str, object], overridden: set[str]) -> None:
    for line, text in imported.problems:
        source.problems.setdefault(text, Origin(False, line, "", None))
    for option, setting in imported.settings.items():
        alternative = _ALTERNATIVES.get(option, option)
        if option in overridden:
            continue
        if alternative != option and given.get(alternative) is not None:
            _add_difference(source, setting, alternative, given)
        elif option not in given:
            source.add_default(option, setting.value, Origin(False, setting.line, setting.origin, setting.text))
        elif given[option] != setting.value:
            _add_difference(source, setting, option, given)


def _add_difference(source: LayeredValues, setting: KeyEntry, option: str, given: Mapping[str, object]) -> None:
    """A foreign key sets another value than `option` has, which is its own or its alternative."""
    here = f"{setting.quote} sets {setting.option}={yaml_value(setting.value)}"
    ours = f"{source.origin(tuple(option.split('.'))).where} sets {option}={yaml_value(given[option])}"
    text = f"{here}, but {ours}.\n  Keep one, or override it: {option}=..."
    source.problems.setdefault(text, Origin(False, setting.line, "", None))


def _require_the_rest(source: LayeredValues, imported: Import) -> None:
    """A problem where another tool's file is the config, and nothing sets the model or the length of the run."""
    given = source.given()
    missing = [(option, other, example) for option, other, example in _NEEDED if not {option, other} & given.keys()]
    if not missing:
        return
    where = Origin(False, 0, str(imported.path), None)
    for option, _, example in missing:  # else the schema would report it once more
        source.add_default(option, example, None)
    needed = " and ".join(f"{option} (or {other})" for option, other, _ in missing)
    examples = [f"{option}={example}" for option, _, example in missing]
    examples += [f"{option}={example}" for option, example in _DATA if option not in given]
    source.add_problem(
        where,
        (),
        f"{_KINDS[imported.kind]}; a run needs {needed} too.\n"
        f"  Add: python -m portable_fsdp.launch --config={imported.path} {' '.join(examples)}\n"
        "  Without data.source the run trains on the bytes of CPython's documentation.\n"
        f"  Or import it under your config: --config=YOURS.yaml --import={imported.path} (explain shows the result).",
    )
