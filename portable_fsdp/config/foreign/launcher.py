"""What a foreign file or environment says of processes, hosts and the device: checked, never obeyed."""

from collections.abc import Iterable, Mapping

from portable_fsdp.config.foreign.read import Import, Said
from portable_fsdp.config.foreign.rows import NO
from portable_fsdp.runtime.errors import ConfigError


def check_launcher_facts(
    imports: Iterable[Import],
    *,
    processes: int | None,
    environ: Mapping[str, str],
    device: str = "",
    counted_by: str = "the launcher",
) -> None:
    """Raise ConfigError where num_processes, num_machines, machine_rank or use_cpu isn't what there is.

    `processes` counts those of all hosts, one for each device (under xla, the devices themselves); None where only the
    engine knows. The hosts are torchrun's (GROUP_WORLD_SIZE, GROUP_RANK); where it didn't start this process, they
    aren't compared. `device` is what `--device` came to.
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
                found.append(f"{said.where}: {said.key}: expected {there}, as {counted_by} has it, found {said.typed}.")
            wanted = _device(said)
            if device and wanted not in ("", device):
                found.append(
                    f"{said.where}: {said.key}: expected device {device}, as --device has it, found {said.typed}."
                )
    if found:
        way = "Mend the file, or start as it says (--num_devices, torchrun's --nproc-per-node, --nnodes, --node-rank"
        way += ", --device)." if device else ")."
        raise ConfigError("\n".join(found) + f"\n  {way} Nothing was started.")


def _device(said: Said) -> str:
    """The device that a key asks for: `use_cpu: true`, ACCELERATE_TORCH_DEVICE=cuda:0. Else an empty text."""
    if said.fact == "use_cpu":
        return "cpu"
    return said.typed.partition(":")[0] if said.fact == "device" and said.typed.lower() not in NO else ""


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None
