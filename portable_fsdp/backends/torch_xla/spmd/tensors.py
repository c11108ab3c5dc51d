"""The tensors and programs of an XLA step, on a mesh of devices; or on none, for a plan of absent devices.

`XlaBackend` works on either; `plan/tpu_trace.py` has the latter. A tensor is split by rows of the batch, sharded like a
weight, or replicated.
"""

# Shards are reached through torch_xla's private bridge only.
# pyright: reportPrivateUsage=false

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.torch_xla.program import Compiler, Programs
from portable_fsdp.layout import LOSS_AXES, ROW_AXES, Region, Spec, batch_spec, coordinates, count_row_shards, region

Initializer = Callable[[Region], Tensor]
"""Returns a piece of a global tensor, on the host."""


class Tensors(Compiler, Protocol):
    """Makes global tensors and the programs that run on them."""

    for_tpu: bool
    """Whether layers may use a TPU's attention kernel and the memory of its host."""

    torus: tuple[int, ...]
    """The torus of the chips, as `sums.Torus`."""

    def make(self, shape: Sequence[int], dtype: torch.dtype, spec: Spec, fetch: Initializer | None) -> Tensor:
        """Make a global tensor sharded by `spec`, with pieces from `fetch`; None: values don't matter."""
        ...

    def place(self, tensor: Tensor, spec: Spec) -> Tensor:
        """Place a tensor of this host's rows as a part of a global one."""
        ...


class DeviceTensors(Programs):
    """Tensors on the devices of this process, as parts of a mesh over all processes."""

    def __init__(
        self, mesh: Any, axes: Mapping[str, int], processes: int, *, torus: tuple[int, ...], for_tpu: bool
    ) -> None:
        import torch_xla
        import torch_xla.distributed.spmd as spmd

        super().__init__("xla")
        self.torus, self.for_tpu = torus, for_tpu
        self._bridge: Any = cast(Any, torch_xla)._XLAC
        self._spmd: Any = spmd
        self._mesh, self._axes, self._processes = mesh, axes, processes
        self._specs: dict[tuple[Any, bool], Any] = {}
        # Global numbers, in the order of shards: those of a host need not be consecutive.
        self._local_devices = [int(name.split(":")[1]) for name in self._bridge._xla_get_runtime_devices()]

    def make(self, shape: Sequence[int], dtype: torch.dtype, spec: Spec, fetch: Initializer | None) -> Tensor:
        """Put only its part on each device. Compiles nothing.

        `_global_tensor_from_cpu_shards` is private; no public function avoids a full copy.
        """
        assert fetch is not None
        largest = region(shape, spec, self._axes, coordinates(self._axes, 0))
        pieces: list[Tensor] = []
        for device in self._local_devices:
            data = fetch(region(shape, spec, self._axes, coordinates(self._axes, device)))
            missing = [full.stop - size for full, size in zip(largest, data.shape, strict=True)]
            padding = [number for rows in reversed(missing) for number in (0, rows)]
            pieces.append((nn.functional.pad(data, padding) if any(missing) else data).contiguous())
        sharding = self._mesh.get_op_sharding(_partition(spec, self._axes))
        return self._bridge._global_tensor_from_cpu_shards(pieces, sharding, list(shape))

    def row_shards(self) -> tuple[int, ...]:
        """Return the numbers of the row shards that this process feeds."""
        whole, spec = (count_row_shards(self._axes),), batch_spec(1)
        places = (coordinates(self._axes, device) for device in self._local_devices)
        return tuple(sorted({region(whole, spec, self._axes, place)[0].start for place in places}))

    def place(self, tensor: Tensor, spec: Spec) -> Tensor:
        cuts = [self._axes.get(axis, 1) for axis in spec[0]] if spec else [math.prod(self._axes.values())]
        is_whole = bool(spec) and not any(spec)
        if self._processes > 1 and not is_whole and math.prod(cuts) < math.prod(self._axes.values()):
            # torch_xla can place a process's rows only if no two devices share rows.
            own = self.row_shards()
            rows = len(tensor) // len(own)

            def fetch(where: Region) -> Tensor:
                start = own.index(where[0].start // rows) * rows
                return tensor[(slice(start, start + rows), *where[1:])]

            return self.make((rows * math.prod(cuts), *tensor.shape[1:]), tensor.dtype, spec, fetch)
        key = _partition(spec, self._axes), self._processes > 1 and not is_whole
        if key not in self._specs:  # making one takes as long as placing a number
            self._specs[key] = self._spmd.ShardingSpec(self._mesh, key[0], minibatch=key[1])
        (placed,) = self._bridge._xla_tensors_from_aten([tensor], ["xla:0"], [self._specs[key].xla_spec(tensor)])
        return placed


def _partition(spec: Spec, axes: Mapping[str, int]) -> tuple[Any, ...]:
    """Convert a spec to torch_xla's: an axis, several, or None per dimension. torch_xla can't place rows over some axes
    of a mesh if the others have size 1."""

    def words(part: tuple[str, ...]) -> Any:
        names = [axis for axis in part if axis in axes]
        if all(axes[axis] == 1 for axis in names):
            return None
        return names[0] if len(names) == 1 else tuple(names)

    return tuple(map(words, spec))


class Layouts:
    """Annotates tensors with a sharding; XLA's partitioner derives that of all others. A spec may end early: the
    dimensions after it aren't split."""

    def __init__(self, mesh: Any, axes: Mapping[str, int]) -> None:
        import torch_xla
        import torch_xla.distributed.spmd as spmd

        self.mesh, self.axes = mesh, axes
        self._spmd: Any = spmd
        self._bridge: Any = cast(Any, torch_xla)._XLAC

    def split_rows(self, tensor: Tensor, *rest: tuple[str, ...]) -> None:
        """Split dimension 0 by rows; `rest`: the axes that split the dimensions after it."""
        self.shard(tensor, _split(tensor, rest))

    def split_rows_in_loop(self, tensor: Tensor, *rest: tuple[str, ...]) -> Tensor:
        """Return a new tensor, split by rows: tensors traced for a loop can't be annotated in place."""
        return self.marked(tensor, *_split(tensor, rest))

    def marked(self, tensor: Tensor, *spec: tuple[str, ...]) -> Tensor:
        """Return a new tensor, sharded by `spec`, and so its gradient."""
        partition = self._partition(tensor, spec)
        return self._spmd.xla_sharding.mark_sharding_with_gradients(tensor, self.mesh, partition)

    def part(self, tensor: Tensor, *spec: tuple[str, ...]) -> Tensor:
        """Return a device's part of a global tensor sharded by `spec`, for operations that each device runs by itself:
        the partitioner doesn't split them."""
        partition = self._partition(tensor, spec)
        # An argument of the program can't be annotated so, a new tensor can.
        return self._spmd.enable_manual_sharding(tensor * 1, partition, mesh=self.mesh).global_tensor

    def whole(self, part: Tensor, *spec: tuple[str, ...]) -> Tensor:
        """Return the global tensor, sharded by `spec`, of which each device has a part."""
        times = [math.prod(self.axes.get(axis, 1) for axis in axes) for axes in spec]
        shape = [size * count for size, count in zip_longest(part.shape, times, fillvalue=1)]
        partition = self._partition(part, spec)
        return self._spmd.disable_manual_sharding(part, partition, shape, mesh=self.mesh).global_tensor

    def _partition(self, tensor: Tensor, spec: Spec) -> tuple[Any, ...]:
        return _partition((*spec, *((),) * (tensor.dim() - len(spec))), self.axes)

    def run_by_device(self, forward: Callable[..., Any], /, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a forward that computes each token by itself, and flattens `[rows, tokens, width]`: it gets
        `[devices, tokens of a device, width]`. XLA can't split flattened tokens whose rows are split as well."""
        rows, cuts = count_row_shards(self.axes), self.axes.get("context", 1)
        pieces = hidden.unflatten(0, (rows, -1)).unflatten(2, (cuts, -1)).transpose(1, 2)
        own = self.marked(pieces.flatten(2, 3).flatten(0, 1), LOSS_AXES)
        out = forward(own, *args, **kwargs)
        first = (out[0] if isinstance(out, tuple) else out).view(pieces.shape).transpose(1, 2).reshape(hidden.shape)
        first = self.split_rows_in_loop(first, ("context",))
        return (first, *out[1:]) if isinstance(out, tuple) else first

    def shard(self, tensor: Tensor, spec: Spec) -> None:
        # Not `mark_sharding`, which makes an XLAShardedTensor of each: that takes four times as long.
        self._bridge._xla_mark_sharding(tensor, self.mesh.get_op_sharding(self._partition(tensor, spec)))

    def replicated(self, tensor: Tensor) -> Tensor:
        """Return the tensor, whole on each device. A tensor on the host stays, and one of 0 dimensions is whole."""
        on_device = tensor.dim() > 0 and tensor.device.type == "xla"
        return laid_out(tensor, partial(self.shard, spec=())) if on_device else tensor

    def gathered(self, weight: Tensor, spec: Spec) -> Tensor:
        """Return the weight gathered over the axes of FSDP; its gradient is sharded by `spec`."""
        return cast(Tensor, _LaidOut.apply(weight, partial(self.shard, spec=spec), self._gather(spec)))

    def gathered_bytes(self, stored: Tensor, spec: Spec) -> Tensor:
        """Return a table gathered over the axes of FSDP, in a traced loop too."""
        return self.marked(stored * 1, *_kept(spec))  # an argument of the program has its own sharding

    def stacked(self, weights: list[Tensor], spec: Spec, gather: bool) -> Tensor:
        """Return `[len(weights), ...]`, each weight sharded by `spec`, or gathered with `gather`; gradients are
        sharded."""
        spec = ((), *spec)
        layout = partial(self.shard, spec=spec)
        return cast(Tensor, _LaidOut.apply(torch.stack(weights), layout, self._gather(spec) if gather else None))

    def _gather(self, spec: Spec) -> Callable[[Tensor], None]:
        return partial(self.shard, spec=_kept(spec))


def _kept(spec: Spec) -> Spec:
    """The axes that still split a gathered weight."""
    return tuple(cuts if cuts == ("expert",) else tuple(axis for axis in cuts if axis == "tensor") for cuts in spec)


def _split(tensor: Tensor, rest: Sequence[tuple[str, ...]]) -> Spec:
    is_flat = tensor.dim() < 3  # of flattened tokens, or without any
    return (ROW_AXES, *(() if is_flat else rest))[: tensor.dim()]


def laid_out(tensor: Tensor, mark: Callable[[Tensor], None]) -> Tensor:
    """Return a new tensor with the same values, annotated by `mark`."""
    tensor = tensor | False if tensor.dtype is torch.bool else tensor * 1  # a clone would keep the old annotation
    mark(tensor)
    return tensor


class _LaidOut(torch.autograd.Function):
    """Shards a tensor, then perhaps replicates it; shards its gradient. Two steps, so that a gather follows a cast."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shard: Callable[[Tensor], None], replicate: Any) -> Tensor:
        ctx.shard = shard
        sharded = laid_out(tensor, shard)
        return sharded if replicate is None else laid_out(sharded, replicate)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return laid_out(cast(Tensor, outputs[0]), ctx.shard), None, None


OnDevices = Callable[..., list[Tensor]]
traced: list[tuple[OnDevices, OnDevices]] = []
"""What `scan` has traced, by number: a run traces a loop's body once, and the engine clears this when it closes."""


def as_operation(name: str, run: OnDevices, like: OnDevices, *tensors: Tensor | None) -> list[Tensor]:
    """Return `run(*tensors)`; while `scan` traces (with fake tensors), as one operation with results like `like`'s."""
    if detect_fake_mode() is None:
        return run(*tensors)
    traced.append((run, like))
    return _operation(name)([*tensors], len(traced) - 1)


@cache  # once per process: the dispatcher registers it by name
def _operation(name: str) -> OnDevices:
    @torch.library.custom_op(f"portable_fsdp::{name}", mutates_args=())
    def operation(tensors: Sequence[Tensor | None], number: int) -> list[Tensor]:
        return traced[number][0](*tensors)

    @operation.register_fake
    def _(tensors: Any, number: int) -> list[Tensor]:
        return traced[number][1](*tensors)

    return operation


def rows_between(policy: ShardPolicy) -> tuple[tuple[str, ...], ...]:
    """The axes that split the tokens of a row in what a layer returns, `[rows, tokens, width]`: its dimension 1."""
    return (("context", "tensor"),) if policy.tensor and policy.tensor.splits_rows else (("context",),)


def axes_apart(spec: Spec, shape: Sequence[int], axes: Mapping[str, int]) -> Spec:
    """Move FSDP's axes to dimension 1 where `tensor` and they would split dimension 0 unevenly; from a vector they go.

    XLA splits a dimension over two axes in equal tiles, while `layout.region` splits axis by axis.
    """
    if not spec or "tensor" not in spec[0] or shape[0] % math.prod(axes.get(axis, 1) for axis in spec[0]) == 0:
        return spec
    return (spec[0][:1], spec[0][1:], *spec[2:])[: len(spec)]
