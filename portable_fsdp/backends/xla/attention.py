"""Attention on TPUs: torch's scaled_dot_product_attention is given to the flash kernel, which keeps no scores.

XLA has no kernel of its own for it: torch's formula, which it would trace, holds scores of [rows, heads, seq, seq] in
float32, and computes their products in float32 too. Models stay as they are: what they call is caught.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from portable_fsdp.backends.xla.kernels import use_readable_kernels

Forward = Callable[..., Any]


def with_flash_attention(forward: Forward, mesh: Any, rows: tuple[str, ...]) -> Forward:
    """`forward`, a layer's, in which causal attention runs as torch_xla's flash kernel, in all of a row or within its
    documents.

    Args:
        mesh: of torch_xla, over whose axes `rows` the batch is split; the kernel runs on each device's rows.

    A layer that keeps documents apart is given their numbers, integers `[batch, 1, 1, seq]`; the attention in it that
    is masked by nothing else has a bool mask. Other attention (any other mask, a window, a length that the kernel's
    blocks don't divide) stays torch's formula.
    """
    use_readable_kernels()

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
        query, key, value = args[:3]
        documents = self._documents if kwargs.get("attn_mask") is not None else None
        return self._attend(query, key, value, kwargs.get("scale"), documents)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, documents: Tensor | None
    ) -> Tensor:
        from torch_xla.experimental.custom_kernel import flash_attention

        groups = query.shape[1] // key.shape[1]
        numbers = None if documents is None else documents[:, 0, 0].to(torch.int32)
        attend = cast(Callable[..., Tensor], flash_attention)
        return attend(
            query,
            key.repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            causal=True,
            q_segment_ids=numbers,
            kv_segment_ids=numbers,
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
    """Whether it is plain causal attention, perhaps within documents, in lengths that the kernel's blocks of up to 1024
    divide."""
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
