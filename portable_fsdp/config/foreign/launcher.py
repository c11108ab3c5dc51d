"""What a foreign file says of processes and hosts, against those there are: checked, never obeyed."""

from collections.abc import Iterable, Mapping

from portable_fsdp.config.foreign.read import Import
from portable_fsdp.runtime.errors import ConfigError


def check_launcher_facts(imports: Iterable[Import], *, processes: int | None, environ: Mapping[str, str]) -> None:
    """Raise ConfigError where a file's num_processes, num_machines or machine_rank isn't what the launcher started.

    `processes` counts those of all hosts, one for each device; None where only the engine knows. The hosts are
    torchrun's (GROUP_WORLD_SIZE, GROUP_RANK); where it didn't start this process, they aren't compared.
    """
    there_are: dict[str, int | None] = {
        "num_processes": processes,
        "num_machines": _integer(environ, "GROUP_WORLD_SIZE"),
        "machine_rank": _integer(environ, "GROUP_RANK"),
    }
    found: list[str] = []
    for imported in imports:
        for said in imported.launcher:
            number, there = imported.number(said.fact), there_are.get(said.fact)
            if number is not None and there is not None and number != there:
                found.append(f"{said.where}: {said.key}: expected {there}, as the launcher has it, found {said.typed}.")
    if found:
        way = "Mend the file, or start as it says (--num_devices, torchrun's --nproc-per-node, --nnodes, --node-rank)."
        raise ConfigError("\n".join(found) + f"\n  {way} Nothing was started.")


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None
