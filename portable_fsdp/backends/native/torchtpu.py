"""TorchTPU (the package torch_tpu) under native: what a TPU needs around FSDP2. Imports no torch.

It gives torch the device "tpu" and the process group backend `tpu_dist`. Each process drives one chip, and libtpu has
to know the whole slice before the first tensor: from TORCH_TPU_* variables, set by the process that starts the others.
"""

import logging
import os
import warnings
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

from packaging.requirements import Requirement

from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.host import installed, tpu_chips
from portable_fsdp.runtime.launchers import detect_launch, problem_of_tpu_worker, tpu_workers
from portable_fsdp.runtime.rendezvous import Hosts

if TYPE_CHECKING:
    import torch

    from portable_fsdp.backends.contract import MemoryStats

PACKAGE = "torch_tpu"
WARM_UP_STEPS = 3  # operations compile when they first run, and a step is read and logged one step later

log = logging.getLogger("portable_fsdp")


def check(environ: Mapping[str, str]) -> None:
    """What can be refused before torch is imported. Raises BackendError."""
    check_installation()
    launch, chips = detect_launch(environ), len(tpu_chips())
    if chips and not launch.is_alone:  # alone it may be the parent of the others
        check_launch(environ, launch.world_size, chips)


def check_installation() -> None:
    """Raises BackendError where torch_tpu can't work with what is installed beside it. Reads metadata only."""
    version, torch_xla = installed(PACKAGE), installed("torch_xla")
    if torch_xla is not None:
        raise BackendError(
            f"backend native on tpu: torch_tpu {version} and torch_xla {torch_xla} are both installed, and each needs "
            f"another torch (found {installed('torch')}).\n  Give each an environment of its own: "
            "pip install '.[torchtpu]' in one, pip install '.[tpu]' in the other."
        )
    for requirement in map(Requirement, metadata.requires(PACKAGE) or []):
        found = installed(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            raise BackendError(
                f"backend native on tpu: torch_tpu {version} needs {requirement}, found {found or 'none'}.\n"
                "  In a new environment: pip install '.[torchtpu]'"
            )


# ---------------------------------------------------------------------------------------------------------- the start


def prepare_start(processes: int, environ: Mapping[str, str]) -> Hosts | None:
    """Set this process's environment for `processes` processes on each host, before they start.

    Returns where the hosts of a slice meet; None for one host. Raises BackendError for several slices, for a number of
    processes that the chips don't take, and where the environment contradicts itself or doesn't say which host this is.
    """
    hosts, chips = tpu_workers(environ), len(tpu_chips())
    if int(environ.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        raise BackendError(
            "backend native on tpu: expected one slice, found MEGASCALE_NUM_SLICES="
            f"{environ['MEGASCALE_NUM_SLICES']}.\n  Use --backend=xla, in an environment with torch_xla."
        )
    if problem := problem_of_tpu_worker(environ):
        raise BackendError(f"environment: {problem}.\n  Set the TPU_* variables as the TPU VM does, or unset them.")
    if len(hosts) > 1:
        if not environ.get("TPU_WORKER_ID"):
            raise BackendError(
                f"environment: TPU_WORKER_HOSTNAMES names {len(hosts)} hosts, and no TPU_WORKER_ID says which one this "
                "is.\n  Set it to the host's place in that list, from 0 (launch/tpu_vm.sh does)."
            )
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
    """Raises BackendError where this host's chips and processes are not one to one: libtpu would abort, or wait."""
    addresses = [name for name in environ.get("TORCH_TPU_SLICEBUILDER_ADDRESSES", "").split(",") if name]
    if len(addresses) == world_size or (not addresses and world_size == chips == 1):
        return
    raise BackendError(
        "backend native on tpu: expected a process for each chip, and in TORCH_TPU_SLICEBUILDER_ADDRESSES an address "
        f"for each process, found {world_size} process(es), {chips} chip(s) on this host and {len(addresses)} "
        "address(es).\n  Run `python -m portable_fsdp.launch --device=tpu --backend=native` on each host, without "
        "another launcher: it sets them and starts a process for each chip. A program of your own that starts its "
        "processes calls torch.tpu.distributed.set_tpu_launch_env first."
    )


def load() -> None:
    """Give torch its device "tpu", as torch itself would at import (`runtime/host.py` says why it doesn't).

    Raises BackendError where torch_tpu finds no chip.
    """
    (entry,) = metadata.entry_points(group="torch.backends", name=PACKAGE)
    entry.load()()
    import torch

    if not hasattr(torch, "tpu") or "tpu" not in str(torch._C._get_privateuse1_backend_name()):  # pyright: ignore
        raise BackendError(
            f"backend native on tpu: torch_tpu {installed(PACKAGE)} finds no chip on this host: it looks for TPUs of "
            "v4 and newer behind VFIO (/dev/vfio/*).\n  Start a TPU VM with a newer image, or use --backend=xla in an "
            "environment with torch_xla."
        )
    # torch_tpu's version is pinned, so an experimental API can't change; precision.matmul chose the precision.
    for message in ("<TorchTpu/ApiStage/", "<TorchTpu/Performance/> TPU is using HIGHEST precision as requested"):
        warnings.filterwarnings("ignore", message)


def open_chip(processes: int | None) -> "tuple[torch.device, str, TpuPrograms]":
    """This process's chip, its name and its programs. `processes`: of the run; None in a process group of the caller's.

    Raises BackendError where chips and processes don't fit, or no chip is found.
    """
    if processes is not None:
        check_launch(os.environ, processes, len(tpu_chips()))
    load()
    import torch

    return torch.device("tpu"), cast(Any, torch).tpu.get_device_name(), TpuPrograms()


def memory(device: "torch.device") -> "MemoryStats | None":
    """As `Backend.memory`."""
    import torch

    from portable_fsdp.backends.contract import MemoryStats

    accelerator = cast(Any, torch.accelerator)  # of torch 2.11 and newer
    _, total = accelerator.get_memory_info(device)
    peak, now = accelerator.max_memory_allocated(device), accelerator.memory_allocated(device)
    return MemoryStats(peak, now, total) if total else None


# ------------------------------------------------------------------------------------------------------- the programs


class TpuPrograms:
    """Counts the programs that TorchTPU compiles, and warns of new ones in a step that should have none.

    Shapes of a step never change, so after the first steps each operation has its program. TorchTPU itself prints a new
    one as StableHLO, with its operation and shapes.
    """

    def __init__(self) -> None:
        from torch_tpu._internal.device import _device_module  # pyright: ignore

        self._device: Any = cast(Any, _device_module).TpuDeviceModule
        self._steps, self._baseline, self._has_warned = 0, 0, False

    @property
    def count(self) -> int:
        """Compiled so far in this process. TorchTPU compiles in threads of its own, so the count lags behind."""
        return int(self._device._get_cache_stats().num_compilations)

    def note_step(self) -> None:
        """After each step. Waits for the device once, at the end of warm-up."""
        self._steps += 1
        if self._steps == WARM_UP_STEPS:
            import torch

            cast(Any, torch.accelerator).synchronize()  # else programs of the warm-up would still be counted after it
            self._baseline = self.count
            self._device._set_dump_on_cache_miss(True)
        elif self._steps > WARM_UP_STEPS and not self._has_warned and (new := self.count - self._baseline):
            self._has_warned = True
            log.warning(
                "TorchTPU compiled %d new program(s) in or after a step whose shapes are those of the steps before; "
                "the StableHLO above names them: an operation with new shapes or numbers in a callback, a loss or a "
                "layer. Each takes seconds.",
                new,
            )

    def close(self) -> None:
        """At the end of a run."""
        log.info("TorchTPU compiled %d programs in this process", self.count)
        self.expect_others()

    def expect_others(self) -> None:
        """An evaluation or samples follow: what they compile belongs to no step. The next step ends a new warm-up."""
        self._steps = min(self._steps, WARM_UP_STEPS - 1)
        self._device._set_dump_on_cache_miss(False)
