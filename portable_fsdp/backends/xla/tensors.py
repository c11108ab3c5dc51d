"""Where tensors and programs of an XLA step are: on devices, or nowhere, for a plan of devices that aren't here.

`XlaBackend` works on either; `plan/tpu_trace.py` has the other one.
"""

# Shards are reached through torch_xla's private bridge only.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from portable_fsdp.backends.base import Metrics, Region, full_region, shard_region
from portable_fsdp.backends.pjrt import Programs
from portable_fsdp.backends.xla.layouts import Spec

Fetch = Callable[[Region], Tensor]
"""A piece of a global tensor, on the host."""


class Tensors(Protocol):
    """Makes global tensors and the programs that run on them."""

    flash_attention: bool
    """Whether attention is the TPU's kernel; else torch's own formula."""

    @property
    def compilations(self) -> int: ...

    def make(self, shape: Sequence[int], dtype: torch.dtype, spec: Spec, fetch: Fetch | None) -> Tensor:
        """A global tensor with the partition `spec`, whose pieces `fetch` gives; None where they don't matter."""
        ...

    def place(self, tensor: Tensor, spec: Spec) -> Tensor:
        """A tensor of this host's rows, as part of a global one."""
        ...

    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]: ...

    def wait(self) -> None:
        """For all programs that were started."""
        ...


class DeviceTensors:
    """On the devices of this process, as parts of a mesh over all processes."""

    def __init__(self, mesh: Any, shards: int, processes: int, *, flash_attention: bool) -> None:
        import torch_xla
        import torch_xla.distributed.spmd as spmd

        self.flash_attention = flash_attention
        self._xla: Any = torch_xla
        self._bridge: Any = cast(Any, torch_xla)._XLAC
        self._spmd: Any = spmd
        self._mesh, self._shards, self._processes = mesh, shards, processes
        # Global numbers, in the order in which shards are given: a host's own need not follow one another.
        self._local_devices = [int(name.split(":")[1]) for name in self._bridge._xla_get_runtime_devices()]
        self._programs = Programs("xla")

    @property
    def compilations(self) -> int:
        return self._programs.compilations

    def make(self, shape: Sequence[int], dtype: torch.dtype, spec: Spec, fetch: Fetch | None) -> Tensor:
        """Each device gets its rows (all rows if not sharded), and no more. Compiles nothing.

        `_global_tensor_from_cpu_shards` is private; no public function avoids a full copy.
        """
        assert fetch is not None
        pieces: list[Tensor] = []
        for device in self._local_devices:
            if spec[:1] == ("shard",):
                data = fetch(shard_region(shape, device % self._shards, self._shards))
                missing = -(-shape[0] // self._shards) - data.shape[0]
                data = nn.functional.pad(data, (0, 0) * (len(shape) - 1) + (0, missing))
            else:
                data = fetch(full_region(shape))
            pieces.append(data.contiguous())
        return self._bridge._global_tensor_from_cpu_shards(pieces, self._mesh.get_op_sharding(spec), list(shape))

    def place(self, tensor: Tensor, spec: Spec) -> Tensor:
        sharding = self._spmd.ShardingSpec(self._mesh, spec, minibatch=self._processes > 1)
        (placed,) = self._bridge._xla_tensors_from_aten([tensor], ["xla:0"], [sharding.xla_spec(tensor)])
        return placed

    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        return self._programs.compile(fn, name)

    def wait(self) -> None:
        self._xla.sync(wait=True)
