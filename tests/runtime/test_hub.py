"""A hub id becomes a folder of the cache: what is fetched, what isn't, several processes at once, what is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, serve

from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.hub import TOKENIZER_FILES, is_hub_id, local_folder

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.hub import local_folder
try:
    print(json.dumps(str(local_folder("model.pretrained", sys.argv[1], *json.loads(sys.argv[2])))))
except ConfigError as error:
    print(error)
"""

FILES = {
    "config.json": "{}",
    "model.safetensors": "weights" * 10_000,
    "pytorch_model.bin": "pickle",
    "model.fp16.safetensors": "other weights",
    "consolidated.safetensors": "the same weights again",
    "original/model.safetensors": "and again",
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "modeling_own.py": "raise SystemExit",
}
TAKEN = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    for name, content in FILES.items():
        file = tmp_path / "repo" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    with serve(Hub({"org/model": tmp_path / "repo"})) as hub:
        yield hub


def start(tmp_path: Path, hub: Hub, name: str, *patterns: Sequence[str], **more: str) -> "subprocess.Popen[str]":
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": f"{tmp_path}/cache", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, name, json.dumps(patterns)]
    return subprocess.Popen(command, env={**os.environ, **settings, **more}, stdout=subprocess.PIPE, text=True)


def ask(tmp_path: Path, hub: Hub, name: str, *patterns: Sequence[str], **more: str) -> str:
    with start(tmp_path, hub, name, *patterns, **more) as process:
        return process.communicate(timeout=60)[0].strip()


def names(folder: str) -> set[str]:
    root = Path(json.loads(folder))
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_safetensors_and_tokenizer_come_and_pickles_and_code_do_not(tmp_path: Path, hub: Hub) -> None:
    assert names(ask(tmp_path, hub, "org/model", TOKENIZER_FILES)) == TAKEN - {"model.safetensors"}
    folder = ask(tmp_path, hub, "org/model")
    assert names(folder) == TAKEN
    assert json.loads(folder).endswith(f"/snapshots/{COMMIT}")
    assert json.loads(ask(tmp_path, hub, "org/model@v1")) == json.loads(folder)
    assert hub.downloads("model.safetensors") == 1


def test_two_processes_at_once_download_once(tmp_path: Path, hub: Hub) -> None:
    hub.expected = 2
    processes = [start(tmp_path, hub, "org/model") for _ in range(2)]
    folders = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [names(folder) for folder in folders] == [TAKEN, TAKEN]
    assert hub.downloads("model.safetensors") == 1


def test_what_the_hub_refuses_names_the_key_and_the_fixes(tmp_path: Path, hub: Hub) -> None:
    hub.repos["org/gated"], hub.gated = hub.repos["org/model"], {"org/gated"}
    for name, offline, url, expected in (
        ("org/none", "0", hub.url, "RepositoryNotFoundError: "),
        ("org/gated", "0", hub.url, "GatedRepoError: "),
        ("org/model@v2", "0", hub.url, "RevisionNotFoundError: "),
        ("org/model", "1", hub.url, "LocalEntryNotFoundError: "),
        ("org/model", "0", "http://127.0.0.1:9", "LocalEntryNotFoundError: "),
    ):
        message = ask(tmp_path, hub, name, HF_HUB_OFFLINE=offline, HF_ENDPOINT=url)
        first = f"model.pretrained: {name}: not a local folder, and not downloaded from {url}: {expected}"
        assert message.startswith(first)
        assert f"access: {url}/{name.partition('@')[0]}." in message
        assert f"the cache: {tmp_path}/cache/hub." in message


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder("model.pretrained", "org/model") == Path("org/model")
    assert local_folder("model.pretrained", str(tmp_path)) == tmp_path
    assert [is_hub_id(name) for name in ("org/model", "org/model@main", "other/model")] == [False, True, True]


def test_what_is_neither_folder_nor_hub_id_is_refused_without_a_network() -> None:
    for name in ("model", "./org/model", "/org/model", "org/model/part", "../model", "~/model", "a b/c"):
        assert not is_hub_id(name), name
        message = rf"^model\.pretrained: no such folder: {name}.*\n  Name a local folder or a hub id "
        with pytest.raises(ConfigError, match=message):
            local_folder("model.pretrained", name)
