"""`model.lora.start_from`: adapters that exist, in a folder as peft saves them, as the initial values of a run.

They must be what the run trains: r, alpha, layers and shapes as in `model.lora`, of plain LoRA. The base that they were
trained on is not looked at: the folder knows its name alone.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from portable_fsdp.config import schema
from portable_fsdp.models.lora import adapted_layers, peft_keys
from portable_fsdp.models.weights import Slices
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.hub import local_folder
from portable_fsdp.runtime.strict_json import parse_json

log = logging.getLogger("portable_fsdp")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = "model.lora.start_from"
_FLOATS = ("F32", "BF16", "F16", "F64")

_ANY = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "lora_dropout"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size"),
)
"""Keys of adapter_config.json that are compared with the weights or the config, or say nothing of the product."""
_PLAIN: Mapping[str, Collection[Any]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # Others (pissa, olora, loftq, ...) change the base's own weights as they begin.
    "init_lora_weights": (True, False, "gaussian"),
}
"""What plain LoRA says; of all other keys it is nothing: null, false, empty."""


def start_from(
    lora: schema.Lora, model: nn.Module, fill: Callable[[str, Slices], Tensor]
) -> Callable[[str, Slices], Tensor]:
    """The `fill` of a model with adapters, on meta, that gives those of the folder, in the dtypes of the model.

    Reads the asked slices and nothing else. Raises ConfigError: no such folder, a kind that isn't built, other r,
    alpha, layers or shapes than those of the run.
    """
    folder = local_folder(_KEY, cast(str, lora.start_from), (CONFIG, WEIGHTS))
    _check_config(folder / CONFIG, lora)
    path = folder / WEIGHTS
    if not path.is_file():
        pickle = (folder / "adapter_model.bin").is_file()
        found = "adapter_model.bin, a pickle, which may run any code when it is opened" if pickle else "none"
        raise _refusal(folder, WEIGHTS, found, "Save it again with peft: save_pretrained(FOLDER).")
    parameters = dict(model.named_parameters())
    keys = {ours: theirs for names in adapted_layers(list(parameters)) for theirs, ours in peft_keys(names)}
    with _open(path) as file:
        _check_weights(path, file, {keys[ours]: tuple(parameters[ours].shape) for ours in keys})

    def started(fqn: str, slices: Slices) -> Tensor:
        if fqn not in keys:
            return fill(fqn, slices)
        with _open(path) as file:
            return cast(Tensor, file.get_slice(keys[fqn])[slices]).to(parameters[fqn].dtype)

    return started


def _check_config(path: Path, lora: schema.Lora) -> None:
    try:
        said = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _refusal(path.parent, f"{CONFIG} of peft", f"{error}", "Name a folder that peft has saved.") from None
    if not isinstance(said, dict):
        raise _refusal(path.parent, f"a JSON object in {CONFIG}", str(said)[:80], "Save it again with peft.")
    for key, value in cast(dict[str, Any], said).items():
        plain = _PLAIN.get(key, (None, False, "", [], {}))
        if key not in _ANY and value not in plain:
            raise _refusal(
                path.parent,
                f"plain LoRA adapters ({key}: {' or '.join(json.dumps(one) for one in plain)})",
                f"{key}: {json.dumps(value)[:80]} in {CONFIG}",
                "Other kinds are not built: merge them into their base (peft's merge_and_unload), and start from that.",
            )
    for name, theirs, ours in (("r", said.get("r"), lora.r), ("alpha", said.get("lora_alpha"), lora.alpha)):
        if theirs != ours:
            way_out = f"Set model.lora.{name} to {theirs}."
            raise _refusal(path.parent, f"model.lora.{name}={ours:g}", f"{theirs} in {CONFIG}", way_out)
    if said.get("lora_dropout"):
        log.info("%s: %s: trained on without their dropout (%s)", _KEY, path.parent, said["lora_dropout"])


def _check_weights(path: Path, file: Any, expected: Mapping[str, tuple[int, ...]]) -> None:
    found = {key: file.get_slice(key) for key in cast(list[str], list(file.keys()))}
    missing, others = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or others:
        said = [f"none for {missing[0]} ({len(missing)} in all)"] if missing else []
        said += [f"{others[0]} too ({len(others)} in all)"] if others else []
        raise _refusal(
            path.parent,
            f"the adapters of the {len(expected) // 2} layers that model.lora.targets names, and no other tensor",
            f"{' and '.join(said)} in {path.name}",
            f"Set model.lora.targets to the layers that it has (target_modules in {CONFIG}).",
        )
    for key, tensor in found.items():
        shape, dtype = tuple(cast(list[int], tensor.get_shape())), str(tensor.get_dtype())
        if shape != expected[key] or dtype not in _FLOATS:
            raise _refusal(
                path.parent,
                f"{key} as {list(expected[key])} of {', '.join(_FLOATS)}",
                f"{dtype} {list(shape)} in {path.name}",
                "Take adapters of this model.",
            )


def _open(path: Path) -> Any:
    """A safetensors file, to be used as a context manager."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise _refusal(path.parent, f"a whole safetensors file {path.name}", str(error), "Copy it again.") from None


def _refusal(folder: Path, expected: str, found: str, way_out: str) -> ConfigError:
    return ConfigError(f"{_KEY}: {folder}: expected {expected}, found {found}.\n  {way_out} Nothing was started.")
