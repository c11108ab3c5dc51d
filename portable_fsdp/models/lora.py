"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: their layers, and their initial values.

A layer `q_proj` becomes a peft layer, with the weights `q_proj.base_layer.weight`, `q_proj.lora_A.default.weight`
`[r, in]` and `q_proj.lora_B.default.weight` `[out, r]`; it computes base(x) + alpha / r * B(A(x)). Only A and B train.

`model.lora.start_from` names a folder of existing adapters, saved by peft, from which the run starts. They must be
plain LoRA with the run's r, alpha, layers and shapes. The folder only has the name of its base: nothing here compares
the bases.
"""

import json
import logging
import math
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from portable_fsdp.config import schema
from portable_fsdp.config.describe import matches, matching
from portable_fsdp.models.tensor_files import open_safetensors
from portable_fsdp.models.weights import FLOATS, TensorSlices, WeightFill, seeded
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.files import parse_json, read_regular
from portable_fsdp.runtime.hub import local_folder

log = logging.getLogger("portable_fsdp")

ALL_LINEAR = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = "model.lora.start_from"
_BASE = ".base_layer"
_A, _B = ".lora_A.default", ".lora_B.default"
_INSIDE = "base_model.model"  # where peft's model holds ours

_ANY = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "lora_dropout"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size"),
)
"""Keys of adapter_config.json that are compared with the weights or the config, or don't change the product."""
_PLAIN: Mapping[str, Collection[Any]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # Others (pissa, olora, loftq, ...) change the base's own weights at the start.
    "init_lora_weights": (True, False, "gaussian"),
}
"""Values of plain LoRA; any other key must be null, false or empty."""


class AdapterNames(NamedTuple):
    """FQNs of the weights of one layer under LoRA, and of the layer itself."""

    layer: str
    base: str
    a: str
    b: str

    @classmethod
    def of(cls, layer: str) -> "AdapterNames":
        return cls(layer, f"{layer}{_BASE}.weight", f"{layer}{_A}.weight", f"{layer}{_B}.weight")


def peft_keys(names: AdapterNames) -> tuple[tuple[str, str], tuple[str, str]]:
    """(name in peft's files, without the adapter's name; our FQN) of a layer's two weights."""
    return ((f"{_INSIDE}.{names.layer}.lora_A.weight", names.a), (f"{_INSIDE}.{names.layer}.lora_B.weight", names.b))


def plain_name(fqn: str) -> str:
    """The FQN of a base weight in the model without adapters."""
    return fqn.replace(f"{_BASE}.", ".")


def is_adapter(fqn: str) -> bool:
    return _A in fqn or _B in fqn


def adapted_layers(names: list[str]) -> list[AdapterNames]:
    """The layers with adapters among the FQNs of a model's weights."""
    return [AdapterNames.of(name.removesuffix(f"{_A}.weight")) for name in names if name.endswith(f"{_A}.weight")]


def holds_inputs_first(module: nn.Module) -> bool:
    """Whether a layer's weight is `[in, out]` (transformers' Conv1D in GPT-2), not `[out, in]`."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def add_adapters(model: nn.Module, lora: schema.Lora, seed: int, dtype: torch.dtype, fill: WeightFill) -> WeightFill:
    """Add adapters to the layers that `lora.targets` names, on meta, in `dtype`, and freeze all other weights.

    Returns the `fill` of the adapted model: that of the base, and adapters drawn as peft does (A uniform as torch's
    linear layers, B zero), so that the model begins as its base. Raises ConfigError if peft isn't installed, a
    pattern matches no linear layer, or a layer's weight is tied.
    """
    targets = _targets(model, lora.targets)
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"model.lora: the package peft is not installed ({error}).\n"
            "  pip install peft, or in a checkout of portable_fsdp: pip install '.[lora]'."
        ) from None
    inputs_first = any(holds_inputs_first(model.get_submodule(name)) for name in targets)
    settings: Any = cast(Any, peft).LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, target_modules=targets, fan_in_fan_out=inputs_first, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", category=UserWarning)  # GPT-2 has both
        peft.inject_adapter_in_model(settings, model)
    for name in targets:  # each engine casts weights at use, and inputs have their dtype
        cast(Any, model.get_submodule(name)).cast_input_dtype_enabled = False
    drawn: dict[str, torch.Size] = {}
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(fqn))
        if is_adapter(fqn):
            parameter.data = parameter.data.to(dtype)
            drawn[fqn] = parameter.shape

    def with_adapters(fqn: str, slices: TensorSlices) -> Tensor:
        if fqn not in drawn:
            return fill(plain_name(fqn), slices)
        weight = torch.zeros(drawn[fqn])  # the whole, in float32, as in peft's LoraLayer.reset_lora_parameters
        if _A in fqn:
            with seeded(seed, fqn):
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        return weight[slices].to(dtype)

    return with_adapters


def _targets(model: Any, patterns: tuple[str, ...]) -> list[str]:
    """FQNs of the layers that get adapters, in the model's order."""
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    linear = {name: m for name, m in modules.items() if isinstance(m, nn.Linear) or holds_inputs_first(m)}
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern == ALL_LINEAR:
            chosen.update(name for name, module in linear.items() if module is not head)
            continue
        named = [name for name in modules if matches(pattern, name) or name.endswith(f".{pattern}")]
        if named and not any(layer.startswith(name) for name in named for layer in linear):
            raise ConfigError(
                f"model.lora.targets: {pattern!r} matches {named[0]}, but no linear layer.\n"
                "  Adapters of embeddings, of norms and of experts in one tensor are not supported."
            )
        chosen.update({*named} & linear.keys() or matching("model.lora.targets", pattern, linear))
    weights = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    for name in chosen:
        if weights.count(id(linear[name].weight)) > 1:
            raise ConfigError(
                f"model.lora.targets: {name} can't have an adapter: its weight is tied to the embedding.\n"
                f"  Leave it out, as {ALL_LINEAR} does."
            )
    if not chosen:
        raise ConfigError(f"model.lora: {type(model).__name__} has no linear layers to adapt.\n  Leave model.lora out.")
    return [name for name in linear if name in chosen]


# ------------------------------------------------------------------------------------------------ adapters of a folder


def start_from(lora: schema.Lora, model: nn.Module, fill: WeightFill) -> WeightFill:
    """Return the `fill` of a model with adapters, on meta, that reads the folder's adapters in the model's dtypes.

    Reads only the requested slices. Raises ConfigError for a missing folder, an unsupported kind, and r, alpha, layers
    or shapes other than the run's.
    """
    folder = local_folder(_KEY, cast(str, lora.start_from), (CONFIG, WEIGHTS))
    _check_config(folder, lora)
    path = folder / WEIGHTS
    if not path.is_file():
        is_pickle = (folder / "adapter_model.bin").is_file()
        actual = "adapter_model.bin, a pickle, which may run any code when it is opened" if is_pickle else "none"
        raise _refusal(folder, WEIGHTS, actual, "Save it again with peft: save_pretrained(FOLDER).")
    parameters = dict(model.named_parameters())
    keys = {ours: theirs for names in adapted_layers(list(parameters)) for theirs, ours in peft_keys(names)}
    _check_weights(path, {theirs: tuple(parameters[ours].shape) for ours, theirs in keys.items()})

    def with_saved_adapters(fqn: str, slices: TensorSlices) -> Tensor:
        if fqn not in keys:
            return fill(fqn, slices)
        with open_safetensors(_KEY, path) as file:
            return cast(Tensor, file.get_slice(keys[fqn])[slices]).to(parameters[fqn].dtype)

    return with_saved_adapters


def _check_config(folder: Path, lora: schema.Lora) -> None:
    try:
        saved = parse_json(read_regular(folder / CONFIG, folder))
    except (OSError, ValueError) as error:
        raise _refusal(folder, f"{CONFIG} of peft", f"{error}", "Name a folder that peft has saved.") from None
    if not isinstance(saved, dict):
        raise _refusal(folder, f"a JSON object in {CONFIG}", str(saved)[:80], "Save it again with peft.")
    for key, value in cast(dict[str, Any], saved).items():
        plain = _PLAIN.get(key, (None, False, "", [], {}))
        if key not in _ANY and value not in plain:
            raise _refusal(
                folder,
                f"plain LoRA adapters ({key}: {' or '.join(map(json.dumps, plain))})",
                f"{key}: {json.dumps(value)[:80]} in {CONFIG}",
                "Merge other kinds into their base (peft's merge_and_unload), and start from that.",
            )
    for name, theirs, ours in (("r", saved.get("r"), lora.r), ("alpha", saved.get("lora_alpha"), lora.alpha)):
        if theirs != ours:
            fix = f"Set model.lora.{name} to {theirs}."
            raise _refusal(folder, f"model.lora.{name}={ours:g}", f"{theirs} in {CONFIG}", fix)
    if saved.get("lora_dropout"):
        log.info("%s: %s: training continues without their dropout (%s)", _KEY, folder, saved["lora_dropout"])


def _check_weights(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    with open_safetensors(_KEY, path) as file:
        tensors = {key: file.get_slice(key) for key in cast(list[str], list(file.keys()))}
        headers = {key: (tuple(each.get_shape()), str(each.get_dtype())) for key, each in tensors.items()}
    missing, others = sorted(expected.keys() - headers.keys()), sorted(headers.keys() - expected.keys())
    if missing or others:
        differences = [f"none for {missing[0]} ({len(missing)} in all)"] if missing else []
        differences += [f"{others[0]} too ({len(others)} in all)"] if others else []
        raise _refusal(
            path.parent,
            f"the adapters of the {len(expected) // 2} layers that model.lora.targets names, and no other tensor",
            f"{' and '.join(differences)} in {path.name}",
            f"Set model.lora.targets to the layers that it has (target_modules in {CONFIG}).",
        )
    for key, (shape, dtype) in headers.items():
        if shape != expected[key] or dtype not in FLOATS:
            form, actual = f"{list(expected[key])} of {', '.join(FLOATS)}", f"{dtype} {list(shape)} in {path.name}"
            raise _refusal(path.parent, f"{key} as {form}", actual, "Use adapters of this model.")


def _refusal(folder: Path, expected: str, actual: str, fix: str) -> ConfigError:
    return ConfigError(f"{_KEY}: {folder}: expected {expected}, found {actual}.\n  {fix}")
