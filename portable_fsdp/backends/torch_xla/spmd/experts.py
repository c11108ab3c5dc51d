"""Experts on XLA: products by group with the kernel of TPUs, and exchanges over the mesh axis `expert`.

`models/experts.py` has the algorithm. A change of a buffer's sharding becomes its all-to-all. On PJRT CPU, which can't
run the kernel, a dense formula computes the products.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.backends.torch_xla.spmd.splash import run_kernel
from portable_fsdp.backends.torch_xla.spmd.tensors import Layouts, as_operation
from portable_fsdp.layout import LOSS_AXES

_ROWS = (512, 256, 128)
"""Rows of a tile, which the kernel computes whole: a group that ends inside one costs another tile."""
_COLUMNS = 1024
_OUTER, _EXPERT, _CONTEXT = ("replicate", "shard"), ("expert",), ("context",)


@dataclass(frozen=True)
class GroupedProduct:
    """Products of rows, sorted by group, with the matrix of their group: jax's megablox kernel.

    Args:
        transposed: matrices are `[inputs, outputs]`, as for transposed experts.
        active: rows that groups have in the mean, for the expected work.
        interpret: run on CPUs, by plain operations in the kernel's order.
    """

    transposed: bool
    active: int
    interpret: bool = False

    def tile(self, rows: int, groups: int) -> int:
        """Rows per tile: the largest that computes at most 10 % more than the active rows."""
        sizes = [size for size in _ROWS if rows % size == 0]
        return next((size for size in sizes if groups * size <= self.active / 10), sizes[-1])

    def flops(self, function: Callable[..., Any], kinds: Sequence[Any]) -> int:
        (rows, inputs), other, groups = kinds[0][0], kinds[1][0], kinds[2][0][0]
        outputs = other[-1] if len(other) == 2 else math.prod(other[1:]) // inputs
        return 2 * (self.active + groups * self.tile(rows, groups)) * inputs * outputs


def product(kernel: GroupedProduct, rows: Any, weight: Any, sizes: Any) -> Any:
    """`[rows, a]`, `[groups, b, a]` (or `[groups, a, b]`), `[groups]` -> `[rows, b]` on jax arrays. Rows after the last
    group are arbitrary."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiling = (kernel.tile(len(rows), len(sizes)), _COLUMNS, _COLUMNS)
    options: dict[str, Any] = {"transpose_rhs": not kernel.transposed, "interpret": kernel.interpret}
    return gmm(rows, weight, sizes, preferred_element_type=rows.dtype, tiling=tiling, **options)


def product_of_groups(kernel: GroupedProduct, left: Any, right: Any, sizes: Any) -> Any:
    """`[rows, a]`, `[rows, b]`, `[groups]` -> `[groups, a, b]` on jax arrays: the gradient of weights."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiling = (kernel.tile(len(left), len(sizes)), _COLUMNS, _COLUMNS)
    return tgmm(left.T, right, sizes, preferred_element_type=left.dtype, tiling=tiling, interpret=kernel.interpret)


class MeshExperts:
    """`models.experts.Groups` of all devices of a mesh."""

    def __init__(self, layouts: Layouts, capacity: float | None, *, has_kernel: bool, interpret: bool = False) -> None:
        self._layouts, self._has_kernel, self._interpret, axes = layouts, has_kernel, interpret, layouts.axes
        self.capacity, self.divisions = capacity, axes.get("expert", 1)
        self.multiple = _ROWS[-1] if has_kernel else 1
        # Devices along replicate and shard, expert, context: they hold different tokens, in this order.
        self._grid = (axes["replicate"] * axes["shard"], self.divisions, axes.get("context", 1))
        self.devices = math.prod(self._grid)

    def on_each(self, function: Callable[..., list[Tensor]], *tensors: Tensor) -> list[Tensor]:
        def run(*tensors: Tensor) -> list[Tensor]:
            return [*map(self.from_devices, function(*map(self.rows_on_devices, tensors)))]

        def like(*tensors: Tensor) -> list[Tensor]:
            results = function(*(tensor[0] for tensor in tensors))
            return [out.new_empty((self.devices, *out.shape)) for out in results]

        return as_operation("experts", run, like, *tensors)

    def linear(self, experts: Any, sizes: Tensor, active: int, rows: Tensor, name: str) -> Tensor:
        adapter = getattr(getattr(experts, "lora_of", None), name, None)
        weight: Tensor = getattr(experts, name) if adapter is None else adapter(getattr(experts, name))
        if self._has_kernel and rows.shape[1] % _ROWS[-1] == 0:
            kernel = GroupedProduct(experts.is_transposed, active, self._interpret)
            out = cast(Tensor, _Product.apply(rows, weight, sizes, kernel, self))
        else:
            by_expert = _one_hot(sizes, rows)[..., None] * rows[:, :, None]
            out = self._per_division("gxcneh,xeho->gxcno", by_expert, weight, experts.is_transposed)
        if not experts.has_bias:
            return out
        bias, is_own = cast(Tensor, getattr(experts, f"{name}_bias")), _one_hot(sizes, rows)
        out = out + self._per_division("gxcne,xeo->gxcno", is_own.to(bias.dtype), bias, True)
        return torch.where(is_own.any(dim=-1, keepdim=True), out, torch.zeros_like(out))  # as `grouped_linear`

    def _per_division(self, equation: str, rows: Tensor, weight: Tensor, is_transposed: bool) -> Tensor:
        weight = weight if is_transposed else weight.transpose(1, 2)
        out = torch.einsum(equation, rows.unflatten(0, self._grid), weight.unflatten(0, (self.divisions, -1)))
        return self._layouts.marked(out.flatten(0, 2), LOSS_AXES)

    def rows_on_devices(self, tensor: Tensor) -> Tensor:
        """Return a device's part of `[devices, ...]`, without that dimension."""
        return self._layouts.part(tensor, LOSS_AXES)[0]

    def experts_on_devices(self, weight: Tensor) -> Tensor:
        """Return the experts that a device holds."""
        return self._layouts.part(weight, _EXPERT)

    def from_devices(self, part: Tensor) -> Tensor:
        """Return `[devices, ...]`, of which each device has a part."""
        return self._layouts.whole(part[None], LOSS_AXES)

    def sum_of_devices(self, part: Tensor) -> Tensor:
        """Return the sum of a gradient `[held, ...]` over devices that hold the same experts: `[experts, ...]`."""
        return self._layouts.whole(part[None], (*_OUTER, *_CONTEXT), _EXPERT).sum(dim=0)

    def exchange(self, buffer: Tensor) -> Tensor:
        mark = self._layouts.marked
        if self._grid[2] == 1:
            grid = mark(buffer.unflatten(0, self._grid[:2]), _OUTER, _EXPERT)
            received = mark(grid, _OUTER, (), _EXPERT).transpose(1, 2).flatten(0, 1)
        else:  # torch_xla marks 5 dimensions at most
            grid = mark(buffer.flatten(2).unflatten(0, self._grid), _OUTER, _EXPERT, _CONTEXT)
            received = mark(grid, _OUTER, (), _CONTEXT, _EXPERT).transpose(1, 3).flatten(0, 2).view_as(buffer)
        return mark(received, LOSS_AXES)


def _one_hot(sizes: Tensor, rows: Tensor) -> Tensor:
    """Return bool `[devices, rows, experts]`: whether each of the sorted rows belongs to the expert."""
    ends, at = sizes.cumsum(dim=1), torch.arange(rows.shape[1], device=rows.device)[:, None]
    return (at < ends[:, None]) & (at >= (ends - sizes)[:, None])


class _Product(torch.autograd.Function):
    """`[devices, rows, a]`, weights of experts, `[devices, held]` -> `[devices, rows, b]`, by the kernel."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, sizes: Tensor, kernel: GroupedProduct, groups: MeshExperts
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, sizes)
        ctx.kernel, ctx.groups = kernel, groups

        def run(rows: Tensor, weight: Tensor, sizes: Tensor) -> list[Tensor]:
            own = groups.rows_on_devices(rows), groups.experts_on_devices(weight), groups.rows_on_devices(sizes)
            return [groups.from_devices(*run_kernel(product, kernel, *own))]

        def like(rows: Tensor, weight: Tensor, _: Tensor) -> list[Tensor]:
            return [rows.new_empty((*rows.shape[:2], weight.shape[2 if kernel.transposed else 1]))]

        return as_operation("experts", run, like, rows, weight, sizes)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        groups, kernel = ctx.groups, ctx.kernel

        def run(rows: Tensor, weight: Tensor, sizes: Tensor, gradient: Tensor) -> list[Tensor]:
            rows, gradient, sizes = map(groups.rows_on_devices, (rows, gradient, sizes))
            back = GroupedProduct(not kernel.transposed, kernel.active, kernel.interpret)
            of_rows = run_kernel(product, back, gradient, groups.experts_on_devices(weight), sizes)
            factors = (rows, gradient) if kernel.transposed else (gradient, rows)
            of_weight = run_kernel(product_of_groups, kernel, *factors, sizes)
            return [groups.from_devices(*of_rows), groups.sum_of_devices(*of_weight)]

        def like(rows: Tensor, weight: Tensor, *_: Tensor) -> list[Tensor]:
            return [torch.empty_like(rows), torch.empty_like(weight)]

        return *as_operation("experts", run, like, *ctx.saved_tensors, gradients[0]), None, None, None
