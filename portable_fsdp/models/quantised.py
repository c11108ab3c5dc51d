"""`precision.frozen` in 4 or 8 bits: which weights are quantised, and the bytes that an engine requests.

The bytes are those of bitsandbytes 0.50 on CPUs, by plain operations, or those of a folder that it quantised. Weights
are read and quantised piece by piece: no host holds a base, and none more of a tensor than it needs, a few MB at a
time.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from portable_fsdp.config.describe import is_inside
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import Region, Spec, full_region, weight_spec
from portable_fsdp.models.experts import expert_modules
from portable_fsdp.models.weights import (
    Base,
    BuiltModel,
    TensorFile,
    TensorSlices,
    WeightFill,
    names_of_weights,
    plain_name,
)
from portable_fsdp.quantised import BLOCK, NESTED, NF4, ByteTable, constants, dequantise, is_linear, nested_levels
from portable_fsdp.runtime.errors import ConfigError

if TYPE_CHECKING:
    from portable_fsdp.tensor_plan import TensorPlan

_KEY = "precision.frozen"
_UNITS = (1024, 512, 256, 128, 64)
_CHUNK = 2**20  # weights that are read and quantised at a time


# ------------------------------------------------------------------------------------------------------ which weights


def quantised_tables(
    model: nn.Module,
    scheme: str,
    layers: Sequence[str],
    outside: Iterable[str],
    layouts: Mapping[str, Spec],
    plan: "TensorPlan | None",
    base: Base | None,
) -> dict[str, ByteTable]:
    """FQN -> table of each weight to quantise: frozen weights of linear layers, and of experts in one tensor.

    Only in the model's `layers`, not in the modules `outside` (`precision.modules`), not routers, tied weights, and
    layers with a part that trains, nor what `base` has unquantised beside quantised weights. `layouts`: of the weights.
    Raises ConfigError if nothing is left, or the axes `tensor` or `expert` would split a weight within rows of its
    table.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = names_of_weights(model)
    tables, outside, experts = dict[str, ByteTable](), [*outside], expert_modules(model)
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    scores = {1, *(getattr(getattr(model, "config", None), key, None) for key in keys)}  # outputs of routers
    for name, module in model.named_modules():
        if not is_inside(name, layers) or is_inside(name, outside) or module is head:
            continue
        own = dict(module.named_parameters(recurse=False))
        is_frozen = own and not any(weight.requires_grad or len(names[weight]) > 1 for weight in own.values())
        is_layer = is_linear(module) and len(own.get("weight", ())) not in scores
        if is_frozen and (is_layer or name in experts):
            dims = 3 if name in experts else 2
            chosen = {f"{name}.{leaf}": weight for leaf, weight in own.items() if weight.dim() == dims}
            for fqn, weight in chosen.items():
                if base is None or base.file.scheme is None or base.weights.is_quantised(plain_name(fqn)):
                    tables[fqn] = _table_of(fqn, tuple(weight.shape), scheme, layouts[fqn], plan)
    if not tables:
        raise ConfigError(
            f"{_KEY}={scheme}: the layers of {type(model).__name__} have no frozen linear layer outside "
            "precision.modules.\n  Freeze some with model.freeze, train adapters with model.lora, or set "
            f"{_KEY}=bfloat16."
        )
    return tables


def _table_of(fqn: str, shape: tuple[int, ...], scheme: str, spec: Spec, plan: "TensorPlan | None") -> ByteTable:
    last, parts = shape[-1], plan.parts.get(fqn) if plan is not None else None
    sizes = (last,)
    if plan is not None and parts is not None and parts.dim == len(shape) - 1:
        sizes = tuple(size / plan.size for size in parts.sizes)  # a device's part of each packed matrix
    units = (BLOCK,) if scheme == "nf4" else _UNITS
    smallest = 256 if scheme == "nf4_double" else BLOCK  # a smaller row would have too many scales
    fitting = [unit for unit in units if unit >= smallest and all(size % unit == 0 for size in sizes)]
    if fitting:
        return ByteTable(scheme, shape, fitting[0])
    if scheme == "int8" and sizes == (last,):
        return ByteTable(scheme, shape, last)
    axis = "tensor" if any("tensor" in axes for axes in spec) else "expert"
    if scheme != "int8" and axis == "expert" and spec[0] != ("expert",):
        return ByteTable(scheme, shape, units[0], is_flat=True)
    raise ConfigError(
        f"{_KEY}={scheme}: sharding.{axis} can't split {fqn} {list(shape)}: devices hold whole rows of {smallest} "
        f"quantised weights.\n  Set sharding.{axis}=1, {_KEY}=bfloat16, or leave its layer out: "
        f'precision.modules={{"{fqn.rpartition(".")[0]}": float32}}.'
    )


def table_layouts(
    tables: Mapping[str, ByteTable], layouts: Mapping[str, Spec], plan: "TensorPlan | None"
) -> tuple[dict[str, Spec], "TensorPlan | None"]:
    """Return layouts and plan of a model with tables: whole rows, which the last dimension of a weight counts."""
    own = {fqn: weight_spec(2) if table.is_flat else (*layouts[fqn], ()) for fqn, table in tables.items()}
    parts = {} if plan is None else dict(plan.parts)
    for fqn in tables.keys() & parts.keys():
        part, table = parts[fqn], tables[fqn]
        if part.dim == len(table.shape) - 1:
            parts[fqn] = replace(part, sizes=tuple(size // table.unit for size in part.sizes))
    return {**layouts, **own}, plan and replace(plan, parts=parts)


# ------------------------------------------------------------------------------------------------------------- bytes


class Nested(NamedTuple):
    """The scales of a whole tensor in 8 bits: their codes, the scale of each 256 of them, and their mean."""

    codes: Tensor
    scales: Tensor
    offset: Tensor


def nested_scales(scales: Tensor) -> Nested:
    """Quantise the scales of a tensor, float32 `[blocks]`, as bitsandbytes' `compress_statistics` does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # else the mean would depend on their number
    offset = scales.mean()
    torch.set_num_threads(threads)
    centred = nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
    largest = centred.abs().amax(dim=1)
    normed = (centred * (1 / largest)[:, None]).nan_to_num_(0.0).clamp_(-1, 1)
    normed = ((normed + 1) * 32767.5 + 0.5).trunc_() * (2 / 65535) - 1  # the kernel's table has 2**16 entries
    levels = nested_levels()
    codes = torch.bucketize(normed, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)
    return Nested(codes.flatten()[: len(scales)], largest, offset)


def block_scales(values: Tensor) -> Tensor:
    """`[..., n * 64]` -> `[..., n]`: the largest absolute value of each block."""
    return values.unflatten(-1, (-1, BLOCK)).abs().amax(dim=-1)


def nf4_codes(values: Tensor, scales: Tensor, count: int) -> Tensor:
    """`[..., n * 64]`, `[..., n]` -> uint8 `[..., n * 32]`, the code of the first of two weights in the high bits.

    `count`: weights without padding. bitsandbytes divides in a block that isn't whole, and multiplies elsewhere.
    """
    blocks, scales = values.unflatten(-1, (-1, BLOCK)), scales.clamp(min=1e-38)
    normed, last = blocks * (1.0 / scales)[..., None], count // BLOCK
    if count < values.numel() and count % BLOCK:
        normed.view(-1, BLOCK)[last] = blocks.reshape(-1, BLOCK)[last] / scales.flatten()[last]
    normed, codes = normed.clamp_(-1, 1), torch.zeros(normed.shape, dtype=torch.uint8)
    for low, high in itertools.pairwise(torch.tensor(NF4)):
        codes += normed > (low + high) / 2  # 4 times as fast as torch.bucketize
    codes = codes.flatten(-2)
    return (codes[..., 0::2] << 4) | codes[..., 1::2]


def _as_bytes(numbers: Tensor) -> Tensor:
    """float32 `[..., n]` -> uint8 `[..., 4 * n]`."""
    return numbers.contiguous().view(torch.uint8)


class StoredWeight(NamedTuple):
    """A weight that a file holds quantised: codes of all its weights in order, and their scales, float32 or nested."""

    codes: Callable[[int, int], Tensor]  # bytes of a range: uint8, or int8
    scales: Tensor | Nested


class TableFill:
    """The `fill` of a model with tables: bytes of tables, int8, and all else from `fill`.

    `stored(fqn)`: the weight as a file holds it; None: quantise it here.
    """

    def __init__(
        self, fill: WeightFill, tables: Mapping[str, ByteTable], stored: Callable[[str], StoredWeight | None]
    ) -> None:
        self._fill, self._tables, self._stored = fill, tables, stored
        self._nested = lru_cache(maxsize=1)(self._nested_scales)

    def __call__(self, fqn: str, slices: TensorSlices) -> Tensor:
        table = self._tables.get(fqn)
        if table is None:
            return self._fill(fqn, slices)
        parts = full_region(table.stored_shape[:-1]) if not slices else slices[: len(table.stored_shape) - 1]
        out = torch.empty([*(cut.stop - cut.start for cut in parts), table.row_bytes], dtype=torch.uint8)
        width = math.prod(out.shape[1:-1]) * table.unit  # weights in an index of dimension 0
        read = self._int8_rows if table.scheme == "int8" else self._nf4_rows
        for start in range(0, len(out), step := max(1, _CHUNK // max(width, 1))):
            rows = slice(parts[0].start + start, min(parts[0].start + start + step, parts[0].stop))
            out[start : start + step] = read(fqn, table, (rows, *parts[1:]))
        return out.view(torch.int8)

    def _int8_rows(self, fqn: str, table: ByteTable, parts: Region) -> Tensor:
        """Return the bytes of the rows in `parts` of a table."""
        stored, whole = self._stored(fqn), (*parts[:-1], slice(0, table.stored_shape[-2]))
        if stored is None:  # a scale is that of a weight's whole row
            values = self._values(fqn, table, whole)
            scales = values.abs().amax(dim=(-1, -2), keepdim=True)
            codes = (values * (127.0 / scales)).round_().nan_to_num_(0.0).to(torch.int8)  # a row of zeros stays zero
        else:
            codes = _by_rows(stored.codes, table, whole)
            scales = cast(Tensor, stored.scales).view(*table.shape[:-1], 1, 1)[whole[:-1]]
        codes = codes[..., parts[-1], :].view(torch.uint8)
        padded = nn.functional.pad(codes, (0, table.code_bytes - table.unit))
        return torch.cat([padded, _as_bytes(scales.expand(*codes.shape[:-1], 1))], dim=-1)

    def _nf4_rows(self, fqn: str, table: ByteTable, parts: Region) -> Tensor:
        """Return the bytes of the rows in `parts` of a table."""
        stored, blocks, scales = self._stored(fqn), table.unit // BLOCK, None
        if stored is None:
            values = self._values(fqn, table, parts)
            scales = block_scales(values)
            count = math.prod(table.shape) - parts[0].start * table.unit if table.is_flat else values.numel()
            codes = nf4_codes(values, scales, count)
        else:
            codes = _by_rows(stored.codes, table, parts, per_byte=2)
        if table.scheme == "nf4":
            scales = _per_row(cast(Tensor, stored.scales), table, blocks)[parts] if stored is not None else scales
            return torch.cat([codes, _as_bytes(cast(Tensor, scales))], dim=-1)
        nested = self._nested(fqn)
        of_blocks = _per_row(nested.codes, table, blocks)[parts]
        of_rows = _per_row(nested.scales.repeat_interleave(NESTED // table.unit), table, 1)[parts]
        of_rows = torch.cat([of_rows, nested.offset.expand_as(of_rows)], dim=-1)
        return torch.cat([codes, of_blocks, _as_bytes(of_rows)], dim=-1)

    def _nested_scales(self, fqn: str) -> Nested:
        """Read the whole tensor for the statistics of its scales."""
        if (stored := self._stored(fqn)) is not None:
            return cast(Nested, stored.scales)
        shape, scales = self._tables[fqn].shape, list[Tensor]()
        count = math.prod(shape)
        for start in range(0, count, _CHUNK):
            values = self._range(fqn, shape, start, min(start + _CHUNK, count))
            scales.append(block_scales(nn.functional.pad(values, (0, -len(values) % BLOCK))))
        return nested_scales(torch.cat(scales))

    def _values(self, fqn: str, table: ByteTable, parts: Region) -> Tensor:
        """Read the weights in rows of a table: float32 `[..., rows, unit]`."""
        unit = table.unit
        if table.is_flat:
            start, stop = parts[0].start * unit, parts[0].stop * unit
            values = self._range(fqn, table.shape, start, min(stop, math.prod(table.shape)))
            return nn.functional.pad(values, (0, stop - start - len(values))).view(-1, unit)
        columns = slice(parts[-1].start * unit, parts[-1].stop * unit)
        return self._fill(fqn, (*parts[:-1], columns)).float().unflatten(-1, (-1, unit))

    def _range(self, fqn: str, shape: Sequence[int], start: int, stop: int) -> Tensor:
        """Read the weights from `start` to `stop` of the flat tensor, float32."""
        width = math.prod(shape[1:])
        rows = slice(start // width, -(-stop // width))
        values = self._fill(fqn, (rows, *full_region(shape[1:]))).float().flatten()
        return values[start - rows.start * width : stop - rows.start * width]


def _by_rows(codes: Callable[[int, int], Tensor], table: ByteTable, parts: Region, per_byte: int = 1) -> Tensor:
    """Read the codes in rows of a table, `parts` of it, from the range of the flat weight that holds them."""
    shape, size = table.stored_shape[:-1], table.unit // per_byte
    width = math.prod(shape[1:]) * size
    flat = codes(parts[0].start * width, parts[0].stop * width)
    flat = nn.functional.pad(flat, (0, (parts[0].stop - parts[0].start) * width - len(flat)), value=0x77)
    rows = flat.view(-1, *shape[1:], size)
    return rows[(slice(None), *parts[1:])]


def _per_row(numbers: Tensor, table: ByteTable, count: int) -> Tensor:
    """`[n]` -> `[..., count]`: `count` numbers for each row of a table; missing ones, of padding, are 0."""
    rows = table.stored_shape[:-1]
    total = math.prod(rows) * count
    return nn.functional.pad(numbers[:total], (0, max(0, total - len(numbers)))).view(*rows, count)


def _dequantised(fill: WeightFill, tables: Mapping[str, ByteTable], fqn: str, slices: TensorSlices) -> Tensor:
    """The `fill` of the weights themselves: quantised ones, float32, dequantised from `fill`'s bytes."""
    table = tables.get(fqn)
    if table is None:
        return fill(fqn, slices)
    weight = dequantise(fill(fqn, ()), table, torch.float32, constants(table.scheme))
    return weight[slices] if slices else weight


def as_quantised(
    fill: WeightFill,
    shapes: Mapping[str, tuple[int, ...]],
    scheme: str,
    stored: Callable[[str], StoredWeight | None],
) -> WeightFill:
    """Return the `fill` of a model in which the weights in `shapes` have the values of `scheme`, float32."""
    units = {"nf4": BLOCK, "nf4_double": NESTED // 16}
    tables = {
        name: ByteTable(scheme, shape, units.get(scheme, shape[-1]), is_flat=scheme != "int8")
        for name, shape in shapes.items()
    }
    return partial(_dequantised, TableFill(fill, tables, stored), tables)


def with_tables(built: BuiltModel, tables: Mapping[str, ByteTable], config: Config) -> BuiltModel:
    """Return the model with the bytes of its tables as `fill`, and a base that says so. Raises ConfigError for a weight
    that isn't in files: no checkpoint would hold its bytes. (A plan needs no files.)"""
    base, scheme = built.base, config.precision.scheme
    if base is None:
        raise ConfigError(
            f"{_KEY}={scheme}: needs model.pretrained: no checkpoint holds quantised weights, and a run that resumes "
            f"reads them from the same files again.\n  Set {_KEY}=auto."
        )
    if missing := [fqn for fqn in sorted(tables) if not base.weights.holds(plain_name(fqn))]:
        raise ConfigError(
            f"{_KEY}={scheme}: {missing[0]} is not in model.pretrained (model.allow), but drawn from run.seed, and "
            f"no checkpoint holds quantised weights.\n  Set {_KEY}=bfloat16, or train it: leave it out of model.freeze."
        )
    if scheme != "nf4" and base.file.scheme is not None:
        for fqn in tables:
            if base.weights.stored(plain_name(fqn)) is None:
                raise ConfigError(
                    f"{_KEY}={scheme}: {base.file.where}: {fqn} is joined from several quantised tensors, whose scales "
                    "don't fit one.\n  Use the model's unquantised folder."
                )
    fill = TableFill(built.fill, tables, lambda fqn: base.weights.stored(plain_name(fqn)))
    frozen = replace(
        base,
        names=base.names if config.model.lora is not None else frozenset(tables),
        fill=partial(_dequantised, fill, tables),
        scheme=scheme,
        quantised={fqn: table.shape for fqn, table in tables.items()},
    )
    return replace(built, fill=fill, base=frozen)


# ---------------------------------------------------------------------------------------------- folders of bitsandbytes

# A quantised `weight` comes with tensors named after it: in 4 bits `absmax`, `quant_map`, for 8-bit scales
# `nested_absmax` and `nested_quant_map`, and JSON in `quant_state.bitsandbytes__nf4`; in 8 bits with `SCB` beside it.

_STATE, _SCALES = ".quant_state.bitsandbytes__", "SCB"
_STORAGE = {"U8": 1, "I8": 1, "F32": 4}  # bytes of the numbers that hold codes of 4 bits, if not 2
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


class BitsandbytesFolder(TensorFile):
    """A folder as transformers saved it, bit for bit: its tensors under the names of the model; quantised ones are read
    in float32, one tensor at a time.

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
