"""`model.factory`: any nn.Module, built on meta, its initial values made one weight at a time.

The factory runs once, under `torch.device("meta")`, where it takes no memory; a `Recording` keeps what it does to each
tensor. A weight's value is what the same operations make on the host. So whatever the constructor does counts
(`nn.init`, a loop over parameters, a copy of another weight), and no host holds the whole model. Each random operation
is seeded by (seed, FQN of the weight that it fills, its number there): a value depends on no other weight.
"""

# Buffers are replaced in a module's own table: torch has no public way.
# pyright: reportPrivateUsage=false

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
    """The place of a meta tensor when it was used: a parameter's `data` may be replaced later."""

    storage: torch.UntypedStorage  # kept, so that its address stays its own
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        """The tensor itself where it isn't on meta."""
        if tensor.device.type != "meta":
            return tensor
        return cls(tensor.untyped_storage(), tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def among(self, made: Mapping[int, Tensor]) -> Tensor:
        """The same place in what was made on the host."""
        return made[self.storage._cdata].as_strided(self.shape, self.stride, self.offset)


class _Call(NamedTuple):
    """An operation that wrote to storages of the meta device; `_MetaView`s stand for their tensors."""

    operator: Any
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    results: list[_MetaView]
    reads: frozenset[int]  # storages
    writes: frozenset[int]


class Recording(TorchDispatchMode):
    """While it is on, operations on meta tensors are kept, and their tensors with them."""

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
            writes |= reads  # also of arguments that it only reads: those are computed too, to no harm
        if writes:
            inputs = tree_map_only(Tensor, _MetaView.of, (args, kwargs))
            results = [_MetaView.of(tensor) for tensor in _on_meta(result)]
            self._calls.append(_Call(func, inputs, results, reads, writes))
        return result

    def names(self, owners: Mapping[int, str]) -> list[str]:
        """A name for each call: the owner of a storage that it writes, and how many wrote there before."""
        counts: Counter[str] = Counter()
        names: list[str] = []
        for call in self._calls:
            owner = next((owners[storage] for storage in sorted(call.writes) if storage in owners), "")
            names.append(f"{owner}#{counts[owner]}")
            counts[owner] += 1
        return names

    def value(self, tensor: Tensor, seed: int, names: Sequence[str]) -> Tensor:
        """What the recorded calls make of a meta tensor, on the host; random ones seeded by (seed, their name)."""
        needed, numbers = {_storage(tensor)}, list[int]()
        for number in reversed(range(len(self._calls))):
            if self._calls[number].writes & needed:
                numbers.append(number)
                needed |= self._calls[number].reads
        made: dict[int, Tensor] = {}
        with torch.no_grad():
            for number in reversed(numbers):
                call = self._calls[number]
                args, kwargs = tree_map_only(_MetaView, lambda view: view.among(made), call.inputs)
                if "device" in kwargs:
                    kwargs = {**kwargs, "device": torch.device("cpu")}
                is_random = torch.Tag.nondeterministic_seeded in call.operator.tags
                with seeded(seed, names[number]) if is_random else nullcontext():
                    result = call.operator(*args, **kwargs)
                for view, real in zip(call.results, _tensors(result), strict=True):
                    made.setdefault(view.storage._cdata, real)
        return cast(_MetaView, _MetaView.of(tensor)).among(made).clone()


class _Constants(TorchFunctionMode):
    """Values that the host knows stay known: on meta `torch.tensor([1.0])` would forget them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == cast(Any, Tensor).is_meta.__get__:
            return False  # torch.nn.init.orthogonal_ leaves meta tensors alone
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is None:
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")  # a copy, which is recorded
        return func(*args, **kwargs)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _on_meta(values: Any) -> Iterator[Tensor]:
    return (tensor for tensor in _tensors(values) if tensor.device.type == "meta")


def _storage(tensor: Tensor) -> int:
    """Stays the same while the recording keeps a tensor of it."""
    return tensor.untyped_storage()._cdata


class RecordedWeights:
    """`fill` of a factory's model; see `weights.RandomWeights`."""

    def __init__(self, values: dict[str, Tensor], recording: Recording, seed: int, dtype: torch.dtype) -> None:
        self._values, self._recording, self._seed, self._dtype = values, recording, seed, dtype
        self._names = recording.names({_storage(value): fqn for fqn, value in reversed(values.items())})
        self._last: tuple[str, Tensor] | None = None

    def __call__(self, fqn: str, slices: TensorSlices) -> Tensor:
        if self._last is None or self._last[0] != fqn:
            value = self.draw(fqn)
            self._last = (fqn, value.to(self._dtype) if value.is_floating_point() else value)
        return self._last[1][slices].clone()

    def draw(self, fqn: str) -> Tensor:
        """All of it, as the factory makes it."""
        return self._recording.value(self._values[fqn], self._seed, self._names)


def open_factory(
    name: str, make: Callable[[], Any], seed: int, master: torch.dtype
) -> tuple[nn.Module, RecordedWeights]:
    """The module, its parameters on meta in the dtype `master` and its buffers on the host, and its initial values.

    `make` returns the module; `name` begins the messages. Raises ConfigError where it returns no module or a
    parameter off meta.
    """
    recording = Recording()
    with recording, torch.device("meta"), _Constants():
        model = make()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{name}: expected it to return a torch.nn.Module, found {type(cast(object, model)).__name__}."
        )
    named = [*model.named_parameters(), *model.named_buffers()]
    for fqn, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"{name}: expected parameters with a shape, found {fqn} of a lazy module.\n  Give its sizes."
            )
        if parameter.device.type != "meta":
            raise ConfigError(
                f"{name}: expected parameters on the meta device, found {fqn} on {parameter.device}.\n"
                "  Make it with torch's functions and without a device (torch.zeros, torch.nn.init): values from "
                "files or NumPy belong in a checkpoint (checkpoint.load=weights_only)."
            )
    for owner, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.device.type == "meta":
                raise ConfigError(
                    f"{name}: expected tensors that are parameters or buffers, found "
                    f"{f'{owner}.{attribute}'.lstrip('.')}, an attribute that no device would get.\n"
                    f'  Write self.register_buffer("{attribute}", ..., persistent=False).'
                )
    fill = RecordedWeights({fqn: tensor.detach() for fqn, tensor in named}, recording, seed, master)
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
    """The sizes of any module; its FLOPs are counted, not computed from sizes."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    every = sum(weight.numel() for weight in model.parameters())
    return ModelSize(parameters=every, frozen_parameters=every - trained, trained_parameters=trained)
