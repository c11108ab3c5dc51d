"""What a foreign file or environment says of processes, hosts and the device: checked, never obeyed."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from portable_fsdp.convert.read import Import, Said
from portable_fsdp.convert.rows import NO
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.process import tpu_workers
from portable_fsdp.runtime.tasks import read_tasks


def check_launcher_facts(
    imports: Iterable[Import],
    *,
    processes: int | None,
    environ: Mapping[str, str],
    device: str = "",
    counted_by: str = "the launcher",
    by_hand: bool = False,
) -> None:
    """Raise ConfigError where num_processes, num_machines, machine_rank or use_cpu isn't what there is.

    `processes` counts those of all hosts, one for each device (under xla, the devices themselves); None where only the
    engine knows. The hosts are those of whoever started this process, as far as it tells them. `device` is what
    `--device` came to; `by_hand` says that nobody else starts processes on other hosts.
    """
    hosts = _hosts(environ, by_hand)
    found: list[str] = []
    for imported in imports:
        # `accelerate config` never asks for the hosts of a TPU: it writes 1, and machine 0, on each of them.
        unasked = hosts.of_tpu and imported.number("num_machines") == 1
        there_are = {
            "num_processes": processes,
            "num_machines": None if unasked else hosts.there_are,
            "machine_rank": None if unasked else hosts.this_is,
        }
        for said in imported.launcher:
            number, there = imported.number(said.fact), there_are.get(said.fact)
            if number is not None and there is not None and number != there:
                found.append(f"{said.where}: {said.key}: expected {there}, as {counted_by} has it, found {said.typed}.")
            wanted = _device(said)
            if device and wanted not in ("", device):
                found.append(
                    f"{said.where}: {said.key}: expected device {device}, as --device has it, found {said.typed}."
                )
        if imported.total is not None and processes is not None and imported.total[1] != processes:
            by = imported.total[0]
            expected = f"expected {processes} devices, as {counted_by} has it"
            found.append(f"{by.where}: {by.key}: {expected}, found {by.typed}.")
    if found:
        way = "Mend the file, or start as it says (--num_devices, torchrun's --nproc-per-node, --nnodes, --node-rank"
        way += ", --device)." if device else ")."
        raise ConfigError("\n".join(found) + f"\n  {way} Nothing was started.")


class _Hosts(NamedTuple):
    """None where the environment doesn't say it."""

    there_are: int | None
    this_is: int | None  # counted from 0
    of_tpu: bool = False


def _hosts(environ: Mapping[str, str], by_hand: bool) -> _Hosts:
    """Those of torchrun, srun, mpirun, a TPU slice or torchrun's variables; by hand there is one.

    mpirun's, and those of the variables, are counted by the processes of this one.
    """
    if environ.get("GROUP_WORLD_SIZE"):
        return _Hosts(_integer(environ, "GROUP_WORLD_SIZE"), _integer(environ, "GROUP_RANK"))
    tasks = read_tasks(environ)
    if tasks is not None and tasks.count > 1:
        if tasks.launcher == "srun":
            count = "SLURM_STEP_NUM_NODES" if environ.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES"
            return _Hosts(_integer(environ, count), _integer(environ, "SLURM_NODEID"))
        return _counted(tasks.count, tasks.local_count)
    workers, slices = len(tpu_workers(environ)), _integer(environ, "MEGASCALE_NUM_SLICES") or 1
    if not workers:
        everywhere, here = _integer(environ, "WORLD_SIZE"), _integer(environ, "LOCAL_WORLD_SIZE")
        if everywhere and here:
            return _counted(everywhere, here)
        return _Hosts(1, 0) if by_hand else _Hosts(None, None)
    worker, slice_ = _integer(environ, "TPU_WORKER_ID"), _integer(environ, "MEGASCALE_SLICE_ID") or 0
    return _Hosts(workers * slices, None if worker is None else slice_ * workers + worker, of_tpu=True)


def _counted(everywhere: int, here: int) -> _Hosts:
    """The hosts by numbers of processes; which one this is they tell where it is the only one."""
    count, rest = divmod(everywhere, max(1, here))
    return _Hosts(None if rest else count, 0 if count == 1 else None)


def _device(said: Said) -> str:
    """The device that a key asks for: `use_cpu: true`, ACCELERATE_TORCH_DEVICE=cuda:0. Else an empty text."""
    if said.fact == "use_cpu":
        return "cpu"
    return said.typed.partition(":")[0] if said.fact == "device" and said.typed.lower() not in NO else ""


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None
