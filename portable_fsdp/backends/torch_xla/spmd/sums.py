"""Sum the gradients of linear layers and embeddings, nearly all of a model, over devices on XLA.

They are summed in float32, while products have a lower dtype (`summed_in_float32`): XLA sums a gradient in the dtype in
which each device computed its part, and autograd would give a bfloat16 weight a bfloat16 gradient. So these functions
take both the master and its compute copy, and return the gradient of the master. All other trained weights must
compute in float32. The other two products of a linear layer may use int8: s8 operands and an s32 result; each product
scales each row of both operands anew.

They are reduce-scattered along one axis of the TPU's torus after the other (`Scatter`) if the compiler would all-reduce
them: the weight may then be master or copy. For a sum over all chips of a slice of more than eight, or of three axes,
libtpu 0.0.21 makes an all-reduce. Each chip then takes its part: twice the bytes of a reduce-scatter, and nothing
overlaps it. Along one axis the compiler keeps a reduce-scatter. So here the product runs on each device by itself
(XLA's manual sharding), followed by one reduce-scatter per axis. The head and its loss run so too, by chunks of a
device's positions (`ChunkedHead`).
"""

# pyright: reportPrivateUsage=false

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from portable_fsdp.backends.contract import Forward
from portable_fsdp.backends.state import dtype_name
from portable_fsdp.backends.torch_xla.spmd.forward import Copies, Mark
from portable_fsdp.backends.torch_xla.spmd.tensors import Layouts, as_operation, laid_out
from portable_fsdp.backends.weight_uses import Use
from portable_fsdp.quantised import holds_inputs_first, is_linear
from portable_fsdp.runtime.errors import BackendError

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
    the weight is gathered once, its gradient summed over devices once. Gradients as in `_Linear`.
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


# ---------------------------------------------------------------------------------------- linear layers and embeddings


def summed_in_float32(uses: Mapping[str, Use]) -> dict[str, Use]:
    """Return the uses; trained ones in a lower dtype get `splits_gradient`. Raises BackendError for other modules."""
    lower = {fqn: use for fqn, use in uses.items() if use.dtype != torch.float32 and use.weight.requires_grad}
    others = [fqn for fqn, use in lower.items() if _forward_of(use.module) is None]
    if others:
        raise _refusal(others, lower[others[0]])
    modules = {id(use.module) for use in lower.values()}
    return {fqn: use._replace(splits_gradient=id(use.module) in modules) for fqn, use in uses.items()}


def replace_forwards(
    uses: Mapping[str, Use],
    copies: Copies,
    shard: Callable[..., None],
    scatter: Scatter | None,
    in_int8: Collection[nn.Module],
) -> None:
    """Replace forwards of modules that have a use that `splits_gradient` or a gradient for `scatter`, or `in_int8`."""
    by_module: dict[nn.Module, dict[str, Use]] = {}
    for use in uses.values():
        by_module.setdefault(use.module, {})[use.leaf] = use
    for module, own in by_module.items():
        if run := _forward_of(module):
            weight, is_int8 = own["weight"], module in in_int8
            is_scattered = scatter is not None and weight.weight.requires_grad
            if is_int8 or is_scattered or any(use.splits_gradient for use in own.values()):
                sums = SummedGradients(partial(shard, spec=weight.spec), scatter, is_int8)
                module.forward = partial(run, module, module.forward, own, copies, sums)


class SummedGradients(NamedTuple):
    """Sums of gradients over devices: by the compiler's choice, or by `scatter`."""

    shard: Mark
    scatter: Scatter | None
    is_int8: bool  # the layer's other products

    def by_hand(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `scatter` sums the gradient for a module's input `x`; if it can't divide it, the compiler does."""
        return self.scatter is not None and x.dim() > 0 and self.scatter.fits(len(x), weight)

    def by_chunks(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> bool:
        """Whether the head's loss is computed by chunks: not if the compiler sums gradients, once for each chunk."""
        if self.scatter is None or not self.by_hand(hidden, weight) or hidden.shape[:-1] != labels.shape:
            return False
        rows = len(hidden) // (self.scatter.replicas * self.scatter.parts)
        return chunk_length(rows, hidden.shape[1]) < hidden.shape[1]

    def product(self, left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        """`[..., a]`, `[..., b]` -> `[a, b]`, the gradient of `weight`."""
        if self.scatter is not None and self.by_hand(left, weight):
            return self.scatter.product(left, right, weight.dtype)
        total = product_in(left, right, weight.dtype)
        return total if total.dtype == left.dtype else laid_out(total, self.shard)  # a scan takes no marks

    def rows(self, ids: Tensor, gradient: Tensor, weight: Tensor, padding: int) -> Tensor:
        """`[...]`, `[..., hidden]` -> `[words, hidden]`, the gradient of `weight`."""
        gradient = gradient.to(weight.dtype)
        if self.scatter is not None and self.by_hand(ids, weight):
            return self.scatter.rows(ids, gradient, len(weight), padding)
        total = torch.ops.aten.embedding_dense_backward(gradient, ids, len(weight), padding, False)
        return laid_out(total, self.shard)


def _forward_of(module: nn.Module) -> Forward | None:
    """Return the function that replaces a module's forward. Exact classes only: a subclass may override forward."""
    if isinstance(module, nn.Embedding) and type(module) is nn.Embedding:
        return None if module.max_norm is not None or module.scale_grad_by_freq else _embedding
    return _linear if is_linear(module) else None


def _linear(
    module: nn.Module,
    plain: Forward,
    uses: dict[str, Use],
    copies: Copies,
    sums: SummedGradients,
    x: Tensor,
    loss_input: Any = None,  # a head's, in training: models/loss.py
) -> Tensor:
    weight, bias, inputs_first = uses["weight"], uses.get("bias"), holds_inputs_first(module)
    if not (weight.splits_gradient or sums.is_int8) and (x.dim() < 2 or not sums.by_hand(x, weight.weight)):
        return plain(x)
    get_gradients = (weight.weight, None if bias is None else bias.weight)  # masters if split, else the copies
    low = (copies.of(weight), None if bias is None else copies.of(bias)) if weight.splits_gradient else get_gradients
    takes_chunks = loss_input is not None and sums.by_chunks(x, weight.weight, loss_input.labels)
    if takes_chunks and bias is None and not inputs_first:
        return cast(Tensor, ChunkedHead.apply(x, get_gradients[0], low[0], loss_input, sums.scatter))
    return cast(Tensor, _Linear.apply(x, *get_gradients, *low, inputs_first, sums))


def _embedding(
    module: nn.Embedding, plain: Forward, uses: dict[str, Use], copies: Copies, sums: SummedGradients, ids: Tensor
) -> Tensor:
    use, padding = uses["weight"], module.padding_idx
    if not use.splits_gradient and not sums.by_hand(ids, use.weight):
        return plain(ids)
    copy = copies.of(use) if use.splits_gradient else use.weight
    return cast(Tensor, _Embedding.apply(ids, use.weight, copy, -1 if padding is None else padding, sums))


class _Linear(torch.autograd.Function):
    """Linear layer: x `[..., inputs]` -> `[..., outputs]`, by a copy of the weight `[outputs, inputs]`, or transposed.

    Gradients go to the weight, in its dtype, and none to the copy (which may be the weight itself).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_copy: Tensor,
        bias_copy: Tensor | None,
        inputs_first: bool,
        sums: SummedGradients,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, weight_copy)
        ctx.inputs_first, ctx.sums = inputs_first, sums
        if sums.is_int8:
            total = int8_product(x, weight_copy)
            return total if bias_copy is None else total + bias_copy
        return functional.linear(x, weight_copy.t() if inputs_first else weight_copy, bias_copy)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        gradient = cast(Tensor, outputs[0])
        x, weight, copy = cast(tuple[Tensor, Tensor, Tensor], ctx.saved_tensors)
        wants_x, wants_weight, wants_bias, *_ = cast(tuple[bool, ...], ctx.needs_input_grad)
        of_x = None
        if wants_x:
            transposed = copy.t() if ctx.inputs_first else copy
            of_x = int8_product(gradient, transposed.t()) if ctx.sums.is_int8 else gradient @ transposed
        factors = (x, gradient) if ctx.inputs_first else (gradient, x)
        of_weight = ctx.sums.product(*factors, weight) if wants_weight else None
        of_bias = gradient.flatten(0, -2).sum(0, dtype=weight.dtype) if wants_bias else None
        return of_x, of_weight, of_bias, None, None, None, None


class _Embedding(torch.autograd.Function):
    """Embedding: ids `[...]` -> `[..., hidden]`, rows of a copy of the weight `[words, hidden]`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, copy: Tensor, padding: int, sums: SummedGradients) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.padding, ctx.sums = padding, sums
        return functional.embedding(ids, copy)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        ids, weight = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        return None, ctx.sums.rows(ids, cast(Tensor, outputs[0]), weight, ctx.padding), None, None, None


def _refusal(others: list[str], first: Use) -> BackendError:
    modules = ", ".join(f'"*{end}": float32' for end in sorted({fqn.split(".")[-2] for fqn in others}))
    dtype = dtype_name(first.dtype)
    return BackendError(
        "backend xla: precision.reduce=float32 cannot be honoured: XLA sums a gradient over devices in the dtype in "
        f"which it is\n  computed, here {dtype} for {others[0]} ({type(first.module).__name__}), and {len(others) - 1} "
        "more tensors; only linear layers\n  and embeddings always compute theirs in float32.\n"
        f"  Set precision.modules={{{modules}}}, or precision.reduce=auto."
    )


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """`[..., inputs]`, `[outputs, inputs]` -> `[..., outputs]` in the dtype of x, without gradients."""
    return cast(Tensor, _int8_operator()(x, weight))


@cache  # one operator, so that `scan` can trace it
def _int8_operator() -> Any:

    @torch.library.custom_op("portable_fsdp::int8_product", mutates_args=())
    def product(x: Tensor, weight: Tensor) -> Tensor:
        import torch_xla

        (rows, scales), (columns, factors) = _rounded(x), _rounded(weight)
        dimensions = ([x.dim() - 1], [1]), ([], [])
        sums = cast(Any, torch_xla)._XLAC._xla_dot_general(rows, columns, dimensions, None, torch.int32)
        return (sums.float() * scales * factors.squeeze(-1)).to(x.dtype)

    product.register_fake(lambda x, weight: x.new_empty((*x.shape[:-1], len(weight))))
    return product


def _rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Round to integers up to 127; return them and the factor of each row. Rows of zeros stay zero."""
    scales = tensor.abs().amax(-1, keepdim=True).float().clamp(min=1e-30) / 127
    return (tensor / scales).round().to(torch.int8), scales
