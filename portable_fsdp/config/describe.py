"""Text about the schema: the values that a key takes, the nearest valid key, a value as YAML.

Also matches name patterns of modules and parameters; one without a match raises an error with the nearest names.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import yaml
from annotated_types import MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from portable_fsdp.config.data import PERCENT
from portable_fsdp.config.schema import Config, Needs
from portable_fsdp.config.yaml_text import Dumper, parse
from portable_fsdp.runtime.errors import ConfigError

Key = tuple[str, ...]
"""`("optim", "lr")`; list items by index: `("optim", "groups", "0", "lr")`."""

Settings = dict[str, str]
"""`optim.lr` -> value in YAML, as in an override."""


def key_name(key: Key) -> str:
    """Format a key: `optim.lr`, `optim.groups[0].lr`."""
    parts = [f"[{part}]" if n and part.isdecimal() else f".{part}" for n, part in enumerate(key)]
    return "".join(parts).removeprefix(".")


def fields(model: type[BaseModel] = Config, above: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Yield every section and key in schema order, including keys of listed mappings (`optim.groups.lr`)."""
    for name, info in model.model_fields.items():
        yield (*above, name), info
        if inside := _section(info.annotation) or _listed_section(info.annotation):
            yield from fields(inside, (*above, name))


@cache
def _known() -> dict[Key, FieldInfo]:
    return dict(fields())


@cache
def option_names() -> tuple[str, ...]:
    """Return every `section.key`, without keys inside lists and mappings."""
    return tuple(key_name(key) for key in _known() if len(key) == 2)


def description_of(option: str) -> str:
    """Return the description of `section.key`, on one line."""
    return " ".join((_known()[tuple(option.split("."))].description or "").split())


def needs_of(option: str) -> Needs | None:
    """Return the setting without which `section.key` has no effect; None if it has one alone."""
    return next((note for note in _known()[tuple(option.split("."))].metadata if isinstance(note, Needs)), None)


def value_of(config: Config, option: str) -> Any:
    """Return the value of `section.key`."""
    section, _, key = option.partition(".")
    return getattr(getattr(config, section), key)


def with_value(config: Config, option: str, value: Any) -> Config:
    """Return a copy with another value of `section.key` (from YAML or Python), unchecked."""
    section, _, key = option.partition(".")
    changed = getattr(config, section).model_copy(update={key: tuple(value) if isinstance(value, list) else value})
    return config.model_copy(update={section: changed})


def with_settings(config: Config, settings: Mapping[str, str]) -> Config:
    """Return a copy with these values of `section.key`, in YAML, unchecked."""
    for option, text in settings.items():
        config = with_value(config, option, parse(text)[1])
    return config


AUTO = {"train.micro_batch": "1", "memory.gradient_checkpointing": "full", "compile.enabled": "false"}
"""Keys whose `auto` a run resolves by plan, once its engine is open (`train/auto.py`), with the values of a config that
nothing plans: all layers recomputed, not compiled, a row at a time."""


def autos(config: Config) -> tuple[str, ...]:
    """Return the keys of AUTO that are `auto`."""
    return tuple(key for key in AUTO if value_of(config, key) == "auto")


def without_plan(config: Config) -> Config:
    """Return the config with the values of AUTO for `auto`; of an own model, whose layers may not be alike, none is
    recomputed."""
    values = AUTO | ({"memory.gradient_checkpointing": "none"} if config.model.factory else {})
    return with_settings(config, {key: values[key] for key in autos(config)})


def changed_values(before: Config, after: Config) -> dict[str, str]:
    """Return the keys whose values differ, with the later value in YAML."""
    pairs = ((key, yaml_value(value_of(before, key)), yaml_value(value_of(after, key))) for key in option_names())
    return {key: new for key, old, new in pairs if new != old}


def default_of(option: str) -> Any:
    """Return the default of `section.key`; None if the key is unknown or has no default."""
    info = _known().get(tuple(option.split(".")))
    return None if info is None or info.is_required() else info.get_default(call_default_factory=True)


def yaml_value(value: object) -> str:
    """Format a value as one line of YAML, as after `key=`: `[LlamaDecoderLayer]`, `null`."""
    text = yaml.dump(
        plain_values(value), Dumper=Dumper, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**9
    )
    return text.removesuffix("\n").removesuffix("\n...")


def shortened(text: str, limit: int = 60) -> str:
    """Cut the text to `limit` characters, between words where it has some."""
    words, space, rest = text[: limit - 3].rpartition(" ")
    cut = f"{words} " if len(words) > limit // 2 else f"{words}{space}{rest}"
    return text if len(text) <= limit else f"{cut}..."


def deepest_field(location: Sequence[int | str]) -> tuple[Key, FieldInfo]:
    """Return the schema field for a location in pydantic's report (`optim.betas` for its second number)."""
    key, field = (), FieldInfo(annotation=Config)
    for part in location:
        if (section := _section(field.annotation)) and part in section.model_fields:
            field = section.model_fields[str(part)]
        elif (listed := _listed_section(field.annotation)) and isinstance(part, int):
            field = FieldInfo(annotation=listed)
        elif get_origin(field.annotation) is dict and location[-1] != "[key]":
            field = FieldInfo(annotation=get_args(field.annotation)[1])
        else:
            break
        key = (*key, str(part))
    return key, field


_OTHER_KEYS = {"learning_rate": "lr", "batch_size": "global_batch", "max_steps": "steps", "num_epochs": "epochs"}


def nearest(key: Key) -> str:
    """Return a hint for an unknown key: the nearest valid key, or else the keys of its section."""
    known = _known()
    plain = tuple(_OTHER_KEYS.get(part, part) for place, part in enumerate(key) if place == 0 or not part.isdecimal())
    siblings = [candidate for candidate in known if candidate[:-1] == plain[:-1]]
    same_name = [candidate for candidate in known if candidate[-1] == plain[-1]]
    close = [plain] * (plain in known) or _close(plain, siblings) or same_name or _close(plain, list(known))
    if not close:
        siblings = siblings or [candidate for candidate in known if len(candidate) == 1]
        return f"expected one of {', '.join(candidate[-1] for candidate in siblings)}"
    values = "" if _section(known[close[0]].annotation) else f" ({expected(known[close[0]])})"
    return f"nearest: {key_name(close[0])}{values}"


def expected(schema: FieldInfo) -> str:
    """Describe the values that a field takes: `none | full`, `an integer >= 1 or null`, `a list of text`."""
    constraints = " and ".join(_constraint_words(schema.metadata))
    words = f"{_type_words(schema.annotation)} {constraints}".strip()
    return f"{words} or null" if NoneType in get_args(schema.annotation) else words


def expected_key(schema: FieldInfo) -> str:
    """Describe the keys that a field's mapping takes: `text | prompt`, or `text`."""
    is_mapping = get_origin(schema.annotation) is dict
    return _type_words(get_args(schema.annotation)[0]) if is_mapping else "text"


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_STRATEGIES = {"zero3": "FULL_SHARD", "zero2": "SHARD_GRAD_OP", "ddp": "NO_SHARD", "hsdp": "HYBRID_SHARD"}
_RESHARD = {"true": "sharding.strategy=FULL_SHARD", "false": "sharding.strategy=SHARD_GRAD_OP"}
_SCHEDULES = {"cosine_with_restarts": "cosine", "constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}
_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw8bit"}
_ATTENTION = {"flash_attention_2": "auto", "flash_attention_3": "auto", "flash_attn": "auto", "flash": "auto"}
_FORMATS = {"sharegpt": "chat", "chatml": "chat", "messages": "chat", "alpaca": "instruction"}
_OTHER_WORDS = _DTYPES | _STRATEGIES | _RESHARD | _SCHEDULES | _OPTIMIZERS | _ATTENTION | _FORMATS


def typing_hint(schema: FieldInfo, value: object) -> str:
    """Return a hint if YAML reads a word as a boolean or number, if a list is needed, or if a word is near; else ""."""
    annotation, origin = schema.annotation, get_origin(schema.annotation)
    if _item(annotation) and not _listed_section(annotation) and isinstance(value, str):
        return f"; a list of one is [{value}]"
    takes_text = annotation is str or (origin in (Union, UnionType) and str in get_args(annotation))
    place = schema.description or "" if isinstance(value, bool) else expected(schema)
    if (word := _OTHER_WORDS.get(str(value).lower(), "-")) in place:
        return f"; write {word}"
    if (takes_text or origin is Literal) and isinstance(value, bool):
        return f", which YAML reads as the boolean {str(value).lower()}; in quotes it is text"
    if origin is Literal and isinstance(value, str):
        words = {str(word).lower(): word for word in get_args(annotation)}
        near = difflib.get_close_matches(value.lower(), words, n=1)
        return f"; write {words[near[0]]}" if near else ""
    return ", a number; in quotes it is text" if takes_text and isinstance(value, int | float) else ""


def plain_values(value: object) -> object:
    """Convert tuples to lists and sections to mappings, as in YAML."""
    return each_value(value, lambda inner: plain_values(inner.model_dump()) if isinstance(inner, BaseModel) else inner)


def each_value(value: object, change: Callable[[object], object]) -> Any:
    """Copy nested mappings and lists; `change` replaces each value in them. Tuples become lists."""
    if isinstance(value, Mapping):
        return {key: each_value(inner, change) for key, inner in cast(Mapping[object, object], value).items()}
    if isinstance(value, list | tuple):
        return [each_value(inner, change) for inner in cast(Sequence[object], value)]
    return change(value)


def changed(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """Return dotted key -> [value in a, value in b] for all keys that differ; None for an absent key."""
    values: dict[str, list[Any]] = {}
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            values |= changed(cast(dict[str, Any], left), cast(dict[str, Any], right), f"{prefix}{key}.")
        elif left != right:
            values[f"{prefix}{key}"] = [left, right]
    return values


def _section(annotation: object) -> type[BaseModel] | None:
    """Return the section type of an annotation (also of `Section | None`), or None."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(argument for argument in get_args(annotation) if argument is not NoneType)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _item(annotation: object) -> object:
    """Return the item type of a list; None for other types."""
    arguments = get_args(annotation)
    return arguments[0] if get_origin(annotation) is tuple and arguments[-1] is Ellipsis else None


def _listed_section(annotation: object) -> type[BaseModel] | None:
    return _section(_item(annotation))


def _close(key: Key, known: Sequence[Key]) -> list[Key]:
    matches = difflib.get_close_matches(key[-1], [candidate[-1] for candidate in known], n=1)
    return [candidate for candidate in known if candidate[-1] in matches]


def _type_words(annotation: object) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is Annotated:
        return " ".join([_type_words(arguments[0]), " and ".join(_constraint_words(arguments[1:]))]).strip()
    if origin in (Union, UnionType):
        return " or ".join(_type_words(argument) for argument in arguments if argument is not NoneType)
    if section := _section(annotation):
        return f"a mapping with {', '.join(section.model_fields)}"
    if listed := _listed_section(annotation):
        return f"a list of mappings with {', '.join(listed.model_fields)}"
    if item := _item(annotation):
        return f"a list of {_type_words(item)}"
    if origin is tuple:
        return f"a list [{', '.join(map(_type_words, arguments))}]"
    if origin is dict and get_origin(arguments[1]) is Literal:
        return f"a mapping of text to {_type_words(arguments[1])}"
    words = {bool: "true | false", int: "an integer", float: "a number", str: "text", dict: "a mapping"}
    return words[origin or cast(type, annotation)]


def _constraint_words(metadata: Sequence[object]) -> Iterator[str]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    for constraint in metadata:
        if isinstance(constraint, MinLen):
            yield "that is not empty"
        if constraint is PERCENT:
            yield "like 5%"
        yield from (f"{sign} {getattr(constraint, name)}" for name, sign in signs.items() if hasattr(constraint, name))


# ---------------------------------------------------------------------------- name patterns: `*norm*`, `model.layers.0`


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or weight is one of `modules`, or inside one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def matches(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches `name` or a module that contains it; `*` matches any text, including dots."""
    return any(fnmatchcase(candidate, pattern) for candidate in _with_ancestors(name))


def matching(key: str, pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that `pattern` matches, in order. Raises ConfigError, which names `key`, if there are none."""
    names = list(names)
    matched = [name for name in names if matches(pattern, name)]
    if not matched:
        known = sorted({candidate for name in names for candidate in _with_ancestors(name)})
        text = pattern.strip("*.").lower()
        near = [name for name in known if text in name.lower()][:3] or difflib.get_close_matches(pattern, known, n=3)
        if not near:  # the last part of a name only
            last = difflib.get_close_matches(text, {name.rpartition(".")[2] for name in known}, n=1)
            near = [name for name in known if name.rpartition(".")[2] in last][:3]
        hint = f"nearest: {', '.join(near)}" if near else f"the first names: {', '.join(names[:3])}"
        raise ConfigError(f"{key}: the pattern {pattern!r} matches nothing in the model.\n  {hint}.")
    return matched


def _with_ancestors(name: str) -> Iterator[str]:
    """Yield `a.b.weight`, `a.b`, `a`."""
    while name:
        yield name
        name = name.rpartition(".")[0]
