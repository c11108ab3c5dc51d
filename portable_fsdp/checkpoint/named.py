"""What a loop of the user's own saves by name: several models, optimizers with their groups, and other objects.

Keys: `NAME.FQN` and `exp_avg/NAME.FQN` for several models; one model has no prefix, as in a run of the trainer. An
object is any with `state_dict` and `load_state_dict` (schedulers, loaders, counters): its tensors are saved as
`objects/NAME/...`, the rest as JSON in the manifest, nothing by pickle. So are the groups of `shard_optimizer`'s
optimizers, as `optimizer.NAME`.
"""

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from portable_fsdp.backends.contract import Backend, OptimizerState, Read, TensorState
from portable_fsdp.backends.state import dtype_name, state_key, tensors_of
from portable_fsdp.checkpoint.manifests import OBJECTS, Manifest, Named, StrictModel, check_json, folder_of, key_in
from portable_fsdp.checkpoint.snapshot import sum_of_bits
from portable_fsdp.layout import Region
from portable_fsdp.optim.counting import CountingOptimizer
from portable_fsdp.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from portable_fsdp.checkpoint.store import Reader

log = logging.getLogger("portable_fsdp")

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]

# Of an optimizer's group. The last two change no value, and differ by engine.
_NOT_SAVED = ("params", "fused", "foreach")


class Merged(NamedTuple):
    """The state of several optimizers, or of none."""

    state: Mapping[Tensor, Any]


def has_layouts_of_its_own(backend: Backend) -> bool:
    """Whether the engine alone knows which part of a tensor it has: it then saves and loads whole models."""
    return any(backend.axes.get(axis, 1) > 1 for axis in ("tensor", "expert"))


class _Groups(StrictModel):
    """What is saved of an optimizer besides the state of its weights. `weights`: their keys, by group. `values`: state
    of a weight that isn't a tensor, by its key; `of_all`: of no weight."""

    kind: str
    groups: list[dict[str, Any]]
    weights: list[list[str]]
    values: dict[str, dict[str, Any]]
    of_all: dict[str, Any]


class NamedState:
    """Models, optimizers and objects, as one save or load sees them."""

    def __init__(
        self,
        backend: Backend,
        models: Models,
        optimizers: Optimizers,
        objects: Mapping[str, Any],
        elsewhere: Collection[str] = (),
    ) -> None:
        """`elsewhere`: models whose weights the user's code saves and loads; of these the optimizers' state is saved.

        Raises CheckpointError for names and objects that can't be saved.
        """
        self._backend, self._elsewhere, self._stored = backend, elsewhere, frozenset[str]()
        self._models = {"model": models} if isinstance(models, nn.Module) else models
        self._optimizers = {"optimizer": optimizers} if isinstance(optimizers, torch.optim.Optimizer) else optimizers
        self._objects = objects
        self._check_names()
        self._names_of_models = tuple(self._models) if len(self._models) > 1 else ()
        self._prefixes = {name: name if self._names_of_models else "" for name in self._models}
        self._keys: dict[Tensor, str] = {
            weight: key_in(self._prefixes[name], fqn)
            for name, model in self._models.items()
            for fqn, weight in model.named_parameters()
        }
        self._check_optimizers()
        self._encoded: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        self._read_states: dict[str, Any] = {}

    def _check_names(self) -> None:
        for what, named in {"models": self._models, "optimizers": self._optimizers, "objects": self._objects}.items():
            if not isinstance(cast(object, named), Mapping):
                raise CheckpointError(
                    f"checkpoint: {what}: expected a dict by name, found a {type(named).__name__}.\n"
                    f'  Write {what}={{"name": value}}.'
                )
            for name, value in named.items():
                if not isinstance(cast(object, name), str) or not name.isidentifier():
                    raise CheckpointError(f"checkpoint: the name {name!r}: expected a name as of a Python variable.")
                if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
                    raise CheckpointError(
                        f"checkpoint: {what}: {name} is a {type(value).__name__} without state_dict and "
                        "load_state_dict.\n  Add these methods, or save its value in an object that has them."
                    )

    def _check_optimizers(self) -> None:
        plain, owners = torch.optim.Optimizer, dict[Tensor, str]()
        for name, optimizer in self._optimizers.items():
            where, kind = f"checkpoint: optimizer {name}", type(optimizer)
            if optimizer not in self._backend.optimizers:
                raise CheckpointError(f"{where}: the engine doesn't know it.\n  Pass it to engine.shard_optimizer.")
            if (kind.state_dict, kind.load_state_dict) != (plain.state_dict, plain.load_state_dict) and (
                _values(optimizer.state_dict()) != _values(plain.state_dict(optimizer))
            ):
                raise CheckpointError(
                    f"{where}: {kind.__name__} has a state_dict of its own, which a checkpoint of shards can't call.\n"
                    "  Keep what it adds in its groups or state, or in an object."
                )
            for weight in _weights(optimizer):
                if weight not in self._keys:
                    raise CheckpointError(f"{where}: a weight is of no model that is saved.\n  Save its model too.")
                if (other := owners.setdefault(weight, name)) != name:
                    key = self._keys[weight]
                    raise CheckpointError(f"{where}: {key} is in {other} too.\n  Put each weight into one optimizer.")

    # ----------------------------------------------------------------------------------------------------- a save

    def state(self) -> dict[str, TensorState]:
        """The tensors of models and optimizers. *collective*"""
        for optimizer in self._optimizers.values():
            if isinstance(optimizer, CountingOptimizer):
                optimizer.settle_counts()
        merged, state = self._merged(), dict[str, TensorState]()
        for name, model in self._models.items():
            try:
                tensors = self._backend.state(model, merged)
            except KeyError as error:
                if error.args[0] is model:
                    raise CheckpointError(
                        f"checkpoint: model {name}: this engine didn't shard it.\n  Save it as an object."
                    ) from None
                raise
            prefixed = {key_in(self._prefixes[name], key): tensor for key, tensor in tensors.items()}
            if name in self._elsewhere and not has_layouts_of_its_own(self._backend):
                prefixed = {key: t for key, t in prefixed.items() if _is_state(key) or key in self._stored}
            state |= prefixed
        return state

    def _merged(self) -> OptimizerState:
        return Merged({w: state for optimizer in self._optimizers.values() for w, state in optimizer.state.items()})

    def encode(self) -> None:
        """Take the states of objects. Raises CheckpointError for values that neither JSON nor a tensor holds."""
        for name, state in self._states().items():
            try:
                self._encoded[name] = _encoded(state, name, self._tensors)
            except RecursionError:
                raise CheckpointError(f"checkpoint: objects: {name}: its state holds itself, or is too deep.") from None
        check_json(self._encoded)

    def objects(self) -> tuple[Named, dict[str, TensorState]]:
        """What is in the manifest, and the tensors of objects, once all processes have encoded them. *collective*

        Raises CheckpointError, on all processes, if they differ in an object.
        """
        forms = {key: _form(tensor) for key, tensor in self._tensors.items()}
        mine = {
            name: json.dumps([state, {key: forms[key] for key in _keys(state)}])
            for name, state in self._encoded.items()
        }
        for number, other in enumerate(gathered := self._backend.gather(mine)):
            for name in {*other, *gathered[0]}:
                if other.get(name) != gathered[0].get(name):
                    raise CheckpointError(
                        f"checkpoint: objects: {name} differs between the processes 0 and {number}.\n  A checkpoint "
                        "has one value for all: leave out what belongs to a process, or agree on it (engine.agree)."
                    )
        for key, tensor in self._tensors.items():
            if isinstance(tensor, DTensor) and has_layouts_of_its_own(self._backend):
                raise CheckpointError(
                    f"checkpoint: {key} is sharded: with sharding.tensor or sharding.expert an object can't tell which "
                    "part it has.\n  Average weights in a sharded AveragedModel, and save that as a model."
                )
        states = {key: self._backend.tensor_state(tensor) for key, tensor in self._tensors.items()}
        self._warn_of_others()
        return Named(models=self._names_of_models, objects=self._encoded), states

    def _warn_of_others(self) -> None:
        """Warn of optimizers of these models that aren't saved."""
        for other in self._backend.optimizers:
            if other not in self._optimizers.values() and any(weight in self._keys for weight in _weights(other)):
                log.warning(
                    "checkpoint: the state of the %s that has %s isn't saved: name it too",
                    type(other).__name__,
                    next(self._keys[w] for w in _weights(other) if w in self._keys),
                )

    def _own(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers whose groups the user's loop sets; those of others are set by the config."""
        known = self._backend.optimizers
        return {f"optimizer.{name}": each for name, each in self._optimizers.items() if known[each] is not None}

    def _states(self) -> dict[str, Any]:
        """Name -> state of each object, and of an optimizer its `_Groups`."""
        own = {name: self._groups(optimizer) for name, optimizer in self._own().items()}
        return own | {name: value.state_dict() for name, value in self._objects.items()}

    def _groups(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        groups, key_of, state = optimizer.param_groups, self._keys, cast(dict[Any, Any], optimizer.state)
        values = {w: {k: v for k, v in s.items() if not isinstance(v, Tensor)} for w, s in state.items() if w in key_of}
        return {
            "kind": type(optimizer).__name__,
            "groups": [{key: value for key, value in group.items() if key not in _NOT_SAVED} for group in groups],
            "weights": [[key_of[weight] for weight in group["params"]] for group in groups],
            "values": {key_of[weight]: each for weight, each in values.items() if each},
            "of_all": {name: value for name, value in state.items() if isinstance(name, str)},
        }

    # ----------------------------------------------------------------------------------------------------- a load

    def prepare(self, reader: "Reader", *, weights_only: bool) -> None:
        """Check that a checkpoint holds these models, optimizers and objects, read the objects, and allocate optimizer
        state that begins with a first step, where it has some. Raises CheckpointError."""
        saved, own = reader.manifest.named or Named(), self._own()
        self._stored = frozenset(reader.manifest.tensors)
        self._require_same("models", saved.models, self._names_of_models, reader)
        if weights_only:
            return
        self._require_same("objects", saved.objects, [*own, *self._objects], reader)
        stored = {key.rpartition("/")[2] for key in reader.manifest.tensors if _is_state(key)}
        for name, optimizer in own.items():
            self._require_same_groups(name, optimizer, saved.objects[name], reader)
            fresh = [w for w in _weights(optimizer) if self._keys[w] in stored and not optimizer.state.get(w)]
            if (allocate := self._backend.optimizers[optimizer]) is not None:
                allocate(optimizer, fresh)
        current: dict[str, Tensor] = {}  # to lay out tensors like them
        for name, state in self._objects.items():
            if _keys(saved.objects[name]):
                _encoded(state.state_dict(), name, current)
        read = partial(self._read, reader, current)
        for name, state in saved.objects.items():
            try:
                self._read_states[name] = _decoded(state, read)
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"checkpoint {reader.folder.name}: named.objects.{name}: {error}") from None

    def _require_same_groups(self, name: str, optimizer: torch.optim.Optimizer, state: Any, reader: "Reader") -> None:
        where = f"checkpoint {reader.folder.name}: {name.replace('.', ' ')}"
        now = self._groups(optimizer)
        try:
            saved = _Groups.model_validate(state)
        except ValueError as error:
            raise CheckpointError(f"{where}: manifest.json: {str(error).splitlines()[1]}") from None
        if saved.kind != now["kind"]:
            raise CheckpointError(
                f"{where}: it was a {saved.kind} and is a {now['kind']}.\n  Make a {saved.kind}, or start from the "
                "weights: checkpoint.load=weights_only."
            )
        if saved.weights != now["weights"] or len(saved.groups) != len(now["groups"]):
            both = saved.weights, now["weights"]
            sizes = [" + ".join(str(len(group)) for group in groups) or "none" for groups in both]
            raise CheckpointError(
                f"{where}: its groups hold other weights than those saved ({sizes[0]} weights then, {sizes[1]} now).\n"
                "  Make the same groups, or start from the weights: checkpoint.load=weights_only."
            )

    @staticmethod
    def _require_same(what: str, before: Iterable[str], now: Iterable[str], reader: "Reader") -> None:
        if sorted(before) != sorted(now):
            none = "one without a name" if what == "models" else "none"
            saved, ours = (
                ", ".join(name.replace("optimizer.", "optimizer ") for name in each) or none for each in (before, now)
            )
            raise CheckpointError(
                f"checkpoint {reader.folder.name}: it holds the {what} {saved}; this run has {ours}.\n  Save and load "
                f"the same {what} by the same names, or start from its weights: checkpoint.load=weights_only."
            )

    def load(self, read: Read, *, weights_only: bool) -> None:
        """Overwrite models, optimizers and objects, in this order; with `weights_only` models alone."""
        merged = Merged({}) if weights_only else self._merged()
        for name, model in self._models.items():

            def prefixed(key: str, slices: Region, into: Tensor | None = None, name: str = name) -> Tensor:
                return read(key_in(self._prefixes[name], key), slices, into)

            if name in self._elsewhere and not has_layouts_of_its_own(self._backend):
                self._load_optimizer_state(model, merged, prefixed)
            else:
                self._backend.load_state(model, merged, prefixed)
        if weights_only:
            return
        for name, optimizer in self._own().items():
            saved = _Groups.model_construct(**self._read_states[name])
            for group, settings in zip(optimizer.param_groups, saved.groups, strict=True):
                group |= {key: value for key, value in settings.items() if key not in _NOT_SAVED}
            for weight in _weights(optimizer):
                if values := saved.values.get(self._keys[weight]):
                    optimizer.state[weight] |= values
            cast(dict[Any, Any], optimizer.state).update(saved.of_all)
        for name, value in self._objects.items():
            value.load_state_dict(self._read_states[name])

    def _load_optimizer_state(self, model: nn.Module, merged: OptimizerState, read: Callable[..., Tensor]) -> None:
        for fqn, weight in model.named_parameters():
            for name, tensor in tensors_of(merged.state.get(weight, {})).items():
                with torch.no_grad():
                    self._backend.load_tensor(tensor, partial(read, state_key(name, fqn)))

    def _read(self, reader: "Reader", current: Mapping[str, Tensor], key: str) -> Tensor:
        """Read a tensor of an object: laid out like its current one, if that has the same shape; else on the host."""
        like, entry = current.get(key), reader.manifest.tensors.get(key)
        if not key.startswith(OBJECTS):
            raise ValueError(f"{key} is no tensor of an object")
        if like is None or entry is None or entry.shape != (*like.shape,) or entry.dtype != dtype_name(like.dtype):
            return reader.read_whole(key)
        with torch.no_grad():
            self._backend.load_tensor(new := like.detach().clone(), partial(reader.read, key))
        return new


def only_model(manifest: Manifest, model: str) -> Manifest:
    """The manifest of one of several models, by the keys that it would have alone. `model` may go on to a module of it:
    `ema.module`. Raises CheckpointError for an unknown one."""

    def own(keys: Mapping[str, Any]) -> dict[str, Any]:
        parts = ((key.rpartition("/"), value) for key, value in keys.items() if not key.startswith(OBJECTS))
        return {
            f"{state}{slash}{fqn.removeprefix(f'{model}.')}": value
            for (state, slash, fqn), value in parts
            if fqn.startswith(f"{model}.")
        }

    if not (tensors := own(manifest.tensors)):
        models = ", ".join(manifest.named.models if manifest.named else ()) or "one, without a name"
        raise CheckpointError(f"--model {model}: the checkpoint has no such model. It has {models}.")
    ties = {alias: key.removeprefix(f"{model}.") for alias, key in own(manifest.ties).items()}
    return manifest.model_copy(update={"tensors": tensors, "ties": ties, "named": None})


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _values(state: dict[str, Any]) -> list[str]:
    """What tells whether two state dicts hold the same: bitsandbytes' arranges it in another way."""
    return sorted(str(id(leaf)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in tree_leaves(state))


def _is_state(key: str) -> bool:
    return folder_of(key) == "optimizer" and not key.startswith(OBJECTS)


def _form(tensor: Tensor) -> list[Any]:
    """What all processes have alike in a tensor: shape, dtype, and content. Pieces of sharded ones are compared later,
    as XLA's are: reading one would compile a program."""
    is_whole = tensor.device.type != "xla" and not isinstance(tensor, DTensor)
    return [*tensor.shape, dtype_name(tensor.dtype), int(sum_of_bits(tensor)) if is_whole else None]


def _keys(state: Any) -> list[str]:
    """The keys of the tensors in a state as JSON."""
    keys: list[str] = []
    _decoded(state, lambda key: keys.append(key) or torch.empty(0))
    return keys


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, and add its tensors to `tensors`. What JSON lacks is an object of one key: `__tuple__`,
    `__float__`, `__dict__` (pairs), `__tensor__` (its key). `path`: where the value is, `scheduler.base_lrs.0`."""
    match value:
        case Tensor():
            key = OBJECTS + path.replace(".", "/", 1)
            while key in tensors:
                key += "_"
            tensors[key] = value
            return {"__tensor__": key}
        case np.generic() if not isinstance(value.item(), np.generic):
            return _encoded(value.item(), path, tensors)
        case float() if not math.isfinite(value):
            return {"__float__": str(float(value))}
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            items = [_encoded(each, f"{path}.{at}", tensors) for at, each in enumerate(cast(list[Any], value))]
            return items if isinstance(value, list) else {"__tuple__": items}
        case Mapping():
            pairs = [(k, _encoded(v, f"{path}.{k}", tensors)) for k, v in cast(Mapping[Any, Any], value).items()]
            if all(isinstance(key, str) and not key.startswith("__") for key, _ in pairs):
                return dict(pairs)
            return {"__dict__": [[_encoded(key, f"{path}: a key", tensors), each] for key, each in pairs]}
        case _:
            raise CheckpointError(
                f"checkpoint: objects: {path} is a {type(value).__name__}, which a checkpoint can't hold.\n"
                "  Return numbers, text, lists, dicts and tensors in state_dict (an array: torch.as_tensor(it))."
            )


def _decoded(value: Any, read: Callable[[str], Tensor]) -> Any:
    match value:
        case {"__tensor__": str(key), **others} if not others:
            return read(key)
        case {"__float__": str(text), **others} if not others:
            return float(text)
        case {"__tuple__": list(items), **others} if not others:
            return tuple(_decoded(each, read) for each in items)
        case {"__dict__": list(pairs), **others} if not others:
            return {_decoded(key, read): _decoded(each, read) for key, each in cast(list[list[Any]], pairs)}
        case list():
            return [_decoded(each, read) for each in value]
        case dict():
            return {key: _decoded(each, read) for key, each in value.items()}
        case _:
            return value
