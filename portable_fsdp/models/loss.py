"""The loss: cross entropy summed over the counted labels, in float32, with no float32 copy of all logits.

`head_loss.py` takes it without logits of all tokens where it can. Here they exist, in the compute dtype. The loss
upcasts one chunk of positions at a time, computes its gradient at once, and writes that over the logits: beside them it
holds a chunk. An engine that compiles the whole step fuses the upcast itself and takes all positions at once: chunks
would cost it a copy of all logits each (8B on v5p:2x2x4, 4 layers: 87.7 GiB of temporaries, not 3.2).
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
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


def chunks(positions: int, logits: int) -> list[tuple[int, int]]:
    """Bounds that cut `positions`, which have `logits` logits in all, into even chunks of CHUNK_BYTES at most."""
    step = -(-positions // min(positions, -(-logits * 4 // CHUNK_BYTES)))
    return [(start, min(start + step, positions)) for start in range(0, positions, step)]


def _chunks(logits: Tensor, chunked: bool) -> list[tuple[int, int]]:
    """Bounds along the sequence."""
    return chunks(logits.shape[1], logits.numel()) if chunked else [(0, logits.shape[1])]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    exact, labels = logits.float().flatten(0, 1), labels.flatten()
    if logits.device.type != "xla":
        return F.cross_entropy(exact, labels, ignore_index=IGNORED, reduction="sum")
    # torch_xla's own keeps float32 one-hot labels as large as the logits. XLA fuses this comparison instead.
    is_label = labels[:, None] == torch.arange(exact.shape[1], device=exact.device)
    of_label = torch.where(is_label, exact, 0.0).sum(dim=-1)
    return torch.where(labels != IGNORED, exact.logsumexp(dim=-1) - of_label, 0.0).sum()


class _CrossEntropySum(torch.autograd.Function):
    """Computes the gradient chunk by chunk in forward (as Liger Kernel does, arXiv 2410.10989, section 3.2)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunked: bool) -> Tensor:
        bounds = _chunks(logits, chunked)
        if len(bounds) == 1:
            total, ctx.gradient = with_gradient(logits, labels)
            return total
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        ctx.gradient = torch.empty_like(logits) if _may_be_kept(logits) else logits.detach()
        for start, stop in bounds:
            loss, ctx.gradient[:, start:stop] = with_gradient(logits[:, start:stop], labels[:, start:stop])
            total = total + loss
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        scale = cast(Tensor, outputs[0])
        gradient = cast(Tensor, ctx.gradient)
        del ctx.gradient  # in place below: a second backward would be wrong, so it has none
        if gradient.dtype == torch.float16:
            scale = scale / FLOAT16_GAIN
        return scaled(gradient, scale, out=gradient), None, None


def scaled(gradient: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """`gradient` times a float32 tensor without dimensions, into `out` of its dtype.

    On a GPU torch rounds such a factor to the gradient's dtype first, in float16 perhaps to 0. With a dimension it
    doesn't.
    """
    return torch.mul(gradient, scale.reshape(1) if gradient.is_cuda else scale, out=out)


def _may_be_kept(logits: Tensor) -> bool:
    """Whether the backward of what made the logits, perhaps through views, may read them: as tanh's does."""
    node: Any = logits.grad_fn
    name = ""
    while node is not None and (name := type(node).__name__.removesuffix("Backward0")) in _VIEWS:
        node = node.next_functions[0][0]
    return node is None or name not in _KEEP_NO_OUTPUT


def with_gradient(
    logits: Tensor, labels: Tensor, change: Callable[[Tensor], Tensor] = lambda logits: logits
) -> tuple[Tensor, Tensor]:
    """The summed cross entropy of changed logits without a graph, and its gradient for `logits` in their dtype."""
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        loss = _cross_entropy(change(leaf), labels)
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


def cross_entropy_with_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross entropy of logits [positions, vocabulary] without a graph, and its gradient in their dtype.

    Beside the logits it holds two float32 tensors of their size.
    """
    largest, at_largest = logits.max(dim=-1, keepdim=True)
    probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)
    # The largest one is 1 / vocabulary at least, so that its logarithm is exact; a label's own may be 0.
    log_sums = largest - probabilities.gather(1, at_largest).log()
    counted, at = (labels != IGNORED)[:, None], labels.clamp(min=0)[:, None]
    loss = torch.where(counted, log_sums - logits.gather(1, at), 0.0).sum()
    gradient = probabilities.scatter_(1, at, probabilities.gather(1, at) - 1)
    return loss, torch.mul(gradient, counted, out=gradient if logits.dtype == gradient.dtype else logits.new_empty(0))


def cross_entropy_to_compile(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same as one formula without writes in place, which a compiler fuses: it reads logits and writes gradients."""
    counted, at = (labels != IGNORED)[:, None], labels.clamp(min=0)[:, None]
    exact = logits.float()
    log_sums = exact.logsumexp(dim=-1, keepdim=True)
    loss = torch.where(counted, log_sums - exact.gather(1, at), 0.0).sum()
    is_label = at == torch.arange(logits.shape[1], device=logits.device)
    return loss, ((exact - log_sums).exp().sub(is_label.float()) * counted).to(logits.dtype)
