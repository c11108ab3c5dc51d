"""Other people's formats, in and out: what their own libraries read and write is what we hold."""

import json
import shutil
import subprocess
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from plain_backend import PlainBackend, checkpoints, load, named_tensors, small_model
from safetensors.torch import load_file, save_file
from test_foreign import MODELS, build
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_torch_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_torch_save
from transformers import AutoModelForCausalLM

from portable_fsdp.backends.base import Rank
from portable_fsdp.checkpoint import commit, storage
from portable_fsdp.checkpoint.format import IMPORTED, Manifest
from portable_fsdp.checkpoint.prune import prune
from portable_fsdp.checkpoint.storage import locate
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats.base import load_export
from portable_fsdp.formats.huggingface import export
from portable_fsdp.formats.importing import detect, import_checkpoint
from portable_fsdp.models.architecture import config_from_json
from portable_fsdp.runtime.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
TIED = {**MODELS["llama"], "tie_word_embeddings": True}


def trained(architecture: dict[str, Any], seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    """A model and an AdamW whose state holds random content."""
    model = build(architecture, seed)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(7)
        state["exp_avg"].normal_()
        state["exp_avg_sq"].uniform_()
    return model, optimizer


def saved(folder: Path, model: Any, optimizer: torch.optim.Optimizer, step: int = 3) -> Path:
    opened = checkpoints(folder, PlainBackend(devices=2), model_config=model.config.to_dict())
    return opened.save(step, model, optimizer, (0, 0))


def tensors_in(path: Path) -> Tensors:
    """All of a checkpoint, after it was verified."""
    with Reader(path) as reader:
        reader.verify(Rank(0, 1))
        return {key: reader.read_whole(key) for key in reader.manifest.tensors}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def weights(model: Any) -> Tensors:
    return named_tensors(model, torch.optim.SGD(model.parameters()))


def dcp_save(state: Any, folder: Path) -> None:
    with warnings.catch_warnings():  # of torch: it saves in a single process, and reads a TypedStorage
        warnings.simplefilter("ignore")
        dcp_torch_save(state, checkpoint_id=folder, no_dist=True)


def dcp_load(state: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_torch_load(state, checkpoint_id=folder, no_dist=True)


# ---------------------------------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("shard", ["5GB", "2KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_save_pretrained_is_imported(tmp_path: Path, name: str, shard: str) -> None:
    model = build(MODELS[name])
    model.save_pretrained(tmp_path / "hub", max_shard_size=shard)
    path = import_checkpoint(tmp_path / "hub", tmp_path / "run")
    assert path == tmp_path / "run" / "checkpoints" / "step-00000000"
    assert_same(tensors_in(path), weights(model))
    with Reader(path) as reader:
        assert reader.manifest.written_by.backend == "import huggingface"
        assert reader.manifest.config == {}
        opened = config_from_json(cast(dict[str, Any], reader.manifest.architecture))
    assert opened.to_dict()["vocab_size"] == model.config.vocab_size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_export_has_the_dtype_asked_for(tmp_path: Path, dtype: str) -> None:
    model, optimizer = trained(MODELS["llama"])
    with Reader(saved(tmp_path, model, optimizer)) as reader:
        export(reader, tmp_path / "out", dtype=dtype, max_shard_bytes=3000)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = {key: tensor.to(getattr(torch, dtype)) for key, tensor in model.state_dict().items()}
    assert_same(cast(Any, opened).state_dict(), expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_an_import_converts_weights_but_not_the_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained(MODELS["llama"])
    source = saved(tmp_path, model, optimizer)
    with Reader(source) as reader:
        load_export("dcp").export(reader, tmp_path / "dcp", dtype="bfloat16", save_tokenizer=None, advance=_ignore)
    back = import_checkpoint(tmp_path / "dcp", tmp_path / "run", dtype="float32", trust_metadata=True)
    expected = tensors_in(source)
    rounded = {key: t if "/" in key else t.bfloat16().float() for key, t in expected.items()}
    assert_same(tensors_in(back), rounded)


def test_a_value_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    model = build(MODELS["llama"])
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    path = saved(tmp_path, model, torch.optim.SGD(model.parameters()))
    with Reader(path) as reader, pytest.raises(CheckpointError, match=r"lm_head.weight: .*float16.*found 1e\+06"):
        export(reader, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_a_large_import_is_cut_into_files(tmp_path: Path) -> None:
    model = build(MODELS["llama"])
    model.save_pretrained(tmp_path / "hub")
    path = import_checkpoint(tmp_path / "hub", tmp_path / "run", max_file_bytes=3000)
    assert len(list((path / "model").iterdir())) > 3
    assert_same(tensors_in(path), weights(model))


def test_tied_weights_that_stand_twice_must_be_equal(tmp_path: Path) -> None:
    model = build(TIED)
    model.save_pretrained(tmp_path / "hub")
    stored = load_file(tmp_path / "hub" / "model.safetensors")
    twice = {**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(twice, tmp_path / "hub" / "model.safetensors")
    assert_same(tensors_in(import_checkpoint(tmp_path / "hub", tmp_path / "equal")), weights(model))
    twice["lm_head.weight"][3, 3] += 1
    save_file(twice, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected one content for tied weights"):
        import_checkpoint(tmp_path / "hub", tmp_path / "different")
    assert not (tmp_path / "different" / "checkpoints" / "step-00000000").exists()


def test_what_is_not_the_models_is_left_out_and_what_is_missing_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(MODELS["llama"])
    model.save_pretrained(tmp_path / "hub")
    stored = load_file(tmp_path / "hub" / "model.safetensors")
    save_file({**stored, "rotary.inv_freq": torch.ones(2)}, tmp_path / "hub" / "model.safetensors")
    assert_same(tensors_in(import_checkpoint(tmp_path / "hub", tmp_path / "run")), weights(model))
    assert "left out 1 tensors that are not the model's: rotary.inv_freq" in caplog.text
    del stored["model.norm.weight"]
    save_file(stored, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"found none for model.norm.weight"):
        import_checkpoint(tmp_path / "hub", tmp_path / "other")
    save_file({**stored, "model.norm.weight": torch.ones(3)}, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.norm.weight: expected \[16\] .* found \[3\]"):
        import_checkpoint(tmp_path / "hub", tmp_path / "other")


def test_an_imported_step_is_never_overwritten(tmp_path: Path) -> None:
    build(MODELS["llama"]).save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "run")
    with pytest.raises(CheckpointError, match="expected no such step"):
        import_checkpoint(tmp_path / "hub", tmp_path / "run" / "checkpoints")


# ------------------------------------------------------------------------------------------------------------- DCP


@pytest.mark.parametrize("architecture", [MODELS["llama"], TIED], ids=["untied", "tied"])
def test_dcp_load_opens_an_export(tmp_path: Path, architecture: dict[str, Any]) -> None:
    model, optimizer = trained(architecture)
    with Reader(saved(tmp_path, model, optimizer)) as reader:
        load_export("dcp").export(reader, tmp_path / "dcp", dtype=None, save_tokenizer=None, advance=_ignore)
    other, its_optimizer = trained(architecture, seed=1)
    state = {
        "model": get_model_state_dict(other),
        "optimizer": {"state": get_optimizer_state_dict(other, its_optimizer)["state"]},
    }
    dcp_load(state, tmp_path / "dcp")  # in place: the model's own tensors
    assert_same(weights(other), weights(model))
    assert_same(named_tensors(other, its_optimizer), named_tensors(model, optimizer))


def test_a_dcp_export_says_the_step(tmp_path: Path) -> None:
    model, optimizer = trained(TIED)
    source = saved(tmp_path, model, optimizer, step=12)
    with Reader(source) as reader:
        load_export("dcp").export(reader, tmp_path / "dcp", dtype=None, save_tokenizer=None, advance=_ignore)
    model.config.save_pretrained(tmp_path / "config")
    back = import_checkpoint(tmp_path / "dcp", tmp_path / "run", config=tmp_path / "config", trust_metadata=True)
    assert back.name == "step-00000012"
    assert_same(tensors_in(back), tensors_in(source))
    state = {"train_state": {"step": torch.tensor(0, dtype=torch.int32)}}  # as torchtitan asks for it
    dcp_load(state, tmp_path / "dcp")
    assert state["train_state"]["step"] == 12
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert everything.keys() == {"model", "optimizer", "train_state"}
    assert_same(everything["model"], model.state_dict())


def dcp_layouts(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State dicts as they are saved in the wild."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    return {
        "nested": {"model": weights, "optimizer": state, "lr": 0.1},
        "torchtitan": {
            **weights,
            "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
            "train_state": {"step": torch.tensor(12), "ntokens_seen": torch.tensor(5)},
            "lr_scheduler": {"last_epoch": 3},
        },
        "optim": {"model": weights, "optim": state, "step": torch.tensor(12)},
    }


@pytest.mark.parametrize("layout", ["nested", "torchtitan", "optim"])
@pytest.mark.parametrize("architecture", [MODELS["llama"], TIED], ids=["untied", "tied"])
def test_a_folder_of_dcp_save_is_imported(tmp_path: Path, architecture: dict[str, Any], layout: str) -> None:
    model, optimizer = trained(architecture)
    model.config.save_pretrained(tmp_path / "config")
    dcp_save(dcp_layouts(model, optimizer)[layout], tmp_path / "dcp")
    path = import_checkpoint(tmp_path / "dcp", tmp_path / "run", config=tmp_path / "config", trust_metadata=True)
    assert path.name == ("step-00000000" if layout == "nested" else "step-00000012")
    assert_same(tensors_in(path), named_tensors(model, optimizer))


def test_a_folder_of_accelerate_is_imported(tmp_path: Path) -> None:
    model, optimizer = trained(MODELS["llama"])
    dcp_save({"model": get_model_state_dict(model)}, tmp_path / "state" / "pytorch_model_fsdp_0")
    dcp_save({"optimizer": get_optimizer_state_dict(model, optimizer)}, tmp_path / "state" / "optimizer_0")
    assert detect(tmp_path / "state") == "dcp"
    path = import_checkpoint(tmp_path / "state", tmp_path / "run", trust_metadata=True)
    assert_same(tensors_in(path), named_tensors(model, optimizer))


def test_chunks_of_many_ranks_are_put_together(tmp_path: Path) -> None:
    """What two ranks would write: DTensors are chunks with offsets, made here from our own export's metadata."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    whole = torch.arange(35.0).reshape(7, 5)
    dcp_save({"model": {"a": whole[:4].clone(), "b": whole[4:].clone()}}, tmp_path / "dcp")
    metadata: Any = FileSystemReader(tmp_path / "dcp").read_metadata()
    a, b = metadata.state_dict_metadata["model.a"], metadata.state_dict_metadata.pop("model.b")
    a.size = torch.Size([7, 5])
    a.chunks.append(ChunkStorageMetadata(torch.Size([4, 0]), b.chunks[0].sizes))
    place = metadata.storage_data.pop(MetadataIndex("model.b", torch.Size([0, 0])))
    metadata.storage_data[MetadataIndex("model.a", torch.Size([4, 0]))] = place
    _write_metadata(tmp_path / "dcp", metadata)
    assert_same(tensors_in(import_checkpoint(tmp_path / "dcp", tmp_path / "run", trust_metadata=True)), {"a": whole})

    a.chunks[1] = ChunkStorageMetadata(torch.Size([3, 0]), b.chunks[0].sizes)
    metadata.storage_data[MetadataIndex("model.a", torch.Size([3, 0]))] = place
    a.chunks[0] = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 5]))
    _write_metadata(tmp_path / "dcp", metadata)
    with pytest.raises(CheckpointError, match="overlap"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "overlap", trust_metadata=True)
    del a.chunks[1]
    _write_metadata(tmp_path / "dcp", metadata)
    with pytest.raises(CheckpointError, match="expected pieces of 35 elements in all, found 20"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "hole", trust_metadata=True)


def _write_metadata(folder: Path, metadata: Any) -> None:
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _ignore(_: int) -> None: ...


# ------------------------------------------------------------------------------------------------------ single files


@pytest.mark.parametrize("architecture", [MODELS["llama"], TIED], ids=["untied", "tied"])
def test_a_plain_script_loads_the_torch_file(tmp_path: Path, architecture: dict[str, Any]) -> None:
    model, optimizer = trained(architecture)
    source = saved(tmp_path, model, optimizer)
    with Reader(source) as reader:
        load_export("torch").export(reader, tmp_path / "m.pt", dtype=None, save_tokenizer=None, advance=_ignore)
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert_same(loaded, model.state_dict())
    head, embedding = loaded["lm_head.weight"], loaded["model.embed_tokens.weight"]
    assert (head.data_ptr() == embedding.data_ptr()) == bool(architecture.get("tie_word_embeddings"))
    mapped = torch.load(tmp_path / "m.pt", weights_only=True, mmap=True)
    assert_same(mapped, model.state_dict())

    model.config.save_pretrained(tmp_path / "config")
    path = import_checkpoint(tmp_path / "m.pt", tmp_path / "run", config=tmp_path / "config" / "config.json")
    assert_same(tensors_in(path), weights(model))


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_a_single_file_has_the_dtype_asked_for_and_replaces_nothing(tmp_path: Path, format: str) -> None:
    model, optimizer = trained(TIED)
    source = saved(tmp_path, model, optimizer)
    with Reader(source) as reader:
        target = tmp_path / "out" / f"m.{format}"
        load_export(format).export(reader, target, dtype="bfloat16", save_tokenizer=None, advance=_ignore)
        loaded = load_file(target) if format == "safetensors" else torch.load(target, weights_only=True)
        expected = model.state_dict()
        if format == "safetensors":
            del expected["lm_head.weight"]  # a tied weight stands once
        assert_same(loaded, {key: tensor.bfloat16() for key, tensor in expected.items()})
        with pytest.raises(CheckpointError, match="expected a new name"):
            load_export(format).export(reader, target, dtype=None, save_tokenizer=None, advance=_ignore)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_of_two_exports_to_one_file_the_first_stands(tmp_path: Path, format: str) -> None:
    model, optimizer = trained(TIED)
    other, its_optimizer = trained(TIED, seed=1)
    target = tmp_path / "m"
    first = saved(tmp_path / "first", other, its_optimizer)
    with Reader(saved(tmp_path / "second", model, optimizer)) as reader:

        def export_the_other(_: int) -> None:
            if not target.exists() and any(tmp_path.glob(".m.*")):
                with Reader(first) as other_reader:
                    load_export(format).export(other_reader, target, dtype=None, save_tokenizer=None, advance=_ignore)

        with pytest.raises(CheckpointError, match="expected a new name, found something there"):
            load_export(format).export(reader, target, dtype=None, save_tokenizer=None, advance=export_the_other)
    loaded = load_file(target) if format == "safetensors" else torch.load(target, weights_only=True)
    assert torch.equal(loaded["model.embed_tokens.weight"], other.state_dict()["model.embed_tokens.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "m", "second"]


def test_a_single_safetensors_file_is_imported(tmp_path: Path) -> None:
    model, _ = trained(MODELS["qwen3"])
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    assert_same(tensors_in(import_checkpoint(tmp_path / "m.safetensors", tmp_path / "run")), weights(model))


@pytest.mark.parametrize("nest", [None, "model", "state_dict"])
def test_torch_files_of_others_are_imported(tmp_path: Path, nest: str | None) -> None:
    tensors = {"a.weight": torch.randn(3, 4).T, "b": torch.tensor(2), "c": torch.ones(3, dtype=torch.bool)}
    torch.save(tensors if nest is None else {nest: tensors, "epoch": 3}, tmp_path / "m.bin")
    assert_same(tensors_in(import_checkpoint(tmp_path / "m.bin", tmp_path / "run")), tensors)


def test_every_dtype_that_we_store_goes_through_all_formats(tmp_path: Path) -> None:
    names = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    tensors = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    tensors |= {name: torch.ones(3).to(getattr(torch, name)) for name in ("float8_e4m3fn", "float8_e5m2")}
    torch.save(tensors, tmp_path / "all.pt")
    path = import_checkpoint(tmp_path / "all.pt", tmp_path / "run")
    for format in ("torch", "safetensors", "dcp"):
        with Reader(path) as reader:
            load_export(format).export(
                reader, tmp_path / f"x.{format}", dtype=None, save_tokenizer=None, advance=_ignore
            )
        if format == "safetensors":
            save_file(tensors, tmp_path / "theirs.safetensors")
            assert_same(load_file(tmp_path / "x.safetensors"), load_file(tmp_path / "theirs.safetensors"))
        back = import_checkpoint(tmp_path / f"x.{format}", tmp_path / format, trust_metadata=True)
        found = tensors_in(back)
        assert found.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert found[key].dtype == tensor.dtype
            assert torch.equal(found[key].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key
        shutil.rmtree(tmp_path / format)


RANK = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
model(torch.randn(4, 5)).sum().backward()
optimizer.step()
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/dcp")
whole, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    torch.save({"weights": whole, "state": state["state"]}, f"{folder}/whole")
dist.barrier()  # gloo aborts a rank whose peer has left in the middle of a collective
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_fsdp2_saves_on_two_ranks_is_imported(tmp_path: Path) -> None:
    programs = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [program.communicate(timeout=120)[1] for program in programs]
    assert [program.returncode for program in programs] == [0, 0], errors
    whole = torch.load(tmp_path / "whole", weights_only=True)
    expected = dict(whole["weights"])
    expected |= {f"{name}/{fqn}": t for fqn, state in whole["state"].items() for name, t in state.items()}
    assert {"exp_avg/0.weight", "step/1.bias"} < expected.keys()
    path = import_checkpoint(tmp_path / "dcp", tmp_path / "run", trust_metadata=True)
    assert_same(tensors_in(path), expected)


# ------------------------------------------------------------------------------------------------ where it is written


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    build(TIED).save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


def test_an_import_into_an_object_store_stays_there(hub: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    path = import_checkpoint(hub, storage.locate(url))
    assert path == storage.locate(f"{url}/checkpoints/step-00000000")
    assert_same(tensors_in(path), weights(build(TIED)))
    assert commit.MARK not in storage.names(path)


@pytest.mark.parametrize("place", ["folder", "store"])
def test_an_import_that_fails_leaves_nothing(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run = tmp_path / "run" if place == "folder" else storage.locate(f"memory://{uuid.uuid4().hex}")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(commit, "commit", fail)
        with pytest.raises(CheckpointError, match=r"import to .*: can't be written: disk full"):
            import_checkpoint(hub, run)
    assert storage.names(run / "checkpoints") == []
    import_checkpoint(hub, run)


def test_another_runs_save_is_not_disturbed_by_an_import(tmp_path: Path, hub: Path) -> None:
    final = tmp_path / "checkpoints" / "step-00000000"
    attempt = commit.begin(final, "other")
    import_checkpoint(hub, tmp_path)
    assert storage.names(commit.temporary_of(final, attempt)) == [commit.MARK, "model", "optimizer"]


def test_an_import_removes_what_a_killed_one_left(tmp_path: Path, hub: Path) -> None:
    begun = {step: commit.begin(tmp_path / "checkpoints" / f"step-{step:08d}", IMPORTED) for step in (0, 12)}
    import_checkpoint(hub, tmp_path)
    # Another step's may be at work; it is another import's.
    assert storage.names(tmp_path / "checkpoints") == ["step-00000000", f"step-00000012.tmp-{begun[12][:8]}"]


def test_two_imports_at_once_into_a_store(hub: Path) -> None:
    run = locate(f"memory://{uuid.uuid4().hex}/run")
    real = commit.commit

    def second_begins(final: Path, *rest: Any) -> None:
        commit.begin(final.with_name("step-00000200"), IMPORTED)
        real(final, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(commit, "commit", second_begins)
        with Reader(import_checkpoint(hub, run)) as reader:
            reader.verify(Rank(0, 1))


def test_a_file_that_a_store_lost_is_missed_before_the_commit(hub: Path) -> None:
    run = locate(f"memory://{uuid.uuid4().hex}/run")
    real = commit.commit

    def loses_one(final: Path, attempt: str, manifest: Manifest, *rest: Any) -> None:
        storage.remove(final / manifest.files[0].name)
        real(final, attempt, manifest, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(commit, "commit", loses_one)
        with pytest.raises(CheckpointError, match="after it was written, found no such file"):
            import_checkpoint(hub, run)
    assert storage.names(run / "checkpoints") == []


def test_a_target_that_cant_be_written_is_named(tmp_path: Path, hub: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"import to .*file/run: can't be written"):
        import_checkpoint(hub, tmp_path / "file" / "run")


def test_a_tied_model_goes_out_and_in_and_is_loaded(tmp_path: Path) -> None:
    model = build(TIED)
    ties = {"lm_head.weight": "model.embed_tokens.weight"}
    config = model.config.to_dict()
    opened = checkpoints(tmp_path / "run", PlainBackend(), model_config=config, ties=ties)
    path = opened.save(1, model, torch.optim.AdamW(model.parameters()), (0, 0))
    with Reader(path) as reader:
        export(reader, tmp_path / "hub")
    back = import_checkpoint(tmp_path / "hub", tmp_path / "back")

    other = build(TIED, seed=1)
    settings = {"load": "weights_only"}
    new = checkpoints(tmp_path / "new", PlainBackend(), settings, model_config=config, ties=ties)
    resumed = load(new, other, torch.optim.AdamW(other.parameters()), str(back))
    assert resumed.weights_only
    assert_same(weights(other), weights(model))


def test_no_run_deletes_an_import(tmp_path: Path, hub: Path) -> None:
    """Neither its retention nor `prune` for its sake, also where the run has no name."""
    imported = import_checkpoint(hub, tmp_path / "checkpoints")
    ours = checkpoints(tmp_path / "checkpoints", PlainBackend(), {"keep": 1}, config={"run": {"name": None}})
    for step in (5, 6):
        ours.save(step, *small_model(seed=step), (0, 0))
    assert storage.names(tmp_path / "checkpoints") == [imported.name, "step-00000006"]
    ours.save(7, *small_model(seed=7), (0, 0))
    assert prune(tmp_path / "checkpoints", 1).deleted == {}
    assert storage.names(tmp_path / "checkpoints") == [imported.name, "step-00000007"]
