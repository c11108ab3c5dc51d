"""Products of int8 numbers on XLA: s8 operands, an s32 result, scales of rows on both sides, taken anew each time."""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

LARGEST = 127


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """[..., inputs] and [outputs, inputs] -> [..., outputs] in the dtype of x, without gradients."""
    return cast(Tensor, _operator()(x, weight))


@cache
def _operator() -> Any:
    """One operator, so that `scan` can trace it: torch has no name for such a product."""

    @torch.library.custom_op("portable_fsdp::int8_product", mutates_args=())
    def product(x: Tensor, weight: Tensor) -> Tensor:
        import torch_xla

        rows, scales = _rounded(x)
        columns, factors = _rounded(weight)
        dimensions = ([x.dim() - 1], [1]), ([], [])
        sums = cast(Any, torch_xla)._XLAC._xla_dot_general(rows, columns, dimensions, None, torch.int32)
        return (sums.float() * scales * factors.squeeze(-1)).to(x.dtype)

    def shape_of(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], len(weight)))

    product.register_fake(shape_of)
    return product


def _rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers up to LARGEST, and by how much to multiply each row; rows of zeros stay zero."""
    scales = tensor.abs().amax(-1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return (tensor / scales).round().to(torch.int8), scales
