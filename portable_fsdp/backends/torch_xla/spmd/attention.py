"""Attention on TPUs: causal attention in a model's layers runs as the kernel of `splash.py`, which stores no scores.

XLA would trace torch's formula, which stores scores `[rows, heads, seq, seq]` in float32 and multiplies in float32.
Models don't change: a function mode intercepts calls of the project's attention and of torch's.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import logging
import math
import operator
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from portable_fsdp.backends.contract import Forward
from portable_fsdp.backends.torch_xla.spmd.splash import Kernel, block_of, run_kernel, splash_backward, splash_forward
from portable_fsdp.backends.torch_xla.spmd.tensors import Layouts, as_operation
from portable_fsdp.layout import ROW_AXES, Spec, groups_over

log = logging.getLogger("portable_fsdp")


class LayerAttention:
    """The kernel in the layers of a model, and its results that a recomputed layer keeps.

    The second run of a layer reuses the kernel's output and log-sum-exp: products of attention fall from 9 to 7 per
    layer, at the cost of rows x heads x seq x (width in the compute dtype, and one float32).
    """

    def __init__(self, layouts: Layouts, models: Callable[..., Tensor] | None, *, interpret: bool = False) -> None:
        """
        Args:
            layouts: of the mesh; the kernel runs on each device's rows, its part of the heads and of the tokens.
            models: the attention function that models call (`models.attention.attend`), in addition to torch's.
        """
        self._layouts, self._models, self._interpret = layouts, models, interpret
        self._tensor, self._context = (layouts.axes.get(axis, 1) for axis in ("tensor", "context"))
        self._kept: list[Tensor] | None = None
        self._runs_again = False

    def run_layer(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run a layer's `forward` with the kernel for causal attention, over a whole row or within its documents.

        Other attention (any other mask, dropout, a length that the kernel's blocks don't divide) doesn't change.
        """
        with _Caught(self.attend, self._models, context=self._context, tensor=self._tensor):
            return forward(*args, **kwargs)

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
        kernel = Kernel(window, softcap, self._interpret, self._context)
        run = partial(_on_each_device, self._layouts, kernel, ("tensor",) if splits_heads else ())
        query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
        documents = None if documents is None else documents[:, 0, 0].to(torch.int32)
        sinks = None if sinks is None else sinks.float()
        part = torch.arange(self._context, dtype=torch.int32, device=query.device) if self._context > 1 else None
        known = None
        if self._kept and self._runs_again:
            known, self._kept[:2] = tuple(self._kept[:2]), []
        out, lse = cast(tuple[Tensor, Tensor], _Attention.apply(run, known, query, key, value, documents, sinks, part))
        if self._kept is not None and not self._runs_again:
            self._kept += [out.detach(), lse]
        return _with_width(out, query)


class _Caught(TorchFunctionMode):
    def __init__(self, attend: Callable[..., Tensor], models: Callable[..., Tensor] | None, **axes: int) -> None:
        super().__init__()
        self._attend = attend
        readers = {F.scaled_dot_product_attention: _torchs, models: _models}
        self._read = {function: partial(read, **axes) for function, read in readers.items()}

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
    **axes: int,
) -> dict[str, Any] | None:
    """Translate a call of torch's function to the kernel's arguments; None if the kernel can't run it."""
    return _models(query, key, value, attn_mask, None, causal=is_causal, dropout=dropout_p, scale=scale, **axes)


def _models(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    *,
    causal: bool,
    dropout: float,
    context: int = 1,
    tensor: int = 1,
    **options: Any,
) -> dict[str, Any] | None:
    """Translate a call of the models' function: causal attention of lengths that the kernel's blocks divide."""
    length, widths = query.shape[-2], (query.shape[-1], value.shape[-1])
    if not causal or dropout or mask is not None or query.dim() != 4 or key.shape[-2] != length:
        return None
    if context > 1 and query.shape[1] % tensor:
        _warn(f"{query.shape[1]} heads that {tensor} devices share keep all scores in memory with sharding.context")
        return None
    multiple = math.lcm(128 * context, context * context)
    if length % multiple or any(width % 64 for width in widths):
        _warn(
            f"{length} tokens in heads of {widths[0]} and {widths[1]} keep all scores in memory: the kernel needs a "
            f"multiple of {multiple} tokens, and head sizes that are multiples of 64"
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
    """Returns (out, log-sum-exp) of the tensors of `splash_forward`, or `known`: a layer's first run's."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], known: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = known or as_operation("attention", partial(run, splash_forward), _like_forward, *tensors)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.run = run
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        run, tensors = partial(ctx.run, splash_backward), (*ctx.saved_tensors, outputs[0])
        d_query, d_key, d_value, *d_sinks = as_operation("attention_backward", run, _like_backward, *tensors)
        return None, None, d_query, d_key, d_value, None, d_sinks[0].sum(0) if d_sinks else None, None


def _like_forward(query: Tensor, _: Tensor, value: Tensor, *__: Tensor | None) -> list[Tensor]:
    out = query.new_empty([*query.shape[:-1], value.shape[-1]])
    return [_without_padding(out), query.new_empty(query.shape[:-1], dtype=torch.float32)]


def _like_backward(
    query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, sinks: Tensor | None, *__: Tensor | None
) -> list[Tensor]:
    of_sinks = [] if sinks is None else [sinks.new_empty([query.shape[0], *sinks.shape])]
    return [*map(torch.empty_like, (query, key, value)), *of_sinks]


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


def _on_each_device(
    layouts: Layouts, kernel: Kernel, heads: tuple[str, ...], function: Callable[..., Any], *tensors: Tensor | None
) -> list[Tensor]:
    """Run a kernel's function on each device's rows, heads and queries; XLA's partitioner can't split kernels.

    `heads`: the axes that split them. `tensors`: of `splash_forward` or `splash_backward`, the parts' numbers as one.
    """
    import torch_xla

    bridge = cast(Any, torch_xla)._XLAC
    tokens = ("context",) if kernel.parts > 1 else ()
    groups = groups_over(layouts.axes, ("context",))

    def spec(tensor: Tensor, *over: tuple[str, ...]) -> Spec:
        of_heads = heads if tensor.is_floating_point() else ()
        if tensor.dim() == 1:  # sinks, or the number of a part
            return (of_heads if tensor.is_floating_point() else tokens,)
        if tensor.dim() == 5:  # torch_xla takes five dimensions
            return ((*ROW_AXES, *of_heads), *over)
        return (ROW_AXES, of_heads, *over)

    def own(tensor: Tensor, *over: tuple[str, ...]) -> Tensor:
        """A device's part of a global tensor; `over`: the axes that split its dimensions after rows and heads."""
        return layouts.part(tensor, *spec(tensor, *over))

    def whole(tensor: Tensor, *over: tuple[str, ...]) -> Tensor:
        return layouts.whole(tensor, *spec(tensor, *over))

    def turned(pieces: Tensor) -> Tensor:
        """`[rows x heads, 1, parts, ...]`: reverse the pieces on every other device."""
        assert number is not None
        # Without the number 2: `scan` would carry it through its loop, as a tensor that each device has by itself.
        return torch.where((number & torch.ones_like(number)).bool(), pieces.flip(2), pieces)

    def to_parts(tensor: Tensor) -> Tensor:
        """A device's queries in the order of `Kernel.positions`: one all-to-all."""
        part = own(tensor, tokens)
        if not tokens:
            return part
        pieces = turned(part.flatten(0, 1).unflatten(1, (1, kernel.parts, -1)))
        return own(whole(pieces, tokens), (), tokens).reshape(part.shape)

    def from_parts(part: Tensor) -> Tensor:
        if tokens:
            pieces = part.flatten(0, 1).unflatten(1, (kernel.parts, 1, -1))
            part = turned(own(whole(pieces, (), tokens), tokens)).reshape(part.shape)
        return whole(part, tokens)

    def summed(part: Tensor) -> Tensor:
        """The sum over devices that share a row: `[rows, heads]` on each, else tokens are split again."""
        if not tokens:
            return whole(part)
        if part.dim() == 2:
            return whole(bridge._xla_spmd_all_reduce("sum", part, 1.0, groups))
        return whole(bridge._xla_spmd_reduce_scatter("sum", part, 1.0, 2, kernel.parts, groups), tokens)

    query, key, value, documents, sinks, part, *rest = tensors
    assert query is not None
    number = None if part is None else own(part)
    shared = [None if tensor is None else own(tensor) for tensor in (key, value, documents, sinks)]
    if function is splash_forward:
        out, lse = run_kernel(splash_forward, kernel, to_parts(query), *shared, number)
        return [_without_padding(from_parts(out)), whole(lse, tokens)]
    out, lse, gradient = cast(list[Tensor], rest)
    others = [to_parts(_with_width(out, query)), own(lse, tokens), to_parts(_with_width(gradient, query))]
    of_query, *gradients = run_kernel(splash_backward, kernel, to_parts(query), *shared, number, *others)
    return [from_parts(of_query), *map(summed, gradients)]
