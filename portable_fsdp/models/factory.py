"""`model.factory`: any nn.Module, built on meta, with initial values computed one weight at a time.

The factory runs once, under `torch.device("meta")`, where it needs no memory; a `Recording` keeps its operations on
each tensor. Running these operations again on the host gives a weight's value. So everything that the constructor does
applies (`nn.init`, a loop over parameters, a copy of another weight), and no host holds the whole model. Each random
operation is seeded by (seed, FQN of the weight that it fills, its number there): values depend on no other weight.
"""

# Buffers are replaced in a module's own table: torch has no public way.
# pyright: reportPrivateUsage=false

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from portable_fsdp.models.weights import ModelSize, TensorSlices, seeded
from portable_fsdp.runtime.errors import ConfigError


@dataclass(frozen=True)
class _MetaView:
    """The storage and view of a meta tensor at its use: a parameter's `data` may be replaced later."""

    storage: torch.UntypedStorage  # kept, so that its address stays its own
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        """Return the view of a meta tensor; any other tensor itself."""
        if tensor.device.type != "meta":
            return tensor
        return cls(tensor.untyped_storage(), tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def among(self, on_host: Mapping[int, Tensor]) -> Tensor:
        """Return the same view of the storage on the host."""
        return on_host[self.storage._cdata].as_strided(self.shape, self.stride, self.offset)


class _Call(NamedTuple):
    """An operation that wrote to storages of the meta device; `_MetaView`s replace their tensors."""

    operator: Any
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    results: list[_MetaView]
    reads: frozenset[int]  # storages
    writes: frozenset[int]


class Recording(TorchDispatchMode):
    """Mode that records operations on meta tensors, and keeps their tensors alive."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or dict[str, Any]()
        if kwargs.get("generator") is not None:
            raise ValueError("initial values follow run.seed: leave `generator` out")
        result = func(*args, **kwargs)
        reads = frozenset(_storage(tensor) for tensor in _on_meta((args, kwargs)))
        writes = frozenset(_storage(tensor) for tensor in _on_meta(result)) - reads
        if func._schema.is_mutable:
            writes |= reads  # includes arguments that it only reads: recomputing those does no harm
        if writes:
            inputs = tree_map_only(Tensor, _MetaView.of, (args, kwargs))
            results = [_MetaView.of(tensor) for tensor in _on_meta(result)]
            self._calls.append(_Call(func, inputs, results, reads, writes))
        return result

    def names(self, owners: Mapping[int, str]) -> list[str]:
        """Return a name for each call: the owner of a storage that it writes, and the number of earlier writes."""
        counts: Counter[str] = Counter()
        names: list[str] = []
        for call in self._calls:
            owner = next((owners[storage] for storage in sorted(call.writes) if storage in owners), "")
            names.append(f"{owner}#{counts[owner]}")
            counts[owner] += 1
        return names

    def value(self, tensor: Tensor, seed: int, names: Sequence[str]) -> Tensor:
        """Compute a meta tensor's value on the host by the recorded calls; seed random ones by (seed, their name)."""
        needed, numbers = {_storage(tensor)}, list[int]()
        for number in reversed(range(len(self._calls))):
            if self._calls[number].writes & needed:
                numbers.append(number)
                needed |= self._calls[number].reads
        on_host: dict[int, Tensor] = {}
        with torch.no_grad():
            for number in reversed(numbers):
                call = self._calls[number]
                args, kwargs = tree_map_only(_MetaView, lambda view: view.among(on_host), call.inputs)
                if "device" in kwargs:
                    kwargs = {**kwargs, "device": torch.device("cpu")}
                is_random = torch.Tag.nondeterministic_seeded in call.operator.tags
                with seeded(seed, names[number]) if is_random else nullcontext():
                    result = call.operator(*args, **kwargs)
                if "empty" in call.operator._schema.name and (marker := _unfilled(result)) is not None:
                    result.fill_(marker)
                for view, real in zip(call.results, _tensors(result), strict=True):
                    on_host.setdefault(view.storage._cdata, real)
        return cast(_MetaView, _MetaView.of(tensor)).among(on_host).clone()


class _Constants(TorchFunctionMode):
    """Mode that keeps values known to the host: on meta `torch.tensor([1.0])` would lose them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == cast(Any, Tensor).is_meta.__get__:
            return False  # torch.nn.init.orthogonal_ leaves meta tensors alone
        if func is torch.tensor and _is_init_weights(sys._getframe(2)):
            return torch.empty(0, device="cpu")  # so it asks for the device: on meta it fills no weights
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "meta").type == "meta":
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")  # a copy, which is recorded
        return func(*args, **kwargs)


def _unfilled(tensor: Tensor) -> float | None:
    """The value that shows what nothing fills; None for dtypes without one to spare."""
    if tensor.dtype in (torch.int32, torch.int64):
        return torch.iinfo(tensor.dtype).min
    return torch.nan if tensor.is_floating_point() else None


def _is_init_weights(frame: FrameType) -> bool:
    """Whether it is transformers' method of that name, which has no switch (5.24)."""
    is_transformers = frame.f_globals.get("__name__") == "transformers.modeling_utils"
    return is_transformers and frame.f_code.co_name == "init_weights"


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _on_meta(values: Any) -> Iterator[Tensor]:
    return (tensor for tensor in _tensors(values) if tensor.device.type == "meta")


def _storage(tensor: Tensor) -> int:
    """Identify a storage, while the recording keeps a tensor of it alive."""
    return tensor.untyped_storage()._cdata


class RecordedWeights:
    """The `fill` of a factory's model; see `weights.RandomWeights`. Raises ConfigError for a weight without a value."""

    def __init__(
        self, name: str, values: dict[str, Tensor], recording: Recording, seed: int, dtype: torch.dtype
    ) -> None:
        self._name, self._values, self._recording, self._seed, self._dtype = name, values, recording, seed, dtype
        self._names = recording.names({_storage(value): fqn for fqn, value in reversed(values.items())})
        self._last = "", torch.empty(0)

    def __call__(self, fqn: str, slices: TensorSlices) -> Tensor:
        if self._last[0] != fqn:
            value = self.draw(fqn)
            self._last = fqn, value.to(self._dtype) if value.is_floating_point() else value
        return self._last[1][slices].clone()

    def draw(self, fqn: str) -> Tensor:
        """Compute the whole weight or buffer, as the factory would. Raises ConfigError if nothing fills all of it."""
        value = self._recording.value(self._values[fqn], self._seed, self._names)
        marker = _unfilled(value)
        if marker is not None and (value.isnan() if marker is torch.nan else value == marker).any():
            raise ConfigError(
                f"{self._name}: {fqn} has no initial value: nothing fills all of its torch.empty.\n"
                "  Fill it in the constructor (torch.nn.init.normal_, torch.zeros)."
            )
        return value


def open_factory(
    name: str, make: Callable[[], Any], seed: int, master: torch.dtype
) -> tuple[nn.Module, RecordedWeights]:
    """Return the module, with parameters on meta in the dtype `master` and buffers on the host, and its initial values.

    `make` returns the module; `name` begins the messages. Raises ConfigError if it returns no module or a parameter
    that isn't on meta.
    """
    recording = Recording()
    try:
        with recording, torch.device("meta"), _Constants():
            model = make()
    except ConfigError as error:
        if "meta tensor" not in str(error.__cause__):
            raise
        fix = 'The meta device has no values: compute numbers from tensors with device="cpu", or keep tensors (buffers)'
        raise ConfigError(f"{error}\n  {fix}.") from error.__cause__
    if not isinstance(model, nn.Module):
        actual = type(cast(object, model)).__name__
        raise ConfigError(f"{name}: expected it to return a torch.nn.Module, found {actual}.")
    named = [*model.named_parameters(), *model.named_buffers()]
    for fqn, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name}: {fqn}, a parameter of a lazy module, has no shape.\n  Specify its sizes.")
        if parameter.device.type != "meta":
            raise ConfigError(
                f"{name}: expected parameters on the meta device, found {fqn} on {parameter.device}.\n"
                "  Create it with torch's functions and without a device (torch.zeros, torch.nn.init): values from "
                "files or NumPy belong in a checkpoint (checkpoint.load=weights_only)."
            )
    for owner, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.device.type == "meta":
                raise ConfigError(
                    f"{name}: the tensor {f'{owner}.{attribute}'.lstrip('.')} is neither a parameter nor a buffer: no "
                    "device would get it.\n"
                    f'  Write self.register_buffer("{attribute}", ..., persistent=False).'
                )
    fill = RecordedWeights(name, {fqn: tensor.detach() for fqn, tensor in named}, recording, seed, master)
    for fqn, buffer in list(model.named_buffers()):
        if buffer.device.type == "meta":
            owner, _, leaf = fqn.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = fill.draw(fqn)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(master)
    model.train()
    return model, fill


def plain_size(model: nn.Module) -> ModelSize:
    """Return the sizes of any module; its FLOPs are counted, not computed from them."""
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    every = sum(weight.numel() for weight in model.parameters())
    return ModelSize(parameters=every, frozen_parameters=frozen, trained_parameters=every - frozen)
