"""Experts on XLA: products by group with the kernel of TPUs, and exchanges over the mesh axis `expert`.

`models/experts.py` has the algorithm. A change of a buffer's sharding becomes its all-to-all. On PJRT CPU, which can't
run the kernel, a dense formula computes the products.
"""

# jax's kernels take no gradients of `export`; torch_xla's bridge has no public names.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from portable_fsdp.backends.torch_xla.spmd.splash import computation

_ROWS = (512, 256, 128)
"""Rows of a tile, which the kernel computes whole: a group that ends inside one costs another tile."""
_COLUMNS = 1024


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

    def flops(self, _: Callable[..., Any], kinds: Sequence[Any]) -> int:
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

    def __init__(
        self,
        mesh: Any,
        axes: Mapping[str, int],
        capacity: float | None,
        *,
        has_kernel: bool,
        interpret: bool = False,
    ) -> None:
        import torch_xla.distributed.spmd as spmd

        self._mesh, self._spmd, self._has_kernel, self._interpret = mesh, cast(Any, spmd), has_kernel, interpret
        self.capacity, self.divisions = capacity, axes.get("expert", 1)
        self.multiple = _ROWS[-1] if has_kernel else 1
        names = [axis for axis in axes if axis != "tensor"]
        self._outer = tuple(axis for axis in names if axis in ("replicate", "shard"))
        self._expert = "expert" if "expert" in axes else None
        self._context = "context" if "context" in axes else None
        self._all = tuple(names)
        self._without_expert = tuple(axis for axis in names if axis != "expert")
        # Devices along replicate and shard, expert, context: they hold different tokens, in this order.
        self._grid = (axes["replicate"] * axes["shard"], self.divisions, axes.get("context", 1))
        self.devices = math.prod(self._grid)

    def on_each(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        def run(*tensors: Tensor) -> list[Tensor]:
            return [self.from_devices(function(*map(self.rows_on_devices, tensors)))]

        def like(*tensors: Tensor) -> list[Tensor]:
            out = function(*(tensor[0] for tensor in tensors))
            return [out.new_empty((self.devices, *out.shape))]

        return _as_operation(run, like, *tensors)[0]

    def linear(self, experts: Any, sizes: Tensor, active: int, rows: Tensor, name: str) -> Tensor:
        weight: Tensor = getattr(experts, name)
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
        return self._on_rows(out.flatten(0, 2))

    def on_devices(self, tensor: Tensor, *spec: Any) -> Tensor:
        """Return a device's part of a global tensor, for operations that each device runs by itself."""
        spec += (None,) * (tensor.dim() - len(spec))
        return self._spmd.enable_manual_sharding(tensor * 1, spec, mesh=self._mesh).global_tensor

    def rows_on_devices(self, tensor: Tensor) -> Tensor:
        """Return a device's part of `[devices, ...]`, without that dimension."""
        return self.on_devices(tensor, self._all)[0]

    def experts_on_devices(self, weight: Tensor) -> Tensor:
        """Return the experts that a device holds."""
        return self.on_devices(weight, self._expert)

    def from_devices(self, part: Tensor) -> Tensor:
        """Return `[devices, ...]`, of which each device has a part."""
        shape, spec = (self.devices, *part.shape), (self._all, *(None for _ in part.shape))
        return self._spmd.disable_manual_sharding(part[None], spec, shape, mesh=self._mesh).global_tensor

    def sum_of_devices(self, part: Tensor) -> Tensor:
        """Return the sum of a gradient `[held, ...]` over devices that hold the same experts: `[experts, ...]`."""
        spec = (self._without_expert, self._expert, *(None for _ in part.shape[1:]))
        shape = (self._grid[0] * self._grid[2], self.divisions * len(part), *part.shape[1:])
        return self._spmd.disable_manual_sharding(part[None], spec, shape, mesh=self._mesh).global_tensor.sum(dim=0)

    def _on_rows(self, tensor: Tensor) -> Tensor:
        """Mark `[devices, ...]`, and its gradient, as lying on the devices."""
        return self._mark(tensor, self._all)

    def _mark(self, tensor: Tensor, *spec: Any) -> Tensor:
        spec += (None,) * (tensor.dim() - len(spec))
        return self._spmd.xla_sharding.mark_sharding_with_gradients(tensor, self._mesh, spec)

    def exchange(self, buffer: Tensor) -> Tensor:
        if self._context is None:
            grid = self._mark(buffer.unflatten(0, self._grid[:2]), self._outer, self._expert)
            return self._on_rows(self._mark(grid, self._outer, None, self._expert).transpose(1, 2).flatten(0, 1))
        grid = buffer.flatten(2).unflatten(0, self._grid)  # torch_xla marks 5 dimensions at most
        grid = self._mark(grid, self._outer, self._expert, self._context)
        grid = self._mark(grid, self._outer, None, self._context, self._expert)
        return self._on_rows(grid.transpose(1, 3).flatten(0, 2).view_as(buffer))


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
            return [groups.from_devices(_run(product, kernel, *own))]

        def like(rows: Tensor, weight: Tensor, _: Tensor) -> list[Tensor]:
            return [rows.new_empty((*rows.shape[:2], weight.shape[2 if kernel.transposed else 1]))]

        return _as_operation(run, like, rows, weight, sizes)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        groups, kernel = ctx.groups, ctx.kernel

        def run(rows: Tensor, weight: Tensor, sizes: Tensor, gradient: Tensor) -> list[Tensor]:
            rows, gradient, sizes = map(groups.rows_on_devices, (rows, gradient, sizes))
            back = GroupedProduct(not kernel.transposed, kernel.active, kernel.interpret)
            of_rows = _run(product, back, gradient, groups.experts_on_devices(weight), sizes)
            factors = (rows, gradient) if kernel.transposed else (gradient, rows)
            of_weight = _run(product_of_groups, kernel, *factors, sizes)
            return [groups.from_devices(of_rows), groups.sum_of_devices(of_weight)]

        def like(rows: Tensor, weight: Tensor, *_: Tensor) -> list[Tensor]:
            return [torch.empty_like(rows), torch.empty_like(weight)]

        return *_as_operation(run, like, *ctx.saved_tensors, gradients[0]), None, None, None


_Operation = Callable[..., list[Tensor]]
_traced: list[tuple[_Operation, _Operation]] = []
"""What `scan` has traced, by number: a run traces a loop's body once."""


def _as_operation(run: _Operation, like: _Operation, *tensors: Tensor) -> list[Tensor]:
    """Return `run(*tensors)`; while `scan` traces (with fake tensors), as one operation with results like `like`'s."""
    if detect_fake_mode() is None:
        return run(*tensors)
    _traced.append((run, like))
    return _operation()([*tensors], len(_traced) - 1)


@cache  # once per process: the dispatcher registers it by name
def _operation() -> Callable[..., list[Tensor]]:
    @torch.library.custom_op("portable_fsdp::on_devices", mutates_args=())
    def on_devices(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        return _traced[number][0](*tensors)

    @on_devices.register_fake
    def _(tensors: Any, number: int) -> list[Tensor]:
        return _traced[number][1](*tensors)

    return on_devices


def _run(function: Callable[..., Any], kernel: GroupedProduct, *tensors: Tensor) -> Tensor:
    import torch_xla

    kinds = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    bridge = cast(Any, torch_xla)._XLAC
    (out,) = bridge._xla_user_computation("xla::experts", [*tensors], computation(function, kernel, kinds))
    return out
