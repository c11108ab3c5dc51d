"""README.md of an exported folder: what was trained on what, the report's figures, and the loss as a picture.

Names in a checkpoint and in a run's files are untrusted: each value stands in a code span.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from portable_fsdp.checkpoint.format import Manifest, run_name
from portable_fsdp.checkpoint.storage import is_object_store
from portable_fsdp.report.read import RunRecord, read_run
from portable_fsdp.report.summary import Table, engine, figures
from portable_fsdp.runtime.errors import UsageError, printable
from portable_fsdp.runtime.hub import is_hub_id

_PICTURE = "loss.png"


def write_card(folder: Path, manifest: Manifest, library: str, run: Path) -> None:
    """Write README.md, for the `library` that opens the folder, and where matplotlib is installed its picture.

    `run`: the run's local folder; without its files the card holds what the manifest knows.
    """
    try:
        record = None if is_object_store(run) else read_run(run)
    except (UsageError, OSError):
        record = None
    front: dict[str, Any] = {"library_name": library if manifest.architecture else "pytorch", "tags": ["portable_fsdp"]}
    pretrained = str(manifest.config.get("model", {}).get("pretrained") or "")
    if is_hub_id(pretrained):
        front["base_model"] = pretrained.partition("@")[0]
    rows = [*_facts(manifest, pretrained), *(_figures(record) if record else [])]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {_code(record.name if record else run_name(manifest.config) or 'model')}",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows if value)]),
    ]
    if record is not None and record.rows and importlib.util.find_spec("matplotlib") is not None:
        _draw(record, folder / _PICTURE)
        parts.append(f"![Loss by step; diamonds are evaluations]({_PICTURE})")
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _facts(manifest: Manifest, pretrained: str) -> Table:
    """Of local files the name alone: where they lay is nobody's business."""
    data, evaluation, by = manifest.config.get("data", {}), manifest.evaluation, manifest.written_by
    sources = [
        f"{source.get('source') or ''} {_public(str(source.get('path') or ''))}".strip()
        for source in data.get("mixture") or [data]
    ]
    return [
        ("model", str((manifest.architecture or {}).get("model_type", ""))),
        ("fine-tuned from", _public(pretrained)),
        ("data", data.get("factory") or ", ".join(sources)),
        ("checkpoint", f"step {manifest.step:,}"),
        ("eval loss at its save", f"{evaluation.loss:.4f} (step {evaluation.step})" if evaluation else ""),
        ("saved by", f"{by.backend} on {by.device}, torch {by.torch}, portable_fsdp {by.portable_fsdp}"),
    ]


def _public(name: str) -> str:
    return name if is_hub_id(name) else Path(name).name


def _figures(record: RunRecord) -> Table:
    starts = [attempt.start for attempt in record.attempts]
    versions = (starts[-1].get("environment") or {}) if starts else {}
    used = ", ".join(f"{package} {version}" for package, version in versions.items() if package != "host")
    return [("trained on", "; ".join(dict.fromkeys(map(engine, starts)))), ("with", used), *figures(record)]


def _code(text: str) -> str:
    """A code span, in which nothing is Markdown or HTML."""
    return "`" + " ".join(printable(text).split()).replace("`", "'") + "`"


def _cell(text: str) -> str:
    return _code(text).replace("|", r"\|")  # else it would end the cell


def _draw(record: RunRecord, path: Path) -> None:
    """The loss by step, a colour for each engine."""
    from matplotlib.figure import Figure

    chart: Any = Figure(figsize=(8, 4.5), layout="constrained")
    axes, losses, colours = chart.subplots(), record.column("loss"), dict[str, str]()
    for attempt in filter(lambda attempt: attempt.rows, record.attempts):
        name = engine(attempt.start)
        label = None if name in colours else name.replace("$", r"\$")
        begin = int(np.searchsorted(record.steps, attempt.rows[0]["step"]))
        part = slice(max(begin - 1, 0), begin + len(attempt.rows))  # no gap where one start hands over to the next
        axes.plot(record.steps[part], losses[part], color=colours.setdefault(name, f"C{len(colours)}"), label=label)
    axes.plot(record.steps, record.column("eval_loss"), "D", color="0.3")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    chart.savefig(path, dpi=120)
