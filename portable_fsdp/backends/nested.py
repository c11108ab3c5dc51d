"""Tensors inside of what modules take and return: containers, dataclasses and other objects, nested in any way.

torch's own functions (`torch.utils._pytree`) take a dataclass, a subclass of dict and any other object for one value.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_WHOLE = (str, bytes, int, float, complex, NoneType, type, nn.Module)  # no tensors to look for inside of these


class Replacement:
    """Replaces the tensors in values by `change(tensor)`; objects and containers around a new one are copied.

    A module may change such a copy: append to a list, set a field. `write_back` does the same to the original. `kind`:
    what is replaced.
    """

    def __init__(self, change: Callable[[Any], Any], kind: type = Tensor) -> None:
        self._change, self._kind = change, kind
        self._known: dict[int, tuple[Any, Any]] = {}  # id -> the value and what replaces it, both kept alive
        self._copies: list[tuple[Any, Any, dict[Any, Any]]] = []  # the original, the copy, what is in it at first

    def __call__(self, value: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compile knows this one
            return tree_map_only(self._kind, self._change, value)
        if isinstance(value, _WHOLE):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, value  # ends cycles
            self._known[id(value)] = value, self._replaced(value)
        return self._known[id(value)][1]

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return self._change(value)
        is_fixed = isinstance(value, tuple | set | frozenset)
        contents = dict[Any, Any](enumerate(cast("tuple[Any]", value))) if is_fixed else _contents(value)
        changed = {key: new for key, item in contents.items() if (new := self(item)) is not item}
        if not changed:
            return value
        if is_fixed:
            make = cast(Any, value)._make if hasattr(value, "_fields") else cast(Any, type(value))
            return make((contents | changed).values())
        made = copy.copy(value)
        for key, item in changed.items():
            _set(made, key, item)
        self._copies.append((value, made, contents | changed))
        return made

    def write_back(self) -> None:
        """Change the originals as the copies have been changed since."""
        originals = {id(new): value for value, new in self._known.values()}
        for value, made, before in self._copies:
            now = _contents(made)
            if now.keys() != before.keys() or any(item is not before[key] for key, item in now.items()):
                if isinstance(value, dict | list | deque):
                    cast("list[Any]", value).clear()
                for key, item in now.items():
                    _set(value, key, originals.get(id(item), item))


def tensors_in(value: Any) -> list[Tensor]:
    """Each tensor once."""
    found: list[Tensor] = []
    Replacement(lambda tensor: found.append(tensor) or tensor)(value)
    return found


def grad_tensors(value: Any) -> list[Tensor]:
    """The tensors in it that require a gradient."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def tensors_of_modules(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The tensors that the user's code keeps in attributes of modules, also inside lists and dicts."""
    values = ((name, value) for module in modules for name, value in vars(module).items())
    own = _of_every_module()  # and what fully_shard keeps there begins with __
    kinds = (Tensor, list, tuple, dict)
    return tensors_in([v for name, v in values if isinstance(v, kinds) and name not in own and name[:2] != "__"])


@cache
def _of_every_module() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


class _Place(NamedTuple):
    """Takes a tensor's place."""

    number: int


def flatten(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors in `value`, and `unflatten`, which puts other tensors into a copy of `value` as it is now."""
    tensors: list[Tensor] = []
    frame = Replacement(lambda tensor: tensors.append(tensor) or _Place(len(tensors) - 1))(value)
    return tensors, lambda new: Replacement(lambda place: new[place.number], _Place)(frame)


def floats_in(dtype: torch.dtype) -> Replacement:
    """Casts floating point tensors to `dtype`."""
    return Replacement(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _contents(value: Any) -> dict[Any, Any]:
    """(is an item, key or index or name of an attribute) -> value."""
    is_list = isinstance(value, list | deque)
    pairs: Any = value.items() if isinstance(value, dict) else enumerate(cast("Any", value)) if is_list else ()
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    attributes = {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
    with suppress(AttributeError):
        attributes |= object.__getattribute__(value, "__dict__")
    items: dict[Any, Any] = {(True, key): item for key, item in pairs}
    return items | {(False, name): item for name, item in attributes.items()}


def _set(value: Any, key: tuple[bool, Any], item: Any) -> None:
    is_item, name = key
    if not is_item:
        object.__setattr__(value, name, item)  # also of frozen dataclasses
    elif isinstance(value, list | deque) and name == len(cast("list[Any]", value)):
        cast("list[Any]", value).append(item)
    else:
        value[name] = item
