"""What a foreign file or environment says of processes, hosts and the device: checked, never obeyed."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from portable_fsdp.convert.facts import Import, KeyEntry
from portable_fsdp.convert.values import NO
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
    """Raise ConfigError where num_processes, num_machines, machine_rank or use_cpu differs from the actual start.

    `processes` counts those of all hosts, one for each device (under xla, the devices themselves); None where only the
    engine knows. The hosts are those of whoever started this process, as far as the environment has them. `device` is
    the one that `--device` selects; `by_hand`: nobody else starts processes on other hosts.
    """
    start = _hosts(environ, by_hand)
    problems: list[str] = []
    for imported in imports:
        # `accelerate config` never asks for the hosts of a TPU: it writes 1, and machine 0, on each of them.
        unasked = start.of_tpu and imported.number("num_machines") == 1
        actual = {
            "num_processes": processes,
            "num_machines": None if unasked else start.hosts,
            "machine_rank": None if unasked else start.host,
        }
        for note in imported.launcher:
            number, expected = imported.number(note.fact), actual.get(note.fact)
            if number is not None and expected is not None and number != expected:
                problems.append(f"{note.where}: {note.key}: expected {expected} ({counted_by}), found {note.text}.")
            if device and _device(note) not in ("", device):
                problems.append(f"{note.where}: {note.key}: expected device {device} (--device), found {note.text}.")
        if imported.total is not None and processes is not None and imported.total[1] != processes:
            by = imported.total[0]
            problems.append(f"{by.where}: {by.key}: expected {processes} devices ({counted_by}), found {by.text}.")
    if problems:
        flags = "--num_devices, torchrun's --nproc-per-node, --nnodes, --node-rank" + ", --device" * bool(device)
        raise ConfigError("\n".join(problems) + f"\n  Change the file, or start as it says ({flags}).")


class _HostCount(NamedTuple):
    """None where the environment doesn't say it."""

    hosts: int | None
    host: int | None  # from 0
    of_tpu: bool = False


def _hosts(environ: Mapping[str, str], by_hand: bool) -> _HostCount:
    """Those of torchrun, srun, mpirun, a TPU slice or torchrun's variables; by hand there is one.

    mpirun's, and those of the variables, are counted by the processes of this one.
    """
    if environ.get("GROUP_WORLD_SIZE"):
        return _HostCount(_integer(environ, "GROUP_WORLD_SIZE"), _integer(environ, "GROUP_RANK"))
    tasks = read_tasks(environ)
    if tasks is not None and tasks.count > 1:
        if tasks.launcher == "srun":
            count = "SLURM_STEP_NUM_NODES" if environ.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES"
            return _HostCount(_integer(environ, count), _integer(environ, "SLURM_NODEID"))
        return _counted(tasks.count, tasks.local_count)
    workers, slices = len(tpu_workers(environ)), _integer(environ, "MEGASCALE_NUM_SLICES") or 1
    if not workers:
        everywhere, here = _integer(environ, "WORLD_SIZE"), _integer(environ, "LOCAL_WORLD_SIZE")
        if everywhere and here:
            return _counted(everywhere, here)
        return _HostCount(1, 0) if by_hand else _HostCount(None, None)
    worker, slice_ = _integer(environ, "TPU_WORKER_ID"), _integer(environ, "MEGASCALE_SLICE_ID") or 0
    return _HostCount(workers * slices, None if worker is None else slice_ * workers + worker, of_tpu=True)


def _counted(everywhere: int, here: int) -> _HostCount:
    """The hosts by numbers of processes; which one this is they tell where it is the only one."""
    count, rest = divmod(everywhere, max(1, here))
    return _HostCount(None if rest else count, 0 if count == 1 else None)


def _device(note: KeyEntry) -> str:
    """The device that a key selects: `use_cpu: true`, ACCELERATE_TORCH_DEVICE=cuda:0. Else an empty text."""
    if note.fact == "use_cpu":
        return "cpu"
    return note.text.partition(":")[0] if note.fact == "device" and note.text.lower() not in NO else ""


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None
