"""TorchTPU on this host's CPU, for tests: what stands in for chips, `tpu_dist` and the kernels that only a TPU has.

`install` first, before torch is imported; then the product loads torch_tpu as it does on a TPU. A program that a test
starts gets all this by `at_start/sitecustomize.py`, with both folders on its PYTHONPATH. The package has none of it.

What XLA's CPU plugin (of lammps-jax-pjrt-cpu 0.11.2) doesn't compile of torch_tpu 0.2.0's programs, and what stands in:
- the fusion emitters abort on calls between computations: switched off by XLA_FLAGS;
- `aten::cumsum`: by way of the host;
- scaled_dot_product_attention, a Mosaic kernel on TPUs: torch's products and softmax (SDPBackend.MATH).
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cpu_plugin

CHIPS = "TEST_TORCHTPU_CHIPS"
"""Variable with the number of chips that this host seems to have."""

PORT = "TEST_TORCHTPU_PORT"
"""Variable with the port where the hosts of a slice meet, in place of 29500, which another test may use."""

# TorchTPU would have the CPU plugin meet the other processes: while the client opens, it must look alone.
LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
OF_TORCH_TPU = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY", "TORCH_TPU_DEVICES_PER_HOST")

_kept: list[Any] = []


def install(*, quick: bool = True) -> None:
    """`quick`: compile with few of LLVM's passes, which take longest and gain models this small nothing."""
    assert "torch" not in sys.modules, "the rig comes before torch"
    cpu_plugin.install()
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no metadata server is asked
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    emitters = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    passes = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" if quick else ""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {emitters} {passes}".strip()
    _after_import("libtpu", lambda libtpu: setattr(libtpu, "configure_library_path", lambda: None))
    _after_import("torch_tpu._loader", _patch_loader)
    _after_import("torch_tpu._internal.distributed.distributed", _choose_port)
    _after_import("portable_fsdp.runtime.host", _show_chips)


def _chips() -> int:
    return int(os.environ.get(CHIPS, "1"))


def _show_chips(host: ModuleType) -> None:
    chips = [Path(f"/dev/vfio/{number}") for number in range(_chips())]
    setattr(host, "tpu_chips", lambda: chips)  # noqa: B010 - a module has no such attribute to a type checker


def _choose_port(distributed: ModuleType) -> None:
    prepare = distributed.set_tpu_launch_env

    def set_tpu_launch_env(**counts: Any) -> None:
        if port := os.environ.get(PORT):
            os.environ["MASTER_PORT"] = port
        prepare(**counts)

    setattr(distributed, "set_tpu_launch_env", set_tpu_launch_env)  # noqa: B010 - as above


def _patch_loader(loader: ModuleType) -> None:
    """`load` finds chips, those of a v5p, and opens the client as of a process alone."""
    loader.hardware._scan_pci_tpus = lambda: (_chips(), loader.hardware._V5P_TOPOLOGY)
    initialise = loader._init_device_impl

    def init_device(device: str) -> Any:
        answer = initialise(device)
        if "RANK" in os.environ or _chips() == 1:  # else a parent, which only starts the others
            _open_client()
        return answer

    setattr(loader, "_init_device_impl", init_device)  # noqa: B010 - as above


def _open_client() -> None:
    import host_group
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    hidden = {name: os.environ.pop(name) for name in (*LAUNCH, *OF_TORCH_TPU) if name in os.environ}
    torch.zeros(1, device="tpu").cpu()
    os.environ.update(hidden)
    backend: Any = torch.distributed.Backend
    plugin = backend._plugins["TPU_DIST"]
    backend._plugins["TPU_DIST"] = plugin._replace(creator_fn=host_group.create, extended_api=False)
    host = torch.library.Library("aten", "IMPL")

    def cumsum(values: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.cumsum(values.cpu(), dim, dtype=dtype).to(values.device)

    def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        offsets = None if offs is None else offs.cpu()
        return cast(Any, torch)._grouped_mm(a.cpu(), b.cpu(), offs=offsets, out_dtype=out_dtype).to(a.device)

    host.impl("cumsum", cumsum, "PrivateUse1")
    host.impl("_grouped_mm", grouped_mm, "PrivateUse1")
    math = sdpa_kernel(SDPBackend.MATH)
    math.__enter__()
    _kept.extend([host, math])


# --------------------------------------------------------------------------------------------------- after an import


class _Then(importlib.abc.Loader):
    """A module's own loader, and a call with the module after it."""

    def __init__(self, loader: Any, call: Callable[[ModuleType], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Then(spec.loader, self._call)
        return spec


def _after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))
