"""Builds the model on the meta device and says where its weights come from.

`build_model` gives a model whose parameters hold no memory and a `fill(fqn, slices)` that makes any piece of any
weight on the host: drawn from (seed, FQN) alone, or read from a folder of safetensors. A backend pulls the pieces
that its devices need, one at a time, so that no host holds the model twice.
"""

# Parameters and buffers are replaced in a module's own tables: torch has no public way for all of them.
# pyright: reportPrivateUsage=false

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from portable_fsdp.config import schema
from portable_fsdp.models.attention import register
from portable_fsdp.models.loss import attach_loss
from portable_fsdp.models.wrap import find_units
from portable_fsdp.runtime.errors import ConfigError

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class ModelSize:
    """What the FLOPs of a step are counted from."""

    parameters: int  # a tied weight once
    embedding_parameters: int  # of tables that are only looked up
    layers: int
    hidden: int  # attention heads * head_dim


@dataclass(frozen=True)
class BuiltModel:
    """A model on meta (its buffers are real, on the host), its units, its weights, and its transformers config.

    The config is as it was given: with the dropout and the cache that training switches off.
    """

    model: nn.Module
    units: tuple[str, ...]
    fill: Callable[[str, Slices], Tensor]
    config: dict[str, Any]
    size: ModelSize


def build_model(model: schema.Model, *, seed: int, seq_len: int, vocabulary: int) -> BuiltModel:
    """Build the causal language model that the config names, ready to be sharded.

    Args:
        model: the config's section.
        seed: of the initial weights; not used with `model.pretrained`.
        seq_len: tokens in a row, which the model's positions must hold.
        vocabulary: ids of the tokenizer, which the model's embedding must hold.

    The parameters' dtype is float32. Raises ConfigError where the config doesn't name a model that fits.
    """
    # transformers and accelerate would import torch_xla wherever it is installed; we choose the engine ourselves.
    os.environ.setdefault("USE_TORCH_XLA", "0")
    config = _pretrained_config(model.pretrained) if model.pretrained is not None else _config(model.architecture or {})
    _check_sizes(config, seq_len, vocabulary)
    as_given = cast(dict[str, Any], config.to_dict())
    _switch_off(config)
    built = _on_meta(config, model.attention)
    _check_causal(built)
    twin = _on_meta(config, model.attention)  # keeps its meta parameters while the backend replaces the model's
    _fill_buffers(built, twin)
    if model.pretrained is None:
        weights = RandomWeights(twin, seed)
    else:
        weights = PretrainedWeights(Path(model.pretrained), twin)
        for name, buffer in built.named_buffers():
            if weights.holds(name):
                buffer.copy_(weights(name, tuple(slice(0, size) for size in buffer.shape)))
    attach_loss(built)
    built.train()
    return BuiltModel(built, find_units(built), weights, as_given, _size(built))


# ------------------------------------------------------------------------------------------------ the architecture


def _config(architecture: dict[str, Any]) -> Any:
    """The transformers config of `model.architecture`, refusing what its class doesn't know."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    arguments = dict(architecture)
    model_type = str(arguments.pop("model_type"))
    causal = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if model_type not in causal:
        near = difflib.get_close_matches(model_type, causal, n=3)
        raise ConfigError(
            f"model.architecture.model_type: expected a causal language model of transformers, found {model_type!r}."
            + (f"\n  nearest: {', '.join(near)}." if near else "")
        )
    kind = type(AutoConfig.for_model(model_type))
    known = {item.name for item in dataclasses.fields(kind)} | set(kind.attribute_map) | {"rope_theta", "rope_scaling"}
    for key in arguments:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise ConfigError(
                f"model.architecture.{key}: unknown key of {kind.__name__}."
                + (f"\n  nearest: {near[0]}." if near else f"\n  It has: {', '.join(sorted(known))}.")
            )
    try:
        return AutoConfig.for_model(model_type, **arguments)
    except Exception as error:  # transformers validates with exceptions of many classes, all about these values
        raise ConfigError(
            f"model.architecture: transformers refuses it: {_last_line(error)}\n"
            "  Change the key that it names. Nothing was started."
        ) from error


def _pretrained_config(folder: str) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.pretrained: expected a Hugging Face folder with config.json, found "
            f"{'none in it' if path.is_dir() else 'no such folder'}: {folder}\n  Download the model first; the path is "
            "taken from the folder that the run starts in."
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"model.pretrained: {path / 'config.json'}: {_last_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model.pretrained: {path / 'config.json'}: expected a causal language model of transformers, found "
            f"model_type {config.model_type!r}."
        )
    return config


def _check_sizes(config: Any, seq_len: int, vocabulary: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and seq_len > positions:
        raise ConfigError(
            f"data.seq_len: expected at most {positions} (the model's max_position_embeddings), found {seq_len}.\n"
            "  Lower data.seq_len, or take a model with more positions."
        )
    ids = getattr(config, "vocab_size", None)
    if isinstance(ids, int) and ids < vocabulary:
        raise ConfigError(
            f"model: expected vocab_size of at least {vocabulary} (the ids of data.tokenizer), found {ids}.\n"
            f"  Set model.architecture.vocab_size={vocabulary}, or name the model's own tokenizer in data.tokenizer."
        )


def _switch_off(config: Any) -> None:
    """No dropout, and no key-value cache, which training doesn't read."""
    config.use_cache = False
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, 0.0)


def _on_meta(config: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=_attention(kind, attention), dtype=torch.float32
            )
    except Exception as error:  # an activation's name, heads of 0: each fails in a way of its own
        raise ConfigError(
            f"model: {kind.__name__} can't be built from this config: {type(error).__name__}: {_last_line(error)}\n"
            "  Compare the sizes in model.architecture with a model that exists. Nothing was started."
        ) from error


def _check_causal(model: nn.Module) -> None:
    """Encoders count as causal models in transformers too, but see the tokens that they should predict."""
    flags = [flag for module in model.modules() if isinstance(flag := getattr(module, "is_causal", None), bool)]
    if flags and not any(flags):
        raise ConfigError(
            f"model: expected a model whose attention is causal, found {type(model).__name__} as an encoder.\n"
            "  Set model.architecture.is_decoder=true (in a folder: in its config.json), or take another model."
        )


def _attention(kind: Any, wanted: str) -> str:
    """`auto` takes the static one, save for models with an attention of their own (ALiBi in Bloom and Falcon)."""
    takes_any = bool(getattr(kind, "_supports_attention_backend", False))
    if wanted == "static" and not takes_any:
        raise ConfigError(f"model.attention: {kind.__name__} has an attention of its own; set model.attention=auto.")
    if wanted in ("sdpa", "eager"):
        return wanted
    if takes_any:
        return register()
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def _size(model: Any) -> ModelSize:
    tables = {id(table.weight): table.weight for table in model.modules() if isinstance(table, nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        tables.pop(id(head.weight), None)
    config = model.config
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding_parameters=sum(table.numel() for table in tables.values()),
        layers=config.num_hidden_layers,
        hidden=heads * width,
    )


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


# ---------------------------------------------------------------------------------------------------- the weights


def _ancestors(fqn: str) -> list[str]:
    """`a.b.weight` -> `a.b`, `a`, `` (the root): owner first."""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def _initialise(model: Any, fqn: str) -> None:
    """Run transformers' own initialisation of the modules that may touch this tensor, owner first, as it does."""
    for name in _ancestors(fqn):
        model._init_weights(model.get_submodule(name))


def _fill_buffers(model: nn.Module, twin: nn.Module) -> None:
    """Give `model` real buffers: computed ones (rotary frequencies) have their values, from `_init_weights`."""
    for fqn, buffer in list(twin.named_buffers()):
        owner, _, leaf = fqn.rpartition(".")
        module = twin.get_submodule(owner)
        module._buffers[leaf] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    for name, module in twin.named_modules():
        if any(True for _ in module.buffers(recurse=False)):
            with torch.no_grad():
                cast(Any, twin)._init_weights(module)
            for leaf, value in module._buffers.items():
                model.get_submodule(name)._buffers[leaf] = value


class RandomWeights:
    """`fill` of a new model: each weight depends on (seed, FQN) alone, whatever the mesh and the order of asking.

    One weight is drawn at a time, whole, and kept until the next is asked for: a host needs memory for the largest.
    """

    def __init__(self, twin: nn.Module, seed: int) -> None:
        self._twin = twin
        self._seed = seed
        self._last: tuple[str, Tensor] | None = None

    def __call__(self, fqn: str, slices: Slices) -> Tensor:
        if self._last is None or self._last[0] != fqn:
            self._last = (fqn, self._draw(fqn))
        return self._last[1][slices].clone()

    def _draw(self, fqn: str) -> Tensor:
        owner, _, leaf = fqn.rpartition(".")
        module = self._twin.get_submodule(owner)
        placeholder = cast(nn.Parameter, module._parameters[leaf])
        weight = nn.Parameter(
            torch.empty(placeholder.shape, dtype=placeholder.dtype, device="cpu"), requires_grad=False
        )
        module._parameters[leaf] = weight
        digest = hashlib.sha256(f"{self._seed}/{fqn}".encode()).digest()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
                _initialise(self._twin, fqn)
        finally:
            module._parameters[leaf] = placeholder
        return weight.data


class PretrainedWeights:
    """`fill` from a folder of safetensors: reads the asked slices of one file, and nothing else."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        files = _weight_files(folder)
        base = str(getattr(model, "base_model_prefix", ""))
        self._dtypes = {name: tensor.dtype for name, tensor in _stored(model).items()}
        self._where = {name: _stored_name(aliases, files, base) for name, aliases in _aliases(model).items()}
        missing = sorted(name for name, stored in self._where.items() if stored is None)
        if missing:
            raise ConfigError(
                f"model.pretrained: {folder}: expected a weight for each of the model's {len(self._where)} tensors, "
                f"found none for {missing[0]}" + (f", and {len(missing) - 1} more." if len(missing) > 1 else ".")
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
