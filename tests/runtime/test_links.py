"""Links in a folder that somebody else filled: none is followed out of it, to read or to write."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from invented_run import write_run

from portable_fsdp.config.schema import Model
from portable_fsdp.data.tokenize import load_tokenizer
from portable_fsdp.formats.base import config_of
from portable_fsdp.models.pretrained import open_pretrained
from portable_fsdp.models.tensor_files import require_as_exported
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.report.read import read_run
from portable_fsdp.runtime.errors import PortableFSDPError
from portable_fsdp.runtime.files import read_inside, write_text_atomically


def _read_all(folder: Path) -> object:
    run = read_run(folder)
    return run.config, run.rows, run.events, run.samples, run.profiles


OF_A_RUN: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(("config.yaml", "metrics.jsonl", "events.jsonl", "samples.jsonl"), _read_all),
    "profile/step-00000003/summary.txt": _read_all,
}
OF_A_MODEL: dict[str, Callable[[Path], object]] = {
    "portable_fsdp.json": require_as_exported,
    "config.json": lambda folder: open_pretrained(Model(pretrained=str(folder))),
    "model.safetensors.index.json": lambda folder: open_pretrained(Model(pretrained=str(folder))),
    "tokenizer.json": lambda folder: load_tokenizer(str(folder)),
    "chat_template.jinja": lambda folder: load_tokenizer(str(folder)),
    "additional_chat_templates/tool_use.jinja": lambda folder: load_tokenizer(str(folder)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_A_RUN | OF_A_MODEL)
def test_no_link_out_of_its_folder_is_read(tmp_path: Path, name: str) -> None:
    """Protects files elsewhere from being shown in a report or an export."""
    folder, secret = tmp_path / "given", tmp_path / "secret"
    secret.write_text("{}")
    if name in OF_A_RUN:
        write_run(folder)
    else:
        load_tokenizer("bytes").save(folder)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(secret)
    with pytest.raises(PortableFSDPError, match="the link leads out of its folder"):
        (OF_A_RUN | OF_A_MODEL)[name](folder)
    if name == "config.json":
        with pytest.raises(PortableFSDPError, match="the link leads out of its folder"):
            config_of(folder)
    if name == "metrics.jsonl":
        with pytest.raises(OSError, match="the link leads out of its folder"):
            read_jsonl(path, folder)


def test_links_of_the_hubs_cache_belong_to_its_folder(tmp_path: Path) -> None:
    """Protects snapshots of the hub's cache, whose files are links."""
    snapshot = tmp_path / "snapshots" / "0123"
    for folder in (snapshot, tmp_path / "blobs"):
        folder.mkdir(parents=True)
    (tmp_path / "blobs" / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert read_inside(snapshot / "config.json", snapshot) == b"{}"


def test_a_link_at_a_temporary_name_is_not_followed(tmp_path: Path) -> None:
    """Protects files elsewhere from `report`, which writes into the run's folder."""
    (tmp_path / "outside").write_text("untouched")
    (tmp_path / f".report.html.{os.getpid()}.tmp").symlink_to(tmp_path / "outside")
    write_text_atomically(tmp_path / "report.html", "page")
    assert (tmp_path / "outside").read_text() == "untouched"
    assert (tmp_path / "report.html").read_text() == "page"
    assert not (tmp_path / "report.html").is_symlink()
