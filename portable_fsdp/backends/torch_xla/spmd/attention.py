"""Attention on TPUs: causal attention in a model's layers runs as the kernel of `splash.py`, which stores no scores.

XLA would trace torch's formula, which stores scores `[rows, heads, seq, seq]` in float32 and multiplies in float32.
Models don't change: a function mode intercepts calls of the project's attention and of torch's.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import json
import logging
import math
import operator
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from portable_fsdp.backends.contract import Forward
from portable_fsdp.backends.torch_xla.spmd.splash import Kernel, block_of

log = logging.getLogger("portable_fsdp")


class LayerAttention:
    """The kernel in the layers of a model, and its results that a recomputed layer keeps.

    The second run of a layer reuses the kernel's output and log-sum-exp: products of attention fall from 9 to 7 per
    layer, at the cost of rows x heads x seq x (width in the compute dtype, and one float32).
    """

    def __init__(
        self,
        mesh: Any,
        rows: tuple[str, ...],
        models: Callable[..., Tensor] | None,
        *,
        tensor: int = 1,
        interpret: bool = False,
    ) -> None:
        """
        Args:
            mesh: torch_xla's; its axes `rows` split the batch, and the kernel runs on each device's rows.
            tensor: devices along the axis `tensor`, which splits the heads.
            models: the attention function that models call (`models.attention.attend`), in addition to torch's.
        """
        self._mesh, self._rows, self._tensor, self._interpret = str(mesh), rows, tensor, interpret
        self._models = models
        self._kept: list[Tensor] | None = None
        self._runs_again = False

    def in_layer(self, forward: Forward) -> Forward:
        """Wrap a layer's `forward` to use the kernel for causal attention, over a whole row or within its documents.

        Other attention (any other mask, dropout, a length that the kernel's blocks don't divide) doesn't change.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            with _Caught(self.attend, self._models):
                return forward(*args, **kwargs)

        return run

    @contextmanager
    def keep(self, kept: list[Tensor], *, again: bool) -> Generator[None]:
        """Context of a recomputed layer: its first run adds results to `kept`, and the second (`again`) reuses them."""
        around, self._kept, self._runs_again = (self._kept, self._runs_again), kept, again
        try:
            yield
        finally:
            self._kept, self._runs_again = around

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Compute causal attention; arguments as of `models.attention.attend`."""
        splits_heads = self._tensor > 1 and query.shape[1] % self._tensor == 0
        if splits_heads and (times := self._tensor // math.gcd(self._tensor, key.shape[1])) > 1:
            key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))  # fewer than devices
        kernel = Kernel(window, softcap, self._interpret)
        options = json.dumps((self._mesh, self._rows, splits_heads, asdict(kernel)))
        query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
        documents = None if documents is None else documents[:, 0, 0].to(torch.int32)
        sinks = None if sinks is None else sinks.float() * 1  # an argument of the program can't be split by hand
        known = None
        if self._kept and self._runs_again:
            known, self._kept[:2] = tuple(self._kept[:2]), []
        out, lse = cast(tuple[Tensor, Tensor], _Attention.apply(options, known, query, key, value, documents, sinks))
        if self._kept is not None and not self._runs_again:
            self._kept += [out.detach(), lse]
        return _with_width(out, query)


class _Caught(TorchFunctionMode):
    def __init__(self, attend: Callable[..., Tensor], models: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self._attend = attend
        self._read = {F.scaled_dot_product_attention: _torchs, models: _models}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = self._read.get(func)
        call = read(*args, **(kwargs or {})) if read else None
        return self._attend(**call) if call else func(*args, **(kwargs or {}))


def _torchs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any] | None:
    """Translate a call of torch's function to the kernel's arguments; None if the kernel can't run it."""
    return _models(query, key, value, attn_mask, None, causal=is_causal, dropout=dropout_p, scale=scale)


def _models(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    *,
    causal: bool,
    dropout: float,
    **options: Any,
) -> dict[str, Any] | None:
    """Translate a call of the models' function: causal attention of lengths that the kernel's blocks divide."""
    length, widths = query.shape[-2], (query.shape[-1], value.shape[-1])
    if not causal or dropout or mask is not None or query.dim() != 4 or key.shape[-2] != length:
        return None
    if length % 128 or any(width % 64 for width in widths):
        _warn(
            f"{length} tokens in heads of {widths[0]} and {widths[1]} keep all scores in memory: the kernel needs a "
            "multiple of 128 tokens, and head sizes that are multiples of 64"
        )
        return None
    if (block := block_of(length)) < min(512, length):
        _warn(
            f"{length} tokens run in blocks of {block}, and each block writes a gradient of all queries: a multiple of "
            "512 or 1024 tokens needs less time and memory"
        )
    return {"query": query, "key": key, "value": value, "documents": documents, **options}


@cache  # once per process
def _warn(message: str) -> None:
    log.warning("attention: %s", message)


# ------------------------------------------------------------------------------------------------ over all devices


class _Attention(torch.autograd.Function):
    """Returns (out, log-sum-exp) of query, key, value, documents and sinks, or `known`: a layer's first run's."""

    @staticmethod
    def forward(ctx: Any, options: str, known: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = known or _operations()[0](list(tensors), options)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        d_query, d_key, d_value, *d_sinks = _operations()[1]([*ctx.saved_tensors, outputs[0]], ctx.options)
        return None, None, d_query, d_key, d_value, None, d_sinks[0].sum(0) if d_sinks else None


@cache  # once per process: the dispatcher registers them by name
def _operations() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return forward and backward as torch operations, which `scan` can trace.

    They take the tensors of `Kernel.forward` and `Kernel.backward`, and the options as JSON: mesh, axes of the rows,
    whether the axis `tensor` splits heads, and the kernel.
    """

    @torch.library.custom_op("portable_fsdp::attention", mutates_args=())
    def forward(tensors: Sequence[Tensor | None], options: str) -> tuple[Tensor, Tensor]:
        out, lse = _on_each_device("forward", options, *tensors)
        return _without_padding(out), lse

    @forward.register_fake
    def _(tensors: Any, options: str) -> tuple[Tensor, Tensor]:
        query, _, value, *_ = tensors
        out = query.new_empty([*query.shape[:-1], value.shape[-1]])
        return _without_padding(out), query.new_empty(query.shape[:-1], dtype=torch.float32)

    @torch.library.custom_op("portable_fsdp::attention_backward", mutates_args=())
    def backward(tensors: Sequence[Tensor | None], options: str) -> list[Tensor]:
        *inputs, out, lse, gradient = cast(Any, tensors)
        out, gradient = (_with_width(tensor, inputs[0]) for tensor in (out, gradient))
        return _on_each_device("backward", options, *inputs, out, lse, gradient)

    @backward.register_fake
    def _(tensors: Any, options: str) -> list[Tensor]:
        query, key, value, _, sinks, *_ = tensors
        of_sinks = [] if sinks is None else [sinks.new_empty([query.shape[0], *sinks.shape])]
        return [*map(torch.empty_like, (query, key, value)), *of_sinks]

    return forward, backward


def _without_padding(out: Tensor) -> Tensor:
    """Flatten to `[rows, heads, seq x width]` if a width doesn't fill a TPU's 128 lanes: layers keep it so."""
    return out.flatten(2) if out.shape[-1] % 128 else out


def _with_width(out: Tensor, query: Tensor) -> Tensor:
    """Restore `[rows, heads, seq, width]`."""
    return out if out.dim() == 4 else out.unflatten(2, (query.shape[2], -1))


def is_kept(node: fx.Node) -> bool:
    """Whether a value in a traced graph is one that a recomputed layer keeps: the kernel's output or log-sum-exp."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and str(source.target) == "portable_fsdp.attention.default"


def _on_each_device(method: str, options: str, *tensors: Tensor | None) -> list[Tensor]:
    """Run a kernel's method on each device's rows and heads; XLA's partitioner can't split kernels."""
    import torch_xla.distributed.spmd as spmd

    shards: Any = spmd
    name, rows, splits_heads, kernel = json.loads(options)
    mesh = shards.Mesh.from_str(name)
    heads = "tensor" if splits_heads else None
    devices = math.prod(mesh.shape()[axis] for axis in rows)
    parts = mesh.shape()[heads] if heads else 1

    def spec(tensor: Tensor) -> tuple[Any, ...]:
        if tensor.dim() == 1:  # sinks
            return (heads,)
        return (tuple(rows), heads if tensor.is_floating_point() else None, *(None for _ in tensor.shape[2:]))

    own = [t if t is None else shards.enable_manual_sharding(t, spec(t), mesh=mesh).global_tensor for t in tensors]
    results = [cast(Tensor, result) for result in getattr(Kernel(**kernel), method)(*own)]
    sizes = [(devices * result.shape[0], parts * result.shape[1], *result.shape[2:]) for result in results]
    return [
        shards.disable_manual_sharding(result, spec(result), size, mesh=mesh).global_tensor
        for result, size in zip(results, sizes, strict=True)
    ]
