"""Attention on TPUs: torch's scaled_dot_product_attention is given to the flash kernel, which keeps no scores.

XLA would trace torch's formula, which holds scores of [rows, heads, seq, seq] in float32 and multiplies in float32.
Models stay as they are: a function mode catches their call.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from portable_fsdp.backends.base import Forward


def with_flash_attention(forward: Forward, mesh: Any, rows: tuple[str, ...]) -> Forward:
    """`forward`, a layer's, in which causal attention runs as torch_xla's flash kernel, in all of a row or within its
    documents.

    Args:
        mesh: of torch_xla, over whose axes `rows` the batch is split; the kernel runs on each device's rows.

    A layer that keeps documents apart is given their numbers, integers `[batch, 1, 1, seq]`; the attention in it that
    is masked by nothing else has a bool mask. Other attention (any other mask, a window, a length that the kernel's
    blocks don't divide) stays torch's formula.
    """
    _use_readable_kernels()

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Flash(mesh, rows, next(filter(_is_documents, (*args, *kwargs.values())), None)):
            return forward(*args, **kwargs)

    return run


def _is_documents(argument: Any) -> bool:
    is_mask = isinstance(argument, Tensor) and argument.dim() == 4
    return is_mask and not argument.is_floating_point() and argument.dtype != torch.bool


class _Flash(TorchFunctionMode):
    def __init__(self, mesh: Any, rows: tuple[str, ...], documents: Tensor | None) -> None:
        super().__init__()
        self._mesh = mesh
        self._documents = documents
        self._partition = (rows, None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_documents = self._documents is not None
        if func is not F.scaled_dot_product_attention or not _fits(*args, has_documents=has_documents, **kwargs):
            return func(*args, **kwargs)
        from torch_xla.experimental.custom_kernel import flash_attention

        query, *keys_and_values = args[:3]
        groups, scale = query.shape[1] // keys_and_values[0].shape[1], kwargs.get("scale")
        has_mask = self._documents is not None and kwargs.get("attn_mask") is not None
        documents = cast(Tensor, self._documents)[:, 0, 0].to(torch.int32) if has_mask else None
        return cast(Any, flash_attention)(
            query,
            *(tensor.repeat_interleave(groups, dim=1) for tensor in keys_and_values),
            causal=True,
            q_segment_ids=documents,
            kv_segment_ids=documents,
            sm_scale=query.shape[-1] ** -0.5 if scale is None else scale,
            partition_spec=self._partition,
            mesh=self._mesh,
        )


def _fits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    has_documents: bool,
    **_: Any,
) -> bool:
    """Whether it is causal attention, perhaps within documents, of lengths that the kernel's blocks divide."""
    length = query.shape[-2]
    whole_blocks = length % 1024 == 0 or length in (128, 256, 512)
    causal = is_causal if attn_mask is None else has_documents and attn_mask.dtype == torch.bool
    return (
        causal
        and not dropout_p
        and query.dim() == 4
        and whole_blocks
        and key.shape[-2] == length
        and query.shape[-1] % 64 == 0
    )


def _use_readable_kernels() -> None:
    """Replace torch_xla's `trace_pallas` in this process, until a torch_xla fixes pytorch/xla issue 9614.

    torch_xla 2.9.0 lowers Pallas kernels with `jax.jit(...).lower`, whose format (version 8) the libtpu 0.0.21 that it
    pins refuses: "Failed to deserialize the Mosaic module [...] expected <= 7 but got 8". `jax.export` writes the older
    format, and lowers for TPUs on any host, so a plan holds the kernel of a run.
    """
    import torch_xla.experimental.custom_kernel

    cast(Any, torch_xla.experimental.custom_kernel).trace_pallas = _trace_pallas


_KERNELS: dict[tuple[Any, str], str] = {}  # lowered: a kernel has few shapes, and lowering one takes a second


def _trace_pallas(
    kernel: Callable[..., Any],
    *args: Any,
    static_argnums: Any = None,
    static_argnames: Any = None,
    use_cache: bool = False,
    **kwargs: Any,
) -> tuple[str, list[Tensor]]:
    """What XLA's custom call takes, and the tensors among `args`."""
    from torch_xla.experimental.custom_kernel import to_jax_shape_dtype_struct

    abstract = cast(Callable[[Tensor], Any], to_jax_shape_dtype_struct)
    shapes = [abstract(argument) if isinstance(argument, Tensor) else argument for argument in args]
    key = kernel, str((shapes, kwargs))
    if key not in _KERNELS:
        _KERNELS[key] = _lowered(kernel, static_argnums, static_argnames, shapes, kwargs)
    return _KERNELS[key], [argument for argument in args if isinstance(argument, Tensor)]


def _lowered(
    kernel: Callable[..., Any], static_argnums: Any, static_argnames: Any, args: list[Any], kwargs: dict[str, Any]
) -> str:
    import jax
    from jax import export
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    jitted = jax.jit(kernel, static_argnums=static_argnums, static_argnames=static_argnames)
    exported = export.export(jitted, platforms=["tpu"])(*args, **kwargs)
    with mlir.make_ir_context():
        module = cast(Any, ir.Module.parse(exported.mlir_module()))
        operations = [op for function in module.body.operations for op in function.regions[0].blocks[0].operations]
        return next(op.attributes["backend_config"].value for op in operations if op.name == "stablehlo.custom_call")
