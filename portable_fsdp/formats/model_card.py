"""README.md of an exported folder: the library that opens it, its base, and what was trained on what.

Names in a checkpoint are untrusted: each value stands in a code span.
"""

from pathlib import Path
from typing import Any

import yaml

from portable_fsdp.checkpoint.format import Manifest, run_name
from portable_fsdp.runtime.errors import printable
from portable_fsdp.runtime.hub import is_hub_id


def write_card(folder: Path, manifest: Manifest, library: str) -> None:
    """Write README.md, for the `library` that opens the folder. Names no local folder and no host."""
    front: dict[str, Any] = {"library_name": library if manifest.architecture else "pytorch", "tags": ["portable_fsdp"]}
    data, evaluation, by = manifest.config.get("data", {}), manifest.evaluation, manifest.written_by
    pretrained = str(manifest.config.get("model", {}).get("pretrained") or "")
    if is_hub_id(pretrained):
        front["base_model"] = pretrained.partition("@")[0]
    sources = [
        f"{source.get('source') or ''} {_public(str(source.get('path') or ''))}".strip()
        for source in data.get("mixture") or [data]
    ]
    rows = {
        "model": str((manifest.architecture or {}).get("model_type", "")),
        "fine-tuned from": _public(pretrained),
        "data": data.get("factory") or ", ".join(sources),
        "checkpoint": f"step {manifest.step:,}",
        "eval loss at its save": f"{evaluation.loss:.4f} (step {evaluation.step})" if evaluation else "",
        "saved by": f"{by.backend} on {by.device}, torch {by.torch}, portable_fsdp {by.portable_fsdp}",
    }
    lines = [f"- {name}: {_code(value)}" for name, value in rows.items() if value]
    title = f"# {_code(run_name(manifest.config) or 'model')}"
    text = "\n".join([f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n{title}\n", *lines])
    (folder / "README.md").write_text(f"{text}\n", encoding="utf-8")


def _public(name: str) -> str:
    return name if is_hub_id(name) else Path(name).name


def _code(text: str) -> str:
    """A code span, in which nothing is Markdown or HTML."""
    return "`" + " ".join(printable(text).split()).replace("`", "'") + "`"
