"""Hugging Face folders, out and in: transformers opens our exports, and we import what it saved."""

import errno
import itertools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from foreign_models import MODELS, TIED, assert_same, build, export, save, tensors_in, weights
from huggingface_hub import ModelCard
from plain_backend import Log, Patch, PlainBackend, checkpoints, flip_last_byte, load, names
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from portable_fsdp.checkpoint.storage import part_of
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config.schema import Checkpoint, Config, Model, Train
from portable_fsdp.data.tokenize import ByteTokenizer
from portable_fsdp.formats import base
from portable_fsdp.formats.exporting import new_file
from portable_fsdp.formats.importing import import_checkpoint
from portable_fsdp.models.architecture import config_from_json, config_to_json
from portable_fsdp.models.tensor_files import require_as_exported, require_intact
from portable_fsdp.runtime.errors import CheckpointError, ConfigError
from portable_fsdp.sample import sample

pytestmark = pytest.mark.slow


def save_llama(folder: Path, seed: int = 0, step: int = 1) -> Path:
    return save(folder / "checkpoints", build(MODELS["llama"], seed), step=step)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path)


def export_llama(checkpoint: Path, folder: Path, save_tokenizer: Callable[[Path], None] | None = None) -> None:
    export(checkpoint, "huggingface", folder, save_tokenizer=save_tokenizer)


# ------------------------------------------------------------------------------------------------------------ exports


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MODELS)
def test_an_export_opens_with_equal_weights(tmp_path: Path, name: str, tied: bool) -> None:
    model = build({**MODELS[name], "tie_word_embeddings": tied})
    assert ("lm_head.weight" not in weights(model)) == tied
    path = save(tmp_path / "checkpoints", model, model_config=config_to_json(model.config))
    export_llama(path, tmp_path / "export", lambda folder: (folder / "tokenizer.json").touch())

    opened, report = cast(Any, AutoModelForCausalLM).from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    assert type(opened) is type(model)
    assert_same(opened.state_dict(), model.state_dict())
    embedding, head = opened.get_input_embeddings().weight, opened.get_output_embeddings().weight
    assert (embedding is head) == tied
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == ([type(model).__name__], "float32")
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == model.generation_config.eos_token_id
    files = ["config.json", "generation_config.json", "model.safetensors", "portable_fsdp.json", "tokenizer.json"]
    assert names(tmp_path / "export") == ["README.md", *files]
    card = (tmp_path / "export/README.md").read_text()
    assert f'model = {type(model).__name__}.from_pretrained("FOLDER")' in card
    assert "\n# Step " in card


def test_the_card_of_an_export_names_base_license_and_data_and_no_path(tmp_path: Path) -> None:
    build(MODELS["llama"]).save_pretrained(tmp_path / "base")
    (tmp_path / "base/README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    paths = {"org/rows:subset@main": "huggingface", "<b>/rows": "huggingface", str(tmp_path / "a.txt"): "text"}
    sources = [{"source": source, "path": path} for path, source in paths.items()]
    for name, pretrained in (("local", str(tmp_path / "base")), ("hub", "org/base@v1")):
        config = {"model": {"pretrained": pretrained}, "data": {"mixture": sources}}
        export_llama(
            save(tmp_path / name / "checkpoints", build(MODELS["llama"]), config=config), tmp_path / name / "out"
        )
        text = (tmp_path / name / "out/README.md").read_text()
        data, is_local = cast(Any, ModelCard(text).data), name == "local"
        assert (data.license, data.base_model) == (("apache-2.0", None) if is_local else (None, "org/base"))
        assert (data.datasets, data.library_name) == (["org/rows"], "transformers")
        assert str(tmp_path) not in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_export_has_the_requested_dtype_in_files_of_the_requested_size(
    tmp_path: Path, llama: Path, dtype: str, monkeypatch: Patch
) -> None:
    folder = tmp_path / "export"
    monkeypatch.setattr(base, "MAX_FILE_BYTES", 20_000)
    export(llama, "huggingface", folder, dtype=dtype)
    expected = {key: t.to(getattr(torch, dtype)) for key, t in build(MODELS["llama"]).state_dict().items()}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    count = len(shards)
    assert count > 3
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert sorted(set(index["weight_map"].values())) == shards
    sizes = Counter[str]()
    for key, shard in index["weight_map"].items():
        sizes[shard] += expected[key].nbytes
    assert max(sizes.values()) <= 20_000
    assert all(sizes[a] + sizes[b] > 20_000 for a, b in itertools.pairwise(shards))  # no needless cut
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    opened = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert_same(cast(Any, opened).state_dict(), expected)
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


def test_a_value_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    model = build(MODELS["llama"])
    model.lm_head.weight.data[0, 0] = 1e6
    with pytest.raises(CheckpointError, match=r"lm_head.weight: .*float16.*found 1e\+06"):
        export(save(tmp_path, model), "huggingface", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_a_complete_export_replaces_an_earlier_one(tmp_path: Path, llama: Path, monkeypatch: Patch) -> None:
    folder = tmp_path / "export"
    export_llama(llama, folder)
    newer = save_llama(tmp_path, seed=1, step=2)

    def full(self: Path, target: Path) -> Path:
        if self.suffix == ".unfinished" and self.is_dir():
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    rename = Path.rename
    with pytest.raises(OSError, match="disk full"):
        export_llama(newer, folder, Mock(side_effect=OSError("disk full")))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        with pytest.raises(OSError, match="No space left"):
            export_llama(newer, folder)
    assert json.loads((folder / "portable_fsdp.json").read_text())["step"] == 1
    export_llama(newer, folder)
    assert json.loads((folder / "portable_fsdp.json").read_text())["step"] == 2
    opened: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert_same(opened.state_dict(), build(MODELS["llama"], seed=1).state_dict())
    assert names(tmp_path) == ["checkpoints", "export"]


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("model.safetensors", flip_last_byte, "model.safetensors: damaged: the export wrote "),
    ("generation_config.json", flip_last_byte, "generation_config.json: damaged"),
    ("tokenizer.json", flip_last_byte, "tokenizer.json: damaged"),
    ("tokenizer.json", Path.unlink, "tokenizer.json"),
    ("model-2.safetensors", Path.touch, r"model-2\.safetensors is not a file of the export"),
    ("portable_fsdp.json", lambda file: file.write_text('{"hashes": 3, "files": []}'), "portable_fsdp.json"),
    ("portable_fsdp.json", lambda file: file.write_text("{"), "portable_fsdp.json"),
    ("README.md", lambda file: file.write_text("Mine."), ""),
    ("portable_fsdp.json", Path.unlink, ""),
]
"""The file, what happens to it, and the error, if it is one."""


@pytest.mark.parametrize(("file", "damage", "problem"), DAMAGE)
def test_a_damaged_export_is_refused_wherever_it_is_opened(
    tmp_path: Path, llama: Path, file: str, damage: Callable[[Path], object], problem: str
) -> None:
    """Protects a model from a bit that flipped while it lay on disk or was copied."""
    folder = tmp_path / "export"
    export_llama(llama, folder, ByteTokenizer().save)
    assert require_as_exported(folder)
    damage(folder / file)
    config = Config(model=Model(pretrained=str(folder)), train=Train(steps=1, global_batch=1))
    opens: list[Callable[[], object]] = [
        lambda: list(sample(folder, "\1", count=1, tokens=1, temperature=0, seed=0)),
        lambda: require_intact(config, PlainBackend()),
        lambda: import_checkpoint(folder, tmp_path / "imported"),
    ]
    for open_export in opens:
        with pytest.raises((ConfigError, CheckpointError), match=problem) if problem else nullcontext():
            open_export()
    require_intact(config.model_copy(update={"checkpoint": Checkpoint(verify="off")}), PlainBackend())


def test_files_of_others_are_left_alone(tmp_path: Path, llama: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text("mine")
    with pytest.raises(CheckpointError, match="it exists and is not an earlier export"):
        export_llama(llama, folder)
    assert names(folder) == ["config.json"]
    (folder / "config.json").unlink()
    export_llama(llama, folder)
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes/mine\.txt is not a file of the earlier export"):
        export_llama(llama, folder)
    (folder / "notes" / "mine.txt").unlink()
    with pytest.raises(CheckpointError, match=r"late\.txt is not a file of the earlier"):  # written during the export
        export_llama(llama, folder, lambda _: (folder / "late.txt").touch())
    (folder / "late.txt").unlink()
    (folder / "portable_fsdp.json").write_text("{}")
    with pytest.raises(CheckpointError, match="it exists and is not an earlier export"):
        export_llama(llama, folder)
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


def test_links_and_the_working_folder_are_refused(tmp_path: Path, llama: Path, monkeypatch: Patch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(CheckpointError, match="it is a link to real"):
        export_llama(llama, tmp_path / "link")
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    for target in (".", ".."):
        with pytest.raises(CheckpointError, match="it is the working directory or one above it"):
            export_llama(llama, Path(target))
    assert names(tmp_path) == ["a", "checkpoints", "link", "real"]


def test_two_exports_at_once_never_mix(tmp_path: Path, llama: Path, caplog: Log) -> None:
    folder = tmp_path / "export"
    newer = save_llama(tmp_path, seed=1, step=2)
    export_llama(llama, folder, lambda _: export_llama(newer, folder))
    opened: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert_same(opened.state_dict(), build(MODELS["llama"]).state_dict())  # the one that ended last
    assert names(tmp_path) == ["checkpoints", "export"]
    caplog.clear()
    (tmp_path / ".export.0123abcd.unfinished").mkdir()
    (tmp_path / ".export.b.0123abcd.unfinished").mkdir()  # of an export to export.b
    export_llama(llama, folder)
    unfinished = tmp_path / ".export.0123abcd.unfinished"
    assert [record.message.split(":")[0] for record in caplog.records] == [str(unfinished)]
    assert unfinished.exists()


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path, llama: Path) -> None:
    """A damaged model, and models that transformers doesn't know."""
    flip_last_byte(sorted((llama / "model").iterdir())[1])
    sources, model = [(llama, "xxh3_128")], build(MODELS["llama"])
    for number, config in enumerate((None, {"model_type": "no_such_model"}, {})):
        path = save(tmp_path / str(number), model, step=1, model_config=config)
        sources.append((path, r"checkpoint step-00000001: .*model_config"))
    for source, message in sources:
        with pytest.raises(CheckpointError, match=message):
            export_llama(source, tmp_path / "export")
        assert not (tmp_path / "export").exists()


def test_an_interrupted_file_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with new_file(tmp_path / "m.safetensors") as path:
            part_of(path).touch()
            path.touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ imports


@pytest.mark.parametrize("shard", ["5GB", "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_save_pretrained_is_imported(tmp_path: Path, name: str, shard: str, monkeypatch: Patch) -> None:
    model = build(MODELS[name])
    model.save_pretrained(tmp_path / "hub", max_shard_size=shard)
    monkeypatch.setattr(base, "MAX_FILE_BYTES", 20_000 if shard == "20KB" else 10**9)
    path = import_checkpoint(tmp_path / "hub", tmp_path / "run")
    assert path == tmp_path / "run" / "checkpoints" / "step-00000000"
    assert (len(list((path / "model").iterdir())) > 3) == (shard == "20KB")
    assert_same(tensors_in(path), weights(model))
    with Reader(path) as reader:
        assert reader.manifest.written_by.backend == "import huggingface"
        assert reader.manifest.config == {}
        opened = config_from_json(cast(dict[str, Any], reader.manifest.architecture))
    assert opened.to_dict()["vocab_size"] == model.config.vocab_size
    with pytest.raises(CheckpointError, match="this step is committed already"):
        import_checkpoint(tmp_path / "hub", tmp_path / "run" / "checkpoints")


def test_tied_weights_that_stand_twice_must_be_equal(tmp_path: Path) -> None:
    model = build(TIED)
    model.save_pretrained(tmp_path / "hub")
    stored = load_file(tmp_path / "hub" / "model.safetensors")
    twice = {**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(twice, tmp_path / "hub" / "model.safetensors")
    assert_same(tensors_in(import_checkpoint(tmp_path / "hub", tmp_path / "equal")), weights(model))
    twice["lm_head.weight"][3, 3] += 1
    save_file(twice, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the tied weights .* have different values"):
        import_checkpoint(tmp_path / "hub", tmp_path / "different")
    assert not (tmp_path / "different" / "checkpoints" / "step-00000000").exists()


def test_other_tensors_are_left_out_and_missing_or_misshapen_ones_refused(tmp_path: Path, caplog: Log) -> None:
    model, norm = build(MODELS["llama"]), "model.norm.weight"
    model.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    stored = load_file(file)
    save_file({**stored, "rotary.inv_freq": torch.ones(2)}, file)
    assert_same(tensors_in(import_checkpoint(tmp_path / "hub", tmp_path / "run")), weights(model))
    assert "ignoring 1 tensors that are not the model's: rotary.inv_freq" in caplog.text
    del stored[norm]
    for more, message in (
        ({}, r"the source lacks model.norm.weight"),
        ({norm: torch.ones(3)}, r"model.norm.weight: expected \[48\] .* found \[3\]"),
    ):
        save_file({**stored, **more}, file)
        with pytest.raises(CheckpointError, match=message):
            import_checkpoint(tmp_path / "hub", tmp_path / "other")


def test_a_tied_model_is_loaded_from_an_export_and_from_state_dicts(tmp_path: Path) -> None:
    """Without a model's config the import can't know which weights are tied."""
    model, ties = build(TIED), {"lm_head.weight": "model.embed_tokens.weight"}
    both = model.state_dict()
    assert both.keys() > ties.keys()
    export_llama(save(tmp_path / "run", model, torch.optim.AdamW(model.parameters()), ties=ties), tmp_path / "hub")
    torch.save(both, tmp_path / "both.pt")
    torch.save({key: tensor for key, tensor in both.items() if key not in ties}, tmp_path / "one.pt")
    torch.save(both | {"lm_head.weight": both["lm_head.weight"] + 1}, tmp_path / "other.pt")
    for source in ("hub", "both.pt", "one.pt", "other.pt"):
        path = import_checkpoint(tmp_path / source, tmp_path / f"{source} in")
        other, config = build(TIED, seed=1), model.config.to_dict() if source == "hub" else None
        settings = {"load": "weights_only"}
        new = checkpoints(tmp_path / f"new {source}", PlainBackend(), settings, model_config=config, ties=ties)
        with pytest.raises(CheckpointError, match=r"lm_head.weight +tied") if source == "other.pt" else nullcontext():
            assert load(new, other, torch.optim.AdamW(other.parameters()), str(path)).weights_only
            assert_same(weights(other), weights(model))
