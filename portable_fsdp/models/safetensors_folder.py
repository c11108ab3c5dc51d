"""The weights of a Hugging Face folder: one safetensors file, or several and their index. Read by the slice."""

from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from portable_fsdp.models.weights import TensorFile, TensorSlices
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.files import parse_json, read_regular

_KEY = "model.pretrained"
_PICKLES = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SAMPLED = 2048  # elements


class SafetensorsFolder(TensorFile):
    """Opening it reads the headers of its files, and none of their weights. Raises ConfigError."""

    def __init__(self, folder: Path) -> None:
        self.where = folder
        self._files = _weight_files(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for path in sorted(set(self._files.values())):
            with open_safetensors(_KEY, path) as file:
                held = set(cast(list[str], list(file.keys())))
                for key in (key for key, holder in self._files.items() if holder == path):
                    if key not in held:
                        raise ConfigError(
                            f"{_KEY}: {folder}: expected {key} in {path.name} ({INDEX}), found none.\n"
                            "  Download the folder again."
                        )
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
        _refuse(folder)
    absent = sorted({path.name for path in files.values() if not path.is_file()})
    if absent:
        raise ConfigError(f"{_KEY}: {folder}: expected {absent[0]} (its index names it), found no such file.")
    return files


def _refuse(folder: Path) -> NoReturn:
    others = [path.name for pattern in ("*.gguf", *_PICKLES) for path in sorted(folder.glob(pattern))]
    raise ConfigError(
        f"{_KEY}: expected {SINGLE} or {INDEX} in {folder}, found {others[0] if others else 'neither'}.\n"
        "  For a GGUF file set model.gguf_file. A pickle may run any code when it is opened, and is never downloaded:\n"
        "  if you trust it, rewrite it once: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(ANOTHER)."
    )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(cast(dict[str, str], parse_json(read_regular(index, index.parent))["weight_map"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{_KEY}: {index}: expected a JSON object with a weight_map (tensor -> file), found something else "
            f"({type(error).__name__}).\n  Download the folder again."
        ) from error


def open_safetensors(key: str, path: Path) -> Any:
    """A context manager over a safetensors file; raises ConfigError, which names the config's `key`."""
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error}.") from error
    except SafetensorError as error:
        raise ConfigError(
            f"{key}: {path}: expected a whole safetensors file, found {path.stat().st_size:,} bytes that are not one "
            f"({error}).\n  Download it again."
        ) from error
