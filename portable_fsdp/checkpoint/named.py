"""What a loop of the user's own saves by name: several models, optimizers with their groups, and other objects.

Keys: `NAME.FQN` and `exp_avg/NAME.FQN` for several models; one model has no prefix, as in a run of the trainer. An
object is any with `state_dict` and `load_state_dict` (schedulers, loaders, counters): its tensors are saved as
`objects/NAME/...`, the rest as JSON in the manifest, nothing by pickle.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from portable_fsdp.backends.contract import Backend, OptimizerState, Read, TensorState
from portable_fsdp.backends.state import dtype_name
from portable_fsdp.checkpoint.manifests import OBJECTS, Manifest, Named, check_json, folder_of, key_in
from portable_fsdp.layout import Region
from portable_fsdp.optim.counting import CountingOptimizer
from portable_fsdp.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from portable_fsdp.checkpoint.store import Reader

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]

_NOT_SAVED = ("params", "fused", "foreach", "decoupled")  # of an optimizer's group: all but the first are the engine's


class _Merged(NamedTuple):
    """Several optimizers."""

    state: Mapping[Tensor, Any]


class NamedState:
    """Models, optimizers and objects, as one save or load sees them."""

    def __init__(self, backend: Backend, models: Models, optimizers: Optimizers, objects: Mapping[str, Any]) -> None:
        """Raises CheckpointError for names and objects that can't be saved. *collective*"""
        self._backend = backend
        self._models = {"model": models} if isinstance(models, nn.Module) else dict(models)
        self._optimizers = optimizers if isinstance(optimizers, Mapping) else {"optimizer": optimizers}
        self._objects = objects
        for name, value in {**self._models, **self._optimizers, **objects}.items():
            if not name.isidentifier():
                raise CheckpointError(f"checkpoint: the name {name!r}: expected a name as of a Python variable.")
            if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
                raise CheckpointError(
                    f"checkpoint: objects: {name} is a {type(value).__name__} without state_dict and load_state_dict.\n"
                    "  Add these methods, or save its value in an object that has them."
                )
        self._prefixes = {name: name if len(self._models) > 1 else "" for name in self._models}
        self._keys: dict[Tensor, str] = {
            weight: key_in(self._prefixes[name], fqn)
            for name, model in self._models.items()
            for fqn, weight in model.named_parameters()
        }
        owners: dict[Tensor, str] = {}  # the optimizer of each weight
        for name, optimizer in self._optimizers.items():
            for weight in _weights(optimizer):
                if (other := owners.setdefault(weight, name)) != name or weight not in self._keys:
                    what = f"is in {other} too" if other != name else "is of no model that is saved"
                    raise CheckpointError(
                        f"checkpoint: optimizer {name}: its weight {self._keys.get(weight, 'of another model')} {what}."
                        "\n  Save all models of its weights by name, and each weight in one optimizer."
                    )

    def state(self) -> dict[str, TensorState]:
        """The tensors of models and optimizers. *collective*"""
        for optimizer in self._optimizers.values():
            if isinstance(optimizer, CountingOptimizer):
                optimizer.settle_counts()
        return {
            key_in(self._prefixes[name], key): tensor
            for name, model in self._models.items()
            for key, tensor in self._backend.state(model, self._merged).items()
        }

    @property
    def _merged(self) -> OptimizerState:
        several = [*self._optimizers.values()]
        if len(several) == 1:
            return several[0]
        return _Merged({weight: state for optimizer in several for weight, state in optimizer.state.items()})

    def objects(self) -> tuple[Named, dict[str, TensorState]]:
        """What is in the manifest, and the tensors of objects. *collective*

        Raises CheckpointError for values that neither JSON nor a tensor holds, or that differ between processes.
        """
        tensors: dict[str, Tensor] = {}
        states = {name: _encoded(state, name, tensors) for name, state in self._states().items()}
        check_json(states)
        named = Named(models=self._names_of_models, objects=states)
        texts = self._backend.gather({name: json.dumps(state) for name, state in states.items()})
        for name in states:
            if differing := [number for number, each in enumerate(texts) if each[name] != texts[0][name]]:
                raise CheckpointError(
                    f"checkpoint: objects: {name} differs between the processes 0 and {differing[0]}.\n  A checkpoint "
                    "has one value for all: leave out what belongs to a process, or agree on it (engine.agree)."
                )
        return named, {key: self._backend.tensor_state(tensor) for key, tensor in tensors.items()}

    @property
    def _names_of_models(self) -> tuple[str, ...]:
        return tuple(self._models) if len(self._models) > 1 else ()

    def _own(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers whose groups the user's loop sets; those of others are set by the config."""
        own = self._backend.own_optimizers
        return {f"optimizer.{name}": each for name, each in self._optimizers.items() if each in own}

    def _states(self) -> dict[str, Any]:
        """Name -> state of each object; of an optimizer its groups: its tensors are saved with their weights."""
        own = {name: self._groups(optimizer) for name, optimizer in self._own().items()}
        return own | {name: value.state_dict() for name, value in self._objects.items()}

    def _groups(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        groups, key_of, state = optimizer.param_groups, self._keys, cast(dict[Any, Any], optimizer.state)
        values = {w: {k: v for k, v in s.items() if not isinstance(v, Tensor)} for w, s in state.items() if w in key_of}
        return {
            "groups": [{key: value for key, value in group.items() if key not in _NOT_SAVED} for group in groups],
            "weights": [[key_of[weight] for weight in group["params"]] for group in groups],
            "values": {key_of[weight]: each for weight, each in values.items() if each},
            "of_all": {name: value for name, value in state.items() if isinstance(name, str)},
        }

    def prepare(self, reader: "Reader", *, weights_only: bool) -> None:
        """Check that a checkpoint holds these models, optimizers and objects, and allocate optimizer state that begins
        with a first step, where it has some. Raises CheckpointError."""
        saved, own = reader.manifest.named or Named(), self._own()
        self._require_same("models", saved.models, self._names_of_models, reader)
        if weights_only:
            return
        self._require_same("objects", saved.objects, [*own, *self._objects], reader)
        stored = {key.rpartition("/")[2] for key in reader.manifest.tensors if folder_of(key) == "optimizer"}
        for name, optimizer in own.items():
            before, now = (groups["weights"] for groups in (saved.objects[name], self._groups(optimizer)))
            if before != now:
                sizes = [" + ".join(str(len(group)) for group in groups) or "none" for groups in (before, now)]
                raise CheckpointError(
                    f"checkpoint {reader.folder.name}: {name}: its groups hold other weights than those saved "
                    f"({sizes[0]} weights then, {sizes[1]} now).\n  Make the same groups, or start from the weights: "
                    "checkpoint.load=weights_only."
                )
            fresh = [w for w in _weights(optimizer) if self._keys[w] in stored and not optimizer.state.get(w)]
            self._backend.own_optimizers[optimizer](fresh)

    @staticmethod
    def _require_same(what: str, before: Iterable[str], now: Iterable[str], reader: "Reader") -> None:
        if sorted(before) != sorted(now):
            none = "one without a name" if what == "models" else "none"
            saved, ours = (", ".join(names) or none for names in (before, now))
            raise CheckpointError(
                f"checkpoint {reader.folder.name}: it holds the {what} {saved}; this run has {ours}.\n  Save and load "
                f"the same {what} by the same names, or start from its weights: checkpoint.load=weights_only."
            )

    def load(self, reader: "Reader", read: Read, *, weights_only: bool) -> None:
        """Overwrite models, optimizers and objects, in this order."""
        for name, model in self._models.items():

            def prefixed(key: str, slices: Region, into: Tensor | None = None, name: str = name) -> Tensor:
                return read(key_in(self._prefixes[name], key), slices, into)

            self._backend.load_state(model, self._merged, prefixed)
        if weights_only or reader.manifest.named is None:
            return
        present: dict[str, Tensor] = {}
        for name, state in self._states().items():
            _encoded(state, name, present)
        read_tensor = partial(self._read, reader, present)
        states = {name: _decoded(state, read_tensor) for name, state in reader.manifest.named.objects.items()}
        for name, optimizer in self._own().items():
            for group, settings in zip(optimizer.param_groups, states[name]["groups"], strict=True):
                group |= {key: value for key, value in settings.items() if key not in _NOT_SAVED}
            for weight in _weights(optimizer):
                if values := states[name]["values"].get(self._keys[weight]):
                    optimizer.state[weight] |= values
            cast(dict[Any, Any], optimizer.state).update(states[name]["of_all"])
        for name, value in self._objects.items():
            value.load_state_dict(states[name])

    def _read(self, reader: "Reader", present: Mapping[str, Tensor], key: str) -> Tensor:
        """Read a tensor of an object: laid out like its present one, if that has the same shape; else on the host."""
        like, entry = present.get(key), reader.manifest.tensors.get(key)
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
        case np.generic():
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
            return {_decoded(key, read): _decoded(each, read) for key, each in pairs}
        case list():
            return [_decoded(each, read) for each in value]
        case dict():
            return {key: _decoded(each, read) for key, each in value.items()}
        case _:
            return value
