"""The format of a checkpoint folder: `manifest.json`, and the safetensors files that it lists.

A manifest is hostile input: we check all of it before we open a file. The checks run over columns of numbers, because
every process reads all pieces, and a large model on many processes has hundreds of thousands. No torch here.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from portable_fsdp.checkpoint.storage import MANIFEST, STEP_NAME, exists, read_file, require_regular, store_of
from portable_fsdp.runtime.errors import CheckpointError, table
from portable_fsdp.runtime.files import parse_json

IMPORT = "import "
"""Prefix of `written_by.backend` in an import; the format's name follows."""
IMPORTED = "\timport"
"""Owner of imported checkpoints. Contains a tab, which run names can't, so no run deletes them or their debris."""

_DTYPES = {
    8: {"float64": "F64", "int64": "I64"},
    4: {"float32": "F32", "int32": "I32"},
    2: {"float16": "F16", "bfloat16": "BF16", "int16": "I16"},
    1: {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
DTYPE_BYTES = {name: size for size in _DTYPES for name in _DTYPES[size]}
"""Bytes of one element, by torch's name of the dtype: those that safetensors and torch share."""
SAFETENSORS_DTYPES = {name: _DTYPES[size][name] for size in _DTYPES for name in _DTYPES[size]}
"""torch's name of a dtype -> the name in a safetensors file."""

_FILE_NAME = re.compile(r"(?:model|optimizer)/[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_MAX_ROWS = 12  # in a table of differences

MAX_RANK = 16
"""Dimensions of a tensor."""

Dims = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MAX_RANK)]


class NamedSave(NamedTuple):
    """A committed save that an events.jsonl names."""

    step: int
    path: str
    events: Path  # the file


class Saved(NamedTuple):
    """A checkpoint that this run committed."""

    step: int
    path: Path
    seconds: float  # from the call until the commit
    blocked_seconds: float  # during which the training waited for it
    removed: tuple[int, ...]  # older steps that retention deleted after it


class StrictModel(BaseModel):
    """Accept the declared fields only, of exactly their types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorEntry(StrictModel):
    """A global tensor of `n` dimensions; its pieces tile it exactly once.

    Piece k is in file number `files[k]`, starts at `offsets[n*k : n*(k+1)]` of the tensor, and has the shape
    `sizes[n*k : n*(k+1)]`. A file holds at most one piece of a tensor.
    """

    shape: Dims
    dtype: str
    files: list[int] = Field(default_factory=list)
    offsets: list[int] = Field(default_factory=list)
    sizes: list[int] = Field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class FileEntry(StrictModel):
    """A file's name inside the checkpoint, its length, and the 128-bit XXH3 of its content in hexadecimal."""

    name: str
    bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern="^[0-9a-f]{32}$")


class DataPosition(StrictModel):
    """The position in the data order: the epoch and the samples consumed in it; XXH3 hashes of rows and tokenizer."""

    epoch: int = Field(ge=0)
    position: int = Field(ge=0)
    rows: str | None = None
    tokenizer: str | None = None


class Evaluated(StrictModel):
    """A run's evaluations up to a save. Losses are means over the counted tokens, in nats."""

    rows: str  # hash of the evaluated rows
    step: int = Field(ge=0)  # of the last evaluation
    loss: float
    best_step: int = Field(ge=0)
    best_loss: float
    without_improvement: int = Field(ge=0)  # evaluations since the best one


class LossScale(StrictModel):
    """Dynamic loss scaling of a float16 run, after the step."""

    scale: float = Field(gt=0, allow_inf_nan=False)
    finite_steps: int = Field(ge=0)  # in a row, since the scale last changed
    skipped_steps: int = Field(ge=0)  # of the whole run


class BaseFingerprint(StrictModel):
    """The weights of `model.pretrained` that a checkpoint of adapters leaves out. They have no pieces.

    `quantised`: the FQNs of those that the run quantised by `scheme`; their entries in `tensors` are dequantised."""

    pretrained: str  # the value of model.pretrained
    gguf_file: str | None
    fingerprint: str = Field(pattern="^[0-9a-f]{32}$")
    scheme: str | None = None
    quantised: tuple[str, ...] = ()
    tensors: dict[str, TensorEntry]

    def __str__(self) -> str:
        file = f" {self.gguf_file}" if self.gguf_file else ""
        scheme = f", in {self.scheme}" if self.scheme else ""
        return f"{self.pretrained}{file} (fingerprint {self.fingerprint}{scheme})"


class Named(StrictModel):
    """What a loop of the user's own saved by name, see `checkpoint/named.py`. `models`: prefixes of weights, none for
    one model. `objects`: the state of each, and the groups of each optimizer as `optimizer.NAME`, as JSON; their
    tensors are `objects/NAME/...`."""

    models: tuple[str, ...] = ()
    objects: dict[str, Any] = Field(default_factory=lambda: {})


class WrittenBy(StrictModel):
    """The writer of the checkpoint, for people; no reader depends on it."""

    device: str
    backend: str
    process_count: int = Field(ge=1)
    torch: str
    portable_fsdp: str


class Manifest(StrictModel):
    """`manifest.json`. `architecture` is its key `model_config` (transformers' config), a name that pydantic reserves;
    `ties` are further names of tensors; `saved_at` is in UTC (ISO 8601). `evaluation`, `loss_scale`, `base` and `named`
    are left out where there is none, so that older releases read the rest."""

    format_version: int = Field(ge=1, le=1)
    step: int = Field(ge=0)
    saved_at: str
    config: dict[str, Any]
    architecture: dict[str, Any] | None = Field(alias="model_config")
    data: DataPosition
    evaluation: Evaluated | None = None
    loss_scale: LossScale | None = None
    base: BaseFingerprint | None = None
    named: Named | None = None
    ties: dict[str, str]
    written_by: WrittenBy
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]

    @property
    def bytes(self) -> int:
        """Total size of the files, without the manifest."""
        return sum(file.bytes for file in self.files)

    @property
    def left_out(self) -> dict[str, TensorEntry]:
        """The model's tensors that are in no file: those of its base."""
        return {} if self.base is None else self.base.tensors


OBJECTS = "objects/"
"""Prefix of the tensors of named objects."""


def folder_of(key: str) -> str:
    """The folder of a tensor: optimizer state is keyed `<state name>/<FQN>`, and no FQN has a slash. Tensors of named
    objects lie beside it."""
    return "optimizer" if "/" in key else "model"


def key_in(model: str, key: str) -> str:
    """The key of a named model's tensor: `ema.norm.weight`, `exp_avg/ema.norm.weight`; "": the only model."""
    state, slash, fqn = key.rpartition("/")
    return f"{state}{slash}{model}.{fqn}" if model else key


def bytes_of_tensors(tensors: Mapping[str, TensorEntry]) -> int:
    """Total size of the tensors' elements."""
    return sum(tensor.nbytes for tensor in tensors.values())


def step_folder(run_folder: Path, step: int) -> Path:
    """The folder of a committed step."""
    return run_folder / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a folder's name; None for a name that no commit makes."""
    match = STEP_NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def committed_steps(run_folder: Path) -> list[Path]:
    """The committed checkpoints, newest first. Readers check whether they are intact."""
    store = store_of(run_folder)
    paths = [run_folder / name for name in store.names(run_folder) if STEP_NAME.fullmatch(name)]
    committed = [path for path in paths if store.is_committed(path)]
    return sorted(committed, key=lambda path: (step_of(path), path.name), reverse=True)


def checkpoints_below(folder: Path) -> list[Path]:
    """The committed checkpoints of a run, newest first, from the run's folder or its `checkpoints/`."""
    return committed_steps(folder / "checkpoints") or committed_steps(folder)


def best_checkpoint(newest: Path, evaluation: Evaluated | None) -> tuple[Path, str]:
    """Return the best checkpoint of a run by its evaluations, and the reason; without evaluations the newest."""
    if evaluation is None:
        return newest, ""
    best = step_folder(newest.parent, evaluation.best_step)
    if not store_of(best).is_committed(best):
        return newest, f" (the newest: {best.name}, the best by its evaluation, is gone)"
    return best, f" (the best by its evaluation: eval_loss {evaluation.best_loss:.4f})"


def require_checkpoint(folder: Path) -> None:
    """Check that `folder`, named by `checkpoint.resume`, exists and isn't a run's. Raises CheckpointError."""
    if not store_of(folder).names(folder):  # not `is_dir`: fsspec answers any error with False
        raise CheckpointError(
            f"checkpoint.resume: no such folder: {folder}\n"
            "  Use auto, none, or a checkpoint's folder, as runs/run/checkpoints/step-00000500."
        )
    if not exists(folder / MANIFEST) and (below := checkpoints_below(folder)):
        raise CheckpointError(
            f"checkpoint.resume: expected a checkpoint's folder, found a run's folder: {folder}\n"
            f"  Name one of its checkpoints: checkpoint.resume={below[0]}."
        )


def check_json(values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for values that JSON doesn't round-trip: infinity, text that isn't UTF-8."""
    for name, value in values.items():
        try:
            TypeAdapter(Any).validate_json(json.dumps(value, allow_nan=False))
        except ValueError as error:
            raise CheckpointError(f"{name}: can't be written as JSON: {error}") from None


def run_name(config: Mapping[str, Any]) -> str:
    """The run's name in a resolved config, or ""."""
    run: Any = config.get("run")
    return str((run.get("name") if isinstance(run, dict) else None) or "")


def run_of(manifest: Manifest) -> str:
    """The name of the run that wrote a checkpoint, perhaps ""; IMPORTED for an import."""
    return IMPORTED if manifest.written_by.backend.startswith(IMPORT) else run_name(manifest.config)


def manifest_text(manifest: Manifest) -> str:
    """Return sealed JSON with one line per tensor and file: readable, and `diff` shows the changes."""
    without = {key for key in ("evaluation", "loss_scale", "base", "named") if getattr(manifest, key) is None}
    parts: list[str] = []
    for key, value in manifest.model_dump(mode="json", by_alias=True, exclude=without).items():
        match key:
            case "tensors":
                lines = (f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
                text = "{\n" + ",\n".join(lines) + "\n}"
            case "files":
                text = "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n]"
            case _:
                text = json.dumps(value)
        parts.append(f"{json.dumps(key)}: {text}")
    return seal("{\n" + ",\n".join(parts))


def seal(content: str) -> str:
    """Close the JSON object with a last key `xxh3_128`: the hash of all text before the comma in front of it."""
    return f'{content},\n"xxh3_128": "{xxhash.xxh3_128_hexdigest(content.encode())}"\n}}\n'


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder/manifest.json`; opens no other file. Raises `CheckpointError`."""
    path = folder / MANIFEST
    require_regular(path, folder.name)
    try:
        text = read_file(path).decode()
        content: object = parse_json(text)
        version = cast(dict[str, object], content).get("format_version") if isinstance(content, dict) else None
        if version != 1:
            raise ValueError(f"expected format_version 1, found {repr(version)[:80]}; saved by a newer portable_fsdp?")
        unsealed = text[: -len(seal(""))]
        if text != seal(unsealed):
            raise ValueError("another hash than its last key, xxh3_128: it was altered after the save")
        manifest = Manifest.model_validate_json(unsealed + "}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        more = f", and {error.error_count() - 1} more problems" if error.error_count() > 1 else ""
        where = ".".join(map(str, first["loc"]))
        problem = f"{where:.200}: {first['msg']:.500}{more}"
        raise CheckpointError(f"checkpoint {folder.name}: manifest.json: {problem}") from None
    except (OSError, ValueError) as error:
        raise damaged(folder, MANIFEST, "the manifest as it was saved", f"{error!s:.1000}") from None
    check_manifest(manifest, folder.name)
    if step_of(folder) not in (None, manifest.step):
        raise CheckpointError(
            f"checkpoint {folder.name}: expected step {step_of(folder)} (the folder's name), "
            f"found step {manifest.step} (manifest.json). Was the folder renamed?"
        )
    return manifest


def hash_file(path: Path, name: str) -> FileEntry:
    """Hash a file and return its entry, under its name in the checkpoint. Raises OSError."""
    digest, store = xxhash.xxh3_128(), store_of(path)
    with store.open(path) as source:
        buffer = memoryview(bytearray(store.chunk_bytes))
        for start in range(0, source.size, len(buffer)):
            chunk = buffer[: source.size - start]
            source.read_into(start, chunk)
            digest.update(chunk)
        return FileEntry(name=name, bytes=source.size, xxh3_128=digest.hexdigest())


def verify_file(folder: Path, file: FileEntry, *, content: bool) -> None:
    """Check that a plain file has the length of its entry, and with `content` the hash. Raises CheckpointError."""
    size = require_regular(folder / file.name, folder.name)
    if size != file.bytes:
        raise damaged(folder, file.name, f"{file.bytes} bytes", f"{size} bytes")
    if content:
        try:
            actual = hash_file(folder / file.name, file.name)
        except OSError as error:
            raise CheckpointError(f"checkpoint {folder.name}: {file.name}: {error}") from None
        if actual != file:
            raise damaged(folder, file.name, f"content with xxh3_128 {file.xxh3_128}", actual.xxh3_128)


def damaged(folder: Path, file: str, expected: str, actual: str) -> CheckpointError:
    """The error for a file that changed after the save."""
    return CheckpointError(
        f"checkpoint {folder.name}: {file}: expected {expected}, found {actual}.\n"
        "  The file was altered or cut after the save: copy it again from an intact copy,\n"
        "  or take an older checkpoint."
    )


def check_manifest(manifest: Manifest, name: str) -> None:
    """Check that files have plain names and are used, and pieces tile every tensor once. Raises CheckpointError."""
    try:
        for file in manifest.files:
            if not _FILE_NAME.fullmatch(file.name):
                raise ValueError(f"file {file.name!r}: expected model/NAME.safetensors or optimizer/NAME.safetensors")
        if len({file.name for file in manifest.files}) != len(manifest.files):
            raise ValueError("files: two entries have the same name")
        folders = np.array([file.name.startswith("model/") for file in manifest.files], dtype=bool)
        used = [0] * len(manifest.files)
        for key, tensor in manifest.tensors.items():
            _check_tensor(key, tensor, folders, used)
        for file, needed in zip(manifest.files, used, strict=True):
            if not needed:
                raise ValueError(f"file {file.name!r}: no tensor uses it")
            if needed > file.bytes:
                raise ValueError(
                    f"file {file.name!r}: expected at least {needed} bytes for its tensors, found {file.bytes}"
                )
        for key, tensor in manifest.left_out.items():
            _check_dtype(key, tensor)
            if key in manifest.tensors or folder_of(key) != "model" or tensor.files or tensor.offsets or tensor.sizes:
                raise ValueError(f"{key}: expected a model weight that is in base only and has no pieces")
        known = manifest.tensors.keys() | manifest.left_out.keys()
        for alias, key in manifest.ties.items():
            if alias in known or key not in known:
                raise ValueError(f"ties: {alias!r} must be a new name, and {key!r} the name of a tensor")
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"checkpoint {name}: manifest.json: {error!s:.1000}") from None


def describe(tensor: TensorEntry | None) -> str:
    """`float32 [8192, 2048]`."""
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def first_rows(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table of differences, and how many more there are."""
    more = f"\n    and {len(rows) - _MAX_ROWS} more" if len(rows) > _MAX_ROWS else ""
    return table([heading, *rows[:_MAX_ROWS]], indent="    ") + more


def _check_dtype(key: str, tensor: TensorEntry) -> None:
    if tensor.dtype not in DTYPE_BYTES:
        raise ValueError(f"{key}: expected a dtype of {', '.join(DTYPE_BYTES)}; found {tensor.dtype!r}")


def _check_tensor(key: str, tensor: TensorEntry, in_model: NDArray[np.bool_], used: list[int]) -> None:
    """Check a tensor, and add the bytes of each piece to `used` of its file. Raises ValueError."""
    _check_dtype(key, tensor)
    count, rank = len(tensor.files), len(tensor.shape)
    if not len(tensor.offsets) == len(tensor.sizes) == count * rank:
        raise ValueError(f"{key}: expected {count} offsets and sizes of {rank} dimensions each")
    files = np.array(tensor.files, dtype=np.int64)
    if count and not (files.min() >= 0 and files.max() < len(used)):
        raise ValueError(f"{key}: expected file numbers below {len(used)}, found {files.min()} to {files.max()}")
    if (in_model[files] != (folder_of(key) == "model")).any():
        raise ValueError(f"{key}: a piece is outside {folder_of(key)}/")
    if len(np.unique(files)) != count:
        raise ValueError(f"{key}: two of its pieces are in one file")
    offsets = np.array(tensor.offsets, dtype=np.int64).reshape(count, rank)
    sizes = np.array(tensor.sizes, dtype=np.int64).reshape(count, rank)
    check_tiling(key, tensor.shape, offsets, sizes)
    for file, volume in zip(tensor.files, cast(list[int], sizes.prod(axis=1).tolist()), strict=True):
        used[file] += volume * DTYPE_BYTES[tensor.dtype]


def check_tiling(key: str, whole: tuple[int, ...], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Check that boxes cover every element of a tensor exactly once, and none is empty. Raises ValueError.

    `offsets`, `sizes`: int64 [count, dimensions].
    """
    shape = np.array(whole, dtype=np.int64)
    inside = (sizes > 0) & (offsets >= 0) & (sizes <= shape) & (offsets <= shape - sizes)
    if not inside.all():
        k = int(np.argmin(inside.all(axis=1)))
        raise ValueError(
            f"{key}: expected a piece inside {shape.tolist()}, found {sizes[k].tolist()} at {offsets[k].tolist()}"
        )
    expected, actual = math.prod(whole), sum(cast(list[int], sizes.prod(axis=1).tolist()))
    if expected != actual:
        raise ValueError(f"{key}: expected pieces of {expected} elements in total, found {actual}")
    if len(offsets) < 2:
        return
    axis = int(np.argmax([len(np.unique(column)) for column in offsets.T]))  # with the most cuts
    order = np.argsort(offsets[:, axis], kind="stable")
    offsets, sizes = offsets[order], sizes[order]
    ends = offsets[:, axis] + sizes[:, axis]
    if (ends[:-1] > offsets[1:, axis]).any():  # else each starts where the previous one ends
        _refuse_overlap(key, offsets, sizes, axis)


def _refuse_overlap(key: str, offsets: NDArray[np.int64], sizes: NDArray[np.int64], axis: int) -> None:
    """Raise ValueError if boxes overlap: a sweep along `axis`, by which they are sorted, has few open at a time."""
    is_open = np.zeros(0, dtype=np.int64)
    for k in range(len(offsets)):
        is_open = is_open[offsets[is_open, axis] + sizes[is_open, axis] > offsets[k, axis]]
        starts, stops = offsets[is_open], offsets[is_open] + sizes[is_open]
        overlap = ((offsets[k] < stops) & (starts < offsets[k] + sizes[k])).all(axis=1)
        if overlap.any():
            other = int(is_open[int(np.argmax(overlap))])
            raise ValueError(f"{key}: the pieces at {offsets[other].tolist()} and {offsets[k].tolist()} overlap")
        is_open = np.append(is_open, k)
