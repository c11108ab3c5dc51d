"""README.md of an export: front matter that YAML reads, and values that are no Markdown."""

import re
from pathlib import Path
from typing import Any

import yaml
from foreign_models import MODELS, build, export, save

FROM_HUB = {"pretrained": "org/base@main", "gguf_file": "a.gguf"}  # for which no export asks the hub
HOSTILE = "a | b` <img src=x> [x](http://y)\n---\n# z $\\frac"


def card(tmp_path: Path, **config: Any) -> tuple[dict[str, Any], str]:
    """Front matter and text."""
    sections = {"data": {"source": "text", "path": "/home/someone/corpus.txt"}, **config}
    export(save(tmp_path / "run", build(MODELS["llama"]), config=sections), "huggingface", tmp_path / "export")
    _, front, text = re.split(r"^---\n", (tmp_path / "export/README.md").read_text(), maxsplit=2, flags=re.MULTILINE)
    return yaml.safe_load(front), text


def test_a_card_has_the_base_the_data_and_the_step(tmp_path: Path) -> None:
    front, text = card(tmp_path, model=FROM_HUB)
    assert front == {"library_name": "transformers", "tags": ["portable_fsdp"], "base_model": "org/base"}
    values = dict(re.findall(r"^- ([\w -]+): `(.*)`$", text, re.MULTILINE))
    assert (values["model"], values["fine-tuned from"], values["data"]) == ("llama", "org/base@main", "text corpus.txt")
    assert values["checkpoint"] == "step 3"


def test_names_are_no_markdown(tmp_path: Path) -> None:
    mixture = [{"source": "text", "path": f"/x/{HOSTILE}"}, {"source": "huggingface", "path": "org/name"}]
    run = {"name": HOSTILE}
    front, text = card(tmp_path, run=run, model={"pretrained": HOSTILE}, data={"mixture": mixture})
    assert "base_model" not in front
    for line in filter(None, text.splitlines()):
        spans = re.sub(r"`[^`]*`", "", line)
        assert re.fullmatch(r"# |- [\w -]+: ", spans), line
