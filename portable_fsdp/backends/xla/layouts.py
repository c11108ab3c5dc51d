"""How tensors of a step lie over the XLA mesh: by rows of the batch, as shards of a weight, or whole on each device."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

ROWS = ("replicate", "shard")  # mesh axes over which the rows of a batch go

Spec = tuple[Any, ...]
"""Of each dimension: the mesh axis, or axes, over which it is split, or None."""


def by_rows(tensor: Tensor) -> Spec:
    """The partition of a tensor whose dimension 0 is rows of the batch; a scalar is everywhere."""
    return (ROWS, *(None for _ in tensor.shape[1:])) if tensor.dim() else ()


class Layouts:
    """Gives tensors a layout, in place: an annotation, from which XLA's partitioner derives all the others."""

    def __init__(self, mesh: Any) -> None:
        import torch_xla.distributed.spmd as spmd

        self.mesh = mesh
        self._spmd: Any = spmd

    def split_rows(self, tensor: Tensor) -> None:
        self._spmd.mark_sharding(tensor, self.mesh, by_rows(tensor))

    def split_rows_in_loop(self, tensor: Tensor) -> Tensor:
        """As an operation that gives a new tensor: what is traced for a loop can't be annotated in place."""
        return self._spmd.xla_sharding.mark_sharding_with_gradients(tensor, self.mesh, by_rows(tensor))

    def shard(self, tensor: Tensor, dim: int = 0) -> None:
        spec = tuple("shard" if at == dim else None for at in range(tensor.dim()))
        self._spmd.mark_sharding(tensor, self.mesh, spec)

    def replicate(self, tensor: Tensor) -> None:
        self._spmd.mark_sharding(tensor, self.mesh, (None,) * tensor.dim())

    def gathered(self, weight: Tensor) -> Tensor:
        """The whole weight on each device; its gradient is sharded."""
        return cast(Tensor, _LaidOut.apply(weight, self.shard, self.replicate))

    def stacked(self, weights: list[Tensor], gather: bool) -> Tensor:
        """`[len(weights), ...]`, each of them sharded (or whole) as it was; gradients are sharded."""
        layout = partial(self.shard, dim=1)
        return cast(Tensor, _LaidOut.apply(torch.stack(weights), layout, self.replicate if gather else None))


def laid_out(tensor: Tensor, mark: Callable[[Tensor], None]) -> Tensor:
    """The same values in the layout that `mark` gives: in place, and so to a tensor of its own."""
    tensor = tensor * 1
    mark(tensor)
    return tensor


class _LaidOut(torch.autograd.Function):
    """A tensor laid out as shards, then perhaps whole; its gradient as shards. Two, so that a gather follows a cast."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shard: Callable[[Tensor], None], replicate: Any) -> Tensor:
        ctx.shard = shard
        sharded = laid_out(tensor, shard)
        return sharded if replicate is None else laid_out(sharded, replicate)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return laid_out(cast(Tensor, outputs[0]), ctx.shard), None, None
