"""Attention on TPUs: torch's scaled_dot_product_attention is given to the flash kernel, which keeps no scores.

XLA has no kernel of its own for it: torch's formula, which it would trace, holds scores of [rows, heads, seq, seq] in
float32, and computes their products in float32 too. Models stay as they are: what they call is caught.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from portable_fsdp.backends.xla.kernels import use_readable_kernels

Forward = Callable[..., Any]


def with_flash_attention(forward: Forward, mesh: Any, rows: tuple[str, ...]) -> Forward:
    """`forward` in which causal attention without a mask runs as torch_xla's flash kernel.

    Args:
        mesh: of torch_xla, over whose axes `rows` the batch is split; the kernel runs on each device's rows.

    Other attention (a mask, a window, a length that the kernel's blocks don't divide) stays torch's formula.
    """
    use_readable_kernels()

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Flash(mesh, rows):
            return forward(*args, **kwargs)

    return run


class _Flash(TorchFunctionMode):
    def __init__(self, mesh: Any, rows: tuple[str, ...]) -> None:
        super().__init__()
        self._mesh = mesh
        self._partition = (rows, None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not _fits(*args, **kwargs):
            return func(*args, **kwargs)
        query, key, value = args[:3]
        return self._attend(query, key, value, kwargs.get("scale"))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        from torch_xla.experimental.custom_kernel import flash_attention

        groups = query.shape[1] // key.shape[1]
        attend = cast(Callable[..., Tensor], flash_attention)
        return attend(
            query,
            key.repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            causal=True,
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
    **_: Any,
) -> bool:
    """Whether it is plain causal attention, in lengths that the kernel's blocks of up to 1024 divide."""
    length = query.shape[-2]
    whole_blocks = length % 1024 == 0 or length in (128, 256, 512)
    plain = is_causal and attn_mask is None and not dropout_p and query.dim() == 4
    return plain and whole_blocks and key.shape[-2] == length and query.shape[-1] % 64 == 0
