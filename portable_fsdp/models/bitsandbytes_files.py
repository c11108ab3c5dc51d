"""Folders that transformers saved with weights quantised by bitsandbytes: read as they are, bit for bit.

A quantised `weight` comes with tensors named after it: in 4 bits `absmax`, `quant_map`, for 8-bit scales
`nested_absmax` and `nested_quant_map`, and JSON in `quant_state.bitsandbytes__nf4`; in 8 bits with `SCB` beside it.
"""

import json
import math
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.layout import full_region
from portable_fsdp.models.quantised import Nested, StoredWeight, as_quantised
from portable_fsdp.models.weights import TensorFile, TensorSlices
from portable_fsdp.quantised import NF4, nested_levels
from portable_fsdp.runtime.errors import ConfigError

_STATE, _SCALES = ".quant_state.bitsandbytes__", "SCB"
_STORAGE = {"U8": 1, "I8": 1, "F32": 4}  # bytes of the numbers that hold codes of 4 bits, if not 2
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


class BitsandbytesFolder(TensorFile):
    """The folder's tensors under the names of the model; quantised ones are read in float32, one tensor at a time.

    `scheme`: as precision.frozen names it. Raises ConfigError for other forms than those that a run can keep.
    """

    def __init__(self, folder: TensorFile) -> None:
        self._folder, self.where = folder, folder.where
        in_4_bits = {key.partition(_STATE)[0]: key for key in folder.shapes if _STATE in key}
        in_8_bits = {f"{key.removesuffix(_SCALES)}weight": key for key in folder.shapes if key.endswith(f".{_SCALES}")}
        self._states: dict[str, dict[str, Any]] = {key: self._state(key, name) for key, name in in_4_bits.items()}
        nested = {key for key, state in self._states.items() if "nested_offset" in state}
        self.quantised = frozenset([*in_4_bits, *in_8_bits])
        kinds = {"nf4": in_4_bits.keys() - nested, "nf4_double": nested, "int8": in_8_bits.keys()}
        schemes = [scheme for scheme, keys in kinds.items() if keys]
        if len(schemes) != 1:
            raise self._refusal("weights quantised in one way", " and ".join(schemes) or "none")
        [self.scheme] = schemes
        formats = {f"{key}_format" for key in in_8_bits} & folder.shapes.keys()
        for name in formats:
            if (form := folder.read(name, ()).tolist()) not in (0, [0]):
                raise self._refusal("8-bit weights in rows", f"{name} {form}")
        aside = {f"{key}{part}" for key in in_4_bits for part in _PARTS} | {*in_4_bits.values(), *in_8_bits.values()}
        shapes = {key: shape for key, shape in folder.shapes.items() if key not in aside | formats}
        self.shapes = shapes | {key: tuple(state["shape"]) for key, state in self._states.items()}
        self._last: tuple[str, Tensor] | None = None
        self._scales = lru_cache(maxsize=1)(self._read_scales)

    def _state(self, key: str, name: str) -> dict[str, Any]:
        """Read the form of a weight in 4 bits."""
        kind = name.partition(_STATE)[2]
        state: dict[str, Any] = json.loads(bytes(self._folder.read(name, ()).tolist()))
        sizes = {"blocksize": 64} | ({"nested_blocksize": 256} if "nested_offset" in state else {})
        actual = {name: state.get(name) for name in sizes}
        if kind != "nf4" or actual != sizes:
            raise self._refusal("nf4 in blocks of 64 (and scales in blocks of 256)", f"{kind} {actual} of {key}")
        levels = {".quant_map": torch.tensor(NF4)}
        levels |= {".nested_quant_map": nested_levels()} if "nested_offset" in state else {}
        for part, expected in levels.items():
            if not torch.equal(self._folder.read(f"{key}{part}", ()), expected):
                raise self._refusal("the levels of bitsandbytes", f"others in {key}{part}")
        return state

    def _refusal(self, expected: str, found: str) -> ConfigError:
        return ConfigError(
            f"model.pretrained: {self.where}: expected {expected}, found {found}.\n"
            "  Use the model's unquantised folder, or dequantise it with transformers and save_pretrained it."
        )

    def file_of(self, key: str) -> str:
        return self._folder.file_of(key)

    def dtype_of(self, key: str) -> str:
        return "F32" if key in self.quantised else self._folder.dtype_of(key)

    def sample(self, key: str) -> bytes:
        return self._folder.sample(key)

    def read(self, key: str, slices: TensorSlices) -> Tensor:
        if key not in self.quantised:
            return self._folder.read(key, slices)
        if self._last is None or self._last[0] != key:
            self._last = None  # dropped before the next is made: not two at a time
            values = as_quantised(self._folder.read, {key: self.shapes[key]}, cast(str, self.scheme), self.stored)
            self._last = key, values(key, ())
        return self._last[1][slices] if slices else self._last[1]

    def stored(self, key: str) -> StoredWeight | None:
        return StoredWeight(partial(self._codes, key), self._scales(key)) if key in self.quantised else None

    def _read_scales(self, key: str) -> Tensor | Nested:
        if self.scheme == "int8":
            return self._folder.read(f"{key.removesuffix('weight')}{_SCALES}", ()).float()
        absmax = self._folder.read(f"{key}.absmax", ())
        if self.scheme == "nf4":
            return absmax
        offset = torch.tensor(float(self._states[key]["nested_offset"]))
        return Nested(absmax, self._folder.read(f"{key}.nested_absmax", ()), offset)

    def _codes(self, key: str, start: int, stop: int) -> Tensor:
        """Read the bytes of codes from `start` to `stop`, or to the end."""
        shape = self._folder.shapes[key]
        if self.scheme == "int8":
            rows = slice(start // math.prod(shape[1:]), -(-stop // math.prod(shape[1:])))
            return self._folder.read(key, (rows, *full_region(shape[1:]))).flatten()
        size = _STORAGE.get(self._folder.dtype_of(key), 2)
        whole = slice(start // size, min(-(-stop // size), shape[0]))
        return self._folder.read(key, (whole, slice(0, 1))).flatten().view(torch.uint8)
