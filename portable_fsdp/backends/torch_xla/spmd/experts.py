"""Experts on XLA: products by group with the kernel of TPUs, and exchanges over the mesh axis `expert`.

Each device sorts the rows of its tokens by expert. Under the axis it writes them into a buffer with room for the worst
case at each device of the axis, and a change of that buffer's sharding becomes one all-to-all. Rows move by gathers
alone, backward too: a scatter is slow on TPUs. On PJRT CPU, which can't run the kernel, a dense formula computes the
products.
"""

# jax's kernels take no gradients of `export`; torch_xla's bridge has no public names.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.torch_xla.spmd.splash import computation
from portable_fsdp.models.experts import run_expert

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


class ExpertGroups:
    """The experts of a model over a mesh: devices with different tokens, `expert` among them or not."""

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
        self._capacity, self.divisions = capacity, axes.get("expert", 1)
        names = [axis for axis in axes if axis != "tensor"]
        self._outer = tuple(axis for axis in names if axis in ("replicate", "shard"))
        self._expert = "expert" if "expert" in axes else None
        self._context = "context" if "context" in axes else None
        self._all = tuple(names)
        self._without_expert = tuple(axis for axis in names if axis != "expert")
        # Devices along replicate and shard, expert, context: they hold different tokens, in this order.
        self._grid = (axes["replicate"] * axes["shard"], self.divisions, axes.get("context", 1))

    def replace_forwards(self, model: nn.Module, policy: ShardPolicy) -> None:
        for name in policy.experts:
            module = model.get_submodule(name)
            module.forward = MethodType(lambda experts, *args, **kwargs: self.run(experts, *args, **kwargs), module)

    def run(self, experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts; arguments as of `models.experts.dense_experts`."""
        devices, top_k = math.prod(self._grid), top_k_index.shape[1]
        own = self._on_rows(hidden.view(devices, -1, hidden.shape[1]))
        chosen = self._on_rows(top_k_index.view(devices, -1).int())
        count = experts.down_proj.shape[0]
        if self.divisions == 1:
            sizes, order, rank = self._on_each(partial(_sorted, count), chosen)
            rows = self._take(own, order // top_k, rank.unflatten(1, (-1, top_k)))
            out = self._take(self._products(experts, rows, sizes), rank, order[..., None])
        else:
            out = self._exchanged(experts, own, chosen, count // self.divisions)
        weighted = out.unflatten(1, (-1, top_k)) * self._on_rows(top_k_weights.view(devices, -1, top_k))[..., None]
        return weighted.sum(dim=2).view_as(hidden).to(hidden.dtype)

    def _exchanged(self, experts: Any, own: Tensor, chosen: Tensor, held: int) -> Tensor:
        """Run `own` `[devices, tokens, hidden]` on the devices of their experts, which hold `held` each; returns
        `[devices, tokens * top_k, hidden]`."""
        choices = chosen.shape[1]
        top_k = choices // own.shape[1]
        room = own.shape[1] * min(top_k, held)  # a token has different experts
        if self._capacity is not None:
            room = min(room, math.ceil(choices / self.divisions * self._capacity))
        room = -(-room // _ROWS[-1]) * _ROWS[-1] if self._has_kernel else room
        slot, choice, ends = self._on_each(partial(_places, self.divisions, held, room), chosen)
        drops = self._capacity is not None
        buffer = self._take(own, choice // top_k, slot.unflatten(1, (-1, top_k)), drops=drops)
        received = self._exchange(buffer.unflatten(1, (self.divisions, room))).flatten(1, 2)
        sizes, order, rank = self._on_each(partial(_sorted_places, room), self._exchange(ends))
        rows = self._take(received, order, rank[..., None])
        out = self._take(self._products(experts, rows, sizes, active=choices), rank, order[..., None])
        back = self._exchange(out.unflatten(1, (self.divisions, room))).flatten(1, 2)
        return self._take(back, slot, choice[..., None], drops=drops)

    def _on_each(self, function: Callable[[Tensor], Sequence[Tensor]], ids: Tensor) -> list[Tensor]:
        """Run a function of integers on each device's part of `[devices, ...]`; its results are int32."""
        return [self.from_devices(result.int()) for result in function(self.rows_on_devices(ids))]

    # ------------------------------------------------------------------------------------------------- the products

    def _products(self, experts: Any, rows: Tensor, sizes: Tensor, active: int | None = None) -> Tensor:
        """Run each expert on its rows: `[devices, rows, hidden]`, `[devices, held]` -> `[devices, rows, hidden]`."""
        ends = sizes.cumsum(dim=1)
        at = torch.arange(rows.shape[1], device=rows.device)
        one_hot = (at[:, None] < ends[:, None]) & (at[:, None] >= (ends - sizes)[:, None])  # [devices, rows, held]
        kernel = GroupedProduct(experts.is_transposed, active or rows.shape[1], self._interpret)

        def linear(inputs: Tensor, name: str) -> Tensor:
            weight: Tensor = getattr(experts, name)
            if self._has_kernel:
                out = cast(Tensor, _Product.apply(inputs, weight, sizes, kernel, self))
            else:
                by_expert = one_hot[..., None] * inputs[:, :, None]
                out = self._per_division("gxcneh,xeho->gxcno", by_expert, weight, experts.is_transposed)
            if not experts.has_bias:
                return out
            bias = getattr(experts, f"{name}_bias")
            return out + self._per_division("gxcne,xeo->gxcno", one_hot.to(bias.dtype), bias, True)

        return run_expert(experts, rows, linear)

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
        shape, spec = (math.prod(self._grid), *part.shape), (self._all, *(None for _ in part.shape))
        return self._spmd.disable_manual_sharding(part[None], spec, shape, mesh=self._mesh).global_tensor

    def sum_of_devices(self, part: Tensor) -> Tensor:
        """Return the sum of a gradient `[held, ...]` over devices that hold the same experts: `[experts, ...]`."""
        spec = (self._without_expert, self._expert, *(None for _ in part.shape[1:]))
        shape = (self._grid[0] * self._grid[2], self.divisions * len(part), *part.shape[1:])
        return self._spmd.disable_manual_sharding(part[None], spec, shape, mesh=self._mesh).global_tensor.sum(dim=0)

    # ------------------------------------------------------------------------------------------- movements of rows

    def _on_rows(self, tensor: Tensor) -> Tensor:
        """Mark `[devices, ...]`, and its gradient, as lying on the devices."""
        return self._mark(tensor, self._all)

    def _mark(self, tensor: Tensor, *spec: Any) -> Tensor:
        spec += (None,) * (tensor.dim() - len(spec))
        if tensor.is_floating_point():
            return self._spmd.xla_sharding.mark_sharding_with_gradients(tensor, self._mesh, spec)
        tensor = tensor * 1
        self._spmd.mark_sharding(tensor, self._mesh, spec)
        return tensor

    def _exchange(self, buffer: Tensor) -> Tensor:
        """`[devices, to, ...]` -> `[devices, from, ...]`: an all-to-all over the axis `expert`."""
        if self._context is None:
            grid = self._mark(buffer.unflatten(0, self._grid[:2]), self._outer, self._expert)
            return self._on_rows(self._mark(grid, self._outer, None, self._expert).transpose(1, 2).flatten(0, 1))
        grid = buffer.flatten(2).unflatten(0, self._grid)  # torch_xla marks 5 dimensions at most
        grid = self._mark(grid, self._outer, self._expert, self._context)
        grid = self._mark(grid, self._outer, None, self._context, self._expert)
        return self._on_rows(grid.transpose(1, 3).flatten(0, 2).view_as(buffer))

    def _take(self, rows: Tensor, index: Tensor, back: Tensor, *, drops: bool = False) -> Tensor:
        """Return `rows[index]` of each device: any row where the index is the number of rows, or with `drops` 0.

        `rows`: `[devices, rows, hidden]`; `index`: `[devices, n]`; `back` `[devices, rows, uses]`: the places of each
        row in the result, or n.
        """
        return cast(Tensor, _Take.apply(rows, index, back, self, drops))


def _sorted(groups: int, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[n]` -> how many are in each group, the order that sorts them, and the rank of each in it. Ids from `groups` on
    sort to the end."""
    order = chosen.argsort(stable=True)
    sizes = (chosen[:, None] == torch.arange(groups, device=chosen.device)).sum(dim=0)
    return sizes, order, order.argsort()


def _places(divisions: int, held: int, room: int, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The places in a buffer `[divisions, room]` of the choices `[n]`, which it groups by the device of their expert.

    Returns the place of each choice, or divisions * room: dropped; the choice at each place `[divisions * room]`, or n:
    none; and the end of each expert's rows in its device's part, `[divisions, held]`.
    """
    sizes, order, rank = _sorted(divisions * held, chosen)
    by_device = sizes.view(divisions, held)
    counts = by_device.sum(dim=1)
    starts = counts.cumsum(dim=0) - counts
    to = chosen // held
    at = rank - starts[to.long()]
    slot = torch.where(at < room, to * room + at, divisions * room)
    ends = by_device.cumsum(dim=1).clamp(max=room)
    places = torch.arange(room, device=chosen.device)
    place = (starts[:, None] + places).clamp(max=len(chosen) - 1).flatten()
    choice = torch.where((places < ends[:, -1:]).flatten(), order[place], len(chosen))
    return slot, choice, ends


def _sorted_places(room: int, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_sorted`, for the rows of a received buffer `[from, room]` by expert; `ends`: `[from, held]`."""
    places = torch.arange(room, device=ends.device)
    expert = (places[:, None] >= ends[:, None]).sum(dim=-1).flatten()
    return _sorted(ends.shape[1], expert)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, back: Tensor, groups: ExpertGroups, drops: bool) -> Tensor:
        ctx.save_for_backward(back)
        ctx.groups, ctx.drops = groups, drops
        return groups.from_devices(_taken(groups.rows_on_devices(rows), groups.rows_on_devices(index), drops))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        groups, back = ctx.groups, ctx.groups.rows_on_devices(*ctx.saved_tensors)
        taken = _taken(groups.rows_on_devices(gradients[0]), back.flatten(), ctx.drops).unflatten(0, back.shape)
        return groups.from_devices(taken.sum(dim=1)), None, None, None, None


def _taken(rows: Tensor, index: Tensor, drops: bool) -> Tensor:
    taken = rows.index_select(0, index.clamp(max=len(rows) - 1))
    return torch.where((index < len(rows))[:, None], taken, torch.zeros_like(taken)) if drops else taken


class _Product(torch.autograd.Function):
    """`[devices, rows, a]`, weights of experts, `[devices, held]` -> `[devices, rows, b]`, by the kernel."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, sizes: Tensor, kernel: GroupedProduct, groups: ExpertGroups
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, sizes)
        ctx.kernel, ctx.groups = kernel, groups
        own = groups.rows_on_devices(rows), groups.experts_on_devices(weight), groups.rows_on_devices(sizes)
        return groups.from_devices(_run(product, kernel, *own))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, weight, sizes = ctx.saved_tensors
        groups, kernel = ctx.groups, ctx.kernel
        rows, gradient, sizes = map(groups.rows_on_devices, (rows, gradients[0], sizes))
        back = GroupedProduct(not kernel.transposed, kernel.active, kernel.interpret)
        of_rows = _run(product, back, gradient, groups.experts_on_devices(weight), sizes)
        factors = (rows, gradient) if kernel.transposed else (gradient, rows)
        of_weight = _run(product_of_groups, kernel, *factors, sizes)
        return groups.from_devices(of_rows), groups.sum_of_devices(of_weight), None, None, None


def _run(function: Callable[..., Any], kernel: GroupedProduct, *tensors: Tensor) -> Tensor:
    import torch_xla

    kinds = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    bridge = cast(Any, torch_xla)._XLAC
    (out,) = bridge._xla_user_computation("xla::experts", [*tensors], computation(function, kernel, kinds))
    return out
