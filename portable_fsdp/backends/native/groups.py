"""The processes along an axis of the mesh, their collectives, and autograd functions of these; then the axes `context`
and `expert`, which need little more (`tensor` has a file), and the sums over replicas of weights that aren't sharded.

Along `context` processes get the same rows, and hold a part of their tokens. Attention gathers the keys and values of
whole rows, once a layer; its backward sums their gradients and scatters them. All other layers work on a token alone,
and positions are those of whole rows. Along `expert` each process holds a part of each layer's experts:
`models/experts.py` has the algorithm, which reads nothing on the host; this file has its all-to-all.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from portable_fsdp.attach import set_expert_groups
from portable_fsdp.backends.contract import Batch, ShardPolicy
from portable_fsdp.backends.state import parameter_slots, put_parameter
from portable_fsdp.layout import RowParts
from portable_fsdp.runtime.errors import BackendError, DataError


class Group:
    """The processes along an axis, and their collectives; `dim` is the dimension that they take parts of."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.index, self.count, self._group = group.rank(), group.size(), group

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum in place; returns the argument, contiguous."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Take the largest in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate."""
        tensor = tensor.movedim(dim, 0).contiguous()
        whole = tensor.new_empty((self.count * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_into_tensor(whole, tensor, group=self._group)
        return whole.movedim(0, dim).contiguous()

    def scatter_sum(self, tensor: Tensor, dim: int) -> Tensor:
        """Sum, and return the own part."""
        tensor = tensor.movedim(dim, 0).contiguous()
        part = tensor.new_empty((tensor.shape[0] // self.count, *tensor.shape[1:]))
        dist.reduce_scatter_tensor(part, tensor, group=self._group)
        return part.movedim(0, dim).contiguous()

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the own part of what each process has."""
        return tensor.chunk(self.count, dim)[self.index].contiguous()

    def exchange(self, tensor: Tensor, _: int) -> Tensor:
        """Exchange equal parts of dimension 0."""
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, tensor.contiguous(), group=self._group)
        return received

    def copied(self, tensor: Tensor, _: int) -> Tensor:
        return tensor.view_as(tensor)

    def summed(self, tensor: Tensor, _: int) -> Tensor:
        return self.sum(tensor.clone(memory_format=torch.contiguous_format))


class _Crossing(torch.autograd.Function):
    """One collective in forward, another in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int, there: Any, back: Any) -> Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim, back
        return there(group, tensor, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(ctx.group, gradients[0], ctx.dim), None, None, None, None


def _crossing(tensor: Tensor, group: Group, dim: int, there: Any, back: Any) -> Tensor:
    return cast(Tensor, _Crossing.apply(tensor, group, dim, there, back))


def enter(tensor: Tensor, group: Group, dim: int | None) -> Tensor:
    """Megatron's f: the input of split weights; `dim`: the dimension of which each process holds a part, if any."""
    kind = type(group)
    there, back = (kind.copied, kind.summed) if dim is None else (kind.gather, kind.scatter_sum)
    return _crossing(tensor, group, dim or 0, there, back)


def leave(tensor: Tensor, group: Group, dim: int | None) -> Tensor:
    """Megatron's g: the sum of what split weights gave; `dim`: keep a part of that dimension only."""
    kind = type(group)
    there, back = (kind.summed, kind.copied) if dim is None else (kind.scatter_sum, kind.gather)
    return _crossing(tensor, group, dim or 0, there, back)


def gather(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Make parts whole, for what each process computes alike."""
    return _crossing(tensor, group, dim, type(group).gather, type(group).part)


def split(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Take the own part of what each process has."""
    return _crossing(tensor, group, dim, type(group).part, type(group).gather)


def exchange(group: Group, tensor: Tensor) -> Tensor:
    """Exchange equal parts of dimension 0, and their gradients."""
    return _crossing(tensor, group, 0, type(group).exchange, type(group).exchange)


# ------------------------------------------------------------------------------------------------- the axis `context`

_OF_TOKENS = ("input_ids", "labels", "positions", "is_last")
"""The tensors of a batch that are split; `segments` stay whole, since queries see the documents of all keys."""


def gather_tokens(group: Group, tokens: Tensor) -> Tensor:
    """Implement `RowParts.gather` for the processes that split a row."""
    first, second = enter(tokens, group, 0).unflatten(0, (group.count, 2, -1)).unbind(1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


def split_tokens(batch: Batch, parts: RowParts) -> Batch:
    """Cut the rows of a batch of text on the host, and add their positions. Raises DataError for a length that the
    devices don't divide."""
    if (ids := batch.get("input_ids")) is None:
        return batch
    length = ids.shape[1]
    if length % (2 * parts.count):
        raise DataError(
            f"sharding.context={parts.count}: expected rows whose tokens are a multiple of {2 * parts.count}, found "
            f"{length}.\n  Pad the rows (data.buckets), or set sharding.context=1."
        )
    if "segments" not in batch:  # else positions may restart
        batch = {**batch, "positions": torch.arange(length).expand_as(ids)}
    own = torch.tensor(parts.positions(length))
    return {name: value[:, own] if name in _OF_TOKENS else value for name, value in batch.items()}


# -------------------------------------------------------------------------------------------------- the axis `expert`


def distribute_experts(model: nn.Module, policy: ShardPolicy, group: Group, shards: int) -> None:
    """Replace the weights of experts, on meta, by the part of this process in `group`, and let them exchange rows.

    Runs after the axis `tensor` has split them. `shards`: devices over which FSDP shards each part, along dimension 1.
    Raises BackendError if they don't divide it.
    """
    for fqn, slots in parameter_slots(model).items():
        if fqn.rpartition(".")[0] in policy.experts:
            weight = model.get_parameter(fqn)
            if weight.shape[1] % shards:
                raise BackendError(
                    f"backend native: sharding.expert: {fqn} {[*weight.shape]}: FSDP shards its dimension 1 over "
                    f"{shards} devices, which don't divide {weight.shape[1]}.\n  Use another number of devices, or "
                    "another sharding.expert."
                )
            own = weight.new_empty((len(weight) // group.count, *weight.shape[1:]))
            put_parameter(slots, own, weight.requires_grad)
    assert policy.process_experts is not None
    groups = policy.process_experts(group.count, policy.expert_capacity, partial(exchange, group))
    set_expert_groups(model, policy.experts, groups)


# ----------------------------------------------------------------------------------------------------------- replicas

# The bucket_cap_mb of torch's DistributedDataParallel: large enough for a link, small enough to start early.
BUCKET_BYTES = 25 * 2**20
SUMS = "portable_fsdp::sum_gradients"
"""A section of a profile, which the planner recognizes."""


class GradientSums:
    """Sums the gradients of replicas during backward, in buckets that have the same order on all replicas.

    A replica adds zeros for a weight that its rows don't use; a weight that no replica uses gets no gradient.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.parameters, self._group, self._dtype = parameters, group, dtype
        self._buckets: list[list[nn.Parameter]] = []
        self._missing: list[set[nn.Parameter]] = []  # parameters of each bucket without a gradient yet
        self._under_way: list[Callable[[], None]] = []  # each waits for the sum of a bucket
        self._started: int | None = None  # number of buckets; None: no sum begins when a gradient arrives
        self._hooks: list[RemovableHandle] = []
        size = BUCKET_BYTES
        for parameter in reversed(parameters):  # backward reaches roughly the last weights first
            if size >= BUCKET_BYTES:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(parameter)
            size += parameter.numel() * dtype.itemsize
            note = partial(self._note, len(self._buckets) - 1)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(note))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def summing(self, *, overlap: bool) -> Generator[None]:
        """Context of the last micro batch; on exit the gradients are the sums. `overlap`: begin during its only
        backward; else it may have several."""
        self._missing, self._started = [set(bucket) for bucket in self._buckets], 0 if overlap else None
        try:
            yield
            self._started = self._started or 0
            while self._started < len(self._buckets):
                self._start_next()
            for finish in self._under_way:
                finish()
        finally:
            self._started = None
            self._under_way.clear()

    def _note(self, bucket: int, parameter: Tensor) -> None:
        if self._started is None:
            return
        if parameter not in self._missing[bucket]:
            raise BackendError(
                "backend native: a weight got a second gradient in the last micro batch, in which replicas sum "
                "gradients in one backward.\n  Add up the losses, or leave the model out of accumulate(True, model)."
            )
        self._missing[bucket].remove(cast(nn.Parameter, parameter))
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start_next()

    def _start_next(self) -> None:
        assert self._started is not None
        bucket = self._buckets[self._started]
        self._started += 1
        unused = [number for number, parameter in enumerate(bucket) if parameter.grad is None]
        with record_function(SUMS):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            users = gradients[0].new_ones(len(bucket), dtype=self._dtype)  # once summed: replicas with a gradient
            for number in unused:
                users[number].zero_()
            flat = torch.cat([*(gradient.flatten().to(self._dtype) for gradient in gradients), users])
            for parameter, part in zip(bucket, _parts(flat, bucket), strict=True):
                # This frees the old gradient's memory; in another dtype the new one is created when the sum is there.
                parameter.grad = part if part.dtype == parameter.dtype else None
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._under_way.append(partial(self._finish, work, flat, bucket, unused))

    def _finish(self, work: Any, flat: Tensor, bucket: list[nn.Parameter], unused: list[int]) -> None:
        """Wait for `flat`: a bucket's summed gradients, then the number of replicas that have each. `unused`: those
        that this replica doesn't have."""
        work.wait()
        for parameter, part in zip(bucket, _parts(flat, bucket), strict=True):
            parameter.grad = part.to(parameter.dtype)
        if unused:  # the host waits for the device; in a plan values are unknown, and replicas are alike
            users = [0.0] * len(bucket) if isinstance(flat, FakeTensor) else flat[-len(bucket) :].tolist()
            for number in unused:
                if not users[number]:
                    bucket[number].grad = None


def _parts(flat: Tensor, bucket: list[nn.Parameter]) -> list[Tensor]:
    """Return views of `flat` with the shapes of the parameters."""
    sizes = [parameter.numel() for parameter in bucket]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view_as(parameter) for part, parameter in zip(parts, bucket, strict=True)]
