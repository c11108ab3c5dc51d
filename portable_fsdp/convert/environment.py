"""The environment of `accelerate launch` as an `Import`: what a file says, under the names of variables."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from portable_fsdp.convert.facts import Import, ImportContext, KeyEntry
from portable_fsdp.convert.read import read_entries
from portable_fsdp.convert.table import ENVIRONMENT, find, key_table
from portable_fsdp.convert.values import Raw
from portable_fsdp.runtime.process import is_by_accelerate

LAUNCHER = "accelerate launch"


def read_environment(environ: Mapping[str, str], context: ImportContext) -> Import | None:
    """What `accelerate launch` passes to the processes that it starts; None where it didn't start this one.

    Raises nothing: problems are in the result, an unknown variable with one of accelerate's prefixes among them.
    """
    if not is_by_accelerate(environ):
        return None
    result = Import(Path(LAUNCHER), ENVIRONMENT)
    prefixes = tuple(key_table().families)
    variables = {name: environ[name] for name in sorted(environ) if name.startswith(prefixes)}
    entries = [KeyEntry(ENVIRONMENT, name, _raw(text), 0, LAUNCHER) for name, text in variables.items()]
    result.problems += [(0, text) for text in _without_switch(variables)]
    read_entries(entries, result, context)
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


def _without_switch(variables: Mapping[str, str]) -> Iterator[str]:
    """A problem for each family of variables whose switch is off: accelerate doesn't read them."""
    for prefix in key_table().families:
        flag = f"USE_{prefix.removeprefix('ACCELERATE_').rstrip('_')}"
        names = [name for name in variables if name.startswith(prefix)]
        switch = variables.get(f"ACCELERATE_{flag}", "none")
        if names and find(ENVIRONMENT, f"ACCELERATE_{flag}") and switch.lower() not in ("true", "1"):
            yield (
                f"{LAUNCHER}: {names[0]}: expected ACCELERATE_{flag}=true, without which accelerate doesn't read it, "
                f"found {switch}.\n  Start with {LAUNCHER} --{flag.lower()}, or unset {', '.join(names)}."
            )
