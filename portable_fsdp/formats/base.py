"""The interface of a format (import, export, or both), and a model's tensor names by its config.

Each format is a `ForeignFormat`, named in capitals in its module. Imports and exports hold one tensor at a time, in
the order of our files.
"""

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from portable_fsdp.backends.state import persistent_buffers
from portable_fsdp.checkpoint.manifests import MAX_RANK, TensorEntry, folder_of
from portable_fsdp.checkpoint.storage import require_regular
from portable_fsdp.checkpoint.store import Advance, Reader, no_progress
from portable_fsdp.formats import MODULES
from portable_fsdp.models.architecture import config_from_json, config_to_json, text_config
from portable_fsdp.models.weights import names_of_weights
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.files import parse_json, read_inside
from portable_fsdp.runtime.hub import import_transformers

MAX_FILE_BYTES = 5_000_000_000
FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportOptions:
    """`dtype`: of the model's floating-point tensors; None: as saved. `save_tokenizer` writes into folders of
    transformers. `base`: the adapters' base model, a folder or hub id; None: as in the run. `model`: of several models
    the one to export."""

    dtype: str | None = None
    save_tokenizer: Callable[[Path], None] | None = None
    advance: Advance = no_progress
    base: str | None = None
    model: str = ""


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A foreign checkpoint, open for reading.

    `tensors` has shapes and dtypes by our keys: FQN for the model's, `<state name>/<FQN>` for the optimizer's.
    `read(key)` returns a whole tensor, contiguous, on the host, in that shape and dtype. `model_config`: transformers'
    config, if the source has one.
    """

    tensors: dict[str, TensorEntry]
    read: Callable[[str], Tensor]
    step: int = 0
    model_config: dict[str, Any] | None = None


class ForeignFormat(NamedTuple):
    """`matches(path)` checks names and first bytes only. `open_checkpoint(path, trust_metadata)`: whether to read
    pickled metadata, restricted. `export(reader, options)` checks as much as it can, and returns the function that
    writes into a path. Both raise `CheckpointError`."""

    matches: Callable[[Path], bool] | None = None
    open_checkpoint: Any = None
    export: Callable[[Reader, ExportOptions], Callable[[Path], object]] | None = None


def load_format(name: str) -> Any:
    """Return the `ForeignFormat` of a name in `FORMATS` or `EXPORTS`."""
    return getattr(import_module(f"portable_fsdp.formats.{MODULES.get(name, name)}"), name.upper())


def weights_of(reader: Reader, dtype: str | None = None) -> dict[str, TensorEntry]:
    """Return the entries of the model's tensors, with floating-point ones in `dtype`."""
    tensors = reader.manifest.tensors.items()
    return {key: as_dtype(tensor, dtype) for key, tensor in tensors if folder_of(key) == "model"}


def as_dtype(tensor: TensorEntry, dtype: str | None) -> TensorEntry:
    """Return the entry in `dtype`, if it is floating-point and `dtype` isn't None."""
    if dtype is None or tensor.dtype not in FLOAT_DTYPES:
        return tensor
    return TensorEntry(shape=tensor.shape, dtype=dtype)


def file_inside(folder: Path, name: object) -> Path:
    """Return `folder/name`, a plain file of that folder. Raises `CheckpointError` for a path, a link, or no file."""
    if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise CheckpointError(f"{folder}: expected the plain name of a file in this folder, found {reprlib.repr(name)}")
    if (folder / name).is_symlink():
        raise CheckpointError(
            f"{folder / name}: expected a plain file, found a link, which could lead anywhere.\n"
            "  Copy the folder with the targets of its links (cp -rL, as for a snapshot in the hub's cache)."
        )
    require_regular(folder / name, folder.name)
    return folder / name


def check_numbers(where: str, value: object, what: str = f"a shape (at most {MAX_RANK} sizes)") -> tuple[int, ...]:
    """Return `value` as a tuple: at most `MAX_RANK` integers, none negative. Raises `CheckpointError`."""
    numbers: tuple[Any, ...] = tuple(cast(Any, value)) if isinstance(value, list | tuple) else (None,)
    if len(numbers) > MAX_RANK or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise CheckpointError(f"{where}: expected {what}, found {reprlib.repr(value)}")
    return numbers


def open_folder(
    folder: Path, index: str, single: str, open_file: Callable[[Path], ForeignCheckpoint]
) -> ForeignCheckpoint:
    """Open the files that transformers' `index` lists, or the file `single`, and config.json if the folder has one.

    Raises `CheckpointError`.
    """
    weight_map = _weight_map(folder, index) if (folder / index).exists() else None
    holders: dict[str, ForeignCheckpoint] = {}
    for name in [single] if weight_map is None else sorted(set(weight_map.values())):
        file = open_file(file_inside(folder, name))
        holders |= {key: file for key in file.tensors if weight_map is None or weight_map.get(key) == name}
    for key, name in sorted((weight_map or {}).items()):
        if key not in holders:
            raise CheckpointError(f"{folder}: {name} has no tensor {key}, which {index} lists")
    tensors = {key: file.tensors[key] for key, file in holders.items()}
    config = config_of(folder) if (folder / "config.json").is_file() else None
    return ForeignCheckpoint(tensors, lambda key: holders[key].read(key), 0, config)


def _weight_map(folder: Path, index: str) -> dict[str, str]:
    """Read the index: key -> plain name of a file."""
    path = file_inside(folder, index)
    try:
        content = parse_json(read_inside(path, folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    weight_map = cast(dict[str, object], content).get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected a weight_map (tensor -> file), found {str(weight_map)[:80]}")
    return {key: file_inside(folder, name).name for key, name in cast(dict[str, object], weight_map).items()}


# ------------------------------------------------------------------------- the model's names, by transformers' config


@dataclass(frozen=True)
class ModelNames:
    """A model's FQNs (several for a tied tensor) and the shape of each stored tensor, by its first FQN."""

    aliases: dict[str, list[str]]
    shapes: dict[str, tuple[int, ...]]
    base: str  # the prefix that the FQNs of the model without head lack

    @property
    def ties(self) -> dict[str, str]:
        """Further FQN of a tied tensor -> its first FQN, as in a manifest."""
        return {name: first for first, names in self.aliases.items() for name in names if name != first}


def config_of(path: Path) -> dict[str, Any]:
    """Load transformers' config as a dict, from config.json or its folder; runs no code. Raises `CheckpointError`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        # Not `parse_json`: older releases wrote infinities.
        json.loads(read_inside(file, path) if path.is_dir() else file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not a valid config.json: {error}") from None
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        return config_to_json(config)
    except Exception as error:  # transformers validates with exceptions of many classes
        raise CheckpointError(f"{path}: transformers can't load this config.json: {error}") from None


def config_object(model_config: Mapping[str, Any], where: str) -> Any:
    """Make transformers' config from a dict. Raises `CheckpointError`."""
    try:
        import_transformers()
        return config_from_json(model_config)
    except Exception as error:  # transformers validates with exceptions of many classes
        raise CheckpointError(f"{where}: model_config: {error}") from None


def model_on_meta(model_config: Mapping[str, Any], where: str) -> Any:
    """Build the model of a config on meta; None unless it is a causal language model. Raises `CheckpointError`."""
    transformers = import_transformers()
    config = text_config(config_object(model_config, where))
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # inconsistent sizes fail in many ways
        raise CheckpointError(f"{where}: model_config: {type(error).__name__}: {error}") from None


def names_of(model_config: Mapping[str, Any] | None, where: str) -> ModelNames | None:
    """Return the names in a config's model; None unless it is a causal language model. Raises `CheckpointError`."""
    model = None if model_config is None else model_on_meta(model_config, where)
    if model is None:
        return None
    stored = dict(model.named_parameters()) | persistent_buffers(model)
    aliases = {name: [name] for name in stored} | {names[0]: names for names in names_of_weights(model).values()}
    return ModelNames(aliases, {name: tuple(t.shape) for name, t in stored.items()}, str(model.base_model_prefix))
