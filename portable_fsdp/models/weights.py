"""Where weights come from: drawn from (seed, FQN) alone, or read from a folder of safetensors.

Both are a `fill(fqn, slices)`: a backend asks for the pieces that its devices need, one at a time.
"""

# Parameters and buffers are replaced in a module's own tables: torch has no public way for all of them.
# pyright: reportPrivateUsage=false

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from portable_fsdp.runtime.errors import ConfigError

log = logging.getLogger("portable_fsdp")

Slices = tuple[slice, ...]
"""One slice a dimension, with start and stop set."""


def _ancestors(fqn: str) -> list[str]:
    """`a.b.weight` -> `a.b`, `a`, `` (the root): owner first."""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def _initialise(model: Any, fqn: str) -> None:
    """Run transformers' own initialisation of the modules that may touch this tensor, owner first, as it does."""
    for name in _ancestors(fqn):
        model._init_weights(model.get_submodule(name))


def fill_buffers(model: nn.Module, twin: nn.Module) -> set[str]:
    """Give `model` real buffers: computed ones (rotary frequencies) have their values, from `_init_weights`.

    Returns the FQNs of those that it leaves unset: their values are still those of the filling.
    """
    before, after = _computed_buffers(twin, 0), _computed_buffers(twin, 1)
    for fqn, value in after.items():
        owner, _, leaf = fqn.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = value
    return {fqn for fqn, value in after.items() if not torch.equal(value, before[fqn])}


def _computed_buffers(twin: nn.Module, filling: int) -> dict[str, Tensor]:
    """FQN -> buffer after `_init_weights`, which finds it full of one number."""
    for fqn, buffer in list(twin.named_buffers()):
        owner, _, leaf = fqn.rpartition(".")
        module = twin.get_submodule(owner)
        module._buffers[leaf] = torch.full(buffer.shape, filling, dtype=buffer.dtype, device="cpu")
    for module in twin.modules():
        if any(True for _ in module.buffers(recurse=False)):
            with torch.no_grad():
                cast(Any, twin)._init_weights(module)
    return dict(twin.named_buffers())


class RandomWeights:
    """`fill` of a new model: each weight depends on (seed, FQN) alone, whatever the mesh and the order of asking.

    One weight is drawn at a time, whole, and kept until the next is asked for: a host needs memory for the largest.
    It is drawn in float32 and then rounded to `dtype`, so that a seed means the same weights in all dtypes.
    """

    def __init__(self, twin: nn.Module, seed: int, dtype: torch.dtype) -> None:
        self._twin = twin
        self._seed = seed
        self._dtype = dtype
        self._last: tuple[str, Tensor] | None = None

    def __call__(self, fqn: str, slices: Slices) -> Tensor:
        if self._last is None or self._last[0] != fqn:
            self._last = (fqn, self._draw(fqn).to(self._dtype))
        return self._last[1][slices].clone()

    def _draw(self, fqn: str) -> Tensor:
        owner, _, leaf = fqn.rpartition(".")
        module = self._twin.get_submodule(owner)
        placeholder = cast(nn.Parameter, module._parameters[leaf])
        unset = torch.full(placeholder.shape, torch.nan, dtype=placeholder.dtype, device="cpu")
        weight = nn.Parameter(unset, requires_grad=False)
        module._parameters[leaf] = weight
        digest = hashlib.sha256(f"{self._seed}/{fqn}".encode()).digest()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
                _initialise(self._twin, fqn)
        finally:
            module._parameters[leaf] = placeholder
        if weight.isnan().any():
            raise ConfigError(
                f"model.architecture: expected transformers to initialise all weights, found that {fqn} "
                f"({type(module).__name__}) has no initial value of its own.\n"
                "  Start from a folder (model.pretrained), or take another model. Nothing was started."
            )
        return weight.data


class PretrainedWeights:
    """`fill` from a folder of safetensors: reads the asked slices of one file, and nothing else.

    They come in the dtype that the model's parameter or buffer has, whatever that of the file.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        files = _weight_files(folder)
        base = str(getattr(model, "base_model_prefix", ""))
        self._dtypes = {name: tensor.dtype for name, tensor in _stored(model).items()}
        aliases = _aliases(model)
        self._where = {name: _stored_name(names, files, base) for name, names in aliases.items()}
        missing = sorted(name for name, stored in self._where.items() if stored is None)
        if missing:
            raise ConfigError(
                f"model.pretrained: {folder}: expected a weight for each of the model's {len(self._where)} tensors, "
                f"found none for {missing[0]}" + (f", and {len(missing) - 1} more." if len(missing) > 1 else ".")
            )
        unused = sorted(set(files) - set(self._where.values()) - {name for names in aliases.values() for name in names})
        if unused:
            log.warning(
                "model.pretrained: %s: %d tensors of the folder are not the model's and are left out: %s",
                folder,
                len(unused),
                ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else ""),
            )
        self._files = files
        self._check_shapes(folder, {name: tuple(tensor.shape) for name, tensor in _stored(model).items()})

    def __call__(self, fqn: str, slices: Slices) -> Tensor:
        stored = cast(str, self._where[fqn])
        with _open(self._files[stored]) as file:
            value = file.get_slice(stored)[slices] if slices else file.get_tensor(stored)
        return cast(Tensor, value).to(self._dtypes[fqn])

    def holds(self, fqn: str) -> bool:
        return fqn in self._where

    def _check_shapes(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        for fqn, shape in shapes.items():
            stored = cast(str, self._where[fqn])
            with _open(self._files[stored]) as file:
                found = tuple(cast(list[int], file.get_slice(stored).get_shape()))
            if found != shape:
                raise ConfigError(
                    f"model.pretrained: {folder}: {fqn}: expected {list(shape)} (config.json), found {list(found)} in "
                    f"{self._files[stored].name}."
                )


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """What a folder holds of the model: parameters, each once, and persistent buffers."""
    stored: dict[str, Tensor] = dict(model.named_parameters())
    persistent = set(model.state_dict(keep_vars=True))
    stored.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return stored


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """First FQN of each stored tensor -> all its FQNs (tied weights have several; a folder may hold any)."""
    names = {id(tensor): name for name, tensor in reversed(list(_stored(model).items()))}
    aliases: dict[str, list[str]] = {name: [name] for name in names.values()}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if name not in aliases[names[id(tensor)]]:
            aliases[names[id(tensor)]].append(name)
    return aliases


def _stored_name(aliases: list[str], files: dict[str, Path], base: str) -> str | None:
    """The folder's key for a tensor: one of its FQNs, or that without the base model's prefix (GPT-2's own folders)."""
    candidates = [*aliases, *(alias.removeprefix(f"{base}.") for alias in aliases)]
    return next((candidate for candidate in candidates if candidate in files), None)


def _weight_files(folder: Path) -> dict[str, Path]:
    """Key -> file, from the index or the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _weight_map(index)
        files = {key: folder / Path(name).name for key, name in names.items()}
    elif (folder / "model.safetensors").is_file():
        with _open(folder / "model.safetensors") as file:
            files = dict.fromkeys(cast(list[str], list(file.keys())), folder / "model.safetensors")
    else:
        raise ConfigError(
            f"model.pretrained: expected model.safetensors or model.safetensors.index.json in {folder}, found "
            "neither.\n  Other formats: open the model with transformers and save_pretrained it to a new folder."
        )
    absent = sorted({path.name for path in files.values() if not path.is_file()})
    if absent:
        raise ConfigError(f"model.pretrained: {folder}: expected {absent[0]} (its index names it), found no such file.")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(cast(dict[str, str], json.loads(index.read_text())["weight_map"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"model.pretrained: {index}: expected a JSON object with a weight_map (tensor -> file), found something "
            f"else ({type(error).__name__}).\n  Download the folder again."
        ) from error


def _open(path: Path) -> Any:
    """A safetensors file, to be used as a context manager."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ConfigError(
            f"model.pretrained: {path}: expected a whole safetensors file, found {path.stat().st_size:,} bytes that "
            f"are not one ({error}).\n  Download it again."
        ) from error
