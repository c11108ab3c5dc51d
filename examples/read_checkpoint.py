"""Read a tensor of a checkpoint without portable_fsdp and without torch: safetensors, json and numpy.

    python examples/read_checkpoint.py runs/demo/checkpoints/step-00000150 lm_head.weight

Without a name it lists the tensors. docs/checkpoints.md describes the format.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

NUMPY = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2"}
"""Of the dtypes that numpy knows; others (bfloat16, float8) come back as their bytes, in a last dimension."""


def read_tensor(folder: Path, key: str) -> NDArray[Any]:
    """The whole tensor, put together from its pieces."""
    manifest = json.loads((folder / "manifest.json").read_text())
    key = manifest["ties"].get(key, key)
    tensor = manifest["tensors"][key]
    rank = len(tensor["shape"])
    whole: NDArray[Any] | None = None
    for k, number in enumerate(tensor["files"]):
        offset = tensor["offsets"][rank * k : rank * (k + 1)]
        size = tensor["sizes"][rank * k : rank * (k + 1)]
        piece = read_piece(folder / manifest["files"][number]["name"], key)
        if whole is None:
            whole = np.zeros((*tensor["shape"], piece.shape[-1]), dtype=np.uint8)
        whole[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))] = piece
    if whole is None:
        return np.zeros(tensor["shape"], dtype=np.uint8)
    if tensor["dtype"] not in NUMPY:
        return whole
    return whole.view(NUMPY[tensor["dtype"]]).reshape(tensor["shape"])


def read_piece(file: Path, key: str) -> NDArray[np.uint8]:
    """The bytes of a tensor in a file: its shape, and a last dimension with the bytes of an element."""
    stored = dict(safetensors.deserialize(file.read_bytes()))[key]
    return np.frombuffer(stored["data"], dtype=np.uint8).reshape(*stored["shape"], -1)


def main() -> int:
    folder = Path(sys.argv[1])
    if not (folder / "manifest.json").exists():
        print(f"{folder}: expected a checkpoint's folder (step-00000150), found no manifest.json", file=sys.stderr)
        return 2
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    if len(sys.argv) == 2:
        for key, tensor in tensors.items():
            print(f"{key}  {tensor['dtype']} {tensor['shape']}")
        return 0
    try:
        print(read_tensor(folder, sys.argv[2]))
    except KeyError as error:
        print(f"{folder}: expected one of its {len(tensors)} tensors, found {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
