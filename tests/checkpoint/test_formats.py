"""Other formats, out and in: other tools' own libraries write what we read, and read what we write."""

import itertools
import json
import pickle
import re
import subprocess
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from foreign_models import (
    GGML,
    MODELS,
    TIED,
    WIDE,
    assert_same,
    build,
    dcp_save,
    export,
    save,
    tensors_in,
    trained,
    weights,
    write_gguf,
)
from plain_backend import PlainBackend, bits, checkpoints, named_tensors, random_tensor, small_model
from safetensors.torch import load_file
from small_models import ARCHITECTURES
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_torch_load
from transformers import AutoModelForCausalLM

from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.manifests import DTYPE_BYTES, IMPORTED, Manifest
from portable_fsdp.checkpoint.storage import locate, store_of
from portable_fsdp.formats.importing import detect, import_checkpoint
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow

UNTIED_OR_TIED = pytest.mark.parametrize("architecture", [MODELS["llama"], TIED], ids=["untied", "tied"])


def dcp_load(state: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_torch_load(state, checkpoint_id=folder, no_dist=True)


# ------------------------------------------------------------------------------------------------------------- DCP


@UNTIED_OR_TIED
def test_dcp_load_opens_an_export(tmp_path: Path, architecture: dict[str, Any]) -> None:
    model, optimizer = trained(architecture)
    source = save(tmp_path, model, optimizer, step=12)
    export(source, "dcp", tmp_path / "dcp")
    other, its_optimizer = trained(architecture, seed=1)
    state = {
        "model": get_model_state_dict(other),
        "optimizer": {"state": get_optimizer_state_dict(other, its_optimizer)["state"]},
        "train_state": {"step": torch.tensor(0, dtype=torch.int32)},  # where torchtitan looks for it
    }
    dcp_load(state, tmp_path / "dcp")  # in place: the model's own tensors
    assert_same(weights(other), weights(model))
    assert_same(named_tensors(other, its_optimizer), named_tensors(model, optimizer))
    assert state["train_state"]["step"] == 12
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert everything.keys() == {"model", "optimizer", "train_state"}
    assert_same(everything["model"], model.state_dict())
    model.config.save_pretrained(tmp_path / "config")
    back = import_checkpoint(tmp_path / "dcp", tmp_path / "run", config=tmp_path / "config", trust_metadata=True)
    assert back.name == "step-00000012"
    assert_same(tensors_in(back), tensors_in(source))


def test_an_import_converts_weights_but_not_the_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained(MODELS["llama"])
    source = save(tmp_path, model, optimizer)
    export(source, "dcp", tmp_path / "dcp", dtype="bfloat16")
    back = import_checkpoint(tmp_path / "dcp", tmp_path / "run", dtype="float32", trust_metadata=True)
    rounded = {key: t if "/" in key else t.bfloat16().float() for key, t in tensors_in(source).items()}
    assert_same(tensors_in(back), rounded)


@UNTIED_OR_TIED
def test_folders_of_dcp_save_are_imported(tmp_path: Path, architecture: dict[str, Any]) -> None:
    """State dicts as they are saved in the wild: nested; torchtitan's; with a step; accelerate's, in two folders."""
    model, optimizer = trained(architecture)
    model.config.save_pretrained(tmp_path / "config")
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    step = {"step": torch.tensor(12), "ntokens_seen": torch.tensor(5)}
    for source, folders, number in (
        ("nested", {"": {"model": weights, "optimizer": state, "lr": 0.1}}, 0),
        ("torchtitan", {"": weights | {"optimizer": flat, "train_state": step, "lr_scheduler": {"last_epoch": 3}}}, 12),
        ("optim", {"": {"model": weights, "optim": state, "step": torch.tensor(12)}}, 12),
        ("accelerate", {"pytorch_model_fsdp_0": {"model": weights}, "optimizer_0": {"optimizer": state}}, 0),
    ):
        for folder, content in folders.items():
            dcp_save(content, tmp_path / source / folder)
        assert detect(tmp_path / source) == "dcp", source
        run, config = tmp_path / f"{source} run", tmp_path / "config"
        path = import_checkpoint(tmp_path / source, run, config=config, trust_metadata=True)
        assert path.name == f"step-{number:08d}", source
        assert_same(tensors_in(path), named_tensors(model, optimizer))


def test_chunks_of_many_ranks_are_put_together(tmp_path: Path) -> None:
    """What two ranks would write: DTensors are chunks with offsets, made here from our own export's metadata."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    def imported() -> dict[str, torch.Tensor]:
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
        return tensors_in(import_checkpoint(tmp_path / "dcp", tmp_path / "run", trust_metadata=True))

    whole = torch.arange(35.0).reshape(7, 5)
    dcp_save({"model": {"a": whole[:4].clone(), "b": whole[4:].clone()}}, tmp_path / "dcp")
    metadata: Any = FileSystemReader(tmp_path / "dcp").read_metadata()
    a, b = metadata.state_dict_metadata["model.a"], metadata.state_dict_metadata.pop("model.b")
    place = metadata.storage_data.pop(MetadataIndex("model.b", torch.Size([0, 0])))
    a.size = torch.Size([7, 5])
    for row in (3, 4):
        a.chunks[1:] = [ChunkStorageMetadata(torch.Size([row, 0]), b.chunks[0].sizes)]
        metadata.storage_data[MetadataIndex("model.a", torch.Size([row, 0]))] = place
        if row == 3:
            with pytest.raises(CheckpointError, match="overlap"):
                imported()
    assert_same(imported(), {"a": whole})
    del a.chunks[1]
    with pytest.raises(CheckpointError, match="expected pieces of 35 elements in total, found 20"):
        imported()


# ------------------------------------------------------------------------------------------------------------ GGUF


@pytest.mark.parametrize(("kind", "bound"), [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 1e-2), ("Q4_0", 2e-1)])
def test_a_gguf_is_what_transformers_reads(tmp_path: Path, kind: str, bound: float) -> None:
    """The file has the layout that llama.cpp's converter writes."""
    model = build(WIDE)
    write_gguf(tmp_path / "m.gguf", model, GGML[kind])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    imported = tensors_in(import_checkpoint(tmp_path / "m.gguf", tmp_path / "run"))
    assert_same(imported, weights(theirs))
    for key, tensor in weights(model).items():
        assert (imported[key] - tensor).abs().max() <= bound * tensor.abs().max(), key
    lower = tensors_in(import_checkpoint(tmp_path / "m.gguf", tmp_path / "low", dtype="bfloat16"))
    assert_same(lower, {key: tensor.bfloat16() for key, tensor in imported.items()})


# ------------------------------------------------------------------------------------------------------ single files


def test_a_single_file_has_the_requested_dtype_and_replaces_nothing(tmp_path: Path) -> None:
    model = build(TIED)
    source, other = save(tmp_path / "run", model), save(tmp_path / "other", build(TIED, seed=1))
    target = tmp_path / "out" / "m.safetensors"
    export(source, "safetensors", target, dtype="bfloat16")
    expected = model.state_dict()
    del expected["lm_head.weight"]  # a tied weight stands once
    assert_same(load_file(target), {key: tensor.bfloat16() for key, tensor in expected.items()})
    with pytest.raises(CheckpointError, match="it already exists"):
        export(source, "safetensors", target)
    target.unlink()

    def export_the_other(_: int) -> None:
        if not target.exists() and any(target.parent.glob(f".{target.name}.*")):
            export(other, "safetensors", target)

    with pytest.raises(CheckpointError, match=r"it already exists\. Name another file"):
        export(source, "safetensors", target, advance=export_the_other)
    key = "model.embed_tokens.weight"
    assert torch.equal(load_file(target)[key], build(TIED, seed=1).state_dict()[key])  # the first of two stands
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("nest", [None, "model", "state_dict"])
def test_torch_files_of_others_are_imported(tmp_path: Path, nest: str | None) -> None:
    tensors = {"a.weight": torch.randn(3, 4).T, "b": torch.tensor(2), "c": torch.ones(3, dtype=torch.bool)}
    torch.save(tensors if nest is None else {nest: tensors, "epoch": 3}, tmp_path / "m.bin")
    assert_same(tensors_in(import_checkpoint(tmp_path / "m.bin", tmp_path / "run")), tensors)


@pytest.mark.parametrize("layout", ["single", "sharded", "by index"])
def test_transformers_folders_of_torch_files_are_imported(tmp_path: Path, layout: str) -> None:
    """As OPT is published: float16, without the prefix `model.`, the tied head beside the embedding."""
    model = build(ARCHITECTURES["opt"]).half()
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    folder = tmp_path / "opt"
    index = folder / "pytorch_model.bin.index.json"
    folder.mkdir()
    model.config.save_pretrained(folder)
    if layout == "single":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        weight_map = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(state)}
        for file in set(weight_map.values()):
            torch.save({name: state[name] for name in state if weight_map[name] == file}, folder / file)
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    source = index if layout == "by index" else folder
    assert detect(source) == "torch"
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    assert_same(tensors_in(tmp_path / "run/checkpoints/step-00000000"), weights(model))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hub"), "--tokenizer", "none"]) == 0
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype="auto").state_dict(), model.state_dict())
    if layout == "sharded":
        (folder / "pytorch_model-00002-of-00002.bin").unlink()
        with pytest.raises(CheckpointError, match=r"no such file: .*pytorch_model-00002-of-00002\.bin"):
            import_checkpoint(folder, tmp_path / "other")


def test_every_dtype_that_we_store_goes_through_all_formats(tmp_path: Path) -> None:
    shapes = {"matrix": (5, 3), "scalar": (), "vector": (7,), "empty": (0, 4), "cube": (2, 3, 4)}
    tensors = {
        f"{dtype}.{name}": random_tensor(shape, getattr(torch, dtype), seed=1)
        for dtype, (name, shape) in itertools.product(DTYPE_BYTES, shapes.items())
    }
    assert all(tensor.dtype.itemsize == DTYPE_BYTES[key.split(".")[0]] for key, tensor in tensors.items())
    expected = {key: (tensor.dtype, tensor.shape, bits(tensor)) for key, tensor in tensors.items()}
    torch.save(tensors, tmp_path / "all.pt")
    path = import_checkpoint(tmp_path / "all.pt", tmp_path / "run")
    for kind in ("safetensors", "dcp"):
        export(path, kind, tmp_path / f"x.{kind}")
        opened = [tensors_in(import_checkpoint(tmp_path / f"x.{kind}", tmp_path / kind, trust_metadata=True))]
        if kind == "safetensors":
            opened.append(load_file(tmp_path / "x.safetensors"))
        for actual in opened:
            assert {key: (tensor.dtype, tensor.shape, bits(tensor)) for key, tensor in actual.items()} == expected


RANKS = """
import os
import sys
import torch
import torch._dynamo  # else each rank imports it
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

folder = sys.argv[1]
other = os.fork()  # after the imports, before torch has a thread
rank = 0 if other else 1
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
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.slow
def test_what_fsdp2_saves_on_two_ranks_is_imported(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RANKS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
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


def test_an_import_that_fails_leaves_nothing(place: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(commit, "commit", Mock(side_effect=OSError("disk full")))
        with pytest.raises(CheckpointError, match=r"import to .*: can't be written: disk full"):
            import_checkpoint(hub, place)
    assert store_of(place).names(place / "checkpoints") == []
    import_checkpoint(hub, place)


def test_an_import_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path, hub: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    _, others = (commit.begin(checkpoints / "step-00000000", run) for run in (IMPORTED, "other"))
    another = commit.begin(checkpoints / "step-00000012", IMPORTED)  # may be at work
    import_checkpoint(hub, tmp_path)
    left = [f"step-00000000.tmp-{others[:8]}", f"step-00000012.tmp-{another[:8]}"]
    assert store_of(checkpoints).names(checkpoints) == ["step-00000000", *left]
    assert store_of(checkpoints).names(checkpoints / left[0]) == [commit.MARK, "model", "optimizer"]


@pytest.mark.parametrize(("kept", "actual"), [(None, "no such file"), (b"only this", "9.")])
def test_a_file_that_a_store_lost_or_cut_is_noticed_before_the_commit(
    hub: Path, monkeypatch: pytest.MonkeyPatch, kept: bytes | None, actual: str
) -> None:
    run = locate(f"memory://{uuid.uuid4().hex}/run")
    real = commit.commit

    def damages_one(final: Path, attempt: str, manifest: Manifest, *rest: Any) -> None:
        path = final / manifest.files[0].name
        store_of(path).remove(path)
        if kept is not None:
            store_of(path).write(path, [kept])
        real(final, attempt, manifest, *rest)

    monkeypatch.setattr(commit, "commit", damages_one)
    with pytest.raises(CheckpointError, match=f"bytes after it was written, found {actual}"):
        import_checkpoint(hub, run)
    assert store_of(run).names(run / "checkpoints") == []


def test_a_target_that_cant_be_written_is_named(tmp_path: Path, hub: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for run in ("file/run", "loop"):  # the second can't be listed either
        with pytest.raises(CheckpointError, match=rf"import to .*{run}: can't be written"):
            import_checkpoint(hub, tmp_path / run)


def test_no_run_deletes_an_import(tmp_path: Path, hub: Path) -> None:
    """Also where the run has no name."""
    imported = import_checkpoint(hub, tmp_path / "checkpoints")
    ours = checkpoints(tmp_path / "checkpoints", PlainBackend(), {"keep": 1}, config={"run": {"name": None}})
    for step in (5, 6, 7):
        path = ours.save(step, *small_model(seed=step), (0, 0))
        assert store_of(tmp_path).names(tmp_path / "checkpoints") == [imported.name, path.name]


# ------------------------------------------------------ the table `Checkpoints that open` of docs/migrating.md


PAGE = (Path(__file__).parents[2] / "docs/migrating.md").read_text()
OTHER_NAMES = "are the names another library's?"


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Llama, whose config.json is in the folder `hub` of an empty working folder."""
    monkeypatch.chdir(tmp_path)
    model = build(MODELS["llama"])
    model.config.save_pretrained("hub")
    return model


def test_torchtitans_folder_opens_under_its_names_alone(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    named = {name.removeprefix("model.").replace("mlp.up_proj", "feed_forward.w3"): name for name in llama.state_dict()}
    tensors = {theirs: llama.state_dict()[ours] for theirs, ours in named.items()}
    dcp_save({**tensors, "train_state": {"step": torch.tensor(7)}}, Path("step-7"))
    assert main(["import", "step-7", "run", "--config", "hub", "--trust-metadata"]) == 2
    assert OTHER_NAMES in capsys.readouterr().err
    assert main(["import", "step-7", "run", "--trust-metadata"]) == 0
    assert_same(tensors_in(Path("run/checkpoints/step-00000007")), tensors)


def test_fabrics_checkpoints_of_a_transformers_model_open(llama: Any) -> None:
    state = {name: {"exp_avg": tensor + 1} for name, tensor in llama.state_dict().items()}
    dcp_save({"model": llama.state_dict(), "optimizer": {"state": state}}, Path("sharded"))
    assert main(["import", "sharded", "run", "--config", "hub", "--trust-metadata"]) == 0
    optimizer = {f"exp_avg/{name}": tensors["exp_avg"] for name, tensors in state.items()}
    assert_same(tensors_in(Path("run/checkpoints/step-00000000")), {**weights(llama), **optimizer})
    torch.save({"model": llama.state_dict(), "optimizer": {"state": state}, "step": 3}, "full.ckpt")
    assert main(["import", "full.ckpt", "full", "--config", "hub"]) == 0
    assert_same(tensors_in(Path("full/checkpoints/step-00000000")), weights(llama))


def test_lightning_trainers_file_opens_once_its_names_are_the_models(
    llama: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prefixed = {f"model.{name}": tensor for name, tensor in llama.state_dict().items()}
    torch.save({"state_dict": prefixed, "optimizer_states": [], "epoch": 1, "global_step": 3}, "last.ckpt")
    assert main(["import", "last.ckpt", "run", "--config", "hub"]) == 2
    assert OTHER_NAMES in capsys.readouterr().err
    [lines] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(lines, {})
    assert main(["import", "weights.pt", "run", "--config", "hub"]) == 0
    assert_same(tensors_in(Path("run/checkpoints/step-00000000")), weights(llama))
