"""A checkpoint, exported, opens in transformers with the same weights."""

import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from plain_backend import PlainBackend, checkpoints, named_tensors
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from portable_fsdp.checkpoint import storage
from portable_fsdp.formats.huggingface import export_huggingface
from portable_fsdp.formats.target import new_file
from portable_fsdp.models.architecture import config_to_json
from portable_fsdp.runtime.errors import CheckpointError

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 29}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama", "intermediate_size": 24, "num_key_value_heads": 2},
    "qwen3": {**SMALL, "model_type": "qwen3", "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 4},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 29, "n_positions": 32},
    # Its config holds an infinity, which JSON lacks.
    "mamba2": {"model_type": "mamba2", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 29, "state_size": 4}
    | {"num_heads": 4, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
}


def build(architecture: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too must be other than their defaults
            parameter.copy_(torch.randn_like(parameter))
    return model


def save(folder: Path, model: Any, model_config: dict[str, Any] | None, step: int = 1) -> Path:
    backend = PlainBackend(devices=3)
    optimizer = torch.optim.SGD(model.parameters())
    return checkpoints(folder, backend, model_config=model_config).save(step, model, optimizer, (0, 0))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    model = build(MODELS["llama"])
    return save(tmp_path / "checkpoints", model, config_to_json(model.config))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MODELS)
def test_an_export_opens_with_equal_weights(tmp_path: Path, name: str, tied: bool) -> None:
    model = build({**MODELS[name], "tie_word_embeddings": tied})
    path = save(tmp_path / "checkpoints", model, config_to_json(model.config))
    export_huggingface(path, tmp_path / "export", None)

    opened, report = cast(Any, AutoModelForCausalLM).from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    assert type(opened) is type(model)
    expected, found = model.state_dict(), opened.state_dict()
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype == torch.float32
        assert torch.equal(found[key], tensor), key
    embedding, head = opened.get_input_embeddings().weight, opened.get_output_embeddings().weight
    assert (embedding is head) == tied
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == ([type(model).__name__], "float32")
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == model.generation_config.eos_token_id


def test_large_models_are_cut_into_shards(tmp_path: Path, llama: Path) -> None:
    export_huggingface(llama, tmp_path / "export", None, max_shard_bytes=3000)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    count = len(shards)
    assert count > 3
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert sorted(set(index["weight_map"].values())) == shards
    expected = build(MODELS["llama"])
    sizes = dict.fromkeys(shards, 0)
    for key, shard in index["weight_map"].items():
        sizes[shard] += expected.state_dict()[key].nbytes
    assert max(sizes.values()) <= 3000
    assert all(sizes[a] + sizes[b] > 3000 for a, b in itertools.pairwise(shards))  # none is cut without need
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in expected.parameters())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(opened.state_dict()[key], tensor) for key, tensor in expected.state_dict().items())


def test_the_tokenizer_lies_beside_the_weights(tmp_path: Path, llama: Path) -> None:
    export_huggingface(llama, tmp_path / "export", lambda folder: (folder / "tokenizer.json").touch())
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "portable_fsdp.json",
        "tokenizer.json",
    ]


def test_an_earlier_export_is_replaced_when_the_new_one_is_whole(tmp_path: Path, llama: Path) -> None:
    folder = tmp_path / "export"
    export_huggingface(llama, folder, None)
    model = build(MODELS["llama"], seed=1)
    newer = save(tmp_path / "checkpoints", model, config_to_json(model.config), step=2)

    def fail(_: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export_huggingface(newer, folder, fail)
    assert json.loads((folder / "portable_fsdp.json").read_text())["step"] == 1
    export_huggingface(newer, folder, None)
    assert json.loads((folder / "portable_fsdp.json").read_text())["step"] == 2
    opened = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(opened.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "export"]


def test_somebody_elses_folder_is_left_alone(tmp_path: Path, llama: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "config.json").write_text("mine")
    with pytest.raises(CheckpointError, match="found something else, which is left alone"):
        export_huggingface(llama, folder, None)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    (folder / "config.json").unlink()
    export_huggingface(llama, folder, None)


def test_a_users_file_in_an_earlier_export_is_not_deleted(tmp_path: Path, llama: Path) -> None:
    folder = tmp_path / "export"
    export_huggingface(llama, folder, None)
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"found notes/mine\.txt too"):
        export_huggingface(llama, folder, None)

    def write_while_it_is_exported(_: Path) -> None:
        (folder / "late.txt").write_text("mine")

    (folder / "notes" / "mine.txt").unlink()
    with pytest.raises(CheckpointError, match=r"found late\.txt too"):
        export_huggingface(llama, folder, write_while_it_is_exported)
    (folder / "late.txt").unlink()
    (folder / "portable_fsdp.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected the names of an earlier export's files"):
        export_huggingface(llama, folder, None)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_two_exports_at_once_never_mix(tmp_path: Path, llama: Path) -> None:
    folder = tmp_path / "export"
    other = build(MODELS["llama"], seed=1)
    newer = save(tmp_path / "checkpoints", other, other.config.to_dict(), step=2)
    export_huggingface(llama, folder, lambda _: export_huggingface(newer, folder, None))
    opened = AutoModelForCausalLM.from_pretrained(folder)
    expected = build(MODELS["llama"]).state_dict()  # that of the one that ended last
    assert all(torch.equal(opened.state_dict()[key], tensor) for key, tensor in expected.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "export"]


def test_what_a_killed_export_left_is_named(tmp_path: Path, llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = tmp_path / ".export.0123abcd.unfinished"
    left.mkdir()
    (tmp_path / ".export.b.0123abcd.unfinished").mkdir()  # of an export to export.b
    export_huggingface(llama, tmp_path / "export", None)
    assert [record.message.split(":")[0] for record in caplog.records] == [str(left)]
    assert left.exists()


def test_a_link_is_not_replaced(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(CheckpointError, match="found a link to real"):
        export_huggingface(llama, tmp_path / "link", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "link", "real"]


@pytest.mark.parametrize("target", [".", ".."])
def test_the_folder_that_one_is_in_is_not_replaced(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    with pytest.raises(CheckpointError, match="found the one that you are in"):
        export_huggingface(llama, Path(target), None)


def test_a_damaged_model_is_not_exported(tmp_path: Path, llama: Path) -> None:
    shard = sorted((llama / "model").iterdir())[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CheckpointError, match="xxh3_128"):
        export_huggingface(llama, tmp_path / "export", None)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("model_config", [None, {"model_type": "no_such_model"}, {}])
def test_a_model_that_transformers_does_not_know(tmp_path: Path, model_config: dict[str, Any] | None) -> None:
    path = save(tmp_path / "checkpoints", torch.nn.Linear(2, 2), model_config)
    with pytest.raises(CheckpointError, match=r"checkpoint step-00000001: .*model_config"):
        export_huggingface(path, tmp_path / "export", None)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = build({**MODELS["llama"], "tie_word_embeddings": True})
    assert "lm_head.weight" not in named_tensors(model, torch.optim.SGD(model.parameters()))


def test_an_interrupted_file_leaves_nothing(tmp_path: Path) -> None:
    def work() -> None:
        with new_file(tmp_path / "m.safetensors") as path:
            storage.part_of(path).touch()
            path.touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def late(source: Path, target: Path) -> None:
        target.write_text("theirs")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(CheckpointError, match="expected a new name"), new_file(tmp_path / "m") as path:
        path.write_text("ours")
    assert [file.name for file in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m").read_text() == "theirs"


def test_an_earlier_export_stays_where_the_new_one_cant_take_its_place(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_huggingface(llama, tmp_path / "hub", None)
    before = sorted(path.name for path in (tmp_path / "hub").iterdir())
    rename = Path.rename

    def full(self: Path, target: Path) -> Path:
        if self.suffix == ".unfinished" and self.is_dir():
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        export_huggingface(llama, tmp_path / "hub", None)
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == before
    assert not list(tmp_path.glob(".hub*"))
