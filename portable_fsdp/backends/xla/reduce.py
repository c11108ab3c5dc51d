"""Gradients summed over devices in float32 on XLA, while products are computed in a lower dtype.

XLA sums a gradient over devices in the dtype in which each device computed its part: a product with a float32 result
is summed in float32. Autograd would give a bfloat16 weight a bfloat16 gradient, so these functions take the master and
its compute copy apart, and give the gradient to the master. They exist for linear layers and embeddings, which hold
nearly all of a model; what else trains must compute in float32.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from portable_fsdp.backends.base import Forward
from portable_fsdp.backends.weight_uses import Use
from portable_fsdp.backends.xla.forward import Copies, Mark
from portable_fsdp.backends.xla.tensors import laid_out
from portable_fsdp.runtime.errors import BackendError


def summed_in_float32(uses: Mapping[str, Use]) -> dict[str, Use]:
    """The uses, those in a lower dtype that train as `apart`. Raises BackendError for one that no function is for."""
    lower = {fqn: use for fqn, use in uses.items() if use.dtype != torch.float32 and use.weight.requires_grad}
    others = [fqn for fqn, use in lower.items() if _maker(use.module) is None]
    if others:
        raise _refusal(others, lower[others[0]])
    modules = {id(use.module) for use in lower.values()}
    return {fqn: use._replace(apart=id(use.module) in modules) for fqn, use in uses.items()}


def replace_forwards(uses: Mapping[str, Use], copies: Copies, shard: Mark) -> None:
    """Give each module whose weights are `apart` a forward that knows of both."""
    by_module: dict[nn.Module, dict[str, Use]] = {}
    for use in uses.values():
        if use.apart:
            by_module.setdefault(use.module, {})[use.leaf] = use
    for module, own in by_module.items():
        make = cast(Callable[..., Forward], _maker(module))
        module.forward = make(module, own, copies, shard)


def _maker(module: nn.Module) -> Callable[..., Forward] | None:
    """By the exact class: one that inherits may do something else besides."""
    kind = type(module)
    if isinstance(module, nn.Embedding) and kind is nn.Embedding:
        return None if module.max_norm is not None or module.scale_grad_by_freq else _embedding
    # transformers' layer of GPT-2: a linear one, its weight transposed.
    is_conv1d = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return _linear if kind is nn.Linear or is_conv1d else None


def _linear(module: nn.Module, uses: dict[str, Use], copies: Copies, shard: Mark) -> Forward:
    inputs_first = type(module) is not nn.Linear

    def forward(x: Tensor) -> Tensor:
        weight, bias = uses["weight"], uses.get("bias")
        masters = (weight.weight, None if bias is None else bias.weight)
        low = (copies.of(weight), None if bias is None else copies.of(bias))
        return cast(Tensor, _Linear.apply(x, *masters, *low, inputs_first, shard))

    return forward


def _embedding(module: nn.Module, uses: dict[str, Use], copies: Copies, shard: Mark) -> Forward:
    padding = cast(nn.Embedding, module).padding_idx

    def forward(ids: Tensor) -> Tensor:
        weight = uses["weight"]
        return cast(Tensor, _Embedding.apply(ids, weight.weight, copies.of(weight), padding, shard))

    return forward


class _Linear(torch.autograd.Function):
    """x [..., inputs] -> [..., outputs], by a copy of the weight [outputs, inputs], or [inputs, outputs]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_copy: Tensor,
        bias_copy: Tensor | None,
        inputs_first: bool,
        shard: Mark,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_copy)
        ctx.inputs_first, ctx.shard = inputs_first, shard
        return functional.linear(x, weight_copy.t() if inputs_first else weight_copy, bias_copy)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        gradient = cast(Tensor, outputs[0])
        x, copy = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        wants_x, wants_weight, wants_bias, *_ = cast(tuple[bool, ...], ctx.needs_input_grad)
        of_x = gradient @ (copy.t() if ctx.inputs_first else copy) if wants_x else None
        factors = (x, gradient) if ctx.inputs_first else (gradient, x)
        of_weight = laid_out(_product(*factors), ctx.shard) if wants_weight else None
        of_bias = laid_out(gradient.flatten(0, -2).sum(0, dtype=torch.float32), ctx.shard) if wants_bias else None
        return of_x, of_weight, of_bias, None, None, None, None


class _Embedding(torch.autograd.Function):
    """ids [...] -> [..., hidden], rows of a copy of the weight [words, hidden]."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, copy: Tensor, padding: int | None, shard: Mark) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.words, ctx.padding, ctx.shard = len(weight), -1 if padding is None else padding, shard
        return functional.embedding(ids, copy)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (ids,) = cast(tuple[Tensor], ctx.saved_tensors)
        gradient = cast(Tensor, outputs[0]).float()
        of_weight = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.words, ctx.padding, False)
        return None, laid_out(of_weight, ctx.shard), None, None, None


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[..., a] and [..., b] -> float32 [a, b], summed over the dimensions in front, with factors in their own dtype."""
    import torch_xla

    rows = list(range(left.dim() - 1))
    bridge = cast(Any, torch_xla)._XLAC
    return bridge._xla_dot_general(left, right, ((rows, rows), ([], [])), None, torch.float32)


def _refusal(others: list[str], first: Use) -> BackendError:
    ends = sorted({fqn.split(".")[-2] for fqn in others})
    modules = ", ".join(f'"*{end}": float32' for end in ends)
    dtype = str(first.dtype).removeprefix("torch.")
    return BackendError(
        "backend xla: precision.reduce=float32 cannot be honoured: XLA sums a gradient over devices in the dtype in "
        f"which it is\n  computed, here {dtype} for {others[0]} ({type(first.module).__name__}), and {len(others) - 1} "
        "more tensors; only linear layers\n  and embeddings compute theirs in float32 by themselves.\n"
        f"  Set precision.modules={{{modules}}}, or precision.reduce=auto."
    )
