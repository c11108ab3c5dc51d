"""`model.architecture`: a mapping of the YAML file or a config.json, read as transformers' `from_pretrained` reads it.

transformers accepts any key, and keeps an unknown one as an attribute that hardly anything reads. A class declares its
fields and other names for them (`attribute_map`), and converts keys of older files (`rotary_pct`, `torch_dtype`). The
log names other keys, each with the nearest that the class declares. A rate of dropout is refused unless it is in a file
or in a mapping pasted from one (recognized by `_MARKS`).
"""

import dataclasses
import difflib
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.files import parse_json

log = logging.getLogger("portable_fsdp")

_MARKS = frozenset(
    {"architectures", "transformers_version", "auto_map", "_name_or_path"}
    | {"cache_implementation", "task_specific_params", "tokenizer_name"}
    | {"tokenizer_class", "is_llama_config"}  # of conversions from other tools
)
"""Keys of config.json files that nobody writes by hand, since they change nothing in training."""

_MAPPINGS = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "token_classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads")
"""Transformers' common names; a class may have its own (`n_embd`) in `attribute_map`."""

_READ_BY_NAME = {"model_type", "tie_word_embeddings", "head_dim", "rope_parameters", "decoder_start_token_id"} | {
    *("bos_token_id", "eos_token_id", "pad_token_id")
}
"""Keys that models read even if their class doesn't declare them."""

_UNDRAWN = ("layerdrop", "layer_drop", "drop_path", "path_drop", "droppath", "token_dropout")


def architecture_mapping(architecture: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return the mapping itself, or the content of the config.json (or of its folder) at this path.

    Needs no torch. Raises ConfigError for a missing file, and for one that is no config.json of transformers.
    """
    if not isinstance(architecture, str):
        return dict(architecture)
    path = Path(architecture)
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError
    except (OSError, ValueError):  # also a name that no file can have
        raise ConfigError(
            f"model.architecture: no such file: {path}\n  Name a config.json or its folder, relative to the run's "
            "working directory, or write a mapping."
        ) from None
    try:
        # JSON has no Infinity, but Mamba 2's files do.
        values = parse_json(path.read_bytes(), constant=float)
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.architecture: {path}: can't be read as JSON: {str(error).rstrip('.')}.") from None
    if not isinstance(values, dict) or not isinstance(cast(dict[str, Any], values).get("model_type"), str):
        raise ConfigError(
            f"model.architecture: {path}: no `model_type`, which a config.json of transformers needs.\n"
            "  Add it (llama, qwen3, gpt2, ...), or name another file."
        )
    return cast(dict[str, Any], values)


def mapping_of(task: str) -> str:
    """The mapping of transformers' modeling_auto with the models of a task; for a user's function causal language
    models."""
    return _MAPPINGS.get(task, _MAPPINGS["causal_lm"])


def models_of(task: str) -> str:
    """Describe the models of a task, for messages."""
    return f"a model for train.task={task}" if task in _MAPPINGS and task != "causal_lm" else "a causal language model"


def text_config(config: Any, task: str = "causal_lm") -> Any:
    """Return the part of a multimodal config that describes the text model which trains, else the config itself.

    Only for `causal_lm`, and if transformers has a causal class for that part (as of 5.24 not for Qwen 2.5-VL).
    """
    from transformers.models.auto import modeling_auto

    if task != "causal_lm" or type(config) not in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return config
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    return text if type(text) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING else config


def trains(config: Any, task: str) -> bool:
    """Whether transformers has a model of this config, or of its text, for the task."""
    from transformers.models.auto import modeling_auto

    return type(text_config(config, task)) in getattr(modeling_auto, mapping_of(task))


def read_architecture(
    architecture: Mapping[str, Any] | str, task: str = "causal_lm", *, drops: bool = False, logs: bool = True
) -> Any:
    """Return the transformers config of a model for `task`, with all values that `from_pretrained` would set.

    `drops`: `model.dropout` isn't 0. `logs`: log the keys without effect. Raises ConfigError for missing sizes, and for
    values that transformers refuses.
    """
    values = architecture_mapping(architecture)
    is_file = isinstance(architecture, str)
    where = f"model.architecture: {architecture}: " if is_file else "model.architecture."
    is_published = is_file or not _MARKS.isdisjoint(values)
    kind = _class_of(str(values["model_type"]), where, task)
    dropout = [key for key, value in values.items() if is_dropout(key, value) and value]
    if dropout and not is_published and not drops:
        raise ConfigError(
            f"{where}{dropout[0]}: expected 0, found {values[dropout[0]]}, but model.dropout is 0.\n"
            "  Set model.dropout=published, or leave it out."
        )
    config: Any = None
    failure: Exception | None = None
    try:
        config = _read(values)
    except Exception as error:  # transformers validates with exceptions of many classes, all about these values
        failure = error
    if config is not None and not trains(config, task):
        raise _unknown_type(str(values["model_type"]), where, task)
    if missing := dict(_missing_sizes(kind, config, values)):
        defaults = ", ".join(f"{name}={default}" for name, default in missing.items())
        raise ConfigError(
            f"{where.rstrip('.: ')}: missing sizes of {kind.__name__}: {', '.join(missing)}.\n"
            f"  Add {'them' if len(missing) > 1 else 'it'}; transformers' defaults are {defaults}."
        )
    if failure is not None:
        raise ConfigError(
            f"{where.rstrip('.: ')}: transformers refuses it: {last_line(failure)}\n  Change the key that it names."
        ) from failure
    if logs:
        log_unknown_keys("model.architecture", config, values)
    if dropout and logs and not drops:
        log.warning("model.architecture: %s: set to 0; to keep it: model.dropout=published", ", ".join(dropout))
    return config


def is_dropout(key: str, value: object) -> bool:
    """Whether a key of a transformers config is a rate of dropout, or of layers that are left out at random."""
    return "drop" in key and isinstance(value, int | float) and not isinstance(value, bool)


def set_dropout(config: Any, rate: float | str) -> dict[str, float]:
    """Set the rates of a transformers config and its parts in place: `published` keeps them.

    Rates of whole layers and paths, and of tokens at experts, become 0: a mask by row and position can't draw them.
    Returns the rates above 0, and the latter.
    """
    rates: dict[str, float] = {}
    for key, value in config.to_dict().items():
        # Other values may differ by layer (Gemma 4): transformers refuses to read them here.
        part = getattr(config, key, None) if key in config.sub_configs else None
        if hasattr(part, "sub_configs"):
            rates |= {f"{key}.{name}": each for name, each in set_dropout(part, rate).items()}
        elif is_dropout(key, value):
            new = 0.0 if any(word in key for word in _UNDRAWN) else float(value if rate == "published" else rate)
            if new != value:  # a class may take integers only
                setattr(config, key, new)
            rates |= {key: new} if new or (value and rate) else {}
    return rates


def last_line(error: Exception) -> str:
    """Return the last line of an error's message; its class if the message is empty."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _class_of(model_type: str, where: str, task: str) -> Any:
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # A part of a multimodal model may be one for the task: `read_architecture` looks.
    parts = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if task == "causal_lm" else ()
    if model_type not in (*getattr(modeling_auto, f"{mapping_of(task)}_NAMES"), *parts):
        raise _unknown_type(model_type, where, task)
    return CONFIG_MAPPING[model_type]


def _unknown_type(model_type: str, where: str, task: str) -> ConfigError:
    from transformers.models.auto import modeling_auto

    near = difflib.get_close_matches(model_type, list(getattr(modeling_auto, f"{mapping_of(task)}_NAMES")), n=3)
    return ConfigError(
        f"{where}model_type: expected {models_of(task)} of transformers, found {model_type!r}."
        + (f"\n  nearest: {', '.join(near)}." if near else "")
    )


def _read(values: Mapping[str, Any]) -> Any:
    """Read the config through a file, since only `from_pretrained` applies all of transformers' conversions."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config._name_or_path = ""
    for key in ("auto_map", "quantization_config"):  # about the weights and the code that came with the file
        vars(config).pop(key, None)
    return config


# ------------------------------------------------------------------------------------------------ a config as JSON


def config_to_json(config: Any) -> dict[str, Any]:
    """Return all values of a transformers config, as transformers writes them to a config.json.

    `inf` is `{"__float__": "Infinity"}` (Mamba 2's `time_step_limit`), since JSON has no infinity.
    """
    return cast(dict[str, Any], json.loads(config.to_json_string(use_diff=False)))


def config_from_json(values: Mapping[str, Any]) -> Any:
    """Return the config of a result of `config_to_json`, or of a dict with real infinities.

    Raises transformers' validation errors: exceptions of many classes, all about these values.
    """
    from transformers import AutoConfig, PreTrainedConfig

    # Private: transformers itself calls it only in from_pretrained, which reads a file.
    decoded = PreTrainedConfig._decode_special_floats(dict(values))  # pyright: ignore[reportPrivateUsage]
    return AutoConfig.for_model(**decoded)


# ------------------------------------------------------------------------------------------------------ unknown keys


def log_unknown_keys(key: str, config: Any, values: Mapping[str, Any]) -> None:
    """Warn in one line of the keys in `values` that their config class doesn't declare; `key`: of our config."""
    if unknown := ", ".join(_unknown_keys(config, values)):
        log.warning("%s: %s declares no %s: probably without effect", key, type(config).__name__, unknown)


def _unknown_keys(config: Any, values: Mapping[str, Any], part: str = "") -> Iterator[str]:
    """Yield each key that the class doesn't declare, with the nearest declared one, also in parts (`text_config.`)."""
    if not hasattr(config, "sub_configs"):  # a part may be a plain dict
        return
    kind = type(config)
    known = {*_fields(kind), *kind.attribute_map, *kind.attribute_map.values(), *_READ_BY_NAME}
    for name, value in values.items():
        if name in config.sub_configs and isinstance(value, dict):
            yield from _unknown_keys(getattr(config, name, None), cast(dict[str, Any], value), f"{part}{name}.")
        # A converted key is no attribute. A key that begins with _ is transformers' own; nobody writes it.
        elif name in vars(config) and name not in known and not name.startswith("_"):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            yield f"{part}{name}" + (f" (nearest: {near[0]})" if near else "")


def _fields(kind: Any) -> dict[str, Any]:
    """Field -> default."""
    return {field.name: field.default for field in dataclasses.fields(kind)}


# ------------------------------------------------------------------------------------------------------------- sizes


def _missing_sizes(kind: Any, config: Any, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and default of each size that no key sets, by any of its names or one that transformers converts.

    The defaults are a published model's: 6.7 billion parameters for llama.
    """
    aliases, defaults = kind.attribute_map, _fields(kind)
    given = {aliases.get(key, key) for key in values}
    for name in dict.fromkeys(aliases.get(size, size) for size in _SIZES):
        default = defaults.get(name)
        if isinstance(default, int) and name not in given and getattr(config, name, default) == default:
            yield name, default
    if config is None or not kind.sub_configs:
        return
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:  # transformers': it has several
        return
    for key in kind.sub_configs:
        if key not in values and getattr(config, key, None) is text and text.to_dict() == type(text)().to_dict():
            yield key, f"that of {type(text).__name__}()"
