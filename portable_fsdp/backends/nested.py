"""Tensors inside the inputs and outputs of modules: in containers, dataclasses and other objects, nested in any way.

torch's own functions (`torch.utils._pytree`) treat a dataclass, a subclass of dict or any other object as one leaf.
"""

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain, filterfalse
from operator import is_
from types import MemberDescriptorType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_FIXED = (tuple, set, frozenset)
_CONTAINERS = (dict, list, deque, *_FIXED)
_WHOLE = (str, bytes, int, float, complex, type, ModuleType, nn.Module)  # hold no tensors to find

_Contents = tuple[dict[Any, Any], dict[str, Any]]  # items by key or index, and attributes


class Replacement:
    """Replace tensors in values by `change(tensor)`; copy the objects and containers around a new one.

    A module may change such a copy: append to a list, set a field. `write_back` does the same to the original.
    `kind`: the type to replace.
    """

    def __init__(self, change: Callable[[Any], Any], kind: type = Tensor) -> None:
        self._change, self._kind = change, kind
        self._known: dict[int, tuple[Any, Any]] = {}  # id -> the value and what replaces it, both kept alive
        self._copies: list[tuple[Any, Any, _Contents]] = []  # original, copy, contents at first

    def __call__(self, value: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compile can trace this function
            return tree_map_only(self._kind, self._change, value)
        running = [self._replace(value)]
        while running:  # no recursion: objects may be nested deeper than Python's recursion limit
            inner = next(running[-1], None)
            running.pop() if inner is None else running.append(self._replace(inner))
        return self._new(value)

    def _new(self, value: Any) -> Any:
        return self._known.get(id(value), (value, value))[1]

    def _replace(self, value: Any) -> Generator[Any]:
        """Yield the inner values, which must be replaced first."""
        if id(value) in self._known or _is_plain(type(value)):
            return
        self._known[id(value)] = value, value  # ends cycles
        if isinstance(value, self._kind):
            self._known[id(value)] = value, self._change(value)
        elif kinds := _kinds_in(value):
            contents = _contents(value)
            for part in contents:
                yield from [item for item in part.values() if type(item) in kinds]
            items, attributes = (
                {key: new for key, item in part.items() if type(item) in kinds and (new := self._new(item)) is not item}
                for part in contents
            )
            if items or attributes:
                if isinstance(value, _FIXED):
                    make: Any = getattr(cast(Any, value), "_make", type(cast(Any, value)))  # _make: named tuples
                    copied = make((contents[0] | items).values())
                else:
                    _fill(copied := copy.copy(value), items, attributes)
                    self._copies.append((value, copied, _contents(copied)))
                self._known[id(value)] = value, copied

    def write_back(self) -> None:
        """Apply to the originals the changes that were made to the copies."""
        originals = {id(new): value for value, new in self._known.values()}
        for value, copied, before in self._copies:
            pairs = [*zip(now := _contents(copied), before, strict=True)]
            if any(new.keys() != old.keys() or not all(map(is_, new.values(), old.values())) for new, old in pairs):
                if isinstance(value, _CONTAINERS):
                    cast("list[Any]", value).clear()
                _fill(value, *({key: originals.get(id(item), item) for key, item in part.items()} for part in now))


def tensors_in(value: Any) -> list[Tensor]:
    """Return each tensor in `value` once."""
    found = dict[int, Tensor]()
    if _all_found(value, found, 4):
        return [*found.values()]
    tensors: list[Tensor] = []
    Replacement(lambda tensor: tensors.append(tensor) or tensor)(value)
    return tensors


def _all_found(value: Any, found: dict[int, Tensor], depth: int) -> bool:
    """Find tensors in plain containers, which takes a third of the time; whether no other value may hold one."""
    if type(value) is Tensor:
        found[id(value)] = value
        return True
    if type(value) not in (tuple, dict, list) or not depth:
        return _is_plain(type(value))
    return all(_all_found(each, found, depth - 1) for each in (value.values() if type(value) is dict else value))


def grad_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in `value` that require a gradient."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def tensors_of_modules(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors that the user's code keeps in attributes of modules, also inside lists and dicts."""
    values = ((name, value) for module in modules for name, value in vars(module).items())
    own = _of_every_module()  # fully_shard's attributes begin with __
    kinds = (Tensor, list, tuple, dict)
    return tensors_in([v for name, v in values if isinstance(v, kinds) and name not in own and name[:2] != "__"])


@cache
def _of_every_module() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


class _Place(NamedTuple):
    """Placeholder for a tensor."""

    number: int


def flatten(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors in `value`, and `unflatten`, which puts other tensors into a copy of `value` as it is now."""
    tensors: list[Tensor] = []
    frame = Replacement(lambda tensor: tensors.append(tensor) or _Place(len(tensors) - 1))(value)
    return tensors, lambda new: Replacement(lambda place: new[place.number], _Place)(frame)


def floats_in(dtype: torch.dtype) -> Replacement:
    """Return a replacement that casts floating point tensors to `dtype`."""
    return Replacement(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def are_cast(values: Iterable[Any], dtype: torch.dtype) -> bool:
    """Whether `floats_in(dtype)` leaves all of these as they are, found without a look inside objects but tuples."""
    others = [value for value in values if value is not None and not isinstance(value, _WHOLE)]
    return all(
        (value.dtype == dtype or not value.is_floating_point())
        if type(value) is Tensor
        else type(value) is tuple and are_cast(value, dtype)  # of rotary embeddings
        for value in others
    )


@lru_cache(10_000)
def _slots(kind: type) -> tuple[bool, list[str]]:
    """Whether values of this type have a `__dict__`, and the names of their slots."""
    tables = [vars(base) for base in kind.__mro__]
    slotted = [table for table in tables if "__slots__" in table]
    names = [name for table in slotted for name, slot in table.items() if isinstance(slot, MemberDescriptorType)]
    return any("__dict__" in table for table in tables), names


@lru_cache(10_000)
def _is_plain(kind: type) -> bool:
    """Whether values of this type hold no other values: numbers, strings, arrays."""
    return issubclass(kind, _WHOLE) or not (issubclass(kind, _CONTAINERS) or any(_slots(kind)))


def _kinds_in(value: Any) -> set[type]:
    """The types of the inner values that may hold tensors; none for a table of plain values, at C speed."""
    inside: Any = [*_attributes(value).values(), *_items(value)]
    first = kinds = set(filterfalse(_is_plain, {*map(type, inside)}))
    for _ in range(4):  # rows of a table
        if not kinds or not kinds <= {list, tuple, dict}:
            break
        rows = {id(row): row for row in inside if type(row) in kinds}.values()
        inside = [*chain.from_iterable([row.values() if isinstance(row, dict) else row for row in rows])]
        kinds = set(filterfalse(_is_plain, {*map(type, inside)}))
    return first if kinds else kinds


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ()


def _attributes(value: Any) -> dict[str, Any]:
    has_dict, slots = _slots(type(value))
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return attributes | object.__getattribute__(value, "__dict__") if has_dict else attributes


def _contents(value: Any) -> _Contents:
    items = value.items() if isinstance(value, dict) else enumerate(_items(value))
    return dict(items), {} if isinstance(value, _FIXED) else _attributes(value)


def _fill(value: Any, items: dict[Any, Any], attributes: dict[str, Any]) -> None:
    for key, item in items.items():
        if isinstance(value, list | deque) and key == len(cast("list[Any]", value)):
            cast("list[Any]", value).append(item)
        else:
            value[key] = item
    for name, item in attributes.items():
        object.__setattr__(value, name, item)  # also of frozen dataclasses
