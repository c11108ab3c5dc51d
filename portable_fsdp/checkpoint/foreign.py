"""Checkpoints in other people's formats. Export only, to the folder that transformers' `from_pretrained` opens."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from portable_fsdp.backends.base import Part
from portable_fsdp.checkpoint import safetensors
from portable_fsdp.checkpoint.format import DTYPE_BYTES, Manifest, TensorEntry, folder_of
from portable_fsdp.checkpoint.safetensors import Lazy
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.files import sync_folder, write_text_atomically

MARK = "portable_fsdp.json"
"""In every export: where it comes from. A folder without it is somebody else's, and is never replaced."""


def export_huggingface(
    checkpoint: Path,
    folder: Path,
    save_tokenizer: Callable[[Path], None] | None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the model of `checkpoint` as a Hugging Face folder, in the dtype that it was saved in. For one process.

    Hashes the model's files first. Holds one tensor in host memory at a time. An older export in `folder` is replaced
    once the new one is whole.
    Raises `CheckpointError`: a damaged checkpoint, a model that isn't of transformers, another thing in `folder`.
    """
    require_replaceable(folder)
    with Reader(checkpoint) as reader:
        config = _model_config(reader.manifest, checkpoint.name)
        reader.verify(Part(0, 1), "model/")
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        config.save_pretrained(unfinished)
        _transformers().GenerationConfig.from_model_config(config).save_pretrained(unfinished)
        _write_weights(reader, unfinished, max_shard_bytes)
        if save_tokenizer is not None:
            save_tokenizer(unfinished)
        write_text_atomically(unfinished / MARK, _mark(reader.manifest))
    _replace(folder, unfinished)


def require_replaceable(folder: Path) -> None:
    """Raises `CheckpointError` where `folder` holds something that isn't an export."""
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not (folder / MARK).is_file():
        raise CheckpointError(
            f"export to {folder}: expected a new name, an empty folder or an earlier export (with {MARK}),\n"
            "  found something else, which is left alone. Name another folder."
        )


def _model_config(manifest: Manifest, name: str) -> Any:
    """transformers' config of the saved model, with what `from_pretrained` needs: architectures and dtype."""
    arguments = manifest.architecture
    if arguments is None:
        raise CheckpointError(
            f"checkpoint {name}: expected a model_config (transformers), found null: can't be exported"
        )
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.for_model(**arguments)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {name}: model_config: {error}") from None
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if not config.architectures and type(config) in causal:
        config.architectures = [causal[type(config)].__name__]
    floating = {tensor.dtype for tensor in _weights(manifest).values() if "float" in tensor.dtype}
    if len(floating) == 1:
        config.dtype = floating.pop()
    return config


def _transformers() -> Any:
    """transformers takes seconds to import, and would import torch_xla wherever that is installed."""
    os.environ.setdefault("USE_TORCH_XLA", "0")
    import transformers

    return transformers


def _weights(manifest: Manifest) -> dict[str, TensorEntry]:
    return {key: tensor for key, tensor in manifest.tensors.items() if folder_of(key) == "model"}


def _write_weights(reader: Reader, folder: Path, max_shard_bytes: int) -> None:
    tensors = _weights(reader.manifest)
    shards = list(_group(tensors, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        lazy = {key: Lazy(tensors[key].dtype, tensors[key].shape, partial(reader.read_whole, key)) for key in keys}
        safetensors.write(folder / file, lazy, {})
        weight_map.update(dict.fromkeys(keys, file))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(_bytes(tensor) for tensor in tensors.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_text_atomically(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _group(tensors: dict[str, TensorEntry], max_bytes: int) -> Iterable[list[str]]:
    """Runs of keys in their order, each as long as it stays within `max_bytes`."""
    keys: list[str] = []
    total = 0
    for key, tensor in tensors.items():
        if keys and total + _bytes(tensor) > max_bytes:
            yield keys
            keys, total = [], 0
        keys.append(key)
        total += _bytes(tensor)
    yield keys


def _bytes(tensor: TensorEntry) -> int:
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def _mark(manifest: Manifest) -> str:
    source: dict[str, Any] = {"step": manifest.step, "written_by": manifest.written_by.model_dump()}
    return json.dumps(source, indent=2) + "\n"


def _replace(folder: Path, new: Path) -> None:
    """Put `new` in the place of `folder`. A kill in between leaves both, one of them under a hidden name."""
    sync_folder(new)
    old = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
