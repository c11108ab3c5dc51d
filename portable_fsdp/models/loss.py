"""The loss: cross entropy summed over the counted labels, in float32, with no float32 copy of all logits.

Logits stay in the compute dtype. Each chunk of positions is upcast on its own, and its gradient is taken at once
and kept in the logits' dtype, so that the loss holds one logits-sized tensor until backward, never several.
"""

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
CHUNK_BYTES = 256 * 2**20  # float32 logits upcast at once, per process


def _chunks(logits: Tensor) -> list[tuple[int, int]]:
    """Bounds along the sequence; not along the batch, which is what is sharded over devices on XLA."""
    length = logits.shape[1]
    count = min(length, -(-logits.numel() * 4 // CHUNK_BYTES))
    step = -(-length // count)
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class _CrossEntropySum(torch.autograd.Function):
    """Takes the gradient chunk by chunk in forward (as Liger Kernel does, arXiv 2410.10989, section 3.2)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        gradient = torch.empty_like(logits)
        for start, stop in _chunks(logits):
            chunk = logits[:, start:stop].detach().requires_grad_()
            with torch.enable_grad():
                loss = _cross_entropy(chunk, labels[:, start:stop])
            gradient[:, start:stop] = torch.autograd.grad(loss, chunk)[0]
            total = total + loss.detach()
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        scale = cast(Tensor, outputs[0])
        gradient = cast(Tensor, ctx.gradient)
        del ctx.gradient  # in place below: a second backward would be wrong, so it has none
        return gradient.mul_(scale), None


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of all counted labels, and how many were counted.

    Args:
        logits: `[batch, seq, vocabulary]`, any float dtype.
        labels: `[batch, seq]` int64: the token after each position, or -100 where none counts.

    Returns: two float32 tensors without dimensions.
    """
    count = (labels != IGNORED).sum().float()
    if not torch.is_grad_enabled() or not logits.requires_grad:
        parts = [_cross_entropy(logits[:, start:stop], labels[:, start:stop]) for start, stop in _chunks(logits)]
        return torch.stack(parts).sum(), count
    return cast(Tensor, _CrossEntropySum.apply(logits, labels)), count


def attach_loss(model: nn.Module, output: torch.dtype | None = None) -> None:
    """Make `model(input_ids, labels)` return (loss_sum, token_count).

    The loss takes the logits in the dtype `output`; None: as the head gives them. The forward of this instance is
    replaced, so that the model stays its own root: no wrapper, no changed name.
    """

    def forward_with_loss(self: nn.Module, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = cast(Any, type(self)).forward(self, input_ids=input_ids, use_cache=False).logits
        return cross_entropy_sum(logits if output is None else logits.to(output), labels)

    model.forward = MethodType(forward_with_loss, model)
