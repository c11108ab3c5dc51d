"""Reports on checkpoints as text and JSON: one, a list of them, the differences between two."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from portable_fsdp.checkpoint import manifests
from portable_fsdp.checkpoint.storage import FOLDERS, store_of
from portable_fsdp.config.describe import changed
from portable_fsdp.runtime.errors import CheckpointError, StoreError, table
from portable_fsdp.runtime.host import in_units


def facts(path: Path, manifest: manifests.Manifest) -> dict[str, Any]:
    """Describe a checkpoint for `--json`. Sizes in bytes, times in UTC."""
    return {
        "path": str(path),
        "step": manifest.step,
        "saved": manifest.saved_at,
        "bytes": manifest.bytes,
        "parameters": _content(manifest, "model")["elements"] + _elements(manifest.left_out),
        "data": manifest.data.model_dump(),
        "evaluation": None if manifest.evaluation is None else manifest.evaluation.model_dump(),
        "base": None if manifest.base is None else manifest.base.model_dump(exclude={"tensors"}),
        "written_by": manifest.written_by.model_dump(),
        **{folder: _content(manifest, folder) for folder in FOLDERS},
    }


def summary(path: Path, manifest: manifests.Manifest) -> str:
    """Describe a checkpoint for a terminal."""
    lines = [
        f"checkpoint  {path}",
        f"step        {manifest.step} (data: epoch {manifest.data.epoch}, position {manifest.data.position})",
        f"written by  {_writer_text(manifest.written_by.model_dump())}",
        f"saved       {time_text(manifest.saved_at)} UTC",
    ]
    if manifest.evaluation is not None:
        step, last = manifest.step, manifest.evaluation
        at = "" if last.step == step else f" at step {last.step}"
        best = f"; the best so far: {last.best_loss:.4f} at step {last.best_step}"
        lines.append(
            f"evaluated   eval_loss {last.loss:.4f}{at}{', the best so far' if last.best_step == step else best}"
        )
    if manifest.base is not None:
        left_out = f"{len(manifest.left_out)} tensors, {_elements(manifest.left_out):,} elements"
        lines.append(f"base        {left_out}, left out: {manifest.base}")
    for folder in FOLDERS:
        content = _content(manifest, folder)
        lines.append(
            f"{folder:<12}{content['tensors']} tensors, {content['elements']:,} elements, "
            f"{in_units(content['bytes'])} in {content['files']} files"
        )
        lines.extend(f"  {line}" for line in _shapes(_tensors(manifest, folder).items()))
    return "\n".join(lines)


def listing(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return `facts` of each, without tensors; path and `damaged` for an unreadable manifest. Raises `StoreError`."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            row = facts(path, manifests.read_manifest(path))
            rows.append({key: row[key] for key in row if key not in FOLDERS})
        except StoreError:
            raise
        except CheckpointError as error:
            if store_of(path).is_committed(path):  # else deleted since it was listed
                rows.append({"path": str(path), "damaged": str(error)})
    return rows


def listing_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format an aligned table, with a column for evaluations if there are any. `rows`: newest first."""
    evaluated = [row for row in rows if row.get("evaluation")]
    bests = {Path(row["path"]).parent: row["evaluation"]["best_step"] for row in reversed(evaluated)}
    lines = [("checkpoint", "saved (UTC)", "size", "parameters", "eval_loss", "written by")]
    for row in rows:
        path = Path(row["path"])
        if "damaged" in row:
            lines.append((path.name, "", "", "", "", f"damaged: {str(row['damaged']).splitlines()[0]}"))
            continue
        evaluation = row["evaluation"]
        loss = f"{evaluation['loss']:.4f}" if evaluation and evaluation["step"] == row["step"] else ""
        best = "best" if bests.get(path.parent) == row["step"] else ""
        facts = (time_text(row["saved"]), in_units(row["bytes"]), f"{row['parameters']:,}", f"{loss} {best}".strip())
        lines.append((path.name, *facts, _writer_text(row["written_by"])))
    if not evaluated:
        return table([(*line[:4], line[5]) for line in lines], right=(2, 3))
    return table(lines, right=(2, 3))


def differences(a: manifests.Manifest, b: manifests.Manifest) -> dict[str, Any]:
    """Compare two checkpoints, a's value before b's. `is_equal` covers tensors and configs, not the keys after it."""
    described = {
        key: [manifests.describe(m.tensors[key]) for m in (a, b)] for key in sorted(a.tensors.keys() & b.tensors.keys())
    }
    fingerprints = [{"fingerprint": m.base.fingerprint} if m.base else {} for m in (a, b)]
    result: dict[str, Any] = {
        "only_in_a": sorted(a.tensors.keys() - b.tensors.keys()),
        "only_in_b": sorted(b.tensors.keys() - a.tensors.keys()),
        "tensors": {key: [left, right] for key, (left, right) in described.items() if left != right},
        "config": changed(a.config, b.config),
        "model_config": changed(a.architecture or {}, b.architecture or {}),
        "base": changed(fingerprints[0], fingerprints[1]),
    }
    result["is_equal"] = not any(result.values())
    result["step"] = [a.step, b.step]
    result["data"] = changed(a.data.model_dump(), b.data.model_dump())
    result["written_by"] = changed(a.written_by.model_dump(), b.written_by.model_dump())
    return result


def differences_text(differences: Mapping[str, Any]) -> str:
    """Format one line per difference, first those that `is_equal` covers."""
    rows: list[tuple[str, str]] = []
    rows += [(key, "only in A") for key in differences["only_in_a"]]
    rows += [(key, "only in B") for key in differences["only_in_b"]]
    rows += [(key, f"{a} -> {b}") for key, (a, b) in differences["tensors"].items()]
    for name in ("config", "model_config", "base", "data", "written_by"):
        rows += [(f"{name}: {key}", f"{a!r} -> {b!r}") for key, (a, b) in differences[name].items()]
    if differences["step"][0] != differences["step"][1]:
        rows.append(("step", f"{differences['step'][0]} -> {differences['step'][1]}"))
    compared = "tensors (names, shapes, dtypes)"
    verdict = f"equal: {compared} and configs" if differences["is_equal"] else f"different: {compared} or configs"
    return "\n".join(filter(None, [table(rows) if rows else "", verdict]))


def time_text(saved: str) -> str:
    return saved[:19].replace("T", " ")


def _tensors(manifest: manifests.Manifest, folder: str) -> dict[str, manifests.TensorEntry]:
    return {key: tensor for key, tensor in manifest.tensors.items() if manifests.folder_of(key) == folder}


def _content(manifest: manifests.Manifest, folder: str) -> dict[str, int]:
    tensors = _tensors(manifest, folder)
    return {
        "tensors": len(tensors),
        "elements": _elements(tensors),
        "bytes": manifests.bytes_of_tensors(tensors),
        "files": sum(file.name.startswith(folder + "/") for file in manifest.files),
    }


def _elements(tensors: Mapping[str, manifests.TensorEntry]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def _writer_text(by: Mapping[str, Any]) -> str:
    count = by["process_count"]
    return (
        f"portable_fsdp {by['portable_fsdp']}, torch {by['torch']}, backend {by['backend']} on {by['device']}, "
        f"{count} process{'es' if count > 1 else ''}"
    )


def _shapes(tensors: Iterable[tuple[str, manifests.TensorEntry]]) -> list[str]:
    """Format one line for equal names and shapes in all layers: `layers.*.norm.weight  float32 [8]  x 2`."""
    alike = Counter((re.sub(r"\.\d+\.", ".*.", key), manifests.describe(tensor)) for key, tensor in tensors)
    return [f"{name}  {text}" + (f"  x {count}" if count > 1 else "") for (name, text), count in alike.items()]
