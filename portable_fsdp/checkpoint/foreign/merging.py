"""The weights of a model trained by adapters (LoRA): the base with the adapters added in, under the base's names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from portable_fsdp.checkpoint.foreign.base import tensors_of
from portable_fsdp.checkpoint.foreign.names import model_on_meta
from portable_fsdp.checkpoint.format import Manifest, TensorEntry
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.models.lora import AdapterNames, adapted_layers, holds_inputs_first, is_adapter, plain_name
from portable_fsdp.runtime.errors import CheckpointError


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


def merged(reader: Reader) -> tuple[dict[str, TensorEntry], Callable[[str], Tensor]]:
    """The model's tensors under the names of the base, and what reads one; as they are where there are no adapters.

    W + alpha / r * B A, in float32, and then in the base's dtype. Reading holds one tensor, and of one with an adapter
    two in float32. Raises `CheckpointError`.
    """
    tensors = tensors_of(reader, "model")
    adapters = adapters_of(reader)
    if adapters is None:
        return tensors, reader.read_whole
    by_weight = {f"{names.layer}.weight": names for names in adapters.layers}
    saved = {plain_name(key): key for key in tensors if not is_adapter(key)}

    def read(key: str) -> Tensor:
        weight = reader.read_whole(saved[key])
        if key not in by_weight:
            return weight
        names = by_weight[key]
        change = reader.read_whole(names.b).float() @ reader.read_whole(names.a).float() * adapters.scale
        if holds_inputs_first(adapters.base.get_submodule(names.layer)):
            change = change.T
        return (weight.float() + change).to(weight.dtype)

    return {name: tensors[key] for name, key in saved.items()}, read
