"""What a checkpoint folder holds: `manifest.json`, and the safetensors files that it lists.

A manifest that is read is hostile input: everything in it is checked before a file is opened. The checks are over
columns of numbers, since a large model on many processes has hundreds of thousands of pieces, and every process reads
them all. How a folder comes to be is in `commit.py`. No torch here.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from portable_fsdp.checkpoint.storage import exists, is_object_store, names, read, require_regular
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.strict_json import parse_json

MANIFEST = "manifest.json"
FOLDERS = ("model", "optimizer")

IMPORT = "import "
"""Begins `written_by.backend` of what no run wrote; the format's name follows."""
IMPORTED = "\timport"
"""Whose an import is, instead of a run's name, which holds no tab: no run deletes it, nor what one has begun."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's name of the dtype: those that safetensors and torch share."""

_STEP_NAME = re.compile(r"step-(\d{8,})")
_FILE_NAME = re.compile(r"(?:model|optimizer)/[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
MAX_ELEMENTS = 2**59  # strides and byte counts of anything below it fit 64 bits
_MAX_BYTES = 2**30  # of a manifest: that of a million pieces has 30 MB

Dims = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=16)]


class StrictModel(BaseModel):
    """Nothing but what is named, of exactly the type that is named."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorEntry(StrictModel):
    """A global tensor of `n` dimensions; its pieces tile it exactly once.

    Piece k lies in the file `files[k]` of the manifest's list, starts at `offsets[n*k : n*(k+1)]` of the tensor, and
    has the shape `sizes[n*k : n*(k+1)]`. A file holds one piece of a tensor at most.
    """

    shape: Dims
    dtype: str
    files: list[int] = Field(default_factory=list)
    offsets: list[int] = Field(default_factory=list)
    sizes: list[int] = Field(default_factory=list)


class FileEntry(StrictModel):
    """A file's name inside the checkpoint, its length, and the 128-bit XXH3 of its content in hexadecimal."""

    name: str
    bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern="^[0-9a-f]{32}$")


class DataPosition(StrictModel):
    """Where the data order stands: the epoch, the samples consumed in it; and XXH3 hashes of the rows and tokenizer."""

    epoch: int = Field(ge=0)
    position: int = Field(ge=0)
    rows: str | None = None
    tokenizer: str | None = None


class Evaluated(StrictModel):
    """What a run's evaluations had told when a step was saved. Losses are means over the counted tokens, in nats."""

    rows: str  # which they were over
    step: int = Field(ge=0)  # of the last one
    loss: float
    best_step: int = Field(ge=0)
    best_loss: float
    without_improvement: int = Field(ge=0)  # evaluations since the best one


class BaseFingerprint(StrictModel):
    """What a checkpoint of adapters leaves out: weights that come from `model.pretrained`. None of them has pieces."""

    pretrained: str  # as model.pretrained has it
    gguf_file: str | None
    fingerprint: str = Field(pattern="^[0-9a-f]{32}$")
    tensors: dict[str, TensorEntry]

    def __str__(self) -> str:
        file = f" {self.gguf_file}" if self.gguf_file else ""
        return f"{self.pretrained}{file} (fingerprint {self.fingerprint})"


class WrittenBy(StrictModel):
    """Who wrote the checkpoint; for people, no reader depends on it."""

    device: str
    backend: str
    process_count: int = Field(ge=1)
    torch: str
    portable_fsdp: str


class Manifest(StrictModel):
    """`manifest.json`. `architecture` (transformers' config as a dict) is its key `model_config`, a name that pydantic
    keeps for itself; `ties` are further names of tensors; `saved_at` is in UTC, as ISO 8601 has it. `evaluation` and
    `base` are left out where there was none, so that releases that don't know them read the rest."""

    format_version: int = Field(ge=1, le=1)
    step: int = Field(ge=0)
    saved_at: str
    config: dict[str, Any]
    architecture: dict[str, Any] | None = Field(alias="model_config")
    data: DataPosition
    evaluation: Evaluated | None = None
    base: BaseFingerprint | None = None
    ties: dict[str, str]
    written_by: WrittenBy
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]

    @property
    def bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.bytes for file in self.files)

    @property
    def left_out(self) -> dict[str, TensorEntry]:
        """The model's tensors that lie in no file of the checkpoint: those of its base."""
        return {} if self.base is None else self.base.tensors


def folder_of(key: str) -> str:
    """The folder that holds a tensor: optimizer state is keyed `<state name>/<FQN>`, and no FQN has a slash."""
    return "optimizer" if "/" in key else "model"


def bytes_of_tensors(tensors: Mapping[str, TensorEntry]) -> int:
    """Of their elements, in files."""
    return sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors.values())


def step_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is committed."""
    return run_folder / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a folder's name states; None if the name is not that of a committed checkpoint."""
    match = _STEP_NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def committed_steps(run_folder: Path) -> list[Path]:
    """The committed checkpoints, newest first. Whether they are whole is the reader's care."""
    found = [run_folder / name for name in names(run_folder)]
    committed = [path for path in found if step_of(path) is not None and is_committed(path)]
    return sorted(committed, key=lambda path: (step_of(path), path.name), reverse=True)


def checkpoints_below(folder: Path) -> list[Path]:
    """The committed checkpoints of a run, newest first, from the run's folder or its `checkpoints/`."""
    return committed_steps(folder / "checkpoints") or committed_steps(folder)


def require_checkpoint(folder: Path) -> None:
    """Raises CheckpointError where `folder`, of `checkpoint.resume`, isn't there, or is a run's with checkpoints."""
    if not names(folder):  # not `is_dir`: fsspec takes any error for a no
        raise CheckpointError(
            f"checkpoint.resume: expected auto, none, or a checkpoint's folder, found no such folder: {folder}\n"
            "  Name one of run.dir's, as runs/run/checkpoints/step-00000500. Nothing was started."
        )
    if not exists(folder / MANIFEST) and (below := checkpoints_below(folder)):
        raise CheckpointError(
            f"checkpoint.resume: expected a checkpoint's folder, found that of a run: {folder}\n"
            f"  Name one of its checkpoints: checkpoint.resume={below[0]}. Nothing was started."
        )


def is_committed(folder: Path) -> bool:
    """In an object store the manifest is the commit; a local folder bears its name since the commit."""
    return exists(folder / MANIFEST) if is_object_store(folder) else folder.is_dir()


def check_json(values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for what no manifest would give back: infinity, text made of bytes that are no UTF-8."""
    for name, value in values.items():
        try:
            TypeAdapter(Any).validate_json(json.dumps(value, allow_nan=False))
        except ValueError as error:
            raise CheckpointError(f"{name}: expected values that JSON can hold, found: {error}") from None


def run_name(config: Mapping[str, Any]) -> str:
    """Of a resolved config; "" where the run has none."""
    run: Any = config.get("run")
    return str((run.get("name") if isinstance(run, dict) else None) or "")


def run_of(manifest: Manifest) -> str:
    """The name of the run that wrote a checkpoint, "" where it had none; IMPORTED for one that none wrote."""
    return IMPORTED if manifest.written_by.backend.startswith(IMPORT) else run_name(manifest.config)


def manifest_text(manifest: Manifest) -> str:
    """JSON with one tensor and one file a line, so that people can read it and `diff` shows what changed; sealed."""
    parts: list[str] = []
    without = {key for key in ("evaluation", "base") if getattr(manifest, key) is None}
    for key, value in manifest.model_dump(mode="json", by_alias=True, exclude=without).items():
        if key == "tensors":
            parts.append(f"{json.dumps(key)}: {_tensor_lines(value)}")
        elif key == "base":
            without_tensors = json.dumps({name: of for name, of in value.items() if name != "tensors"})
            parts.append(f'"base": {without_tensors[:-1]}, "tensors": {_tensor_lines(value["tensors"])}}}')
        elif key == "files":
            parts.append(f"{json.dumps(key)}: [\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return seal("{\n" + ",\n".join(parts))


def _tensor_lines(tensors: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in tensors.items()) + "\n}"


def seal(content: str) -> str:
    """Close the object with a last key `xxh3_128`: the hash of all that stands before the comma in front of it."""
    return f'{content},\n"xxh3_128": "{xxhash.xxh3_128_hexdigest(content.encode())}"\n}}\n'


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder/manifest.json`; opens no other file. Raises `CheckpointError`."""
    path = folder / MANIFEST
    if require_regular(path, folder.name) > _MAX_BYTES:
        raise CheckpointError(f"checkpoint {folder.name}: manifest.json: expected at most 1 GiB")
    try:
        text = read(path).decode()
        version = _version(parse_json(text))
        if version != 1:
            raise ValueError(f"expected format_version 1, found {repr(version)[:80]}; is it of a newer portable_fsdp?")
        manifest = Manifest.model_validate_json(_content_under_seal(text) + "}")
    except ValidationError as error:
        raise CheckpointError(f"checkpoint {folder.name}: manifest.json: {_sentence(error)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {folder.name}: manifest.json: expected the manifest as it was saved, found: {error!s:.1000}\n"
            "  It was altered or cut after the save: copy it again from where it was whole,\n"
            "  or take an older checkpoint."
        ) from None
    check_manifest(manifest, folder.name)
    if step_of(folder) not in (None, manifest.step):
        raise CheckpointError(
            f"checkpoint {folder.name}: expected step {step_of(folder)} (the folder's name), "
            f"found step {manifest.step} (manifest.json). Was the folder renamed?"
        )
    return manifest


def check_manifest(manifest: Manifest, name: str) -> None:
    """Files are plain names inside the folder, all of them used; pieces tile every tensor once. `CheckpointError`."""
    try:
        for file in manifest.files:
            if not _FILE_NAME.fullmatch(file.name):
                raise ValueError(f"file {file.name!r}: expected model/NAME.safetensors or optimizer/NAME.safetensors")
        if len({file.name for file in manifest.files}) != len(manifest.files):
            raise ValueError("files: expected each name once")
        folders = np.array([file.name.startswith("model/") for file in manifest.files], dtype=bool)
        used = [0] * len(manifest.files)
        for key, tensor in manifest.tensors.items():
            _check_tensor(key, tensor, folders, used)
        _check_files(manifest.files, used)
        for key, tensor in manifest.left_out.items():
            _check_left_out(key, tensor, manifest.tensors)
        known = manifest.tensors.keys() | manifest.left_out.keys()
        for alias, key in manifest.ties.items():
            if alias in known or key not in known:
                raise ValueError(f"ties: expected {alias!r} to be another name of a tensor, found {key!r}")
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"checkpoint {name}: manifest.json: {error!s:.1000}") from None


def describe(tensor: TensorEntry | None) -> str:
    """`float32 [8192, 2048]`."""
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _content_under_seal(text: str) -> str:
    content = text[: -len(seal(""))]
    if text != seal(content):
        raise ValueError("expected its own xxh3_128 as the last key, found another: it was altered after the save")
    return content


def _version(value: object) -> object:
    return cast(dict[str, object], value).get("format_version") if isinstance(value, dict) else None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    others = error.error_count() - 1
    where = ".".join(str(part) for part in first["loc"])
    return f"{where:.200}: {first['msg']:.500}" + (f", and {others} more problems" if others else "")


def _check_left_out(key: str, tensor: TensorEntry, stored: Mapping[str, TensorEntry]) -> None:
    _check_kind(key, tensor)
    if key in stored or folder_of(key) != "model" or tensor.files or tensor.offsets or tensor.sizes:
        raise ValueError(f"{key}: expected weights that stand in base alone and have no pieces, found others")


def _check_kind(key: str, tensor: TensorEntry) -> None:
    if tensor.dtype not in DTYPE_BYTES:
        raise ValueError(f"{key}: expected a dtype of {', '.join(DTYPE_BYTES)}; found {tensor.dtype!r}")
    if math.prod(max(size, 1) for size in tensor.shape) > MAX_ELEMENTS:
        raise ValueError(f"{key}: expected at most 2**59 elements, found shape {list(tensor.shape)}")


def _check_tensor(key: str, tensor: TensorEntry, in_model: NDArray[np.bool_], used: list[int]) -> None:
    """Adds the bytes of each piece to `used` of its file."""
    _check_kind(key, tensor)
    count, rank = len(tensor.files), len(tensor.shape)
    if not len(tensor.offsets) == len(tensor.sizes) == count * rank:
        raise ValueError(f"{key}: expected {count} offsets and sizes of {rank} dimensions each")
    files = np.array(tensor.files, dtype=np.int64)
    if count and not (files.min() >= 0 and files.max() < len(used)):
        raise ValueError(f"{key}: expected numbers of {len(used)} files, found {files.min()} to {files.max()}")
    if (in_model[files] != (folder_of(key) == "model")).any():
        raise ValueError(f"{key}: expected in {folder_of(key)}/, found in another folder")
    if len(np.unique(files)) != count:
        raise ValueError(f"{key}: expected each piece in a file of its own, found two in one file")
    offsets = np.array(tensor.offsets, dtype=np.int64).reshape(count, rank)
    sizes = np.array(tensor.sizes, dtype=np.int64).reshape(count, rank)
    check_tiling(key, tensor.shape, offsets, sizes)
    for file, volume in zip(tensor.files, cast(list[int], sizes.prod(axis=1).tolist()), strict=True):
        used[file] += volume * DTYPE_BYTES[tensor.dtype]


def check_tiling(key: str, whole: tuple[int, ...], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Raises ValueError unless boxes, of [count, dimensions] each, cover every element of a tensor exactly once.

    No box may be empty.
    """
    shape = np.array(whole, dtype=np.int64)
    inside = (sizes > 0) & (offsets >= 0) & (sizes <= shape) & (offsets <= shape - sizes)
    if not inside.all():
        k = int(np.argmin(inside.all(axis=1)))
        raise ValueError(
            f"{key}: expected a piece inside {shape.tolist()}, found {sizes[k].tolist()} at {offsets[k].tolist()}"
        )
    expected, found = math.prod(whole), sum(cast(list[int], sizes.prod(axis=1).tolist()))
    if expected != found:
        raise ValueError(f"{key}: expected pieces of {expected} elements in all, found {found}")
    if len(offsets) < 2:
        return
    axis = int(np.argmax([len(np.unique(column)) for column in offsets.T]))  # with the most cuts
    order = np.argsort(offsets[:, axis], kind="stable")
    offsets, sizes = offsets[order], sizes[order]
    ends = offsets[:, axis] + sizes[:, axis]
    if (ends[:-1] > offsets[1:, axis]).any():  # else each begins where the one before has ended
        _refuse_overlap(key, offsets, sizes, axis)


def _refuse_overlap(key: str, offsets: NDArray[np.int64], sizes: NDArray[np.int64], axis: int) -> None:
    """A sweep along `axis`, by which the boxes are sorted: few are open at a time."""
    is_open = np.zeros(0, dtype=np.int64)
    for k in range(len(offsets)):
        is_open = is_open[offsets[is_open, axis] + sizes[is_open, axis] > offsets[k, axis]]
        starts, stops = offsets[is_open], offsets[is_open] + sizes[is_open]
        overlap = ((offsets[k] < stops) & (starts < offsets[k] + sizes[k])).all(axis=1)
        if overlap.any():
            other = int(is_open[int(np.argmax(overlap))])
            raise ValueError(f"{key}: the pieces at {offsets[other].tolist()} and {offsets[k].tolist()} overlap")
        is_open = np.append(is_open, k)


def _check_files(files: tuple[FileEntry, ...], used: list[int]) -> None:
    for file, least in zip(files, used, strict=True):
        if not least:
            raise ValueError(f"file {file.name!r}: no tensor uses it")
        if least > file.bytes:
            raise ValueError(f"file {file.name!r}: expected at least {least} bytes for its tensors, found {file.bytes}")
