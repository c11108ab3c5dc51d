"""`tpu_dist` in tests: a process group whose tensors on "tpu" go through the host and gloo.

XLA's CPU plugin has no collectives between processes. What chips' own links do, no test here can show.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

c10d: Any = dist  # its classes are typed in part


class Done(c10d.Work):
    """A collective that is over."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._future: Any = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[Tensor]:
        return self._tensors


class HostGroup(c10d.ProcessGroup):
    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        self._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)  # which keeps its name

    def getBackendName(self) -> str:
        return "host_group"

    def _run(self, outputs: Sequence[tuple[Tensor, Tensor]], call: Callable[[], Any]) -> Done:
        """`outputs`: (tensor on the device, its copy on the host)."""
        call().wait()
        for tensor, copy in outputs:
            tensor.copy_(copy)
        return Done([tensor for tensor, _ in outputs])

    def _sum(self, copies: list[Tensor], options: Any) -> Any:
        """Into the copies; gloo has no average."""
        sum_options = c10d.AllreduceOptions()
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        sum_options.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        work = self._gloo.allreduce(copies, sum_options)
        if op == dist.ReduceOp.AVG:
            work.wait()
            for copy in copies:
                copy.div_(self.size())
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Done:
        copies = [tensor.cpu() for tensor in tensors]
        return self._run(list(zip(tensors, copies, strict=True)), lambda: self._sum(copies, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Done:
        copies = [tensor.cpu() for tensor in tensors]
        return self._run(list(zip(tensors, copies, strict=True)), lambda: self._gloo.broadcast(copies, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Done:
        copies = [[tensor.cpu() for tensor in output] for output in outputs]
        pairs = [pair for output, copy in zip(outputs, copies, strict=True) for pair in zip(output, copy, strict=True)]
        return self._run(pairs, lambda: self._gloo.allgather(copies, [tensor.cpu() for tensor in inputs]))

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Done:
        copy = torch.empty(output.shape, dtype=output.dtype)
        return self._run([(output, copy)], lambda: self._gloo._allgather_base(copy, given.cpu().contiguous()))

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Done:
        whole = given.cpu().contiguous().clone()
        work = self._sum([whole], opts)
        work.wait()
        part = whole.chunk(self.size())[self.rank()].view(output.shape)
        return self._run([(output, part)], lambda: work)

    def all_to_all_single(self, output: Tensor, given: Tensor, *sizes: Any) -> Done:
        copy = torch.empty(output.shape, dtype=output.dtype)
        return self._run([(output, copy)], lambda: self._gloo.alltoall_base(copy, given.cpu().contiguous(), *sizes[:2]))

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


def create(store: Any, rank: int, size: int, timeout: timedelta) -> HostGroup:
    """Make the group, for `torch.distributed.Backend.register_backend`."""
    return HostGroup(cast(Any, dist).ProcessGroupGloo(store, rank, size, timeout), rank, size)
