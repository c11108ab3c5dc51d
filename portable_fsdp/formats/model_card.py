"""README.md of an exported folder: base model, license, data, how to load.

Names in a checkpoint are untrusted: each is in a code span or in YAML. Of local paths only the last part is written.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from portable_fsdp.checkpoint.format import Manifest, run_name
from portable_fsdp.config.yaml_text import parse
from portable_fsdp.runtime.errors import printable
from portable_fsdp.runtime.files import read_regular
from portable_fsdp.runtime.hub import is_hub_id

_FROM_PRETRAINED = 'from {library} import {name}\n\nmodel = {name}.from_pretrained("FOLDER")'
_STATE_DICT = """from pathlib import Path

from safetensors.torch import load_file

weights = {}
for path in Path("FOLDER").glob("*.safetensors"):
    weights |= load_file(path)
model.load_state_dict(weights)  # the module that the run's model.factory returns"""


def write_card(folder: Path, manifest: Manifest, library: str, opened_by: str | None) -> None:
    """Write README.md into an export. `opened_by`: the class of `library` that opens it; None: a plain state dict."""
    model, data = manifest.config.get("model", {}), manifest.config.get("data", {})
    base, sources = str(model.get("pretrained") or ""), data.get("mixture") or [data]
    paths = [str(source.get("path") or source.get("source") or "") for source in sources]
    front: dict[str, Any] = {"library_name": library, "license": _license(base)}
    if is_hub_id(base):
        front["base_model"] = base.partition("@")[0]
    on_hub = [path for path, source in zip(paths, sources, strict=True) if source.get("source") == "huggingface"]
    front["datasets"] = [name for name in map(_repository, on_hub) if is_hub_id(name)]
    facts = {
        "Base model": _public(base) if base else "none: trained from scratch",
        "License": front["license"] or "unknown: see the base model and the data",
        "Data": data.get("factory") or ", ".join(map(_public, paths)),
        "Checkpoint": f"step {manifest.step}",
    }
    front = {key: value for key, value in front.items() if value}
    lines = "\n".join(f"- {name}: {_code(str(value))}" for name, value in facts.items())
    how = (
        _FROM_PRETRAINED.format(library=library, name=opened_by)
        if opened_by and opened_by.isidentifier()
        else _STATE_DICT
    )
    title, front_matter = _code(run_name(manifest.config) or "model"), yaml.safe_dump(front, sort_keys=False)
    text = f"---\n{front_matter}---\n\n# {title}\n\n{lines}\n\n```python\n{how}\n```\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def _license(base: str) -> str:
    """Return the license that a local base's README.md states; empty if unknown."""
    with suppress(OSError, ValueError, yaml.YAMLError, AttributeError, IndexError):
        text = read_regular(Path(base) / "README.md", Path(base)).decode()
        license = parse(text.split("---")[1])[1].get("license") if text.startswith("---") else ""
        return license if isinstance(license, str) else ""
    return ""


def _repository(name: str) -> str:
    """Return `org/name` of `org/name[:subset][@revision]`."""
    return re.split("[:@]", name)[0]


def _public(name: str) -> str:
    return name if is_hub_id(_repository(name)) else Path(name).absolute().name


def _code(text: str) -> str:
    """Return a code span, in which nothing is Markdown or HTML."""
    return "`" + " ".join(printable(text).split()).replace("`", "'") + "`"
