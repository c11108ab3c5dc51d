"""The model's tensor names by its config: FQNs and ties. Chooses the tensors of a source that are the model's."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash

from portable_fsdp.backends.contract import persistent_buffers
from portable_fsdp.checkpoint.format import folder_of
from portable_fsdp.checkpoint.safetensors import byte_chunks
from portable_fsdp.formats.base import ForeignCheckpoint
from portable_fsdp.models.architecture import config_from_json, config_to_json
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.files import read_regular
from portable_fsdp.runtime.hub import import_transformers

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MAX_LAYERS = 10_000

log = logging.getLogger("portable_fsdp")


@dataclass(frozen=True)
class ModelNames:
    """All FQNs (several for a tied one) and the shape of each stored tensor, by its first FQN."""

    aliases: dict[str, list[str]]
    shapes: dict[str, tuple[int, ...]]
    base: str  # the prefix that the FQNs of the model without head lack

    @property
    def ties(self) -> dict[str, str]:
        """Further FQN of a tied tensor -> its first FQN, as in a manifest."""
        return {name: first for first, names in self.aliases.items() for name in names if name != first}


def config_of(path: Path) -> dict[str, Any]:
    """transformers' config as a dict, from config.json or its folder; never code. Raises `CheckpointError`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        _check_layers(
            str(file), json.loads(read_regular(file, path if path.is_dir() else None))
        )  # older releases wrote infinities, which JSON lacks
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected a config.json, found: {error}") from None
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        return config_to_json(config)
    except Exception as error:  # transformers validates with exceptions of many classes
        raise CheckpointError(f"{path}: expected a config.json that transformers knows, found: {error}") from None


def config_object(model_config: Mapping[str, Any], where: str) -> Any:
    """transformers' config from a dict. Raises `CheckpointError`."""
    _check_layers(where, model_config)
    try:
        import_transformers()
        return config_from_json(model_config)
    except Exception as error:  # transformers validates with exceptions of many classes
        raise CheckpointError(f"{where}: model_config: {error}") from None


def _check_layers(where: str, config: object) -> None:
    """Building a model on meta takes time for each layer. Raises `CheckpointError`."""
    for key in _LAYERS if isinstance(config, Mapping) else ():
        layers = cast(Mapping[str, object], config).get(key)
        if isinstance(layers, int) and layers > _MAX_LAYERS:
            raise CheckpointError(f"{where}: {key}: expected at most {_MAX_LAYERS}, found {layers}")


def model_on_meta(model_config: Mapping[str, Any], where: str) -> Any:
    """The model of a config; None unless it is a causal language model. Raises `CheckpointError`."""
    config = config_object(model_config, where)
    transformers = import_transformers()
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # sizes that don't fit each other fail in many ways
        raise CheckpointError(f"{where}: model_config: {type(error).__name__}: {error}") from None


def names_of(model_config: Mapping[str, Any] | None, where: str) -> ModelNames | None:
    """The names in the model of a config; None unless it is a causal language model. Raises `CheckpointError`."""
    model = None if model_config is None else model_on_meta(model_config, where)
    if model is None:
        return None
    first_of = {id(parameter): name for name, parameter in model.named_parameters()}
    stored = dict(model.named_parameters()) | persistent_buffers(model)
    aliases = {name: [name] for name in stored}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name != first_of[id(parameter)]:
            aliases[first_of[id(parameter)]].append(name)
    return ModelNames(aliases, {name: tuple(t.shape) for name, t in stored.items()}, str(model.base_model_prefix))


def choose_tensors(source: ForeignCheckpoint, names: ModelNames | None) -> dict[str, str]:
    """Our key -> the source's key, for all that we import: each tied tensor once, under its first FQN.

    With `names`, the source must hold the model's tensors, in its shapes; warns of others, which it leaves out. Raises
    `CheckpointError`: a tensor is missing, or stands twice with different bytes.
    """
    for key in source.tensors:
        state, slash, name = key.rpartition("/")
        if not name or not name.isprintable() or len(key) > 1000 or (slash and not state.isidentifier()):
            raise CheckpointError(
                f"expected the name of a tensor as modules have it (layers.0.weight), found {key[:200]!r}"
            )
    if names is None:
        return {key: key for key in source.tensors}
    # A folder may hold a tensor under any of its FQNs, or one without the base model's prefix (GPT-2's).
    candidates = {
        first: list(dict.fromkeys([*aliases, *(alias.removeprefix(f"{names.base}.") for alias in aliases)]))
        for first, aliases in names.aliases.items()
    }
    first_of = {name: first for first, options in candidates.items() for name in options}
    matches = {first: [name for name in options if name in source.tensors] for first, options in candidates.items()}
    left_out = [key for key in source.tensors if key.rpartition("/")[2] not in first_of]
    if missing := [first for first, options in matches.items() if not options]:
        others = [key for key in left_out if folder_of(key) == "model"]
        raise CheckpointError(
            f"expected a tensor for each of the model's {len(matches)} (its config), found none for {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + (f".\n  The source has others, as {others[0]}" if others else "")
            + ".\n  Is it another model's config, or are these another library's names?"
        )
    for first, options in matches.items():
        _check_tensor(source, first, options, names.shapes[first])
    chosen = {first: options[0] for first, options in matches.items()}
    for key in source.tensors:
        state, slash, name = key.rpartition("/")
        if slash and name in first_of:
            chosen.setdefault(f"{state}/{first_of[name]}", key)
    if left_out:
        shown = ", ".join(sorted(left_out)[:3]) + (", ..." if len(left_out) > 3 else "")
        log.warning("left out %d tensors that are not the model's: %s", len(left_out), shown)
    return chosen


def _check_tensor(source: ForeignCheckpoint, first: str, options: list[str], shape: tuple[int, ...]) -> None:
    for name in options:
        if source.tensors[name].shape != shape:
            raise CheckpointError(
                f"{name}: expected {list(shape)} (the model's config), found {list(source.tensors[name].shape)}"
            )
    if len(options) > 1 and len({_digest(source, name) for name in options}) > 1:
        raise CheckpointError(
            f"{first}: expected one content for tied weights, found different ones in {' and '.join(options)}.\n"
            "  Was it saved with tie_word_embeddings=false? Then set that in config.json."
        )


def _digest(source: ForeignCheckpoint, name: str) -> bytes:
    digest = xxhash.xxh3_128(source.tensors[name].dtype.encode())
    for chunk in byte_chunks(name, source.read, source.tensors[name]):
        digest.update(chunk)
    return digest.digest()
