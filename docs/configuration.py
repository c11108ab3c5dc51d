"""Writes docs/configuration.md from the config's schema: `make docs`. tests/test_docs.py compares the two."""

import json
from pathlib import Path
from typing import Any

from portable_fsdp.config.schema import Config

INTRODUCTION = """# Configuration

A run is one YAML file, the same on every device. `portable_fsdp.launch` takes it by `--config`; after the flags,
`section.key=value` overrides a key, and `model.architecture.hidden_size=64` a key inside that mapping. An unknown key
is an error that names the nearest valid one. Where the run happens (`--device`, `--backend`, `--num_devices`) is a flag
and never stands in the file.

This page is made from `portable_fsdp/config/schema.py` by `make docs`. A default of *required* means that the key has
none; of *one of*, that the section needs exactly one of the keys so marked.
"""

ONE_OF = {("model", "architecture"), ("model", "pretrained"), ("train", "steps"), ("train", "epochs")}
"""Keys of which their section takes exactly one: a rule of the schema's validators, which no JSON schema shows."""

BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}


def render() -> str:
    """The whole page."""
    schema = Config.model_json_schema()
    parts = [INTRODUCTION]
    for name, field in schema["properties"].items():
        section = schema["$defs"][field["$ref"].rpartition("/")[2]]
        parts.append(f"## {name}\n\n| key | value | default | meaning |\n|---|---|---|---|\n{_rows(name, section)}\n")
    return "\n".join(parts)


def _rows(name: str, section: dict[str, Any]) -> str:
    rows = []
    for key, field in section["properties"].items():
        default = _default(name, key, field)
        cells = [f"`{name}.{key}`", _values(field), default, field["description"]]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


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
    if field["type"] == "array":
        return f"[{', '.join(_values(part) for part in field['prefixItems'])}]"
    words = {"object": "mapping", "string": "text"}
    kind = str(field["type"])
    bounds = [text.format(field[bound]) for bound, text in BOUNDS.items() if bound in field]
    return " ".join([words.get(kind, kind), ", ".join(bounds)]).strip()


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(render(), encoding="utf-8")
