"""Sum the gradients of linear layers and embeddings, nearly all of a model, over devices on XLA.

They are summed in float32, while products have a lower dtype (`summed_in_float32`): XLA sums a gradient in the dtype in
which each device computed its part, and autograd would give a bfloat16 weight a bfloat16 gradient. So these functions
take both the master and its compute copy, and return the gradient of the master. All other trained weights must
compute in float32.

They are summed axis by axis if the compiler would all-reduce them (`scatter.py`): the weight may then be master or
copy. The other two products of a linear layer may use int8: s8 operands and an s32 result; each product scales each row
of both operands anew.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from portable_fsdp.backends.contract import Forward
from portable_fsdp.backends.state import dtype_name
from portable_fsdp.backends.torch_xla.spmd.forward import Copies, Mark
from portable_fsdp.backends.torch_xla.spmd.scatter import ChunkedHead, Scatter, chunk_length, product_in
from portable_fsdp.backends.torch_xla.spmd.tensors import laid_out
from portable_fsdp.backends.weight_uses import Use
from portable_fsdp.quantised.layers import holds_inputs_first, is_linear
from portable_fsdp.runtime.errors import BackendError


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
