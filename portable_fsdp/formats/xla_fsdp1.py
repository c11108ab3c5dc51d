"""Files saved by the ranks of torch_xla's XlaFullyShardedDataParallel: {'model': ..., 'shard_metadata': ...} each.

Needs no torch_xla: it cuts a parameter into equal parts, flat (padded at the end) or along dimension 0 (padded with
rows), and the metadata has its name and shape. With `flatten_parameters` a unit's parameters are one flat tensor.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from portable_fsdp.checkpoint.format import DTYPE_BYTES, TensorEntry
from portable_fsdp.formats.base import ForeignCheckpoint, ForeignFormat, check_numbers, check_shape
from portable_fsdp.formats.single_file import entry_of, is_torch, load_mapped
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.files import names_in

log = logging.getLogger("portable_fsdp")

_SHARD = "_fsdp_shard"
_FLAT = "_fsdp_wrapped_module.flat_param_"


class Sharded(NamedTuple):
    """Elements `start` up to `start + prod(shape)` of the flattened, concatenated parts."""

    entry: TensorEntry
    parts: list[Tensor]
    start: int


def open_checkpoint(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """Open all files of a folder, one per rank; read with `weights_only`, mapped. Weights only, no optimizer state.

    Holds one tensor beside the page cache. Raises `CheckpointError`.
    """
    ranks = _ranks(path)
    metadata = cast(dict[str, Any], ranks[0]["shard_metadata"])
    tensors: dict[str, Sharded] = {}
    for name in cast(dict[str, Any], ranks[0]["model"]):
        for key, sharded in _unshard(path, name, [rank["model"] for rank in ranks], metadata):
            if key in tensors:
                raise CheckpointError(f"{path}: {name}: a second tensor for {key}")
            tensors[key] = sharded
    if any("optimizer" in rank for rank in ranks):
        log.warning("ignoring the optimizer state in %s: it has numbers, not names", path)
    return ForeignCheckpoint({key: s.entry for key, s in tensors.items()}, lambda key: _read(tensors[key]))


def _ranks(folder: Path) -> list[dict[str, Any]]:
    """Load the files in the order of their ranks; all ranks of one run, each once. Raises `CheckpointError`."""
    by_rank: dict[int, dict[str, Any]] = {}
    sizes: set[int] = set()
    for path in _torch_files(folder):
        value = load_mapped(path)
        if not isinstance(value, dict) or not all(isinstance(value.get(k), dict) for k in ("model", "shard_metadata")):
            raise CheckpointError(
                f"{path}: no dicts model and shard_metadata, which ranks of XlaFullyShardedDataParallel save"
            )
        metadata = value["shard_metadata"]
        rank, size = check_numbers(str(path), (metadata.get("rank"), metadata.get("world_size")), "rank and world_size")
        if rank in by_rank:
            raise CheckpointError(f"{path}: a second file of rank {rank}")
        by_rank[rank] = value
        sizes.add(size)
    if len(sizes) != 1 or sorted(by_rank) != list(range(next(iter(sizes)))):
        raise CheckpointError(
            f"{folder}: expected a file of each rank of one run, found ranks {sorted(by_rank)} of {sorted(sizes)}"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def _torch_files(folder: Path) -> list[Path]:
    """Return torch's files; if some are named `rank...`, only those: transformers' Trainer puts others beside them."""
    try:
        files = [folder / name for name in names_in(folder) if is_torch(folder / name)]
    except OSError as error:
        raise CheckpointError(f"import {folder}: {error.strerror}") from None
    return [file for file in files if re.match(r"rank[-_]?\d", file.name)] or files


def _unshard(folder: Path, name: str, models: list[Any], metadata: Mapping[str, Any]) -> Iterator[tuple[str, Sharded]]:
    """Yield the tensors in the parts named `name`."""
    where = f"{folder}: {name}"
    words = name.split(".")
    cut = next((i for i, word in enumerate(words) if word.startswith(_SHARD)), None)
    parts = [model.get(name) for model in models]
    if not all(isinstance(part, Tensor) for part in parts):
        raise CheckpointError(f"{where}: expected a tensor of each rank, found another type")
    if len({(part.shape, part.dtype) for part in parts}) != 1:
        raise CheckpointError(f"{where}: expected equal parts, found {[list(part.shape) for part in parts]}")
    entry = entry_of(where, parts[0])
    if cut is None:  # a buffer, which every rank has, perhaps in another dtype: the metadata has the original
        info = _get(where, metadata, "buffer_info").get(name)
        dtype = str(info.get("_orig_dtype") if isinstance(info, Mapping) else "").removeprefix("torch.")
        dtype = dtype if dtype in DTYPE_BYTES else entry.dtype
        yield _plain_name(name), Sharded(TensorEntry(shape=entry.shape, dtype=dtype), parts[:1], 0)
        return
    prefix, suffix = ".".join(words[:cut]), ".".join(words[cut:])
    info = _get(where, metadata, "shard_info", prefix, suffix)
    full = ".".join(word for word in (prefix, str(info.get("_orig_name"))) if word)
    whole = tuple(info.get("_orig_size") or ())
    flat = _get(where, metadata, "flatten_info").get(full) if _FLAT in full else None
    if flat is None:
        names, shapes = [full], [whole]
    elif isinstance(flat, tuple | list) and len(flat) == 3 and len(flat[0]) == len(flat[1]):
        names, shapes = [f"{full.rpartition('.')[0]}.{inner}" for inner in flat[0]], list(map(tuple, flat[1]))
    else:
        raise CheckpointError(f"{where}: expected names and shapes of its parameters, found {str(flat)[:80]}")
    start = 0
    for key, shape in zip(names, shapes, strict=True):
        size = check_shape(where, shape)
        yield _plain_name(key), Sharded(TensorEntry(shape=size, dtype=entry.dtype), parts, start)
        start += math.prod(size)
    if start > sum(part.numel() for part in parts) or start != math.prod(check_shape(where, whole)):
        raise CheckpointError(f"{where}: expected parts of {start} elements, found {[list(p.shape) for p in parts]}")


def _get(where: str, value: Any, *keys: str) -> Mapping[str, Any]:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: shard_metadata has no {' > '.join(keys)}")
    return cast(Mapping[str, Any], value)


def _plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")


def _read(sharded: Sharded) -> Tensor:
    result = torch.empty(sharded.entry.shape, dtype=getattr(torch, sharded.entry.dtype))
    flat = result.view(-1)
    first = -sharded.start  # offset of the part in `flat`
    for part in sharded.parts:
        start, stop = max(first, 0), min(first + part.numel(), flat.numel())
        if start < stop:
            flat[start:stop] = part.reshape(-1)[start - first : stop - first]
        first += part.numel()
    return result


XLA_FSDP1 = ForeignFormat(lambda path: path.is_dir() and bool(_torch_files(path)), open_checkpoint)
