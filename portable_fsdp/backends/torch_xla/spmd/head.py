"""A model's head and loss on XLA by chunks of each device's positions: the logits of all tokens never exist.

Each device runs its chunks by itself (XLA's manual sharding), computes their gradients at once, and adds up its
gradient of the weight. The weight is gathered once, its gradient summed over devices once. Forward computes both loss
and gradients.
"""

# pyright: reportPrivateUsage=false

from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.backends.torch_xla.spmd.scatter import Scatter, off_devices, on_devices, product_in, scattered

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

    `loss_input`: labels, and how the model computes its loss from logits: `models.loss.LossInput`. Gradients as in
    `sums._Linear`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, weight_copy: Tensor, loss_input: Any, scatter: Scatter
    ) -> Tensor:
        import torch_xla

        barrier = cast(Any, torch_xla)._XLAC._xla_optimization_barrier_
        devices = scatter.replicas * scatter.parts
        own, labels = on_devices(hidden, scatter), on_devices(loss_input.labels, scatter)
        copy = on_devices(weight_copy, scatter, whole=True)
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
        gradients = [off_devices(torch.cat(of_hidden, 1), hidden.shape, scatter), scattered(of_weight, scatter)]
        barrier(gradients)  # the backward of layers
        ctx.gradients = gradients
        return off_devices(loss, (devices,), scatter).sum()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        # In float32: the loss's scale, 1 / tokens, must not be rounded to bfloat16.
        of_hidden, of_weight = ((gradient.float() * outputs[0]).to(gradient.dtype) for gradient in ctx.gradients)
        return of_hidden, of_weight, None, None, None
