"""Adapters (LoRA): alone, as the folder that peft's `PeftModel.from_pretrained` opens, or merged into their base."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from portable_fsdp.checkpoint.format import Manifest, TensorEntry
from portable_fsdp.checkpoint.safetensors import write_tensors
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config.schema import Model
from portable_fsdp.formats.base import ExportOptions, as_dtype, weights_of
from portable_fsdp.formats.names import model_on_meta
from portable_fsdp.layout import full_region
from portable_fsdp.models import lora
from portable_fsdp.models.pretrained import PretrainedWeights, fingerprint, open_pretrained
from portable_fsdp.models.tensor_files import require_as_exported
from portable_fsdp.models.weights import RandomWeights
from portable_fsdp.runtime.errors import CheckpointError, ConfigError
from portable_fsdp.runtime.hub import import_transformers


def export(reader: Reader, options: ExportOptions) -> Callable[[Path], None]:
    """adapter_config.json and the adapters' weights. Raises `CheckpointError` for a checkpoint without adapters."""
    adapters = adapters_of(reader)
    if adapters is None:
        raise CheckpointError(
            f"checkpoint {reader.folder.name}: expected adapters (model.lora), found none: it has whole weights.\n"
            "  Take --format huggingface."
        )
    import_transformers()  # before peft imports it, without torch_xla
    from peft import LoraConfig

    pretrained, revision = _base_model(reader.manifest)
    ours = {theirs: key for names in adapters.layers for theirs, key in lora.peft_keys(names)}
    tensors = {theirs: as_dtype(reader.manifest.tensors[key], options.dtype) for theirs, key in ours.items()}
    settings = LoraConfig(
        r=adapters.r,
        lora_alpha=cast(int, int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha),
        fan_in_fan_out=any(
            lora.holds_inputs_first(adapters.base.get_submodule(names.layer)) for names in adapters.layers
        ),
        task_type="CAUSAL_LM",
        base_model_name_or_path=pretrained,
        revision=revision,
        inference_mode=True,
    )
    # Set here: the constructor would make a set of them, in random order.
    settings.target_modules = _target_modules(adapters.base, [names.layer for names in adapters.layers])

    def write(folder: Path) -> None:
        settings.save_pretrained(str(folder))
        write_tensors(folder / lora.WEIGHTS, tensors, lambda key: reader.read_whole(ours[key]), {}, options.advance)

    return write


def _target_modules(base: nn.Module, layers: Iterable[str]) -> list[str]:
    """The last parts of the layers' names, as people write them, where no other module has them; else whole names."""
    adapted = set(layers)
    ends = {name.rpartition(".")[2] for name in adapted}
    matching = {name for name, _ in base.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if matching == adapted else adapted)


def _base_model(manifest: Manifest) -> tuple[str | None, str | None]:
    """The adapters' base: a hub id and its revision, or a folder by its absolute path."""
    name = manifest.config.get("model", {}).get("pretrained")
    if name is None:
        return None, None
    if Path(name).is_dir():
        return str(Path(name).resolve()), None
    repository, _, revision = name.partition("@")
    return repository, revision or None


@dataclass(frozen=True)
class Adapters:
    """The adapters of a checkpoint; `base` is the model without them, on meta."""

    r: int
    alpha: float
    layers: list[lora.AdapterNames]
    base: nn.Module


def adapters_of(reader: Reader) -> Adapters | None:
    """None for a checkpoint without adapters. Raises `CheckpointError`."""
    layers = lora.adapted_layers(list(weights_of(reader)))
    if not layers:
        return None
    manifest, where = reader.manifest, f"checkpoint {reader.folder.name}"
    settings = manifest.config.get("model", {}).get("lora") or {}
    match settings:
        case {"r": int(r), "alpha": float() | int() as alpha} if r > 0:
            pass
        case _:
            raise CheckpointError(
                f"{where}: expected r and alpha in model.lora of its config, found {str(settings)[:80]}"
            )
    base: Any = None if manifest.architecture is None else model_on_meta(manifest.architecture, where)
    if base is None:
        raise CheckpointError(f"{where}: expected a model_config (transformers) beside its adapters, found none")
    return Adapters(r, float(alpha), layers, base)


def merged(reader: Reader, base: str | None = None) -> tuple[dict[str, TensorEntry], Callable[[str], Tensor]]:
    """The model's tensors under the names of the base, and a function that reads one; unchanged without adapters.

    W + alpha / r * B A, in float32, then rounded to the base's dtype. Reads a base that the checkpoint leaves out from
    `base`, a folder or on the hub; None: where the run read it. Reading holds one tensor, for one with an adapter two
    in float32. Raises `CheckpointError`.
    """
    tensors = weights_of(reader) | reader.manifest.left_out
    adapters = adapters_of(reader)
    if adapters is None:
        return tensors, reader.read_whole
    by_weight = {f"{names.layer}.weight": names for names in adapters.layers}
    saved = {lora.plain_name(key): key for key in tensors if not lora.is_adapter(key)}
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
        change = reader.read_whole(names.b).float() @ reader.read_whole(names.a).float() * (adapters.alpha / adapters.r)
        if lora.holds_inputs_first(adapters.base.get_submodule(names.layer)):
            change = change.T
        return (weight.float() + change).to(weight.dtype)

    return {name: tensors[key] for name, key in saved.items()}, read


def opened_folder(manifest: Manifest) -> Path | None:
    """Where the run read `model.pretrained`, if that is here; of a hub id: the same commit."""
    opened = (manifest.architecture or {}).get("_name_or_path")
    return Path(str(opened)) if opened and Path(str(opened)).is_dir() else None


def _left_out(reader: Reader, model: nn.Module, name: str | None) -> PretrainedWeights | None:
    """Fills the base that a checkpoint leaves out; None where it holds the base. Raises `CheckpointError`."""
    manifest, base = reader.manifest, reader.manifest.base
    if base is None:
        return None
    place = name or str((opened_folder(manifest) if base.gguf_file is None else None) or base.pretrained)
    problem = f"checkpoint {reader.folder.name}: expected the base of its adapters, which it leaves out:\n    {base}\n"
    way_out = "\n  Name it: --base FOLDER (or org/name@revision). Adapters alone: --format peft."
    try:
        require_as_exported(Path(place))
        file = open_pretrained(Model(pretrained=place, gguf_file=base.gguf_file)).file
        if (actual := fingerprint(file)) != base.fingerprint:
            raise CheckpointError(f"{problem}  found another in {place} (fingerprint {actual}).{way_out}")
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        drawn = RandomWeights(model, 0, torch.float32)  # of nothing: the base has every weight
        allow = manifest.config.get("model", {}).get("allow", ())
        return PretrainedWeights(file, model, model, drawn, allow=allow, rows_before=None)
    except ConfigError as error:
        raise CheckpointError(f"{problem}  found: {error}{way_out}") from None
