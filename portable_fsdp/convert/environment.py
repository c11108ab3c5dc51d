"""The environment of `accelerate launch` as an `Import`: what a file says, under the names of variables.

The launcher passes on a whole plugin, most of which nobody asked for: of two variables that contradict each other, one
that has the launcher's own value says nothing.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from portable_fsdp.convert.keys_variables import ENVIRONMENT
from portable_fsdp.convert.read import Entry, Import, Said, read_entries
from portable_fsdp.convert.rows import Typed
from portable_fsdp.runtime.process import is_by_accelerate

LAUNCHER = "accelerate launch"
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")

COUNT_WITH = {
    "FSDP_": ("ACCELERATE_USE_FSDP", "--use_fsdp"),
    "PARALLELISM_CONFIG_": ("ACCELERATE_USE_PARALLELISM_CONFIG", "--use_parallelism_config"),
    "MEGATRON_LM_": ("ACCELERATE_USE_MEGATRON_LM", "--use_megatron_lm"),
    "ACCELERATE_DEEPSPEED_": ("ACCELERATE_USE_DEEPSPEED", "--use_deepspeed"),
}
"""Variables that accelerate reads beside another one alone, and the flag that sets it."""

STRATEGY, RESHARD = "FSDP_SHARDING_STRATEGY", "FSDP_RESHARD_AFTER_FORWARD"
DEFAULTS = {STRATEGY: ("full_shard", "1"), RESHARD: ("true", "false", "full_shard")}
"""What `accelerate launch` sets where nobody says it, or accelerate doesn't read (version 1), in lower case."""


def read_environment(environ: Mapping[str, str], given: Mapping[str, object], overridden: set[str]) -> Import | None:
    """What `accelerate launch` says to the processes that it starts; None where it didn't start this one.

    `given` and `overridden` as for `read_foreign`. Raises nothing: problems are in the result, an unknown variable with
    one of accelerate's prefixes among them.
    """
    if not is_by_accelerate(environ):
        return None
    result = Import(Path(LAUNCHER), ENVIRONMENT)
    variables = {name: environ[name] for name in sorted(environ) if name.startswith(PREFIXES)}
    unasked = dict(_unasked(variables))
    entries = (
        Entry(ENVIRONMENT, name, _typed(text), 0, LAUNCHER) for name, text in variables.items() if name not in unasked
    )
    result.not_needed += [Said(name, variables[name], LAUNCHER, reason) for name, reason in unasked.items()]
    result.problems += [(0, text) for text in _out_of_force(variables)]
    read_entries(entries, result, given, overridden, launched_numbers(environ))
    return result


def launched_numbers(environ: Mapping[str, str]) -> dict[str, int]:
    """Processes and machines that `accelerate launch` started; nothing where it didn't start this one."""
    if not is_by_accelerate(environ):
        return {}
    counts = {"num_processes": "WORLD_SIZE", "num_machines": "GROUP_WORLD_SIZE"}
    return {fact: int(environ[name]) for fact, name in counts.items() if environ.get(name, "").isdecimal()}


def _typed(text: str) -> Typed:
    """A list of a file arrives as Python writes it."""
    if text.startswith("[") and text.endswith("]"):
        return [item.strip(" '\"") for item in text[1:-1].split(",")]
    return text


def _unasked(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that the launcher sets by itself, where another one says otherwise; each with the reason."""
    default = {name for name, words in DEFAULTS.items() if variables.get(name, words[0]).lower() in words}
    both = ((STRATEGY, RESHARD), (RESHARD, STRATEGY)) if variables.get("FSDP_VERSION") != "2" else ()
    for one, other in both:
        if one in variables and one in default and other not in default:
            yield one, f"{LAUNCHER} sets it in any case; {other} says it"


def _out_of_force(variables: Mapping[str, str]) -> Iterator[str]:
    for prefix, (switch, flag) in COUNT_WITH.items():
        names = [name for name in variables if name.startswith(prefix)]
        if names and variables.get(switch, "false").lower() not in ("true", "1"):
            yield (
                f"{LAUNCHER}: {names[0]}: expected {switch}=true beside it, without which accelerate doesn't read it, "
                f"found {variables.get(switch, 'none')}.\n  Start with {LAUNCHER} {flag}, or unset {', '.join(names)}."
            )
