"""GGUF files (llama.cpp): dequantised by the gguf library, named and arranged by transformers' own tables.

The architectures below map one tensor to one; others are refused by name. Tensors without a name in transformers
(`rope_freqs`) are refused too, since their content would be lost.
"""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from portable_fsdp.models.architecture import config_from_json
from portable_fsdp.models.weights import TensorFile, TensorSlices
from portable_fsdp.runtime.errors import ConfigError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MAGIC = b"GGUF"
_SAMPLED = 4096  # numbers; quantised tensors hold one byte each


def is_gguf(path: Path) -> bool:
    """By its first four bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


class GgufFile(TensorFile):
    """Its tensors in float32 by the model's names, and `config`, as transformers reads it from the file.

    Maps the file, dequantises one whole tensor at a time, and keeps it for the next slice of it. Raises ConfigError.
    """

    def __init__(self, path: Path) -> None:
        self.where = path
        reader = _opened(path)
        self.config, self._processor, names = _transformers_view(path, reader)
        self._tensors = {_hf_name(path, names, str(tensor.name)): tensor for tensor in reader.tensors}
        if len(self._tensors) != len(reader.tensors):
            raise ConfigError(f"{path}: expected one tensor for each name of the model, found two for one")
        self.shapes = {key: tuple(map(int, reversed(tensor.shape))) for key, tensor in self._tensors.items()}
        self._last: tuple[str, Tensor] | None = None

    def file_of(self, key: str) -> str:
        return f"{self.where.name} ({self._tensors[key].name})"

    def dtype_of(self, key: str) -> str:
        return "F32"

    def read(self, key: str, slices: TensorSlices) -> Tensor:
        if not slices:
            self._last = None
            return self._dequantised(self._tensors[key])
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next is made: not two at a time
            self._last = (key, self._dequantised(self._tensors[key]))
        return self._last[1][slices].clone()

    def sample(self, key: str) -> bytes:
        raw = self._tensors[key].data.reshape(-1)
        return bytes(raw[len(raw) // 2 : len(raw) // 2 + _SAMPLED].tobytes())

    def _dequantised(self, tensor: Any) -> Tensor:
        import gguf

        try:
            weights = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            weights = self._processor.process(weights=weights, name=str(tensor.name)).weights
        except Exception as error:  # a type that the library can't dequantise, or sizes that don't fit
            raise ConfigError(f"{self.where}: {tensor.name}: {type(error).__name__}: {error}") from None
        return torch.from_numpy(np.require(weights, requirements=["C", "W"]))


def _opened(path: Path) -> Any:
    """The library's reader, which refuses a length that leaves the file: the library itself would loop over it."""
    import gguf

    class BoundedReader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"a length of {int(count):,} at byte {int(offset):,} of {len(self.data):,}")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = BoundedReader(str(path))
        if reader.byte_order != "I":
            raise ValueError("another byte order than this host's")
        return reader
    except Exception as error:  # the library lets numpy's errors through
        raise ConfigError(
            f"{path}: expected a GGUF file (version 2 or 3, little-endian), found: {type(error).__name__}: {error}"
        ) from None


def _transformers_view(path: Path, reader: Any) -> tuple[Any, Any, dict[str, str]]:
    """The config, what undoes llama.cpp's permutations, and GGUF name -> FQN."""
    from transformers import AutoModelForCausalLM
    from transformers import modeling_gguf_pytorch_utils as tables

    architecture = _check_architecture(path, reader)
    try:
        loaded: Any = cast(Any, tables).load_gguf_checkpoint(str(path), return_tensors=False)
    except Exception as error:  # it validates nothing first
        raise ConfigError(f"{path}: its metadata: {type(error).__name__}: {error}") from None
    width = reader.fields.get(f"{architecture}.attention.key_length")
    if width is not None:  # transformers 5.23 overlooks it for qwen3
        loaded["config"].setdefault("head_dim", int(width.contents()))
    processor: Any = cast(Any, tables).TENSOR_PROCESSORS.get(architecture, tables.TensorProcessor)(
        config=loaded["config"]
    )
    try:
        config = config_from_json(loaded["config"])
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers validates with exceptions of many classes, all about these values
        raise ConfigError(f"{path}: its metadata don't make a model: {type(error).__name__}: {error}") from None
    return config, processor, _names(architecture, model)


def _names(architecture: str, model: Any) -> dict[str, str]:
    """GGUF name -> FQN. transformers' own function walks every module, and takes seconds."""
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    return {f"{table.get_name(fqn.rpartition('.')[0])}.{fqn.rpartition('.')[2]}": fqn for fqn in model.state_dict()}


def _check_architecture(path: Path, reader: Any) -> str:
    field = reader.fields.get("general.architecture")
    architecture = str(field.contents()) if field is not None else "none"
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: expected an architecture of {', '.join(ARCHITECTURES)}; found {architecture}.\n"
            "  Load it with transformers (gguf_file=) if that knows it, save_pretrained, and take that folder."
        )
    layers = reader.fields.get(f"{architecture}.block_count")
    count = int(layers.contents()) if layers is not None else 0
    if count > len(reader.tensors):  # a model is built for its names, which takes time for each layer
        raise ConfigError(f"{path}: expected tensors for each of {count:,} layers, found {len(reader.tensors)} in all")
    return architecture


def _hf_name(path: Path, names: dict[str, str], name: str) -> str:
    if name not in names:
        raise ConfigError(
            f"{path}: expected tensors that transformers has a name for, found {name[:200]!r}, whose content would be "
            "lost.\n  Take the model's Hugging Face folder instead."
        )
    return names[name]
