"""Folders that transformers and peft open: a model with adapters (LoRA) merged into it, or the adapters alone."""

import json
import logging
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from portable_fsdp.checkpoint.manifests import Manifest, TensorEntry, bytes_of_tensors
from portable_fsdp.checkpoint.safetensors import byte_chunks, groups, write_file
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config.schema import Lora, Model
from portable_fsdp.formats import base as formats
from portable_fsdp.formats.base import ExportOptions, ForeignCheckpoint, ForeignFormat
from portable_fsdp.formats.published import PROCESSOR_FILES, published_model, with_parts
from portable_fsdp.formats.single_file import open_safetensors
from portable_fsdp.layout import full_region
from portable_fsdp.models import lora
from portable_fsdp.models.architecture import mapping_of, text_config
from portable_fsdp.models.expert_adapters import expert_products
from portable_fsdp.models.pretrained import PretrainedWeights, fingerprint, open_pretrained
from portable_fsdp.models.tensor_files import INDEX, SINGLE, require_as_exported
from portable_fsdp.models.weights import RandomWeights, WeightFill, plain_name
from portable_fsdp.quantised import holds_inputs_first
from portable_fsdp.runtime.errors import CheckpointError, ConfigError
from portable_fsdp.runtime.files import read_inside, write_text_atomically
from portable_fsdp.runtime.hub import import_transformers, is_hub_id, local_folder

log = logging.getLogger("portable_fsdp")

GENERATION = "generation_config.json"
_LOAD_STATE_DICT = """from pathlib import Path

from safetensors.torch import load_file

weights = {}
for path in Path("FOLDER").glob("*.safetensors"):
    weights |= load_file(path)
model.load_state_dict(weights)  # the module that the run's model.factory returns"""


def export_model(reader: Reader, options: ExportOptions) -> Callable[[Path], None]:
    """Export the model as a Hugging Face folder, adapters (LoRA) merged: a merge holds two tensors in float32.

    A model of `model.factory` exports only weights, for `load_state_dict`. Raises `CheckpointError`: a missing base, a
    model that isn't from transformers.
    """
    saved, read = merged(reader, options.base)
    whole, parts = published_model(reader.manifest.architecture, f"checkpoint {reader.folder.name}"), None
    if whole is not None:
        place = options.base or str(opened_folder(reader.manifest) or reader.manifest.config["model"]["pretrained"])
        saved, read, parts = with_parts(reader, place, whole, saved, read)
    tensors = {key: formats.as_dtype(tensor, options.dtype) for key, tensor in saved.items()}
    config = _model_config(reader.manifest, reader.folder.name, tensors)

    def write(folder: Path) -> None:
        if config is not None:
            config.save_pretrained(folder)
        for name in PROCESSOR_FILES:
            if parts is not None and (parts / name).is_file():
                (folder / name).write_bytes(read_inside(parts / name, parts))
        own = _generation_config(reader.manifest)
        if own is not None:
            (folder / GENERATION).write_bytes(own)
        elif config is not None and _task_of(reader.manifest) in ("causal_lm", "seq2seq_lm"):
            import_transformers().GenerationConfig.from_model_config(config).save_pretrained(folder)
        _write_weights(read, tensors, folder, options)
        opened_by = config.architectures[0] if config is not None and config.architectures else None
        _write_card(folder, reader.manifest, "transformers" if opened_by else "pytorch", opened_by)

    return write


def open_checkpoint(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """Open the folder's weights, and its config.json if it has one. Holds one tensor. Raises `CheckpointError`."""
    return formats.open_folder(path, INDEX, SINGLE, open_safetensors)


def _task_of(manifest: Manifest) -> str:
    return str(manifest.config.get("train", {}).get("task", "causal_lm"))


def _model_config(manifest: Manifest, name: str, tensors: dict[str, TensorEntry]) -> Any:
    """Make transformers' config of the saved model, with architectures and dtype, which `from_pretrained` needs. None:
    the model isn't from transformers."""
    if manifest.config.get("model", {}).get("factory") is not None:
        return None
    if manifest.architecture is None:
        reason = "it names no model of transformers (model_config is null)"
        raise CheckpointError(f"checkpoint {name}: {reason}.\n  Use --format safetensors, or dcp with the optimizer.")
    config = formats.config_object(manifest.architecture, f"checkpoint {name}")
    known = getattr(import_transformers(), mapping_of(_task_of(manifest)))
    if not config.architectures and type(config) in known:
        config.architectures = [known[type(config)].__name__]
    floating = {tensor.dtype for tensor in tensors.values() if tensor.dtype in formats.FLOAT_DTYPES}
    if len(floating) == 1:
        config.dtype = floating.pop()
    return config


def _generation_config(manifest: Manifest) -> bytes | None:
    """Read that file of `model.pretrained`, from the folder that the run opened, else where the name points now. None:
    transformers makes one from the model's config."""
    model = manifest.config.get("model", {})
    name = model.get("pretrained")
    if name is None or model.get("gguf_file") is not None:
        return None
    try:
        folder = opened_folder(manifest) or local_folder("model.pretrained", name, (GENERATION,))
        return read_inside(folder / GENERATION, folder) if (folder / GENERATION).is_file() else None
    except (ConfigError, OSError) as error:
        log.warning("%s is made from the model's config; that of model.pretrained can't be read: %s", GENERATION, error)
        return None


def _write_weights(
    read: Callable[[str], Tensor], tensors: dict[str, TensorEntry], folder: Path, options: ExportOptions
) -> None:
    shards = list(groups(tensors, formats.MAX_FILE_BYTES))
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
        entries = {key: tensors[key] for key in keys}
        write_file(folder / file, file, entries, partial(byte_chunks, read), {}, options.advance)
        weight_map.update(dict.fromkeys(keys, file))
    if len(shards) > 1:
        metadata = {"total_size": bytes_of_tensors(tensors)}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        write_text_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _write_card(folder: Path, manifest: Manifest, library: str, opened_by: str | None) -> None:
    """Write README.md: base model, license, data sets, how to load. `opened_by`: the class of `library` that opens it.

    Names in a checkpoint are untrusted, and local ones private: the card has only ids of the hub.
    """
    from huggingface_hub import ModelCard, ModelCardData

    model, data = manifest.config.get("model", {}), manifest.config.get("data", {})
    base = str(model.get("pretrained") or "")
    sources = [source for source in data.get("mixture") or [data] if source.get("source") == "huggingface"]
    base_id, *data_ids = (
        re.split("[:@]", str(name))[0] for name in (base, *(source.get("path") for source in sources))
    )
    front = ModelCardData(
        base_model=base_id if is_hub_id(base_id) else None,
        datasets=list(filter(is_hub_id, data_ids)) or None,
        library_name=library,
        license=_license(base) if base else None,
    )
    how = _LOAD_STATE_DICT
    if opened_by and opened_by.isidentifier():
        how = f'from {library} import {opened_by}\n\nmodel = {opened_by}.from_pretrained("FOLDER")'
    title = f"# Step {manifest.step} of a run of portable_fsdp"
    ModelCard(f"---\n{front.to_yaml()}\n---\n\n{title}\n\n```python\n{how}\n```\n").save(folder / "README.md")


def _license(base: str) -> str | None:
    """Return the license that a local base's README.md states; None if unknown."""
    from huggingface_hub import ModelCard

    with suppress(Exception):  # no such file, or one that the hub's parser refuses in many classes
        text = read_inside(Path(base) / "README.md", Path(base)).decode()
        found = cast(Any, ModelCard(text).data).license if text.startswith("---") else None
        return found if isinstance(found, str) else None
    return None


# ----------------------------------------------------------------------------------------------------- adapters (LoRA)


def export_adapters(reader: Reader, options: ExportOptions) -> Callable[[Path], None]:
    """Export adapter_config.json and the adapters' weights. Raises `CheckpointError` if there are no adapters."""
    adapters = adapters_of(reader)
    if adapters is None:
        raise CheckpointError(
            f"checkpoint {reader.folder.name}: no adapters (model.lora); it has whole weights.\n"
            "  Use --format huggingface."
        )
    import_transformers()  # before peft imports it, without torch_xla
    from peft import LoraConfig

    pretrained, revision = _base_model(reader.manifest)
    manifest, whole = reader.manifest, lora.whole_tensors(adapters.base, adapters.settings.train_whole)
    names = {key: key for key in formats.weights_of(reader) if lora.is_adapter(key)}
    names |= {name: manifest.ties.get(name, name) for name in whole}  # peft holds tied weights twice
    multimodal = published_model(manifest.architecture, f"checkpoint {reader.folder.name}")
    opened: Any = multimodal.model if multimodal is not None and not multimodal.opens_as_text else None
    as_opened = multimodal.name if multimodal is not None and opened is not None else str
    ours = {theirs: names[name] for name, theirs in lora.peft_keys(adapters.base, names, as_opened).items()}
    tensors = {theirs: formats.as_dtype(manifest.tensors[key], options.dtype) for theirs, key in ours.items()}
    layers = [names.layer for names in adapters.layers if not names.is_of_experts]
    of_experts = [names.layer for names in adapters.layers if names.is_of_experts]
    if layers and lora.read_as_experts(adapters.base, layers):
        raise CheckpointError(
            f"checkpoint {reader.folder.name}: peft would take its adapters of MLPs for those of experts.\n"
            "  Export the merged model: --format huggingface."
        )
    settings = LoraConfig(
        **lora.peft_settings(adapters.settings),
        fan_in_fan_out=any(holds_inputs_first(adapters.base.get_submodule(layer)) for layer in layers),
        target_parameters=_short_names(
            (opened or adapters.base).named_parameters(), map(as_opened, of_experts), parts=2
        )
        or None,
        ensure_weight_tying=bool(whole.keys() & manifest.ties.keys()),
        modules_to_save=[*map(as_opened, lora.whole_modules(adapters.base, adapters.settings.train_whole))] or None,
        base_model_name_or_path=pretrained,
        revision=revision,
        inference_mode=True,
    )
    # Set here: the constructor would make them a set, in random order.
    settings.target_modules = _short_names((opened or adapters.base).named_modules(), map(as_opened, layers), parts=1)

    def write(folder: Path) -> None:
        settings.save_pretrained(str(folder))
        chunks_of = partial(byte_chunks, lambda key: reader.read_whole(ours[key]))
        write_file(folder / lora.WEIGHTS, lora.WEIGHTS, tensors, chunks_of, {}, options.advance)
        _write_card(folder, reader.manifest, "peft", "AutoPeftModelForCausalLM")

    return write


def _short_names(named: Iterable[tuple[str, Any]], chosen: Iterable[str], parts: int) -> list[str]:
    """Return the last `parts` of the chosen names, as people write them; full names if others of `named` have them."""

    def end(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    adapted = set(chosen)
    ends = {end(name) for name in adapted}
    matching = {name for name, _ in named if end(name) in ends}
    return sorted(ends if matching == adapted else adapted)


def _base_model(manifest: Manifest) -> tuple[str | None, str | None]:
    """Return the adapters' base: a hub id and its revision, or a folder by its absolute path."""
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

    settings: Lora
    layers: list[lora.AdapterNames]
    base: nn.Module


def adapters_of(reader: Reader) -> Adapters | None:
    """Return the adapters of a checkpoint, or None. Raises `CheckpointError`."""
    layers = lora.adapted_layers(list(formats.weights_of(reader)))
    if not layers:
        return None
    manifest, where = reader.manifest, f"checkpoint {reader.folder.name}"
    saved = manifest.config.get("model", {}).get("lora") or {}
    try:
        if not {"r", "alpha"} <= saved.keys():
            raise ValueError
        settings = Lora.model_validate(saved)
    except ValueError:
        raise CheckpointError(
            f"{where}: expected r and alpha in model.lora of its config, and only keys of this release, found "
            f"{str(saved)[:80]}"
        ) from None
    base: Any = None if manifest.architecture is None else formats.model_on_meta(manifest.architecture, where)
    if base is None:
        raise CheckpointError(f"{where}: it has adapters but no model_config (transformers)")
    try:
        whole = lora.whole_tensors(base, settings.train_whole)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if missing := {manifest.ties.get(name, name) for name in whole} - manifest.tensors.keys():
        raise CheckpointError(f"{where}: expected {min(missing)} (model.lora.train_whole), found none")
    return Adapters(settings, layers, base)


def merged(reader: Reader, base: str | None = None) -> tuple[dict[str, TensorEntry], Callable[[str], Tensor]]:
    """Return the model's tensors under the base's names, and a function that reads one; unchanged without adapters.

    W + alpha / r * B A, with DoRA each output scaled to its norm, in float32, then rounded to the base's dtype: holds
    two tensors. `base`: see `ExportOptions`. Raises `CheckpointError`.
    """
    left_out = reader.manifest.left_out
    tensors = formats.weights_of(reader) | left_out
    adapters = adapters_of(reader)
    if adapters is None:
        if not left_out:
            return tensors, reader.read_whole
        model = formats.model_on_meta(reader.manifest.architecture or {}, f"checkpoint {reader.folder.name}")
        adapters = Adapters(Lora(), [], model)
    by_weight = {names.weight: names for names in adapters.layers}
    saved = {plain_name(key): key for key in tensors if not lora.is_adapter(key)}
    fill = _left_out(reader, adapters.base, base)

    def read(key: str) -> Tensor:
        entry = tensors[saved[key]]
        if fill is None or saved[key] in reader.manifest.tensors:
            weight = reader.read_whole(saved[key])
        else:
            weight = fill(key, full_region(entry.shape))
        dtype = getattr(torch, entry.dtype)
        if key not in by_weight:
            return weight.to(dtype)
        names = by_weight[key]
        a, b = (reader.read_whole(name).float() for name in (names.a, names.b))
        if names.is_of_experts:
            holder: Any = adapters.base.get_submodule(names.layer.rpartition(".")[0])
            change = expert_products(a, b, len(weight), holder.is_transposed)
            scaling = lora.scaling_of(adapters.settings, names.layer, len(a) // len(weight))
            return (weight.float() + change * scaling).to(dtype)
        change = b @ a * lora.scaling_of(adapters.settings, names.layer, len(a))
        inputs_first = holds_inputs_first(adapters.base.get_submodule(names.layer))
        whole = weight.float() + (change.T if inputs_first else change)
        if adapters.settings.dora:
            norms, magnitude = whole.norm(dim=int(not inputs_first)), reader.read_whole(names.magnitude).float()
            whole *= (magnitude / norms)[(None, ...) if inputs_first else (..., None)]
        return whole.to(dtype)

    return {name: tensors[key] for name, key in saved.items()}, read


def opened_folder(manifest: Manifest) -> Path | None:
    """Return the folder where the run read `model.pretrained`, if this host has it; for a hub id, the same commit."""
    opened = (manifest.architecture or {}).get("_name_or_path")
    return Path(str(opened)) if opened and Path(str(opened)).is_dir() else None


def _left_out(reader: Reader, model: nn.Module, name: str | None) -> WeightFill | None:
    """Open the base that a checkpoint leaves out, with the values that the run's quantised weights have; None if it
    includes the base. Raises `CheckpointError`."""
    manifest, base = reader.manifest, reader.manifest.base
    if base is None:
        return None
    place = name or str((opened_folder(manifest) if base.gguf_file is None else None) or base.pretrained)
    problem = f"checkpoint {reader.folder.name}: expected the base model of its adapters:\n    {base}\n"
    hint = "\n  Name it: --base FOLDER (or org/name@revision). Adapters only: --format peft."
    try:
        require_as_exported(Path(place))
        config, file = open_pretrained(Model(pretrained=place, gguf_file=base.gguf_file))
        if (actual := fingerprint(file)) != base.fingerprint:
            raise CheckpointError(f"{problem}  found another in {place} (fingerprint {actual}).{hint}")
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        drawn = RandomWeights(model, 0, torch.float32)  # fills nothing: the base has every weight
        allow = manifest.config.get("model", {}).get("allow", ())
        rows = getattr(text_config(config), "vocab_size", None)  # fewer if the run's tokenizer had more tokens
        rows = None if rows == getattr(cast(Any, model).config, "vocab_size", None) else rows
        whole = published_model(manifest.architecture, f"checkpoint {reader.folder.name}")
        weights = PretrainedWeights(file, model, model, drawn, allow=allow, rows_before=rows, published=whole)
        if base.scheme is None:
            return weights
        from portable_fsdp.models.quantised import as_quantised

        shapes = {plain_name(key): base.tensors[key].shape for key in base.quantised}
        return as_quantised(weights, shapes, base.scheme, weights.stored)
    except ConfigError as error:
        raise CheckpointError(f"{problem}  found: {error}{hint}") from None


HUGGINGFACE = ForeignFormat(
    lambda path: (path / INDEX).is_file() or (path / SINGLE).is_file(), open_checkpoint, export_model
)
PEFT = ForeignFormat(export=export_adapters)
