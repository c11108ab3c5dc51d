"""Tensor parallelism on local tensors: each process holds plain parameters, its parts of the weights, and its modules
run Megatron-LM's f and g (arXiv 1909.08053, section 3), autograd functions over the processes of the axis `tensor`.

FSDP2 shards the parts over `shard` as it shards whole weights. No DTensor holds activations: torch 2.9 computes them
slower, and wrongly where weights are tied.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import signature
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from portable_fsdp.attach import change_attributes
from portable_fsdp.backends.contract import Forward, KeyedDraws
from portable_fsdp.backends.native.groups import Group, enter, gather, leave, split
from portable_fsdp.backends.native.units import forward_of, local_part
from portable_fsdp.backends.state import parameter_slots, put_parameter
from portable_fsdp.layout import rows_of_shard
from portable_fsdp.tensor_plan import (
    COLWISE,
    EXPERTS,
    GATHERED,
    PACKED,
    ROWWISE,
    SPLIT_INPUT,
    TensorPlan,
    split_ranges,
)

_BARRIER_TIMEOUT_S = 60.0  # of the threads of a trial

# ------------------------------------------------------------------------------------------------------------ modules


def split_model(model: Any, plan: TensorPlan, group: Group, draws: KeyedDraws | None = None) -> None:
    """Replace weights on meta by this process's parts, and forwards by those that cross the group where `plan` says."""
    replace = _replacing()
    outside = group.index if plan.splits_rows else None  # the part of the tokens between blocks
    if draws is not None:
        draws.chunk = outside
    if plan.embedding:
        _split_vocabulary(model, plan, group, replace)
    for fqn, slots in parameter_slots(model).items():
        if (part := plan.parts.get(fqn)) is not None:
            weight = model.get_parameter(fqn)
            shape = [*weight.shape]
            shape[part.dim] = sum(own.stop - own.start for own in split_ranges(part.sizes, group.index, group.count))
            put_parameter(slots, weight.new_empty(shape), weight.requires_grad)
    for name, values in plan.attributes.items():
        change_attributes(model.get_submodule(name), values)
    for name, word in plan.words.items():
        module = model.get_submodule(name)
        layer = getattr(module, "base_layer", module)
        if name in plan.whole_heads:
            replace(module, _own_head, group, *plan.whole_heads[name])
        elif word == GATHERED:
            replace(module, _gathered, group)
        elif word in (ROWWISE, SPLIT_INPUT):
            if layer._parameters.get("bias") is not None:
                replace(layer, _without_bias)
            replace(module, _summed, group, plan.splits_rows, word == SPLIT_INPUT)
        part = plan.parts.get(f"{name}.base_layer.weight") or plan.parts.get(f"{name}.weight")
        if draws is not None and part is not None:
            table = layer.quantised.tables["weight"] if hasattr(layer, "quantised") else None
            # A part along the last dimension counts a table's rows, dropout counts features.
            unit = 1 if table is None or part.dim < len(table.shape) - 1 else table.unit
            own = group.index, split_ranges(part.sizes, group.index, group.count)[0].start * unit
            takes_part = word in (ROWWISE, SPLIT_INPUT)
            after = (outside if takes_part else None), (own if word in (COLWISE, PACKED) else None)
            replace(module, _placed, draws.move, (None, own if takes_part else None), after)
        elif draws is not None and layer is not module:
            replace(module, _whole, draws.move)
        if isinstance(getattr(layer, "nf", None), int):  # transformers' Conv1D: its outputs
            change_attributes(layer, {"nf": layer.weight.shape[1]})
    for name in plan.blocks:
        is_experts = plan.words.get(name) == EXPERTS
        replace(model.get_submodule(name), _experts if is_experts else _block, group, plan.splits_rows)
    whole_blocks = plan.whole_blocks if plan.splits_rows else ()
    for name in whole_blocks:
        replace(model.get_submodule(name), _whole_block, group)
    if draws is not None:
        for name in (*plan.blocks, *whole_blocks):
            replace(model.get_submodule(name), _placed, draws.move, (None, None), (outside, None))
    if plan.splits_rows:
        first, last = (model.get_submodule(plan.layers[at]) for at in (0, -1))
        first.register_forward_pre_hook(
            lambda _, args, kwargs: _with_hidden(args, kwargs, lambda hidden: split(hidden, group, 1)), with_kwargs=True
        )
        last.register_forward_hook(lambda _, __, out: _on_hidden(out, lambda hidden: gather(hidden, group, 1)))


def _split_vocabulary(model: Any, plan: TensorPlan, group: Group, replace: Callable[..., None]) -> None:
    embedding, head = model.get_submodule(plan.embedding), model.get_submodule(plan.head)
    vocabulary = embedding.weight.shape[0]
    words = rows_of_shard(vocabulary, group.index, group.count)
    padding = embedding.padding_idx
    own_padding = padding - words.start if padding in range(words.start, words.stop) else None
    change_attributes(embedding, {"padding_idx": own_padding})
    replace(embedding, _look_up, group, words.start)
    replace(head, _head, group, words.start, vocabulary)


def _replacing() -> Callable[..., None]:
    """Return a function that replaces the forward of a module by `run(forward, *settings, module, ...)`; equal modules
    get the same, so that torch.compile makes one program for them."""

    @cache
    def made(run: Forward, *settings: Any) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(*settings, *args, **kwargs)

        # torch.compile counts recompilations by code object, so each has its own.
        forward.__code__ = forward.__code__.replace(co_name=run.__name__)
        cast(Any, forward).__signature__ = signature(partial(run, *settings))  # a head's has `loss_input`
        return forward

    def replace(module: Any, run: Forward, *settings: Any) -> None:
        module.forward = MethodType(made(run, forward_of(module), *settings), module)

    return replace


def _placed(
    forward: Forward,
    move: Callable[..., Any],
    before: tuple[Any, Any],
    after: tuple[Any, Any],
    self: nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Tell dropout which part of positions and features a module takes, and which it leaves."""
    move(*before)
    out = forward(self, *args, **kwargs)
    move(*after)
    return out


def _whole(forward: Forward, move: Callable[..., Any], self: nn.Module, hidden: Tensor) -> Tensor:
    """Let an adapter of a whole weight drop whole inputs, between modules that leave parts."""
    chunk, part = move(None, None)
    move(chunk, None)
    out = forward(self, hidden)
    move(chunk, part)
    return out


def _own_head(forward: Forward, group: Group, heads: int, width: int, self: nn.Module, hidden: Tensor) -> Tensor:
    start = group.index * heads // group.count * width
    return forward(self, hidden)[..., start : start + width]


def _gathered(forward: Forward, group: Group, self: nn.Module, hidden: Tensor) -> Tensor:
    return gather(forward(self, hidden), group, -1)


def _without_bias(forward: Forward, self: Any, hidden: Tensor) -> Tensor:
    if hasattr(self, "quantised"):
        return forward(self, hidden, with_bias=False)
    return hidden @ self.weight if hasattr(self, "nf") else F.linear(hidden, self.weight)


def _summed(forward: Forward, group: Group, splits_rows: bool, splits_input: bool, self: Any, hidden: Tensor) -> Tensor:
    part = forward(self, split(hidden, group, -1) if splits_input else hidden)
    out = leave(part, group, part.dim() - 2 if splits_rows else None)
    bias = getattr(self, "base_layer", self)._parameters.get("bias")
    return out if bias is None else out + bias


def _block(forward: Forward, group: Group, splits_rows: bool, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _with_hidden(
        args, kwargs, lambda hidden: enter(hidden, group, hidden.dim() - 2 if splits_rows else None)
    )
    return forward(self, *args, **kwargs)


def _experts(
    forward: Forward, group: Group, splits_rows: bool, self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """`forward(hidden [tokens, width], chosen experts [tokens, k], their weights [tokens, k])`."""
    dim = 0 if splits_rows else None
    chosen = group.gather(chosen, 0) if splits_rows else chosen
    return leave(forward(self, enter(hidden, group, dim), chosen, enter(weights, group, dim)), group, dim)


def _whole_block(forward: Forward, group: Group, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Attention that the plan leaves whole: each process computes it for whole rows."""
    args, kwargs = _with_hidden(args, kwargs, lambda hidden: gather(hidden, group, 1))
    return _on_hidden(forward(self, *args, **kwargs), lambda hidden: split(hidden, group, 1))


def _with_hidden(args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """Change the hidden states among a module's arguments: the first one."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _on_hidden(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


# --------------------------------------------------------------------------------------------------------- vocabulary


def _look_up(forward: Forward, group: Group, first: int, self: Any, input: Tensor) -> Tensor:
    """The embedding's own forward (Gemma's scales) on the words of this process; others give 0."""
    own, count = input - first, self.weight.shape[0]
    is_own = (own >= 0) & (own < count)
    embedded = forward(self, own.clamp(0, count - 1))
    return leave(torch.where(is_own[..., None], embedded, 0.0), group, None)


def _head(
    forward: Forward, group: Group, first: int, vocabulary: int, self: Any, hidden: Tensor, loss_input: Any = None
) -> Tensor:
    """The loss of the logits of this process's words, in chunks; without `loss_input` the logits of all words."""
    hidden, plain = enter(hidden, group, None), MethodType(forward, self)
    if loss_input is not None:
        loss = loss_input.by_chunks(self, plain, hidden, partial(vocabulary_loss, group, first))
        if loss is not None:
            return loss
    logits = plain(hidden)
    padding = -(-vocabulary // group.count) - logits.shape[-1]  # where the processes don't divide the vocabulary
    return gather(F.pad(logits, (0, padding)) if padding else logits, group, -1)[..., :vocabulary]


def vocabulary_loss(group: Group, first: int, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of logits `[positions, words of this process]`, and its gradient.

    As `cross_entropy_with_gradient`, with three numbers a position summed over the group. `first`: the id of the first
    word.
    """
    exact = logits.float()
    largest = group.max(exact.amax(dim=-1))
    powers = (exact - largest[:, None]).exp()
    own, counted = labels - first, (labels >= 0)[:, None]
    is_own = (own >= 0) & (own < logits.shape[1])
    at = own.clamp(0, logits.shape[1] - 1)[:, None]
    of_label = torch.where(is_own, exact.gather(1, at)[:, 0], 0.0)
    total, of_label = group.sum(torch.stack([powers.sum(dim=-1), of_label])).unbind()
    loss = torch.where(counted[:, 0], total.log() + largest - of_label, 0.0).sum()
    gradient = powers.div_(total[:, None]).scatter_add_(1, at, -is_own.float()[:, None])
    return loss, gradient.mul_(counted).to(logits.dtype)


# --------------------------------------------------------------------------------------------------------- gradients


def sum_gradients(model: nn.Module, plan: TensorPlan, group: Group) -> list[nn.Parameter]:
    """Sum the gradients of `plan.summed`, in one collective for each dtype: each process has a part of them. Returns
    their weights."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    weights = [w for fqn, w in model.named_parameters() if fqn in plan.summed and w.grad is not None]
    for weight in weights:
        if (own := local_part(cast(Tensor, weight.grad))).numel():
            kinds.setdefault(own.dtype, []).append(own)
    for gradients in kinds.values():
        flat = group.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
    return weights


# ------------------------------------------------------------------------------------------------------------- trials


class _ThreadGroup(Group):
    """The collectives of a trial: each device is a thread of this process."""

    def __init__(self, index: int, count: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.index, self.count, self._slots, self._barrier = index, count, slots, barrier

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all devices, in order. Blocks until each device has read them."""
        self._slots[self.index] = tensor.detach().clone()
        self._barrier.wait(_BARRIER_TIMEOUT_S)
        tensors = [*self._slots]
        self._barrier.wait(_BARRIER_TIMEOUT_S)
        return tensors

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._all(tensor)).sum(dim=0))

    def max(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._all(tensor)).amax(dim=0))

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._all(tensor), dim)

    def scatter_sum(self, tensor: Tensor, dim: int) -> Tensor:
        return self.part(self.sum(tensor.clone()), dim)


def run_parts(copies: Sequence[nn.Module], plan: TensorPlan, run: Callable[[nn.Module], Tensor]) -> Tensor:
    """Split equal copies of a small model on the host, one for each device, and run them at once in threads.

    Returns what `run` returned for the first copy; the copies keep their gradients, summed as a step does. Raises the
    first error of a thread.
    """
    slots, barrier, errors = [None] * len(copies), threading.Barrier(len(copies)), dict[int, Exception]()
    results: dict[int, Tensor] = {}

    def work(index: int, model: nn.Module) -> None:
        group = _ThreadGroup(index, len(copies), slots, barrier)
        whole = {fqn: model.get_parameter(fqn) for fqn in plan.parts}
        try:
            split_model(model, plan, group)
            with torch.no_grad():
                for fqn, weight in whole.items():
                    model.get_parameter(fqn).copy_(plan.part_of(fqn, weight, index))
            results[index] = run(model)
            sum_gradients(model, plan, group)
        except Exception as error:
            errors[index] = error
            barrier.abort()

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors.values(), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results[0]
