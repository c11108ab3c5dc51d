"""The environment of `accelerate launch` as an `Import`: what a file says, under the names of variables.

The launcher passes a whole plugin on, most of which nobody set: of two variables that contradict each other, the one
that has the launcher's own value sets nothing.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from portable_fsdp.convert.facts import Import, ImportContext, KeyEntry
from portable_fsdp.convert.read import read_entries
from portable_fsdp.convert.table import ENVIRONMENT, key_table
from portable_fsdp.convert.values import Raw
from portable_fsdp.runtime.process import is_by_accelerate

LAUNCHER = "accelerate launch"

_STRATEGY, _RESHARD = "FSDP_SHARDING_STRATEGY", "FSDP_RESHARD_AFTER_FORWARD"
_DEFAULTS = {_STRATEGY: ("full_shard", "1"), _RESHARD: ("true", "false", "full_shard")}
"""What `accelerate launch` sets by itself, or accelerate doesn't read (version 1), in lower case."""


def read_environment(environ: Mapping[str, str], context: ImportContext) -> Import | None:
    """What `accelerate launch` passes to the processes that it starts; None where it didn't start this one.

    Raises nothing: problems are in the result, an unknown variable with one of accelerate's prefixes among them.
    """
    if not is_by_accelerate(environ):
        return None
    result = Import(Path(LAUNCHER), ENVIRONMENT)
    prefixes = tuple(key_table().families)
    variables = {name: environ[name] for name in sorted(environ) if name.startswith(prefixes)}
    defaults = dict(_launchers_own(variables))
    entries = {name: KeyEntry(ENVIRONMENT, name, _raw(text), 0, LAUNCHER) for name, text in variables.items()}
    for name, reason in defaults.items():
        result.ignore(entries.pop(name), reason)
    result.problems += [(0, text) for text in _without_switch(variables)]
    read_entries(entries.values(), result, context)
    return result


def launched_numbers(environ: Mapping[str, str]) -> dict[str, int]:
    """Processes and machines that `accelerate launch` started; nothing where it didn't start this one."""
    if not is_by_accelerate(environ):
        return {}
    counts = {"num_processes": "WORLD_SIZE", "num_machines": "GROUP_WORLD_SIZE"}
    return {fact: int(environ[name]) for fact, name in counts.items() if environ.get(name, "").isdecimal()}


def _raw(text: str) -> Raw:
    """A list of a file arrives as Python writes it."""
    if text.startswith("[") and text.endswith("]"):
        return [item.strip(" '\"") for item in text[1:-1].split(",")]
    return text


def _launchers_own(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that the launcher sets by itself, where another one differs; each with the reason."""
    default = {name for name, words in _DEFAULTS.items() if variables.get(name, words[0]).lower() in words}
    both = ((_STRATEGY, _RESHARD), (_RESHARD, _STRATEGY)) if variables.get("FSDP_VERSION") != "2" else ()
    for name, other in both:
        if name in variables and name in default and other not in default:
            yield name, f"{LAUNCHER} always sets it; {other} takes precedence"


def _without_switch(variables: Mapping[str, str]) -> Iterator[str]:
    """A problem for each family of variables that accelerate doesn't read, since its switch is off."""
    for prefix, family in key_table().families.items():
        names = [name for name in variables if name.startswith(prefix)]
        if family.switch and names and variables.get(family.switch, "false").lower() not in ("true", "1"):
            yield (
                f"{LAUNCHER}: {names[0]}: expected {family.switch}=true, without which accelerate doesn't read it, "
                f"found {variables.get(family.switch, 'none')}.\n"
                f"  Start with {LAUNCHER} {family.flag}, or unset {', '.join(names)}."
            )
