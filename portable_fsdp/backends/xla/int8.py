"""Products of int8 numbers on XLA: s8 operands and an s32 result; each row of both is scaled anew in each product."""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """[..., inputs] and [outputs, inputs] -> [..., outputs] in the dtype of x, without gradients."""
    return cast(Tensor, _operator()(x, weight))


@cache
def _operator() -> Any:
    """One operator, so that `scan` can trace it."""

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
    """Whole numbers up to 127, and what to multiply each row by; a row of zeros stays one."""
    scales = tensor.abs().amax(-1, keepdim=True).float().clamp(min=1e-30) / 127
    return (tensor / scales).round().to(torch.int8), scales
