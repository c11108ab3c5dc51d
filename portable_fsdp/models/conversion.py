"""A folder's tensors under the model's own names: transformers renames, joins and splits what older releases saved.

Experts lie on the hub one by one, and are one tensor in the model; GPT-2's own folder lacks a prefix. This module
follows transformers' private tables (`conversion_mapping`) as `from_pretrained` does (tried with 5.23), but lazily: it
reads a renamed tensor by the slice, makes a joined one on demand, and keeps that until the next.
"""

# pyright: reportPrivateUsage=false

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from portable_fsdp.models.weights import TensorFile, TensorSlices
from portable_fsdp.runtime.errors import ConfigError


@dataclass
class _Group:
    """Tensors of the model that one of transformers' converters makes of several keys."""

    converter: Any
    first: str  # of the model's names, as transformers calls the group
    sources: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # (the converter's pattern, key)


class ConvertedTensors:
    """`shapes` by the model's names; `keys`: those that each comes from; `unexpected`: the other keys."""

    def __init__(self, file: TensorFile, model: Any) -> None:
        self._file, self._model = file, model
        self._groups: dict[str, _Group] = {}
        self._last: tuple[_Group, dict[str, Tensor]] | None = None
        self.keys: dict[str, list[str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unexpected: list[str] = []
        self._sort(file.shapes)

    def read(self, name: str, slices: TensorSlices) -> Tensor:
        group = self._groups.get(name)
        if group is None:
            return self._file.read(self.keys[name][0], slices)
        if self._last is None or self._last[0] is not group:
            self._last = None  # first, so that two are never in memory
            self._last = (group, self._make(group, lambda key: self._file.read(key, ())))
        return self._last[1][name][slices].clone()

    def _sort(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        from transformers.core_model_loading import dot_natural_key

        named = self._model.state_dict()
        rename, converters = self._tables(named)
        groups: dict[str, _Group] = {}
        for key in sorted(shapes, key=dot_natural_key):
            name, pattern = rename(key)
            if name not in named:
                self.unexpected.append(key)
            elif pattern is None:
                self._add(name, [key], shapes[key])
            else:
                groups.setdefault(name, _Group(converters[pattern], name)).sources.append((pattern, key))
        for group in groups.values():
            tensors = self._make(group, lambda key: torch.empty(shapes[key], device="meta"))
            for name, tensor in tensors.items():
                self._add(name, [key for _, key in group.sources], tuple(tensor.shape))
                self._groups[name] = group

    def _tables(self, named: Mapping[str, Tensor]) -> tuple[Any, dict[str, Any]]:
        """Key -> (name, the converter's pattern or None), and pattern -> converter."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        tables = get_model_conversion_mapping(self._model)
        renamings: Any = [table for table in tables if isinstance(table, WeightRenaming)]
        converters: Any = [table for table in tables if isinstance(table, WeightConverter)]
        base, names = self._model.base_model_prefix, dict(named)

        def rename(key: str) -> tuple[str, str | None]:
            name, pattern = rename_source_key(key, renamings, converters, base, names)
            if name not in names and key in names:
                return rename_source_key(key, [], [], base, names)
            return name, pattern

        return rename, {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def _add(self, name: str, keys: list[str], shape: tuple[int, ...]) -> None:
        if name in self.keys:
            raise ConfigError(
                f"model.pretrained: {self._file.where}: expected one tensor for {name}, found two: "
                f"{self.keys[name][0]} and {keys[0]}.\n  Remove one of them from the folder."
            )
        self.keys[name], self.shapes[name] = keys, shape

    def _make(self, group: _Group, read: Any) -> dict[str, Tensor]:
        converter = copy.deepcopy(group.converter)  # which keeps the tensors that it gets
        for pattern, key in group.sources:
            converter.add_tensor(group.first, key, pattern, lambda key=key: read(key))
        try:
            tensors = converter.convert(group.first, model=self._model, config=self._model.config)
        except Exception as error:  # of shapes that don't fit each other, or an expert that is missing
            raise ConfigError(
                f"model.pretrained: {self._file.where}: transformers can't make {group.first} of "
                f"{', '.join(key for _, key in group.sources[:3])}, ...: {type(error).__name__}: {error}\n"
                "  Compare config.json with the weights."
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}
