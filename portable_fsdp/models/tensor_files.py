"""Files of weights, read by the slice: a Hugging Face folder with safetensors files, the hashes of an exported folder
(`formats` writes them, every reader of the folder checks them), and GGUF files (llama.cpp).
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from portable_fsdp.config.schema import Config
from portable_fsdp.models.architecture import config_from_json
from portable_fsdp.models.weights import TensorFile, TensorSlices
from portable_fsdp.runtime.collective_errors import Processes, on_each_process
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.files import open_inside, parse_json, read_inside
from portable_fsdp.runtime.launchers import detect_launch

_KEY = "model.pretrained"
_PICKLES = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SAMPLED = 2048  # elements


class SafetensorsFolder(TensorFile):
    """A folder of safetensors files. Opening it reads their headers, but no weights. Raises ConfigError."""

    def __init__(self, folder: Path) -> None:
        self.where = folder
        self._files = _weight_files(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for path in sorted(set(self._files.values())):
            keys = [key for key, holder in self._files.items() if holder == path]
            with open_safetensors(_KEY, path) as file:
                held = set(cast(list[str], list(file.keys())))
                if missing := [key for key in keys if key not in held]:
                    raise ConfigError(
                        f"{_KEY}: {folder}: {path.name} doesn't have {missing[0]}, which {INDEX} lists.\n"
                        "  Download the folder again."
                    )
                for key in keys:
                    tensor = file.get_slice(key)
                    self.shapes[key] = tuple(cast(list[int], tensor.get_shape()))
                    self._dtypes[key] = str(tensor.get_dtype())

    def file_of(self, key: str) -> str:
        return self._files[key].name

    def dtype_of(self, key: str) -> str:
        return self._dtypes[key]

    def read(self, key: str, slices: TensorSlices) -> Tensor:
        with open_safetensors(_KEY, self._files[key]) as file:
            return cast(Tensor, file.get_slice(key)[slices] if slices else file.get_tensor(key))

    def sample(self, key: str) -> bytes:
        shape = self.shapes[key]
        middle = [slice(size // 2, size // 2 + 1) for size in shape[:-1]]
        last = [slice(size // 2, size // 2 + _SAMPLED) for size in shape[-1:]]
        return bytes(self.read(key, (*middle, *last)).contiguous().reshape(-1).view(torch.uint8).numpy())


def _weight_files(folder: Path) -> dict[str, Path]:
    """Key -> file, from the index or the single file."""
    index = folder / INDEX
    if index.is_file():
        files = {key: folder / Path(name).name for key, name in _weight_map(index).items()}
    elif (folder / SINGLE).is_file():
        with open_safetensors(_KEY, folder / SINGLE) as file:
            files = dict.fromkeys(cast(list[str], list(file.keys())), folder / SINGLE)
    else:
        others = [path.name for pattern in ("*.gguf", *_PICKLES) for path in sorted(folder.glob(pattern))]
        raise ConfigError(
            f"{_KEY}: expected {SINGLE} or {INDEX} in {folder}, found {others[0] if others else 'neither'}.\n"
            "  For a GGUF file set model.gguf_file. A pickle may run any code when it is opened, and is never "
            "downloaded.\n  Convert it once, read as data only, and name the folder that you export to:\n"
            f"    python -m portable_fsdp.checkpoint import {folder} RUN\n"
            f"    python -m portable_fsdp.checkpoint export RUN ANOTHER --tokenizer {folder}"
        )
    absent = sorted({path.name for path in files.values() if not path.is_file()})
    if absent:
        raise ConfigError(f"{_KEY}: {folder}: no such file: {absent[0]}, which {INDEX} lists.")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(cast(dict[str, str], parse_json(read_inside(index, index.parent))["weight_map"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{_KEY}: {index}: can't read a JSON object with a weight_map (tensor -> file) from it "
            f"({type(error).__name__}).\n  Download the folder again."
        ) from error


def open_safetensors(key: str, path: Path) -> Any:
    """Return a context manager over a safetensors file; raises ConfigError that names the config's `key`."""
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error}.") from error
    except SafetensorError as error:
        raise ConfigError(
            f"{key}: {path}: its {path.stat().st_size:,} bytes are not a complete safetensors file ({error}).\n"
            "  Download it again."
        ) from error


# ------------------------------------------------------------------------------------------------- exported folders


MARK = "portable_fsdp.json"
"""File in every exported folder: its source, its files, and their hashes. A folder without it isn't ours."""


def hashes_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Name -> length and 128-bit XXH3 of each file except README.md, which people edit. Raises OSError."""
    return {name: _summary(folder, name) for name in names if name != "README.md"}


def require_as_exported(folder: Path) -> bool:
    """Compare the files of an export with the hashes in its mark.

    Returns False for a folder without hashes: it isn't ours, or an earlier release wrote it. Raises ConfigError for a
    damaged or missing file, and for weights that the export didn't write.
    """
    if not os.path.lexists(folder / MARK):
        return False
    fix = f"\n  Copy or export it again. If you changed it on purpose, delete its line below `hashes` in {MARK}."
    try:
        mark: Any = parse_json(read_inside(folder / MARK, folder))
        hashes: dict[str, Any] | None = mark.get("hashes")
        if hashes is None:
            return False
        for name, expected in hashes.items():
            if (actual := _summary(folder, name)) != expected:
                raise ConfigError(f"{folder / name}: damaged: the export wrote {expected:.80}, found {actual}.{fix}")
        others = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in mark["files"])
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder}: can't check the files that {MARK} lists: {error}.{fix}") from None
    if others:
        raise ConfigError(f"{folder}: {others[0]} is not a file of the export.\n  Move it elsewhere.")
    return True


def require_intact(config: Config, processes: Processes) -> None:
    """Run `require_as_exported` for the folders of a run's model, with checkpoint.verify=full; one process of each host
    reads them. *collective*"""

    def check() -> None:
        names = [config.model.pretrained, config.model.lora and config.model.lora.start_from]
        reads = config.checkpoint.verify == "full" and detect_launch(os.environ).local_rank == 0
        for name in filter(None, names if reads else ()):
            require_as_exported(Path(name))

    on_each_process(processes, check)


def _summary(folder: Path, name: str) -> str:
    """Return the length of a file and its hash, as text."""
    with open_inside(folder / name, folder) as file:
        digest = hashlib.file_digest(cast(Any, file), xxhash.xxh3_128)
        return f"{file.tell()} bytes, xxh3_128 {digest.hexdigest()}"


# ---------------------------------------------------------------------------------------------------------------- GGUF

# The gguf library dequantises; names and permutations come from transformers' own tables. The architectures below map
# one tensor to one; others are refused by name. Tensors without a name in transformers (`rope_freqs`) are refused too,
# since their content would be lost.

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MAGIC = b"GGUF"
_SAMPLED_NUMBERS = 4096  # elements of a tensor's data; for quantised tensors bytes


def is_gguf(path: Path) -> bool:
    """Whether the first four bytes of a file are GGUF's."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


class GgufFile(TensorFile):
    """The tensors of a GGUF file in float32, by the model's names, and `config`, read by transformers.

    Maps the file, dequantises one whole tensor at a time, and keeps it for its next slice. Raises ConfigError.
    """

    def __init__(self, path: Path) -> None:
        self.where = path
        reader = _opened(path)
        self.config, self._processor, names = _transformers_view(path, reader)
        tensors = {str(tensor.name): tensor for tensor in reader.tensors}
        if unknown := tensors.keys() - names.keys():
            raise ConfigError(
                f"{path}: transformers has no name for the tensor {min(unknown)[:200]!r}, whose content would be lost."
                "\n  Use the model's Hugging Face folder instead."
            )
        self._tensors = {names[name]: tensor for name, tensor in tensors.items()}
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
            self._last = None  # dropped before the next is made: not two at a time
            self._last = (key, self._dequantised(self._tensors[key]))
        return self._last[1][slices].clone()

    def sample(self, key: str) -> bytes:
        raw = self._tensors[key].data.reshape(-1)
        return bytes(raw[len(raw) // 2 : len(raw) // 2 + _SAMPLED_NUMBERS].tobytes())

    def _dequantised(self, tensor: Any) -> Tensor:
        import gguf

        try:
            weights = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            weights = self._processor.process(weights=weights, name=str(tensor.name)).weights
        except Exception as error:  # a type that the library can't dequantise, or sizes that don't fit
            raise ConfigError(f"{self.where}: {tensor.name}: {type(error).__name__}: {error}") from None
        return torch.from_numpy(np.require(weights, requirements=["C", "W"]))


def _opened(path: Path) -> Any:
    """Open the library's reader, and refuse a length that exceeds the file: the library itself would loop over it."""
    import gguf

    class BoundedReader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"a length of {int(count):,} at byte {int(offset):,} of {len(self.data):,}")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = BoundedReader(str(path))
        if reader.byte_order != "I":
            raise ValueError("a byte order other than this host's")
        return reader
    except Exception as error:  # the library lets numpy's errors through
        raise ConfigError(
            f"{path}: not a readable GGUF file (version 2 or 3, little-endian): {type(error).__name__}: {error}"
        ) from None


def _transformers_view(path: Path, reader: Any) -> tuple[Any, Any, dict[str, str]]:
    """Return the config, the processor that undoes llama.cpp's permutations, and GGUF name -> FQN."""
    from transformers import AutoModelForCausalLM
    from transformers import modeling_gguf_pytorch_utils as tables

    architecture = _check_architecture(path, reader)
    try:
        loaded: Any = cast(Any, tables).load_gguf_checkpoint(str(path), return_tensors=False)
    except Exception as error:  # it validates nothing beforehand
        raise ConfigError(f"{path}: its metadata: {type(error).__name__}: {error}") from None
    width = reader.fields.get(f"{architecture}.attention.key_length")
    if width is not None:  # transformers 5.23 overlooks it for qwen3
        loaded["config"].setdefault("head_dim", int(width.contents()))
    make_processor: Any = cast(Any, tables).TENSOR_PROCESSORS.get(architecture, tables.TensorProcessor)
    try:
        config = config_from_json(loaded["config"])
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers validates with exceptions of many classes, all about these values
        raise ConfigError(f"{path}: can't build a model from its metadata: {type(error).__name__}: {error}") from None
    return config, make_processor(config=loaded["config"]), _names(architecture, model)


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
            "  If transformers supports it, load it there (gguf_file=), save_pretrained, and use that folder."
        )
    layers = reader.fields.get(f"{architecture}.block_count")
    count = int(layers.contents()) if layers is not None else 0
    if count > len(reader.tensors):  # building a model for its names takes time for each layer
        raise ConfigError(f"{path}: expected tensors for each of {count:,} layers, found {len(reader.tensors)} in all")
    return architecture
