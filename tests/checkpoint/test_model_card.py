"""README.md of an export: front matter that YAML reads, values that are no Markdown, a picture or no link to one."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign_models import MODELS, build, export, save
from invented_run import write_run

FROM_HUB = {"pretrained": "org/base@main", "gguf_file": "a.gguf"}  # for which no export asks the hub
HOSTILE = "a | b` <img src=x> [x](http://y)\n---\n# z $\\frac"


def card(tmp_path: Path, run: Path | None = None, **config: Any) -> tuple[dict[str, Any], str]:
    """Front matter and text of the card of an export beside `run`."""
    sections = {"data": {"source": "text", "path": "/home/someone/corpus.txt"}, **config}
    path = save((run or tmp_path / "none") / "checkpoints", build(MODELS["llama"]), config=sections)
    export(path, "huggingface", tmp_path / "export")
    _, front, text = re.split(r"^---\n", (tmp_path / "export/README.md").read_text(), maxsplit=2, flags=re.MULTILINE)
    return yaml.safe_load(front), text


def cells(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\| ([\w -]+) \| `(.*)` \|$", text, re.MULTILINE))


def test_a_card_has_the_run_and_its_figures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    front, text = card(tmp_path, run, model=FROM_HUB)
    assert front == {"library_name": "transformers", "tags": ["portable_fsdp"], "base_model": "org/base"}
    values = cells(text)
    assert (values["model"], values["fine-tuned from"], values["data"]) == ("llama", "org/base@main", "text corpus.txt")
    assert (values["trained on"], values["with"]) == ("native, 2 x cpu; xla, 2 x cpu", "torch 2.9.0")
    assert (values["steps"], values["loss"]) == ("40 of 40", "3.9750 → 3.0000")
    assert values["best eval loss"] == "3.5000 (step 40)"
    assert "![Loss by step; diamonds are evaluations](loss.png)" in text
    assert (tmp_path / "export/loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "loss.png" in json.loads((tmp_path / "export/portable_fsdp.json").read_text())["files"]


def test_names_are_no_markdown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    events = (run / "events.jsonl").read_text().replace('"device": "cpu"', f'"device": {json.dumps(HOSTILE)}')
    (run / "events.jsonl").write_text("damaged\n" + events)
    (run / "config.yaml").write_text(json.dumps({"run": {"name": HOSTILE}}))
    mixture = [{"source": "text", "path": f"/x/{HOSTILE}"}, {"source": "huggingface", "path": "org/name"}]
    front, text = card(tmp_path, run, model={"pretrained": HOSTILE}, data={"mixture": mixture})
    assert "base_model" not in front
    for line in filter(None, text.splitlines()[:-1]):
        spans = re.sub(r"`[^`]*`", "", line)
        assert re.fullmatch(r"# |\| \|( \|)?|\|---\|---\||\| [\w -]+ \|  \|", spans), line
        assert not line.startswith("|") or line.replace(r"\|", "").count("|") == 3


def test_without_the_run_or_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = card(tmp_path)
    assert cells(text)["checkpoint"] == "step 3"
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else installed(name))
    _, with_run = card(tmp_path, write_run(tmp_path / "run"))
    assert cells(with_run)["loss"] == "3.9750 → 3.0000"
    assert "loss.png" not in text + with_run
    assert not (tmp_path / "export/loss.png").exists()
