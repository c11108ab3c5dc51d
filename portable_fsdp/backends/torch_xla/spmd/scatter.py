"""Reduce-scatter gradients along one axis of the TPU's torus after the other.

For a sum over all chips of a slice of more than eight, or of three axes, libtpu 0.0.21 makes an all-reduce. Each chip
then takes its part: twice the bytes of a reduce-scatter, and nothing overlaps it. Along one axis the compiler keeps a
reduce-scatter. So here the product runs on each device by itself (XLA's manual sharding), followed by one
reduce-scatter per axis. The head and its loss run so too, by chunks of a device's positions (`ChunkedHead`).
"""

# pyright: reportPrivateUsage=false

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from portable_fsdp.backends.torch_xla.spmd.tensors import Layouts, as_operation

_AXES = ("replicate", "shard")

Torus = tuple[int, ...]
"""Devices along each axis, the slowest-varying first: slices, then z, y and x. Empty: unknown."""

LARGEST_OF_COMPILER = 8
"""Largest two-axis slice, in chips, for which libtpu 0.0.21 makes a reduce-scatter by itself (compiled: 2x2, 2x4, not
4x4; with three axes not even 2x2x2)."""


def torus_of_run() -> Torus:
    """Return the torus of this run's chips; empty if they have no coordinates (CPU), or are not in their order."""
    import torch_xla.runtime as runtime

    attributes = cast(list[dict[str, Any]], cast(Any, runtime).global_runtime_device_attributes())
    chips = sorted(attributes, key=lambda chip: int(chip["name"].split(":")[1]))
    if not all("coords" in chip for chip in chips):
        return ()
    places = [(int(chip.get("slice_index", 0)), *map(int, reversed(chip["coords"]))) for chip in chips]
    sizes = tuple(max(along) + 1 for along in zip(*places, strict=True))
    return sizes if places == list(product(*map(range, sizes))) else ()


class Scatter(NamedTuple):
    """A reduce-scatter of a tensor over all devices, which leaves a part of its rows on each."""

    replicas: int
    slices: int  # number of slices that hold different parts
    along: Torus  # parts along each axis of a slice

    @property
    def parts(self) -> int:
        return self.slices * math.prod(self.along)

    def fits(self, rows: int, weight: Tensor) -> bool:
        """Whether the devices divide both the rows that they sum over and the rows of the weight."""
        return rows % (self.replicas * self.parts) == 0 and len(weight) % self.parts == 0

    def product(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """`[rows, ..., a]`, `[rows, ..., b]` -> `[a, b]`, summed over all but the last dimension, in `dtype`."""
        return self._summed(partial(product_in, dtype=dtype), (left.shape[-1], right.shape[-1]), dtype, left, right)

    def rows(self, ids: Tensor, gradient: Tensor, words: int, padding: int) -> Tensor:
        """`[rows, ...]`, `[rows, ..., hidden]` -> `[words, hidden]`: sum by word, without those of `padding`."""
        options = {"num_weights": words, "padding_idx": padding, "scale_grad_by_freq": False}
        by_word = partial(torch.ops.aten.embedding_dense_backward, **options)
        return self._summed(by_word, (words, gradient.shape[-1]), gradient.dtype, gradient, ids)

    def _summed(
        self, function: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype, *tensors: Tensor
    ) -> Tensor:
        """Sum what `function` returns for the rows of each device."""

        def run(*tensors: Tensor) -> list[Tensor]:
            return [scattered(function(*(_layouts(self).part(tensor, _AXES) for tensor in tensors)), self)]

        def like(*tensors: Tensor) -> list[Tensor]:
            return [tensors[0].new_empty(shape, dtype=dtype)]

        return as_operation("scattered_sum", run, like, *tensors)[0]


def scatter_over(torus: Torus, axes: Mapping[str, int]) -> Scatter | None:
    """Return the scatter for weights sharded over the mesh `axes`; None if the compiler's is as good, or `torus` isn't
    that of the mesh."""
    # The axis `shard` is then short: the compiler makes reduce-scatters.
    if axes.get("tensor", 1) * axes.get("context", 1) > 1:
        return None
    slices, *slice_axes = torus or (1,)
    longer = [size for size in slice_axes if size > 1]
    if len(longer) < 2 or (len(longer) == 2 and math.prod(longer) <= LARGEST_OF_COMPILER):
        return None
    along: list[int] = []
    rest = axes["shard"]
    for size in (*reversed(longer), slices):
        along.insert(0, math.gcd(size, rest))
        rest //= along[0]
        if along[0] != size:
            break
    scatter = Scatter(axes["replicate"], along[0] if len(along) > len(longer) else 1, tuple(along[-len(longer) :]))
    # A further axis of the mesh, which this file doesn't know, would leave devices without a part.
    is_mesh = rest == 1 and scatter.replicas * scatter.parts == math.prod(axes.values()) == math.prod(torus)
    return scatter if is_mesh and axes["shard"] > 1 else None


def scattered(total: Tensor, scatter: Scatter) -> Tensor:
    """`[rows, width]` on each device -> their sum, a global tensor that is sharded by rows."""
    import torch_xla

    bridge = cast(Any, torch_xla)._XLAC
    if scatter.slices > 1:
        # Within a slice first: then only each chip's part of its slice's sum crosses the network.
        by_slice = total.reshape(scatter.slices, math.prod(scatter.along), -1)
        total = by_slice.transpose(0, 1).reshape(total.shape)
    devices = np.arange(scatter.replicas * scatter.parts).reshape(scatter.replicas, scatter.slices, *scatter.along)
    for axis in (*range(2, devices.ndim), 1):
        if (size := devices.shape[axis]) > 1:
            groups = np.moveaxis(devices, axis, -1).reshape(-1, size).tolist()
            total = bridge._xla_spmd_reduce_scatter("sum", total, 1.0, 0, size, groups)  # dimension 0: others stay sums
    if scatter.replicas > 1:
        total = bridge._xla_spmd_all_reduce("sum", total, 1.0, devices.reshape(scatter.replicas, -1).T.tolist())
    return _layouts(scatter).whole(total, ("shard",))


@cache
def _layouts(scatter: Scatter) -> Layouts:
    import torch_xla.distributed.spmd as spmd

    shape = (scatter.replicas, scatter.parts)
    mesh = cast(Any, spmd).Mesh(np.arange(math.prod(shape)), shape, _AXES)
    return Layouts(mesh, dict(zip(_AXES, shape, strict=True)))


def product_in(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., a]`, `[..., b]` -> `[a, b]` in `dtype`, summed over the leading dimensions; inputs keep their dtype."""
    if dtype == left.dtype:
        return left.flatten(0, -2).t() @ right.flatten(0, -2)
    import torch_xla

    rows = list(range(left.dim() - 1))
    return cast(Any, torch_xla)._XLAC._xla_dot_general(left, right, ((rows, rows), ([], [])), None, dtype)


# -------------------------------------------------------------------------------------------------- head and loss

POSITIONS = 2048
"""Positions per device and chunk, or up to twice as many. On v6e (918 TFLOP/s, 1.6 TB/s), from 1150 on the product that
adds to the weight's gradient takes longer than reading and writing that gradient in bfloat16."""


def chunk_length(rows: int, length: int) -> int:
    """Tokens of a row per chunk: `length`, halved while it is even and the chunk stays above POSITIONS."""
    while length % 2 == 0 and rows * length >= 2 * POSITIONS:
        length //= 2
    return length


class ChunkedHead(torch.autograd.Function):
    """Computes the loss of a linear head without bias: hidden `[batch, seq, width]`, weight copy `[words, width]`.

    The logits of all tokens never exist. Each chunk's gradients are computed in forward, and added up on each device;
    the weight is gathered once, its gradient summed over devices once. Gradients as in `sums._Linear`.
    `loss_input`: labels, and how the model computes its loss from logits: `models.loss.LossInput`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, weight_copy: Tensor, loss_input: Any, scatter: Scatter
    ) -> Tensor:
        import torch_xla

        barrier = cast(Any, torch_xla)._XLAC._xla_optimization_barrier_
        devices, layouts = scatter.replicas * scatter.parts, _layouts(scatter)
        own, labels = layouts.part(hidden, _AXES), layouts.part(loss_input.labels, _AXES)
        copy = layouts.part(weight_copy)
        loss, of_weight, of_hidden = own.new_zeros(1, dtype=torch.float32), cast(Any, None), list[Tensor]()
        length = chunk_length(len(hidden) // devices, hidden.shape[1])
        for start in range(0, hidden.shape[1], length):
            part = own[:, start : start + length] * 1
            if start:  # one chunk after the other
                barrier([part, loss, of_weight, of_hidden[-1]])
            addend, gradient = loss_input.gradient(part @ copy.t(), labels[:, start : start + length])
            product = product_in(gradient, part, weight.dtype)
            loss, of_weight = loss + addend, product if of_weight is None else of_weight + product
            of_hidden.append(gradient @ copy)
        barrier([of_weight, *of_hidden])  # frees the gathered weight before the sum over devices, which ends before
        gradients = [layouts.whole(torch.cat(of_hidden, 1), _AXES), scattered(of_weight, scatter)]
        barrier(gradients)  # the backward of layers
        ctx.gradients = gradients
        return layouts.whole(loss, _AXES).sum()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        # In float32: the loss's scale, 1 / tokens, must not be rounded to bfloat16.
        of_hidden, of_weight = ((gradient.float() * outputs[0]).to(gradient.dtype) for gradient in ctx.gradients)
        return of_hidden, of_weight, None, None, None
