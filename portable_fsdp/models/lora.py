"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: their layers, and their initial values.

A layer `q_proj` becomes a peft layer, with the weights `q_proj.base_layer.weight`, `q_proj.lora_A.default.weight`
`[r, in]` and `q_proj.lora_B.default.weight` `[out, r]`; it computes base(x) + alpha / r * B(A(x)). Only A and B train,
with DoRA also `q_proj.lora_magnitude_vector.default.weight` `[out]`. Modules of `train_whole` keep their names and
train all of their weights; peft would train a copy of them (`modules_to_save`).

Adapters of experts are in `expert_adapters.py`.

`model.lora.start_from` names a folder of existing adapters, saved by peft, from which the run starts. They must have
the run's settings, layers and shapes. The folder only has the name of its base: nothing here compares the bases.
"""

import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from portable_fsdp.config import schema
from portable_fsdp.config.describe import is_inside, matches, matching, yaml_value
from portable_fsdp.models.expert_adapters import EXPERTS, add_to_experts, last_two, names_weight, stacked_weights
from portable_fsdp.models.pretrained import PretrainedWeights, stored_tensors, vocabulary_tables
from portable_fsdp.models.tensor_files import open_safetensors
from portable_fsdp.models.weights import (
    FLOATS,
    Base,
    BuiltModel,
    TensorFile,
    TensorSlices,
    WeightFill,
    plain_name,
    seeded,
)
from portable_fsdp.quantised import holds_inputs_first
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.files import parse_json, read_inside
from portable_fsdp.runtime.hub import local_folder

if TYPE_CHECKING:
    from portable_fsdp.models.multimodal import Published

log = logging.getLogger("portable_fsdp")

ALL_LINEAR = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = "model.lora.start_from"
_BASE = ".base_layer"
_A, _B, _MAGNITUDE = (f".{kind}.default" for kind in ("lora_A", "lora_B", "lora_magnitude_vector"))
_INSIDE = "base_model.model"  # where peft's model holds ours

_ANY = (
    *("target_modules", "target_parameters", "modules_to_save", "ensure_weight_tying"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "fan_in_fan_out"),
    *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
    *("megatron_core", "qalora_group_size"),
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
_SETTINGS = {
    **{"r": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"},
    **{"rank_pattern": "rank_pattern", "alpha_pattern": "alpha_pattern"},
}
"""Keys of model.lora -> peft's keys that must have the same value."""


class AdapterNames(NamedTuple):
    """FQNs of the weights of one layer under LoRA, and those of the layer and its own weight in the plain model; of a
    weight of experts both are its name."""

    layer: str
    weight: str
    a: str
    b: str
    magnitude: str

    @classmethod
    def of(cls, name: str) -> "AdapterNames":
        layer = name.replace(EXPERTS, ".")
        weight = f"{layer}.weight" if layer == name else layer
        return cls(layer, weight, *(f"{name}{kind}.weight" for kind in (_A, _B, _MAGNITUDE)))

    @property
    def is_of_experts(self) -> bool:
        return self.weight == self.layer


def peft_keys(model: nn.Module, names: Collection[str], as_opened: Callable[[str], str] = str) -> dict[str, str]:
    """Return FQN -> name in peft's files of weights that train. `model`: with or without its adapters; `as_opened`:
    gives the FQN in the model that transformers opens for peft.

    peft leaves out the adapter's name, and wraps a module of experts once for each of its weights that has an adapter.
    """
    keys: dict[str, str] = {}
    for fqn in names:
        layer, _, kind = fqn.removesuffix(".default.weight").rpartition(".")
        holder, is_of_experts, leaf = layer.partition(EXPERTS)
        if is_of_experts:
            own = [name for name, _ in model.get_submodule(holder).named_parameters(recurse=False)]
            outer = [
                name for name in own[own.index(leaf) + 1 :] if f"{holder}{EXPERTS}{name}.{kind}.default.weight" in names
            ]
            layer = holder + _BASE * len(outer)
        adapter = f"{layer}.{kind}" if kind in _MAGNITUDE else f"{layer}.{kind}.weight"
        keys[fqn] = f"{_INSIDE}.{as_opened(adapter if is_adapter(fqn) else fqn)}"
    return keys


def peft_settings(lora: schema.Lora) -> dict[str, Any]:
    """Return the arguments of peft's LoraConfig, without those that name modules."""
    settings = {theirs: getattr(lora, ours) for ours, theirs in _SETTINGS.items()}
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha  # as people write it
    return {**settings, "lora_alpha": alpha, "lora_dropout": lora.dropout, "task_type": "CAUSAL_LM"}


def is_adapter(fqn: str) -> bool:
    return any(kind in fqn for kind in (_A, _B, _MAGNITUDE))


def scaling_of(lora: schema.Lora, layer: str, r: int) -> float:
    """Return the factor of a layer's product B A, as peft computes it."""
    return _by_pattern(lora.alpha_pattern, layer, lora.alpha) / (math.sqrt(r) if lora.rslora else r)


def _by_pattern(values: Mapping[str, float], layer: str, default: float) -> float:
    return next((value for pattern, value in values.items() if _peft_matches(pattern, layer)), default)


def _peft_matches(pattern: str, layer: str) -> bool:
    """Whether a regular expression matches the last parts of a name, as in peft's `get_pattern_key`."""
    return re.match(rf"(.*\.)?({pattern})$", layer) is not None


def adapted_layers(names: list[str]) -> list[AdapterNames]:
    """The layers with adapters among the FQNs of a model's weights."""
    return [AdapterNames.of(name.removesuffix(f"{_A}.weight")) for name in names if name.endswith(f"{_A}.weight")]


def with_adapters(
    built: BuiltModel, lora: schema.Lora, seed: int, master: torch.dtype, file: TensorFile | None, *, grows: bool
) -> BuiltModel:
    """Add adapters; only these and modules of `train_whole` train. All else must come from files: no checkpoint has
    it."""
    whole = whole_tensors(built.model, lora.train_whole)
    drawn = built.fill.drawn if isinstance(built.fill, PretrainedWeights) else []
    problems = {name: f"{name} (model.allow)" for name in drawn}
    problems |= {name: f"rows for new tokens in {name}" for name in vocabulary_tables(built.model) if grows}
    if file is not None and (missing := [name for name in problems if name not in whole]):
        raise ConfigError(
            f"model.lora: {file.where} doesn't hold the whole base: {problems[missing[0]]} would be drawn here, and no "
            f"adapter trains it.\n  Name {missing[0].rpartition('.')[0]} in model.lora.train_whole, or use the model's "
            "own tokenizer and all of its weights."
        )
    fill = add_adapters(built.model, lora, seed, master, built.fill, built.published_name)
    if lora.start_from is not None:
        fill = start_from(lora, built.model, fill, built.published)
    return replace(built, fill=fill)


def with_norms(built: BuiltModel, lora: schema.Lora) -> BuiltModel:
    """Let DoRA's magnitudes begin as the norms of the base's stored weights."""
    if not lora.dora or lora.start_from is not None:
        return built
    model, fill = built.model, built.fill
    layers = (name.partition(_MAGNITUDE)[0] for name, _ in model.named_parameters() if _MAGNITUDE in name)
    bases: dict[str, Any] = {layer: model.get_submodule(f"{layer}{_BASE}") for layer in layers}
    shapes = {layer: tuple(base.weight.shape) for layer, base in bases.items()}  # an engine may flatten them

    def filled(fqn: str, slices: TensorSlices) -> Tensor:
        layer, is_magnitude, _ = fqn.partition(_MAGNITUDE)
        if not is_magnitude:
            return fill(fqn, slices)
        inputs_first = holds_inputs_first(bases[layer])
        outputs, inputs = slices[0], slice(0, shapes[layer][0 if inputs_first else 1])
        weight = fill(f"{layer}{_BASE}.weight", (inputs, outputs) if inputs_first else (outputs, inputs)).float()
        return weight.norm(dim=0 if inputs_first else 1).to(model.get_parameter(fqn).dtype)

    return replace(built, fill=filled)


def with_base(built: BuiltModel, model: schema.Model, file: TensorFile) -> BuiltModel:
    """Record the source of frozen weights, and those that checkpoints of adapters leave out: all but adapters and
    `train_whole`."""
    names: list[str] = []
    weights = cast(PretrainedWeights, built.weights)
    if model.lora is not None:
        kept = whole_tensors(built.model, model.lora.train_whole)
        names = [name for name in stored_tensors(built.model) if not is_adapter(name) and name not in kept]
    return replace(
        built, base=Base(str(model.pretrained), model.gguf_file, file, frozenset(names), built.fill, weights)
    )


def add_adapters(
    model: nn.Module,
    lora: schema.Lora,
    seed: int,
    dtype: torch.dtype,
    fill: WeightFill,
    also: Callable[[str], str] = str,
) -> WeightFill:
    """Add adapters to the layers that `lora.targets` names, on meta, in `dtype`, and freeze all other weights. `also`
    gives another name of a layer, by which a target may call it.

    Returns the `fill` of the adapted model: that of the base, and adapters drawn as peft does (A uniform as torch's
    linear layers, B zero), so that the model begins as its base. Raises ConfigError if peft isn't installed, a
    pattern matches no linear layer, a layer's weight is tied, or it is in a module of `lora.train_whole`.
    """
    targets = _targets(model, lora.targets, also)
    whole = whole_modules(model, lora.train_whole)
    if both := [name for name in targets if is_inside(name, whole)]:
        raise ConfigError(
            f"model.lora.train_whole: {both[0]} gets an adapter (model.lora.targets): it can't train both ways.\n"
            "  Leave it out of one of them."
        )
    _check_patterns(lora, targets)
    trained = whole_tensors(model, lora.train_whole)
    stacked = stacked_weights(model)
    for name in targets:
        if name in stacked:
            r = int(_by_pattern(lora.rank_pattern, name, lora.r))
            add_to_experts(model, lora, name, r, scaling_of(lora, name, r))
    _add_to_layers(model, lora, [name for name in targets if name not in stacked])
    drawn: dict[str, torch.Size] = {}
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(fqn) or fqn in trained)
        if is_adapter(fqn):
            parameter.data = parameter.data.to(dtype)
            drawn[fqn] = parameter.shape

    def filled(fqn: str, slices: TensorSlices) -> Tensor:
        if fqn not in drawn:
            return fill(plain_name(fqn), slices)
        weight = torch.zeros(drawn[fqn])  # the whole, in float32, as in peft's LoraLayer.reset_lora_parameters
        if _A in fqn:
            with seeded(seed, fqn):
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        return weight[slices].to(dtype)

    return filled


def _add_to_layers(model: nn.Module, lora: schema.Lora, targets: list[str]) -> None:
    """Let peft put its layers in place of `targets`, on meta."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it warns of kernels for CPUs
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"model.lora: the package peft is not installed ({error}).\n"
            "  pip install peft, or in a checkout of portable_fsdp: pip install '.[lora]'."
        ) from None
    settings = peft_settings(lora)
    for key in ("rank_pattern", "alpha_pattern"):  # peft warns of those of experts alone
        used = [pattern for pattern in settings[key] if any(_peft_matches(pattern, name) for name in targets)]
        settings[key] = {pattern: settings[key][pattern] for pattern in used}
    inputs_first = any(holds_inputs_first(model.get_submodule(name)) for name in targets)
    arguments: Any = cast(Any, peft).LoraConfig(**settings, target_modules=targets, fan_in_fan_out=inputs_first)
    # Without the model's type, by which peft takes linear layers of some models for experts (`read_as_experts`).
    own: Any = model.config
    config = SimpleNamespace(to_dict=own.to_dict, tie_word_embeddings=own.tie_word_embeddings)
    with warnings.catch_warnings(), torch.device("meta"), patch.object(model, "config", config):
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", category=UserWarning)  # GPT-2 has both
        if targets:
            peft.inject_adapter_in_model(arguments, model)
    for name in targets:
        layer: Any = model.get_submodule(name)
        layer.kwargs = {}  # how peft made it, with its name: equal layers are planned once
        layer.cast_input_dtype_enabled = False  # each engine casts weights at use, and inputs have their dtype
        for magnitude in layer.lora_magnitude_vector.values():
            # It clears a cache of evaluations, off by default; torch.compile refuses that in a recomputed layer.
            magnitude._cache_clear = _clear_nothing


def _check_patterns(lora: schema.Lora, targets: list[str]) -> None:
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"model.lora.{key}: {pattern!r} isn't a regular expression ({error}).\n  `.*` matches any text."
                ) from None
            if not any(_peft_matches(pattern, name) for name in targets):
                ends = ", ".join(sorted({name.rpartition(".")[2] for name in targets}))
                raise ConfigError(
                    f"model.lora.{key}: {pattern!r} matches no layer with an adapter.\n"
                    f"  It is a regular expression of the last parts of their names: {ends}."
                )


def _clear_nothing() -> None:
    pass


def read_as_experts(model: nn.Module, layers: list[str]) -> bool:
    """Whether peft would open adapters of the linear layers `layers` as those of experts, as older transformers had
    them: in models with experts, by the ends of their names."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    settings = LoraConfig(target_modules=layers)
    try:
        convert_peft_config_for_transformers(settings, model, None)
    except ValueError:  # some of them can't be experts' alone
        return True
    return set(settings.target_modules or ()) != set(layers)


def check_adapters(config: schema.Config, model: nn.Module, units: Iterable[str]) -> None:
    """Raise ConfigError for an export that peft wouldn't open, and for a unit inside a layer that reads weights outside
    of their modules: with DoRA any layer with an adapter, else modules of experts."""
    lora, names = config.model.lora, adapted_layers([name for name, _ in model.named_parameters()])
    layers = [each.layer for each in names if not each.is_of_experts]
    exports = config.checkpoint.export and not config.checkpoint.merge_adapters
    if exports and layers and read_as_experts(model, layers):
        raise ConfigError(
            f"checkpoint.export: peft would take adapters of {type(model).__name__}'s MLPs or shared experts for "
            "those of its experts.\n  Set checkpoint.merge_adapters=true, or leave them out of model.lora.targets."
        )
    for name in units:
        if EXPERTS in f"{name}." or (lora and lora.dora and (name.endswith(_BASE) or ".lora_" in name)):
            raise ConfigError(
                f"model.lora: {name} can't be a unit: the layer around it reads its weight.\n"
                "  Leave it out of sharding.wrap_classes and sharding.wrap_modules, or set model.lora.dora=false."
            )


def whole_modules(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the FQNs of the modules that train whole: those that hold weights, with all that share a weight.

    `patterns` match these, or modules that contain them, as `model.lora.targets` do. Raises ConfigError for a pattern
    without a module.
    """
    own = {name: [*module.parameters(recurse=False)] for name, module in model.named_modules() if name}
    holders = [name for name, weights in own.items() if weights]
    chosen: set[str] = set()
    for pattern in patterns:
        named = [name for name in holders if matches(pattern, name) or matches(f"*.{pattern}", name)]
        chosen.update(named or matching("model.lora.train_whole", pattern, holders))
    shared = {id(weight) for name in chosen for weight in own[name]}
    chosen |= {name for name in holders if any(id(weight) in shared for weight in own[name])}
    return [name for name in holders if name in chosen and not is_inside(name.rpartition(".")[0], chosen)]


def whole_tensors(model: nn.Module, patterns: Iterable[str]) -> dict[str, Tensor]:
    """Return the weights and persistent buffers of `whole_modules` by FQN, tied ones under each of their names."""
    modules = whole_modules(model, patterns)
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if is_inside(name, modules)}


def _targets(model: Any, patterns: tuple[str, ...] | str, also: Callable[[str], str]) -> list[str]:
    """FQNs of the layers that get adapters, in the model's order. `patterns`: a text is a regular expression. `also`:
    see `add_adapters`."""
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    linear = {name: m for name, m in modules.items() if isinstance(m, nn.Linear) or holds_inputs_first(m)}
    stacked, chosen = stacked_weights(model), set[str]()
    if isinstance(patterns, str):
        names = {name: also(name) for name in (*modules, *stacked)}
        chosen, patterns = _matching_in_full(patterns, names, {*linear, *stacked}), ()
    for pattern in patterns:
        if pattern == ALL_LINEAR:
            chosen.update(name for name, module in linear.items() if module is not head)
            continue
        if of_experts := [name for name in stacked if names_weight(pattern, name)]:
            chosen.update(of_experts)
            continue
        named = [
            name
            for name in modules
            if any(matches(pattern, each) for each in (name, also(name))) or name.endswith(f".{pattern}")
        ]
        if named and not any(layer.startswith(name) for name in named for layer in linear):
            raise ConfigError(
                f"model.lora.targets: {pattern!r} matches {named[0]}, but no linear layer.\n  model.lora.train_whole "
                "trains embeddings and norms. Experts in one tensor get adapters by the names of weights: "
                f"{', '.join(sorted({last_two(name) for name in stacked})) or 'there are none'}."
            )
        chosen.update({*named} & linear.keys() or matching("model.lora.targets", pattern, linear))
    weights = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    for name in chosen & linear.keys():
        if weights.count(id(linear[name].weight)) > 1:
            raise ConfigError(
                f"model.lora.targets: {name} can't have an adapter: its weight is tied to the embedding.\n"
                f"  Leave it out, as {ALL_LINEAR} does."
            )
    if not chosen:
        raise ConfigError(f"model.lora: {type(model).__name__} has no linear layers to adapt.\n  Leave model.lora out.")
    return [name for name in (*linear, *stacked) if name in chosen]


def _matching_in_full(expression: str, names: Mapping[str, str], adaptable: set[str]) -> set[str]:
    """Return the modules and weights of experts of which a regular expression matches the whole name, or the other name
    in `names`. All must be `adaptable`: peft doesn't adapt most other modules."""
    try:
        whole = re.compile(expression)
        matched = {name for name, other in names.items() if whole.fullmatch(name) or whole.fullmatch(other)}
    except re.error as error:
        raise ConfigError(
            f"model.lora.targets: {expression!r} isn't a regular expression ({error}).\n  A list has names: [q_proj]."
        ) from None
    if others := sorted(matched - adaptable):
        raise ConfigError(f"model.lora.targets: {expression!r} matches {others[0]}, which is no linear layer.")
    if not matched:
        first = next((name for name in names if name in adaptable), "none")
        raise ConfigError(
            f"model.lora.targets: {expression!r} matches no linear layer: it is a regular expression of whole names, "
            f"such as {first}.\n  A list has name patterns or last parts of names: [q_proj]."
        )
    return matched


# ------------------------------------------------------------------------------------------------ adapters of a folder


def start_from(
    lora: schema.Lora, model: nn.Module, fill: WeightFill, published: "Published | None" = None
) -> WeightFill:
    """Return the `fill` of a model with adapters, on meta, that reads the folder's adapters in the model's dtypes.

    Reads only the requested slices. `published`: the multimodal model whose text this is. Raises ConfigError for a
    missing folder, an unsupported kind, and r, alpha, layers or shapes other than the run's.
    """
    folder = local_folder(_KEY, cast(str, lora.start_from), (CONFIG, WEIGHTS))
    _check_config(folder, lora)
    path = folder / WEIGHTS
    if not path.is_file():
        is_pickle = (folder / "adapter_model.bin").is_file()
        actual = "adapter_model.bin, a pickle, which may run any code when it is opened" if is_pickle else "none"
        raise _refusal(folder, WEIGHTS, actual, "Save it again with peft: save_pretrained(FOLDER).")
    parameters = dict(model.named_parameters())
    whole = whole_tensors(model, lora.train_whole)
    tensors = {name: parameter for name, parameter in parameters.items() if is_adapter(name)} | whole
    keys = peft_keys(model, tensors, published.name if published is not None and not published.opens_as_text else str)
    _check_weights(path, {keys[name]: tuple(tensor.shape) for name, tensor in tensors.items()})
    first = {id(parameter): name for name, parameter in parameters.items()}
    with open_safetensors(_KEY, path) as file:
        for name, tensor in whole.items():
            saved, own = file.get_tensor(keys[name]), first.get(id(tensor))
            if own is None:
                tensor.copy_(saved)  # a buffer
            elif own != name and not torch.equal(saved, file.get_tensor(keys[own])):
                fix = "Save it with peft's ensure_weight_tying."
                raise _refusal(folder, f"equal weights of {own} and {name}, which are tied", "different ones", fix)

    def with_saved_adapters(fqn: str, slices: TensorSlices) -> Tensor:
        if fqn not in keys:
            return fill(fqn, slices)
        with open_safetensors(_KEY, path) as file:
            return cast(Tensor, file.get_slice(keys[fqn])[slices]).to(parameters[fqn].dtype)

    return with_saved_adapters


def _check_config(folder: Path, lora: schema.Lora) -> None:
    try:
        saved = parse_json(read_inside(folder / CONFIG, folder))
    except (OSError, ValueError) as error:
        raise _refusal(folder, f"{CONFIG} of peft", f"{error}", "Name a folder that peft has saved.") from None
    if not isinstance(saved, dict):
        raise _refusal(folder, f"a JSON object in {CONFIG}", str(saved)[:80], "Save it again with peft.")
    for key, value in cast(dict[str, Any], saved).items():
        plain = _PLAIN.get(key, (None, False, "", [], {}))
        if key not in (*_ANY, *_SETTINGS.values()) and value not in plain:
            raise _refusal(
                folder,
                f"plain LoRA adapters ({key}: {' or '.join(map(json.dumps, plain))})",
                f"{key}: {json.dumps(value)[:80]} in {CONFIG}",
                "Merge other kinds into their base (peft's merge_and_unload), and start from that.",
            )
    for name, key in _SETTINGS.items():
        ours, theirs = getattr(lora, name), saved.get(key) or getattr(schema.Lora(), name)
        if theirs != ours:
            fix = f"Set model.lora.{name} to {yaml_value(theirs)}."
            raise _refusal(folder, f"model.lora.{name}={yaml_value(ours)}", f"{yaml_value(theirs)} in {CONFIG}", fix)
    if (dropout := saved.get("lora_dropout") or 0.0) != lora.dropout:
        log.info("%s: %s: training continues with model.lora.dropout=%s, not %s", _KEY, folder, lora.dropout, dropout)


def _check_weights(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    with open_safetensors(_KEY, path) as file:
        tensors = {key: file.get_slice(key) for key in cast(list[str], list(file.keys()))}
        headers = {key: (tuple(each.get_shape()), str(each.get_dtype())) for key, each in tensors.items()}
    layers = len({layer for layer, kind, _ in (key.partition(".lora_") for key in expected) if kind})
    missing, others = sorted(expected.keys() - headers.keys()), sorted(headers.keys() - expected.keys())
    if missing or others:
        differences = [f"none for {missing[0]} ({len(missing)} in all)"] if missing else []
        differences += [f"{others[0]} too ({len(others)} in all)"] if others else []
        raise _refusal(
            path.parent,
            f"the adapters of the {layers} layers that model.lora.targets names, and no other tensor but those of "
            "model.lora.train_whole",
            f"{' and '.join(differences)} in {path.name}",
            f"Set model.lora.targets and train_whole to what it has (target_modules and modules_to_save in {CONFIG}).",
        )
    for key, (shape, dtype) in headers.items():
        if shape != expected[key] or dtype not in FLOATS:
            form, actual = f"{list(expected[key])} of {', '.join(FLOATS)}", f"{dtype} {list(shape)} in {path.name}"
            raise _refusal(path.parent, f"{key} as {form}", actual, "Use adapters of this model.")


def _refusal(folder: Path, expected: str, actual: str, fix: str) -> ConfigError:
    return ConfigError(f"{_KEY}: {folder}: expected {expected}, found {actual}.\n  {fix}")
