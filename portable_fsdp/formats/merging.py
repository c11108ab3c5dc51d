"""The weights of a model trained by adapters (LoRA): the base with the adapters added in, under the base's names."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from portable_fsdp.backends.base import full_region
from portable_fsdp.checkpoint.format import Manifest, TensorEntry
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config.schema import Model
from portable_fsdp.formats.base import tensors_of
from portable_fsdp.formats.names import model_on_meta
from portable_fsdp.models.lora import AdapterNames, adapted_layers, holds_inputs_first, is_adapter, plain_name
from portable_fsdp.models.pretrained import PretrainedWeights, fingerprint, open_pretrained
from portable_fsdp.models.weights import RandomWeights
from portable_fsdp.runtime.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Adapters:
    """What a checkpoint says of its adapters."""

    r: int
    alpha: float
    layers: list[AdapterNames]
    base: nn.Module  # the model without them, on meta

    @property
    def scale(self) -> float:
        """What their product is multiplied by."""
        return self.alpha / self.r


def adapters_of(reader: Reader) -> Adapters | None:
    """None for a checkpoint without adapters. Raises `CheckpointError`."""
    layers = adapted_layers(list(tensors_of(reader, "model")))
    if not layers:
        return None
    manifest, where = reader.manifest, f"checkpoint {reader.folder.name}"
    r, alpha = _settings(manifest, where)
    return Adapters(r, alpha, layers, _base(manifest, where))


def _settings(manifest: Manifest, where: str) -> tuple[int, float]:
    lora = manifest.config.get("model", {}).get("lora") or {}
    match lora:
        case {"r": int(r), "alpha": float() | int() as alpha} if r > 0:
            return r, float(alpha)
        case _:
            raise CheckpointError(f"{where}: expected r and alpha in model.lora of its config, found {str(lora)[:80]}")


def _base(manifest: Manifest, where: str) -> nn.Module:
    base: Any = None if manifest.architecture is None else model_on_meta(manifest.architecture, where)
    if base is None:
        raise CheckpointError(f"{where}: expected a model_config (transformers) beside its adapters, found none")
    return base


def merged(reader: Reader, base: str | None = None) -> tuple[dict[str, TensorEntry], Callable[[str], Tensor]]:
    """The model's tensors under the names of the base, and what reads one; as they are where there are no adapters.

    W + alpha / r * B A, in float32, and then in the base's dtype. A base that the checkpoint leaves out is read where
    `base` says, in a folder or on the hub; None: where the run found it. Reading holds one tensor, and of one with an
    adapter two in float32. Raises `CheckpointError`.
    """
    tensors = tensors_of(reader, "model") | reader.manifest.left_out
    adapters = adapters_of(reader)
    if adapters is None:
        return tensors, reader.read_whole
    by_weight = {f"{names.layer}.weight": names for names in adapters.layers}
    saved = {plain_name(key): key for key in tensors if not is_adapter(key)}
    fill = _left_out(reader, adapters.base, base)

    def read_base(key: str) -> Tensor:
        entry = tensors[saved[key]]
        if fill is None:
            return reader.read_whole(saved[key])
        return fill(key, full_region(entry.shape)).to(getattr(torch, entry.dtype))

    def read(key: str) -> Tensor:
        weight = read_base(key)
        if key not in by_weight:
            return weight
        names = by_weight[key]
        change = reader.read_whole(names.b).float() @ reader.read_whole(names.a).float() * adapters.scale
        if holds_inputs_first(adapters.base.get_submodule(names.layer)):
            change = change.T
        return (weight.float() + change).to(weight.dtype)

    return {name: tensors[key] for name, key in saved.items()}, read


def _left_out(reader: Reader, model: nn.Module, name: str | None) -> PretrainedWeights | None:
    """What fills the base that a checkpoint leaves out; None where it holds it. Raises `CheckpointError`."""
    manifest, left_out = reader.manifest, reader.manifest.base
    if left_out is None:
        return None
    opened = (manifest.architecture or {}).get("_name_or_path")  # of a hub id: the very commit
    is_here = bool(opened) and left_out.gguf_file is None and Path(str(opened)).is_dir()
    place = name or (str(opened) if is_here else left_out.pretrained)
    said = f"checkpoint {reader.folder.name}: expected the base of its adapters, which it leaves out:\n    {left_out}\n"
    way_out = "\n  Say where it lies: --base FOLDER (or org/name@revision). Adapters alone: --format peft."
    try:
        file = open_pretrained(Model(pretrained=place, gguf_file=left_out.gguf_file)).file
        found = fingerprint(file)
        if found != left_out.fingerprint:
            raise CheckpointError(f"{said}  found another in {place} (fingerprint {found}).{way_out}")
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        drawn = RandomWeights(model, 0, torch.float32)  # of none: the base was whole
        allow = manifest.config.get("model", {}).get("allow", ())
        return PretrainedWeights(file, model, model, drawn, allow=allow, rows_before=None)
    except ConfigError as error:
        raise CheckpointError(f"{said}  found: {error}{way_out}") from None
