"""TorchTPU (the package torch_tpu) under native: the setup that FSDP2 needs on TPUs. Imports no torch.

It adds the device "tpu" and the process group backend `tpu_dist` to torch. Each process drives one chip. libtpu must
know the whole slice before the first tensor: from TORCH_TPU_* variables, which the parent of the processes sets.
"""

import logging
import os
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from packaging.requirements import Requirement

from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.host import installed, tpu_chips
from portable_fsdp.runtime.launchers import detect_launch, problem_of_tpu_hosts, problem_of_tpu_worker, tpu_workers
from portable_fsdp.runtime.rendezvous import Hosts

if TYPE_CHECKING:
    import torch

    from portable_fsdp.backends.contract import MemoryStats

PACKAGE = "torch_tpu"
CACHE = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
"""TorchTPU's variable for the root of its cache; without it each start compiles again (tried with torch_tpu 0.2.0)."""

WARM_UP_STEPS = 3  # operations compile when they first run, and a step is read and logged one step later

log = logging.getLogger("portable_fsdp")


def check(environ: Mapping[str, str]) -> None:
    """Check what can be checked before torch is imported. Raises BackendError."""
    check_installation()
    launch, chips = detect_launch(environ), len(tpu_chips())
    if chips and not launch.is_alone:  # alone it may be the parent of the others
        check_launch(environ, launch.world_size, chips)


def check_installation() -> None:
    """Raise BackendError if torch_tpu can't work with the other installed packages. Reads metadata only."""
    version, torch_xla = installed(PACKAGE), installed("torch_xla")
    if torch_xla is not None:
        raise BackendError(
            f"backend native on tpu: torch_tpu {version} and torch_xla {torch_xla} are both installed, but need "
            f"different versions of torch (found {installed('torch')}).\n  Use one environment for each: "
            "pip install '.[torchtpu]' in one, pip install '.[tpu]' in the other."
        )
    for requirement in map(Requirement, metadata.requires(PACKAGE) or []):
        actual = installed(requirement.name)
        if actual is None or not requirement.specifier.contains(actual, prereleases=True):
            raise BackendError(
                f"backend native on tpu: torch_tpu {version} needs {requirement}, found {actual or 'none'}.\n"
                "  In a new environment: pip install '.[torchtpu]'"
            )


# ---------------------------------------------------------------------------------------------------------- the start


def prepare_start(processes: int, environ: Mapping[str, str]) -> Hosts | None:
    """Set this process's environment for `processes` processes on each host, before they start.

    Returns the rendezvous of the slice's hosts; None for one host. Raises BackendError for several slices, for a number
    of processes that doesn't fit the chips, and if the environment contradicts itself or doesn't name this host.
    """
    hosts, chips = tpu_workers(environ), len(tpu_chips())
    if int(environ.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        raise BackendError(
            "backend native on tpu: expected one slice, found MEGASCALE_NUM_SLICES="
            f"{environ['MEGASCALE_NUM_SLICES']}.\n  Use --backend=xla, in an environment with torch_xla."
        )
    if problem := problem_of_tpu_worker(environ):
        raise BackendError(f"environment: {problem}.\n  Set the TPU_* variables as the TPU VM does, or unset them.")
    if problem := problem_of_tpu_hosts(environ):
        raise BackendError(f"environment: {problem}")
    if len(hosts) > 1:
        os.environ.setdefault("JOB_COMPLETION_INDEX", environ["TPU_WORKER_ID"])
    if processes > chips:
        raise BackendError(
            f"backend native on tpu: --num_devices={processes}: expected at most {chips}, the chips of this host: each "
            "process drives one.\n  Leave --num_devices out to use them all."
        )
    if len(hosts) < 2 and processes == chips == 1:
        return None  # libtpu finds the only chip
    load()
    import torch

    try:
        cast(Any, torch).tpu.distributed.set_tpu_launch_env(nnodes=len(hosts) or 1, nproc_per_node=processes)
    except (RuntimeError, ValueError) as error:  # RuntimeError: this generation has no slice of so few chips
        from torch_tpu._internal.utils import hardware  # pyright: ignore

        sizes = cast(Any, hardware)._scan_pci_tpus()[1] or {}
        allowed = ", ".join(str(size) for size in sorted(sizes) if size <= chips)
        raise BackendError(
            f"backend native on tpu: torch_tpu can't start {processes} process(es) on this host: {error}.\n"
            f"  Set --num_devices to a number of chips that is a slice ({allowed or 'unknown here'}), or leave it out."
        ) from error
    if len(hosts) < 2:
        return None
    return Hosts(len(hosts), int(os.environ["NODE_RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def check_launch(environ: Mapping[str, str], world_size: int, chips: int) -> None:
    """Raise BackendError unless this host has one process per chip: libtpu would abort, or hang."""
    addresses = [name for name in environ.get("TORCH_TPU_SLICEBUILDER_ADDRESSES", "").split(",") if name]
    if len(addresses) == world_size or (not addresses and world_size == chips == 1):
        return
    raise BackendError(
        "backend native on tpu: expected one process per chip, and one address per process in "
        f"TORCH_TPU_SLICEBUILDER_ADDRESSES, found {world_size} process(es), {chips} chip(s) on this host and "
        f"{len(addresses)} address(es).\n  Run `python -m portable_fsdp.launch --device=tpu --backend=native` on each "
        "host, without another launcher: it sets them and starts one process per chip. A program that starts its own "
        "processes must call torch.tpu.distributed.set_tpu_launch_env first."
    )


def load() -> None:
    """Register the device "tpu" with torch, as torch would at import (`runtime/host.py` says why it doesn't).

    Raises BackendError if torch_tpu finds no chip.
    """
    (entry,) = metadata.entry_points(group="torch.backends", name=PACKAGE)
    entry.load()()
    import torch

    if not hasattr(torch, "tpu") or "tpu" not in str(torch._C._get_privateuse1_backend_name()):  # pyright: ignore
        raise BackendError(
            f"backend native on tpu: torch_tpu {installed(PACKAGE)} finds no chip on this host: it supports TPU v4 and "
            "newer behind VFIO (/dev/vfio/*).\n  Start a TPU VM with a newer image, or use --backend=xla in an "
            "environment with torch_xla."
        )
    # torch_tpu's version is pinned, so an experimental API can't change; precision.matmul chose the precision.
    for message in ("<TorchTpu/ApiStage/", "<TorchTpu/Performance/> TPU is using HIGHEST precision as requested"):
        warnings.filterwarnings("ignore", message)


def open_chip(processes: int | None, cache: Path | None) -> "tuple[torch.device, str, TpuPrograms]":
    """Return this process's chip, its name and its programs. `processes`: of the run; None: in the caller's group.

    `cache`: the folder where compiled programs stay for later starts; TorchTPU keeps a copy in /dev/shm. Raises
    BackendError if chips and processes don't fit, or no chip is found.
    """
    if processes is not None:
        check_launch(os.environ, processes, len(tpu_chips()))
    if cache is not None:
        os.environ[CACHE] = str(cache)
    load()
    import torch

    return torch.device("tpu"), cast(Any, torch).tpu.get_device_name(), TpuPrograms()


def memory(device: "torch.device") -> "MemoryStats | None":
    """Implement `Backend.memory`."""
    import torch

    from portable_fsdp.backends.contract import MemoryStats

    accelerator = cast(Any, torch.accelerator)  # torch 2.11 and newer
    _, total = accelerator.get_memory_info(device)
    return MemoryStats(accelerator.max_memory_allocated(device), total) if total else None


# ------------------------------------------------------------------------------------------------------- the programs


class TpuPrograms:
    """Counts the programs that TorchTPU compiles, and warns of new ones in a step that should need none.

    Shapes don't change from step to step, so after the first steps each operation has its program. TorchTPU itself
    prints a new program as StableHLO, with its operation and shapes.
    """

    def __init__(self) -> None:
        from torch_tpu._internal.device import _device_module  # pyright: ignore

        self._device: Any = cast(Any, _device_module).TpuDeviceModule
        self._steps, self._baseline, self._has_warned = 0, 0, False

    @property
    def count(self) -> int:
        """Programs compiled so far in this process. TorchTPU compiles in its own threads, so the count lags."""
        return int(self._device._get_cache_stats().num_compilations)

    def note_step(self) -> None:
        """Call after each step. Waits for the device once, at the end of warm-up."""
        self._steps += 1
        if self._steps == WARM_UP_STEPS:
            import torch

            cast(Any, torch.accelerator).synchronize()  # else programs of the warm-up would still be counted after it
            self._baseline = self.count
            self._device._set_dump_on_cache_miss(True)
        elif self._steps > WARM_UP_STEPS and not self._has_warned and (new := self.count - self._baseline):
            self._has_warned = True
            log.warning(
                "TorchTPU compiled %d new program(s) in or after a step although the step's shapes didn't change. Each "
                "takes seconds. The StableHLO above shows them: an operation with new shapes or numbers in a callback, "
                "a loss or a layer.",
                new,
            )

    def close(self) -> None:
        """Log the number of programs, at the end of a run."""
        log.info("TorchTPU compiled %d programs in this process", self.count)
        self.expect_others()

    def expect_others(self) -> None:
        """Expect programs of an evaluation or of samples, which belong to no step. The next step ends a new warm-up."""
        self._steps = min(self._steps, WARM_UP_STEPS - 1)
        self._device._set_dump_on_cache_miss(False)
