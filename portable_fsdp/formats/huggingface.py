"""The folder that transformers' `from_pretrained` opens: safetensors, an index for several files, config.json."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from portable_fsdp.checkpoint.format import Manifest, TensorEntry, bytes_of_tensors
from portable_fsdp.checkpoint.safetensors import Stored, groups, header_of, read_tensor, write_tensors
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats.base import FLOAT_DTYPES, ExportOptions, ForeignCheckpoint, as_dtype, file_inside
from portable_fsdp.formats.names import config_object, config_of
from portable_fsdp.formats.peft import merged, opened_folder
from portable_fsdp.models.architecture import mapping_of
from portable_fsdp.models.tensor_files import INDEX, SINGLE
from portable_fsdp.runtime.errors import CheckpointError, ConfigError
from portable_fsdp.runtime.files import parse_json, read_regular, write_text_atomically
from portable_fsdp.runtime.hub import import_transformers, local_folder

log = logging.getLogger("portable_fsdp")

GENERATION = "generation_config.json"
GENERATING = ("causal_lm", "seq2seq_lm")
"""Tasks whose models generate text."""


def export(reader: Reader, options: ExportOptions) -> Callable[[Path], None]:
    """The model as a Hugging Face folder, adapters (LoRA) merged into their layers: of these it holds two in float32.

    Of a model of `model.factory` the weights alone, for `load_state_dict`. Raises `CheckpointError`: a base that isn't
    there, a model that isn't of transformers.
    """
    saved, read = merged(reader, options.base)
    tensors = {key: as_dtype(tensor, options.dtype) for key, tensor in saved.items()}
    config = _model_config(reader.manifest, reader.folder.name, tensors)

    def write(folder: Path) -> None:
        if config is not None:
            config.save_pretrained(folder)
        own = _generation_config(reader.manifest)
        if own is not None:
            (folder / GENERATION).write_bytes(own)
        elif config is not None and _task_of(reader.manifest) in GENERATING:
            import_transformers().GenerationConfig.from_model_config(config).save_pretrained(folder)
        _write_weights(read, tensors, folder, options)

    return write


def matches(path: Path) -> bool:
    """A folder with an index, or with the single file."""
    return (path / INDEX).is_file() or (path / SINGLE).is_file()


def open_checkpoint(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """The folder's weights, and its config.json if there is one. Holds one tensor. Raises `CheckpointError`."""
    stored: dict[str, tuple[Path, Stored]] = {}
    weight_map = _weight_map(path) if (path / INDEX).exists() else None
    for name in [SINGLE] if weight_map is None else sorted(set(weight_map.values())):
        file = file_inside(path, name)
        for key, tensor in header_of(file).items():
            if weight_map is None or weight_map.get(key) == name:
                stored[key] = file, tensor
    for key, name in sorted((weight_map or {}).items()):
        if key not in stored:
            raise CheckpointError(f"{path}: expected {key} in {name} ({INDEX}), found none")
    config = config_of(path) if (path / "config.json").is_file() else None
    entries = {key: tensor.entry for key, (_, tensor) in stored.items()}
    return ForeignCheckpoint(entries, lambda key: read_tensor(*stored[key]), 0, config)


def _weight_map(folder: Path) -> dict[str, str]:
    """Key -> plain name of a file."""
    path = file_inside(folder, INDEX)
    try:
        index = parse_json(read_regular(path, folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected JSON, found: {error}") from None
    weight_map = cast(dict[str, object], index).get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected a weight_map (tensor -> file), found {str(weight_map)[:80]}")
    return {key: file_inside(folder, name).name for key, name in cast(dict[str, object], weight_map).items()}


def _task_of(manifest: Manifest) -> str:
    return str(manifest.config.get("train", {}).get("task", "causal_lm"))


def _model_config(manifest: Manifest, name: str, tensors: dict[str, TensorEntry]) -> Any:
    """transformers' config of the saved model, with what `from_pretrained` needs: architectures and dtype. None: the
    model is none of transformers."""
    if manifest.config.get("model", {}).get("factory") is not None:
        return None
    if manifest.architecture is None:
        raise CheckpointError(
            f"checkpoint {name}: expected a model_config (transformers), found null: can't be exported"
        )
    config = config_object(manifest.architecture, f"checkpoint {name}")
    known = getattr(import_transformers(), mapping_of(_task_of(manifest)))
    if not config.architectures and type(config) in known:
        config.architectures = [known[type(config)].__name__]
    floating = {tensor.dtype for tensor in tensors.values() if tensor.dtype in FLOAT_DTYPES}
    if len(floating) == 1:
        config.dtype = floating.pop()
    return config


def _generation_config(manifest: Manifest) -> bytes | None:
    """The bytes of `model.pretrained`'s, from the folder that the run opened, or where the name leads now. None:
    transformers makes one of the model's config."""
    model = manifest.config.get("model", {})
    name = model.get("pretrained")
    if name is None or model.get("gguf_file") is not None:
        return None
    try:
        folder = opened_folder(manifest) or local_folder("model.pretrained", name, (GENERATION,))
        return read_regular(folder / GENERATION, folder) if (folder / GENERATION).is_file() else None
    except (ConfigError, OSError) as error:
        log.warning("%s is made from the model's config, without that of model.pretrained: %s", GENERATION, error)
        return None


def _write_weights(
    read: Callable[[str], Tensor], tensors: dict[str, TensorEntry], folder: Path, options: ExportOptions
) -> None:
    shards = list(groups(tensors, options.max_file_bytes))
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
        write_tensors(folder / file, {key: tensors[key] for key in keys}, read, {}, options.advance)
        weight_map.update(dict.fromkeys(keys, file))
    if len(shards) > 1:
        metadata = {"total_size": bytes_of_tensors(tensors)}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        write_text_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
