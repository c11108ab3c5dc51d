"""Writes docs/configuration.md from the config's schema: `make docs`. tests/test_docs.py compares the two."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from portable_fsdp.config.schema import Config

INTRODUCTION = """# Configuration

A run is one YAML file, the same on every device (`--config`). After the flags, `section.key=value` overrides a key,
`model.architecture.hidden_size=64` a key inside a mapping. Values are YAML, as in
`sharding.wrap_classes=[LlamaDecoderLayer]` or `optim.groups=[{match: "*norm*", weight_decay: 0.1}]`. A `#` after a
space needs YAML's quotes inside the shell's (`"run.dir='runs/a #1'"`). Where the run happens (`--device`, `--backend`,
`--num_devices`) is a flag, never a key. [sharding.md](sharding.md) helps to choose;
`python -m portable_fsdp.explain` says what each engine does with each key.

Default *required*: the key has none; *one of*: the section takes exactly one of them. `optim.groups[].lr` is a key of
each item; an item of `data.mixture` also takes `source` to `chat_template_kwargs`, as the section does.
"""

ONE_OF = {("model", "architecture"), ("model", "pretrained"), ("train", "steps"), ("train", "epochs")}
"""Keys of which their section takes exactly one: a rule of the schema's validators, which no JSON schema shows."""

BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}


def render() -> str:
    """The whole page."""
    schema = Config.model_json_schema()
    parts = [INTRODUCTION]
    for name, field in schema["properties"].items():
        section = schema["$defs"][_named(field)]
        keys = "\n".join(_keys(name, section, schema["$defs"]))
        about = f"{section['description']}\n\n" if "description" in section else ""
        parts.append(f"## {name}\n\n{about}{keys}\n")
    return "\n".join(parts)


def _keys(name: str, section: dict[str, Any], named: dict[str, Any]) -> Iterator[str]:
    """Yield one item for each key, followed by those of the mapping that it takes, or of those that a list holds."""
    for key, field in section["properties"].items():
        meaning = " ".join(field["description"].split())
        yield f"- `{name}.{key}` ({_values(field)}; {_default(name, key, field)}): {meaning}"
        if "$ref" in field.get("items", {}):
            items = named[_named(field["items"])]
            own = {k: v for k, v in items["properties"].items() if v != section["properties"].get(k)}
            yield from _keys(f"{name}.{key}[]", {**items, "properties": own}, named)
        for option in field.get("anyOf", ()):
            if "$ref" in option:
                yield from _keys(f"{name}.{key}", named[_named(option)], named)


def _named(field: dict[str, Any]) -> str:
    """The name under which the schema keeps what a field holds."""
    return str(field["$ref"].rpartition("/")[2])


def _default(name: str, key: str, field: dict[str, Any]) -> str:
    if (name, key) in ONE_OF:
        return "*one of*"
    if "default" not in field:
        return "*required*"
    value = field["default"]
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _values(field: dict[str, Any]) -> str:
    """What a field takes, from its JSON schema: `auto` or `none`; integer ≥ 1; number or null."""
    if "anyOf" in field:
        return " or ".join(_values(part) for part in field["anyOf"])
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "$ref" in field:
        return "mappings"
    if field["type"] == "array" and "items" in field:
        return f"list of {_values(field['items'])}"
    if field["type"] == "array":
        return f"[{', '.join(_values(part) for part in field['prefixItems'])}]"
    if isinstance(values := field.get("additionalProperties"), dict):
        return f"mapping of text to {_values(values)}"
    words = {"object": "mapping", "string": "text"}
    kind = str(field["type"])
    bounds = [text.format(field[bound]) for bound, text in BOUNDS.items() if bound in field]
    return " ".join([words.get(kind, kind), ", ".join(bounds)]).strip()


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(render(), encoding="utf-8")
