"""The loss: cross entropy summed over the counted labels, in float32, with no float32 copy of all logits.

Logits stay in the compute dtype. The loss upcasts one chunk of positions at a time, computes its gradient at once, and
writes that over the logits: beside them it holds a chunk. An engine that compiles the whole step fuses the upcast
itself and takes all positions at once: chunks would cost it a copy of all logits each (8B on v5p:2x2x4, 4 layers: 87.7
GiB of temporaries, not 3.2).
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits, labels) -> (sum over the counted labels, their number), with the shapes of `cross_entropy_sum`."""

DocumentArguments = Callable[[Tensor, Tensor | None, Tensor | None], dict[str, Any]]
"""(input_ids, positions, segments), int64 `[batch, seq]` -> further arguments of the model's forward."""

_VIEWS = ("UnsafeView", "View", "Slice")
# Their backwards don't read what they returned.
_KEEP_NO_OUTPUT = ("Mm", "Addmm", "Linear", "Add", "Mul", "Div", "ToCopy")

CHUNK_BYTES = 256 * 2**20  # float32 logits upcast at once, per process
FLOAT16_GAIN = 2.0**15
"""Gradients of float16 logits, -1 to 1, are kept times this: forward knows no loss scale, and float16 nothing below
6e-8, less than which most of a large vocabulary has."""


def _chunks(logits: Tensor, chunked: bool) -> list[tuple[int, int]]:
    """Bounds along the sequence."""
    length = logits.shape[1]
    count = min(length, -(-logits.numel() * 4 // CHUNK_BYTES)) if chunked else 1
    step = -(-length // count)
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class _CrossEntropySum(torch.autograd.Function):
    """Computes the gradient chunk by chunk in forward (as Liger Kernel does, arXiv 2410.10989, section 3.2)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunked: bool) -> Tensor:
        bounds = _chunks(logits, chunked)
        if len(bounds) == 1:
            total, ctx.gradient = _with_gradient(logits, labels)
            return total
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        ctx.gradient = torch.empty_like(logits) if _may_be_kept(logits) else logits.detach()
        for start, stop in bounds:
            loss, ctx.gradient[:, start:stop] = _with_gradient(logits[:, start:stop], labels[:, start:stop])
            total = total + loss
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        scale = cast(Tensor, outputs[0])
        gradient = cast(Tensor, ctx.gradient)
        del ctx.gradient  # in place below: a second backward would be wrong, so it has none
        if gradient.dtype == torch.float16:
            scale = scale / FLOAT16_GAIN
        return gradient.mul_(scale), None, None


def _may_be_kept(logits: Tensor) -> bool:
    """Whether the backward of what made the logits, perhaps through views, may read them: as tanh's does."""
    node: Any = logits.grad_fn
    name = ""
    while node is not None and (name := type(node).__name__.removesuffix("Backward0")) in _VIEWS:
        node = node.next_functions[0][0]
    return node is None or name not in _KEEP_NO_OUTPUT


def _with_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        loss = _cross_entropy(leaf, labels)
        kept = loss * FLOAT16_GAIN if logits.dtype == torch.float16 else loss
    return loss.detach(), torch.autograd.grad(kept, leaf)[0]


def cross_entropy_sum(logits: Tensor, labels: Tensor, chunked: bool = True) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of all counted labels, and how many were counted.

    Args:
        logits: `[batch, seq, vocabulary]`, any float dtype.
        labels: `[batch, seq]` int64: the token after each position, or -100 where none counts.
        chunked: take CHUNK_BYTES of logits at a time, where nothing fuses the upcast with what follows.

    Returns: two float32 tensors without dimensions.
    """
    count = (labels != IGNORED).sum().float()
    if not torch.is_grad_enabled() or not logits.requires_grad:
        parts = [
            _cross_entropy(logits[:, start:stop], labels[:, start:stop]) for start, stop in _chunks(logits, chunked)
        ]
        return torch.stack(parts).sum(), count
    return cast(Tensor, _CrossEntropySum.apply(logits, labels, chunked)), count


def attach_loss(
    model: nn.Module,
    output: torch.dtype | None = None,
    chunked: bool = True,
    loss: Loss | None = None,
    documents: DocumentArguments | None = None,
) -> None:
    """Make `model(input_ids, labels, positions, segments)` return (loss_sum, token_count) of `loss`, or else of
    `cross_entropy_sum`.

    The loss takes the logits in the dtype `output`; None: the head's own. `positions` and `segments`, int64 `[batch,
    seq]`, tell the documents of a row apart; `documents` turns them into arguments of the model's forward. Without it
    they are unused: a row's only document comes first, and sees nothing of the padding behind it. Without labels the
    forward returns the logits, `[batch, seq, vocabulary]`. This replaces the forward of this instance, so that the
    model stays its own root: no wrapper, no changed name.
    """

    loss = loss or partial(cross_entropy_sum, chunked=chunked)

    def forward_with_loss(
        self: nn.Module,
        input_ids: Tensor,
        labels: Tensor | None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        more = {} if documents is None else documents(input_ids, positions, segments)
        logits: Tensor = cast(Any, type(self)).forward(self, input_ids=input_ids, use_cache=False, **more).logits
        return logits if labels is None else loss(logits if output is None else logits.to(output), labels)

    model.forward = MethodType(forward_with_loss, model)
