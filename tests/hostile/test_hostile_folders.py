"""Folders that somebody else filled: pipes, devices, sockets, links and sparse files in place of a command's files."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import attempt
from invented_run import write_run

from portable_fsdp.config.schema import Model
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.tokenize import load_tokenizer
from portable_fsdp.formats.base import config_of
from portable_fsdp.models.architecture import architecture_mapping
from portable_fsdp.models.pretrained import open_pretrained
from portable_fsdp.models.tensor_files import require_as_exported
from portable_fsdp.plan.__main__ import _measured  # pyright: ignore[reportPrivateUsage]
from portable_fsdp.report.read import read_run
from portable_fsdp.runtime import files
from portable_fsdp.runtime.errors import UsageError

SECRET = "a secret that no page shows"


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.getcwd()
        os.chdir(path.parent)  # the address may have 107 characters
        server.bind(path.name)
        os.chdir(folder)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 << 30)


def _link(path: Path) -> None:
    secret = next(folder for folder in path.parents if folder.name == "run").with_name("secret")
    secret.write_text(SECRET)
    path.symlink_to(secret)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
    "link out": _link,
    "loop": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "sparse": _sparse,
    "deep": lambda path: path.write_text("[" * 500_000),
}


def _read_all(folder: Path) -> object:
    run = read_run(folder)
    return run.config, run.rows, run.events, run.samples, run.profiles


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{
        f"report {name}": (name, _read_all)
        for name in ("config.yaml", "metrics.jsonl", "events.jsonl", "samples.jsonl")
    },
    "report profile": ("profile/step-00000003/summary.txt", _read_all),
    "plan --compare": ("metrics.jsonl", lambda folder: _measured(str(folder), 1)),
    "--config": ("run.yaml", lambda folder: load_config(str(folder / "run.yaml"), [])),
    "architecture": ("config.json", lambda folder: architecture_mapping(str(folder))),
    "import config": ("config.json", config_of),
    "mark": ("portable_fsdp.json", require_as_exported),
    "pretrained": ("config.json", lambda folder: open_pretrained(Model(pretrained=str(folder)))),
    "weights": ("model.safetensors.index.json", lambda folder: open_pretrained(Model(pretrained=str(folder)))),
    "tokenizer": ("tokenizer.json", lambda folder: load_tokenizer(str(folder))),
    "template": ("chat_template.jinja", lambda folder: load_tokenizer(str(folder))),
    "other templates": ("additional_chat_templates/tool_use.jinja", lambda folder: load_tokenizer(str(folder))),
}
OF_A_RUN = {reader for reader in READERS if reader.startswith(("report", "plan"))}
"""The others read the folder of a model, which is refused where it is a run's."""
ACCEPTED = {
    *((f"report {name}", "deep") for name in ("config.yaml", "metrics.jsonl", "events.jsonl", "samples.jsonl")),
    *{("report profile", "deep"), ("template", "deep"), ("template", "folder"), ("other templates", "folder")},
}
"""Reports leave out damaged lines and a config that isn't one; templates and profiles are text."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_wherever_it_is_read(tmp_path: Path, kind: str) -> None:
    """Protects a command from waiting forever, from filling memory, and from showing a file from elsewhere."""
    for number, (reader, (name, read)) in enumerate(READERS.items()):
        folder = tmp_path / str(number) / "run"
        if reader in OF_A_RUN:
            write_run(folder)
        load_tokenizer("bytes").save(folder)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        HOSTILE[kind](path)
        values: list[object] = []
        outcome = attempt(lambda read=read, folder=folder, values=values: values.append(read(folder)), folder)
        assert reader == "--config" or SECRET not in f"{values} {outcome.message}", reader
        assert (outcome.message is None) == ((reader, kind) in ACCEPTED), (reader, outcome.message)


def test_a_folder_of_a_hundred_thousand_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a command from a listing without end."""
    monkeypatch.setattr(files, "_MAX_NAMES", 5)
    for number in range(6):
        (tmp_path / str(number)).touch()
    with pytest.raises(UsageError, match="more than 5 files in this folder"):
        load_tokenizer(str(tmp_path))


def test_links_of_the_hubs_cache_belong_to_its_folder(tmp_path: Path) -> None:
    """Protects snapshots of the hub's cache, whose files are links."""
    snapshot = tmp_path / "snapshots" / "0123"
    for folder in (snapshot, tmp_path / "blobs"):
        folder.mkdir(parents=True)
    (tmp_path / "blobs" / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert files.read_regular(snapshot / "config.json", snapshot) == b"{}"


def test_a_link_at_a_temporary_name_is_not_followed(tmp_path: Path) -> None:
    """Protects files elsewhere from `report`, which writes into the run's folder."""
    (tmp_path / "outside").write_text("untouched")
    (tmp_path / f".report.html.{os.getpid()}.tmp").symlink_to(tmp_path / "outside")
    files.write_text_atomically(tmp_path / "report.html", "page")
    assert (tmp_path / "outside").read_text() == "untouched"
    assert (tmp_path / "report.html").read_text() == "page"
    assert not (tmp_path / "report.html").is_symlink()
