"""The processes along an axis of the mesh, their collectives, and autograd functions of these."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


class Group:
    """The processes along an axis, and their collectives; `dim` is the dimension that they take parts of."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.index, self.count, self._group = group.rank(), group.size(), group

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum in place; returns the argument, contiguous."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Take the largest in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate."""
        tensor = tensor.movedim(dim, 0).contiguous()
        whole = tensor.new_empty((self.count * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_into_tensor(whole, tensor, group=self._group)
        return whole.movedim(0, dim).contiguous()

    def scatter_sum(self, tensor: Tensor, dim: int) -> Tensor:
        """Sum, and return the own part."""
        tensor = tensor.movedim(dim, 0).contiguous()
        part = tensor.new_empty((tensor.shape[0] // self.count, *tensor.shape[1:]))
        dist.reduce_scatter_tensor(part, tensor, group=self._group)
        return part.movedim(0, dim).contiguous()

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the own part of what each process has."""
        return tensor.chunk(self.count, dim)[self.index].contiguous()

    def exchange(self, tensor: Tensor, _: int) -> Tensor:
        """Exchange equal parts of dimension 0."""
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, tensor.contiguous(), group=self._group)
        return received

    def copied(self, tensor: Tensor, _: int) -> Tensor:
        return tensor.view_as(tensor)

    def summed(self, tensor: Tensor, _: int) -> Tensor:
        return self.sum(tensor.clone(memory_format=torch.contiguous_format))


class _Crossing(torch.autograd.Function):
    """One collective in forward, another in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int, there: Any, back: Any) -> Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim, back
        return there(group, tensor, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(ctx.group, gradients[0], ctx.dim), None, None, None, None


def _crossing(tensor: Tensor, group: Group, dim: int, there: Any, back: Any) -> Tensor:
    return cast(Tensor, _Crossing.apply(tensor, group, dim, there, back))


def enter(tensor: Tensor, group: Group, dim: int | None) -> Tensor:
    """Megatron's f: the input of split weights; `dim`: the dimension of which each process holds a part, if any."""
    kind = type(group)
    there, back = (kind.copied, kind.summed) if dim is None else (kind.gather, kind.scatter_sum)
    return _crossing(tensor, group, dim or 0, there, back)


def leave(tensor: Tensor, group: Group, dim: int | None) -> Tensor:
    """Megatron's g: the sum of what split weights gave; `dim`: keep a part of that dimension only."""
    kind = type(group)
    there, back = (kind.summed, kind.copied) if dim is None else (kind.scatter_sum, kind.gather)
    return _crossing(tensor, group, dim or 0, there, back)


def gather(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Make parts whole, for what each process computes alike."""
    return _crossing(tensor, group, dim, type(group).gather, type(group).part)


def split(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Take the own part of what each process has."""
    return _crossing(tensor, group, dim, type(group).part, type(group).gather)


def exchange(group: Group, tensor: Tensor) -> Tensor:
    """Exchange equal parts of dimension 0, and their gradients."""
    return _crossing(tensor, group, 0, type(group).exchange, type(group).exchange)
