"""Adapters leave a checkpoint in peft's own format, or merged into the base: both give the logits of the run.

Checkpoints hold the adapters alone, and know their base, as a run's do.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from foreign_models import export, save
from plain_backend import PlainBackend, checkpoints, load
from safetensors.torch import load_file, save_file
from small_models import ARCHITECTURES, VOCABULARY, materialise
from small_models import logits as logits_of
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.manager import Checkpoints
from portable_fsdp.checkpoint.manifests import read_manifest
from portable_fsdp.config.schema import Lora, Model, Precision
from portable_fsdp.layout import full_region
from portable_fsdp.models.build import build_model
from portable_fsdp.models.pretrained import fingerprint
from portable_fsdp.models.tensor_files import SafetensorsFolder
from portable_fsdp.models.weights import Base, BuiltModel, names_of_weights
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow  # peft takes seconds to import

Keys = dict[str, Any]
PLAIN: Keys = {"r": 3, "alpha": 5.0}
# In one layer both weights, whose adapters peft nests, in the other one of them.
_OF_EXPERTS: Keys = {"rslora": True, "rank_pattern": {r"1\.mlp\.experts\.gate_up_proj": 2}} | {
    "targets": ["all-linear", "experts.down_proj", "layers.1.mlp.experts.gate_up_proj"]
}
KINDS: dict[str, tuple[str, Keys]] = {
    "plain": ("gpt2", {}),
    "all": (
        "llama",
        {"dora": True, "rslora": True, "rank_pattern": {r"layers\.1\..*": 5, "q_proj": 2}, "dropout": 0.1}
        | {"alpha_pattern": {r"layers\.1\..*": 9.0}, "train_whole": ["*norm", "embed_tokens"]},
    ),
    "tied": (
        "llama_tied",
        {"rslora": True, "rank_pattern": {"q_proj": 2}, "train_whole": ["lm_head"]}
        | {"targets": r".*\.layers\.(0|1)\.(mlp|self_attn)\.(q|v|up)_proj"},
    ),
    "dora": ("gpt2", {"dora": True}),
    "experts": ("qwen3_moe", _OF_EXPERTS),
    "experts of mixtral": ("mixtral", _OF_EXPERTS),
    "one of experts": ("gpt_oss", {"targets": ["experts.down_proj"]}),
    "transposed": (
        "gpt_oss",
        {"targets": ["experts.down_proj", "experts.gate_up_proj"], "rank_pattern": {"down_proj": 2}},
    ),
}
PER_COMMIT = {"plain", "all", "tied", "experts"}
IDS = torch.arange(24).view(2, 12)

# transformers', of how peft 0.21 asks it.
AS_PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def base_model(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURES[name]), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)


def adapted(
    base: Path, lora: Keys | None = None, tokens: int = 0, **precision: Any
) -> tuple[BuiltModel, Any, torch.optim.Optimizer]:
    """The model over the base in a folder, with memory, and an optimizer with state. `tokens`: new ones."""
    section = Model(pretrained=str(base), lora=Lora.model_validate(PLAIN | (lora or {})))
    sizes: Keys = {"seed": 0, "seq_len": 12, "vocabulary": VOCABULARY + tokens}
    built = build_model(section, Precision(**precision), keeps_ids=lambda: True, **sizes)
    trained = [weight for weight in materialise(built).parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-9, momentum=0.9)
    for weight in trained:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return built, built.model.eval(), optimizer


def run_of(
    folder: Path, name: str = "llama", lora: Keys | None = None, tokens: int = 0, **changes: Any
) -> tuple[Path, Any]:
    """A base, saved to `folder`/base, and the checkpoint of a run over it, whose adapters have moved."""
    dtype = changes.pop("dtype", "float32")
    base_model(folder / "base", name, getattr(torch, dtype))
    built, model, optimizer = adapted(folder / "base", lora, tokens, frozen=dtype)
    trained = {fqn for fqn, weight in model.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        for fqn in trained:
            model.get_parameter(fqn).add_(torch.randn(model.get_parameter(fqn).shape) * 0.1)
    ties = {other: first for first, *others in names_of_weights(model).values() for other in others}
    run = opened(folder, built.base, lora=lora, **{"model_config": built.config, "ties": ties} | changes)
    path = run.save(1, model, optimizer, (0, 0))
    assert {key for key in read_manifest(path).tensors if "/" not in key} == trained  # and nothing of the base
    return path, model


def opened(
    folder: Path, base: Base | None, settings: Keys | None = None, lora: Keys | None = None, **changes: Any
) -> Checkpoints:
    """The run's checkpoints in `folder`, as it is with this base."""
    pretrained = base.pretrained if base else str(folder / "base")
    config = {"model": {"pretrained": pretrained, "lora": PLAIN | (lora or {}), "dropout": None}}
    arguments = {"config": config, "base": base} | changes
    return checkpoints(folder / "checkpoints", PlainBackend(devices=3), settings, **arguments)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(model, IDS)


def opened_by_peft(folder: Path, tokens: int = 0) -> Any:
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "base")
    if tokens:
        base.resize_token_embeddings(VOCABULARY + tokens)
    return peft.PeftModel.from_pretrained(base, str(folder / "adapters"))


@AS_PEFT_ASKS
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match:RuntimeWarning")  # of experts
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.proof] if kind not in PER_COMMIT else []) for kind in KINDS]
)
def test_every_kind_leaves_for_peft_and_merged_and_starts_a_run(tmp_path: Path, kind: str) -> None:
    name, lora = KINDS[kind]
    path, model = run_of(tmp_path, name, lora)
    export(path, "huggingface", tmp_path / "merged")
    (tmp_path / "base").rename(tmp_path / "away")  # no export of adapters asks for it
    export(path, "peft", tmp_path / "adapters", save_tokenizer=lambda folder: (folder / "tokenizer.json").touch())
    (tmp_path / "away").rename(tmp_path / "base")
    files = ["adapter_config.json", "adapter_model.safetensors", "portable_fsdp.json", "tokenizer.json"]
    assert sorted(file.name for file in (tmp_path / "adapters").iterdir()) == ["README.md", *files]
    card = (tmp_path / "adapters/README.md").read_text()
    assert "AutoPeftModelForCausalLM.from_pretrained" in card
    assert str(tmp_path) not in card  # where its base was on this host

    theirs, expected = opened_by_peft(tmp_path), logits(model)
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-5, atol=1e-5)
    plain = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    assert not torch.allclose(plain, expected, atol=1e-2)
    torch.testing.assert_close(logits(adapted(tmp_path / "base", lora)[1]), plain, rtol=1e-5, atol=1e-5)
    settings = theirs.peft_config["default"]
    for ours, its in (("rslora", "use_rslora"), ("dora", "use_dora"), ("dropout", "lora_dropout")):
        assert getattr(settings, its) == lora.get(ours, 0)
    if kind == "plain":  # without naming the base: the adapters know it
        for opens in (peft.AutoPeftModelForCausalLM, AutoModelForCausalLM):
            assert torch.equal(logits(opens.from_pretrained(str(tmp_path / "adapters"))), expected)

    theirs.save_pretrained(str(tmp_path / "theirs"))
    for folder, master in (("adapters", "float32"), ("theirs", "float32"), ("theirs", "bfloat16")):
        begins = adapted(tmp_path / "base", lora | {"start_from": str(tmp_path / folder)}, master=master)[0]
        for fqn, weight in model.named_parameters():
            rows = (slice(len(weight) // 3, len(weight) // 2), *full_region(weight.shape)[1:])
            assert torch.equal(begins.fill(fqn, rows), weight[rows].to(getattr(torch, master))), fqn

    torch.testing.assert_close(logits(theirs.merge_and_unload()), expected, rtol=1e-5, atol=1e-5)
    whole, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)  # type: ignore
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(logits(whole), expected, rtol=1e-5, atol=1e-5)
    weights = {key.replace(".modules_to_save.default", ""): weight for key, weight in theirs.state_dict().items()}
    for key, weight in load_file(tmp_path / "merged/model.safetensors").items():
        of_theirs = weights.get(key, weights.get(f"base_model.model.{key}"))
        torch.testing.assert_close(weight, of_theirs, rtol=1e-5, atol=1e-5)


@AS_PEFT_ASKS
def test_new_tokens_leave_with_their_tables(tmp_path: Path) -> None:
    path, model = run_of(tmp_path, lora={"train_whole": ["embed_tokens", "lm_head"]}, tokens=3)
    export(path, "peft", tmp_path / "adapters")
    export(path, "huggingface", tmp_path / "merged")
    for whole in (opened_by_peft(tmp_path, tokens=3), AutoModelForCausalLM.from_pretrained(tmp_path / "merged")):
        torch.testing.assert_close(logits(whole), logits(model), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_leaves_out_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = run_of(tmp_path, "llama_tied")
    manifest = read_manifest(path)
    assert all("lora_" in key for key in manifest.tensors)
    assert manifest.left_out.keys() | manifest.tensors.keys() >= dict(model.named_parameters()).keys()
    assert not [key for key in manifest.left_out if "lora_" in key or "/" in key]
    assert manifest.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    for command in ("verify", "show", "list"):
        assert main([command, str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"left out: {tmp_path / 'base'} (fingerprint " in printed
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,}" in printed  # of the whole model
    assert main(["diff", str(path), str(path)]) == 0


def test_a_checkpoint_that_holds_its_base_exports_the_same(tmp_path: Path) -> None:
    path, model = run_of(tmp_path)
    _, old, optimizer = adapted(tmp_path / "base")
    old.load_state_dict(model.state_dict())
    held = opened(tmp_path / "old", None, model_config=read_manifest(path).architecture)
    (tmp_path / "old").mkdir()
    older = held.save(1, old, optimizer, (0, 0))
    assert read_manifest(older).base is None
    for checkpoint, folder in ((path, "export"), (older, "older")):
        export(checkpoint, "huggingface", tmp_path / folder)
    mine, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("export", "older"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in mine.items())


def test_merging_finds_the_base_or_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = run_of(tmp_path)
    export = ["export", str(path), str(tmp_path / "export"), "--tokenizer", "none"]
    for words in (["safetensors"], ["dcp"], ["peft", "--base", str(tmp_path / "base")]):
        assert main([*export, "--format", *words]) == 2
    printed = capsys.readouterr().err
    assert printed.count("the checkpoint leaves out the base model of its adapters: ") == 2
    assert "--base" in printed
    assert "expected --format huggingface, found peft" in printed
    (tmp_path / "base").rename(tmp_path / "moved")
    assert main(export) == 2
    printed = capsys.readouterr().err
    assert f"expected the base model of its adapters:\n    {tmp_path / 'base'} (fingerprint " in printed
    assert "--base FOLDER" in printed
    base_model(tmp_path / "base", seed=1)
    assert main(export) == 2
    assert f"found another in {tmp_path / 'base'} (fingerprint " in capsys.readouterr().err
    assert main([*export, "--base", str(tmp_path / "moved")]) == 0
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)


def test_a_moved_base_is_known_and_another_refused(tmp_path: Path) -> None:
    _, model = run_of(tmp_path)
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.move(tmp_path / "base", moved)
    base_model(other, seed=1)
    built, resumed, optimizer = adapted(moved)
    with torch.no_grad():
        for parameter in resumed.parameters():  # a load overwrites all, the base too
            parameter.zero_()
    run = opened(tmp_path, built.base)
    assert load(run, resumed, optimizer).changes == ()
    assert torch.equal(logits(resumed), logits(model))
    assert read_manifest(run.save(2, resumed, optimizer, (0, 0))).base is not None

    of_other = adapted(other)[0].base
    for settings in ({}, {"load": "weights_only", "resume": "named"}):
        elsewhere = tmp_path / "elsewhere" if settings else tmp_path
        resume = str(tmp_path / "checkpoints/step-00000002") if settings else "auto"
        with pytest.raises(CheckpointError) as error:
            load(opened(elsewhere, of_other, settings), resumed, optimizer, resume)
        for expected in (f"    {moved} (fingerprint ", f"    {other} (fingerprint ", "checkpoint.allow='[model.base]'"):
            assert expected in str(error.value)
        allowed = opened(elsewhere, of_other, {**settings, "allow": ["model.base"]})
        assert [one.name for one in load(allowed, resumed, optimizer, resume).changes] == ["model.base"]
        assert not torch.equal(logits(resumed), logits(model))
    with pytest.raises(CheckpointError, match=r"differ from those of this model(.|\n)*float32 \[101, 48\]  nothing"):
        load(opened(tmp_path, None), resumed, optimizer)
    without = {"model": {"pretrained": str(moved), "dropout": None}}
    with pytest.raises(CheckpointError, match=r'of this model:\n  model\.lora: \{"r": 3, .*, now null\n +this model'):
        load(opened(tmp_path, None, config=without), resumed, optimizer)


def test_a_run_that_holds_its_base_goes_on_holding_it(tmp_path: Path) -> None:
    """Who knows whether it is that of the files."""
    base_model(tmp_path / "base")
    _, held, optimizer = adapted(tmp_path / "base")
    with torch.no_grad():
        for parameter in held.parameters():
            parameter.add_(0.1)
    opened(tmp_path, None).save(1, held, optimizer, (0, 0))
    built, resumed, optimizer = adapted(tmp_path / "base")
    run = opened(tmp_path, built.base, lora={"start_from": None})  # a key that the older release didn't know
    assert load(run, resumed, optimizer).changes == ()
    assert torch.equal(logits(resumed), logits(held))
    assert read_manifest(run.save(2, resumed, optimizer, (0, 0))).base is None


def test_a_fingerprint_tells_other_weights(tmp_path: Path) -> None:
    base_model(tmp_path / "base")
    weights, first = load_file(tmp_path / "base/model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    expected = fingerprint(SafetensorsFolder(tmp_path / "base"))
    for change, changed in {
        "value": weights | {first: weights[first] * 1.001},
        "dtype": weights | {first: weights[first].bfloat16()},
        "name": {key.replace("layers.1.mlp.up", "layers.2.mlp.up"): weight for key, weight in weights.items()},
        "nothing": weights,
    }.items():
        folder = tmp_path / change  # with two files
        folder.mkdir()
        files = {key: f"model-{number % 2}.safetensors" for number, key in enumerate(sorted(changed))}
        for file in set(files.values()):
            save_file({key: changed[key] for key in files if files[key] == file}, folder / file, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        assert (fingerprint(SafetensorsFolder(folder)) == expected) == (change == "nothing"), change


def test_merging_rounds_once(tmp_path: Path) -> None:
    """In float32, and then to the base's dtype: peft's own merge computes in the base's."""
    path, model = run_of(tmp_path, dtype="bfloat16")
    export(path, "huggingface", tmp_path / "export")
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    name = "model.layers.1.mlp.up_proj"
    layer = model.get_submodule(name)
    a, b = (half["default"].weight.float() for half in (layer.lora_A, layer.lora_B))
    expected = (layer.base_layer.weight.float() + 5 / 3 * b @ a).bfloat16()
    assert torch.equal(whole.get_submodule(name).weight, expected)


@AS_PEFT_ASKS
def test_peft_names_just_the_layers_and_the_revision_of_a_base_of_the_hub(tmp_path: Path) -> None:
    own = "model.layers.1.self_attn.q_proj"
    for targets, revision in ((["v_proj", "q_proj"], "v1.0"), ([own], "refs/pr/1"), (["q_proj"], None)):
        pretrained = f"org/name@{revision}" if revision else "org/name"
        folder, config = tmp_path / f"{revision}", {"model": {"pretrained": pretrained, "lora": PLAIN}}
        path, model = run_of(folder, lora={"targets": targets}, config=config)
        export(path, "peft", folder / "adapters")
        settings = json.loads((folder / "adapters" / "adapter_config.json").read_text())
        names = ("target_modules", "base_model_name_or_path", "revision")
        assert [settings[name] for name in names] == [sorted(targets), "org/name", revision]
        assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (3, 5, "LORA")
        assert torch.equal(logits(opened_by_peft(folder)), logits(model))


def test_adapters_in_another_dtype(tmp_path: Path) -> None:
    path, model = run_of(tmp_path)
    arguments = ["--format", "peft", "--tokenizer", "none", "--dtype", "bfloat16"]
    assert main(["export", str(path), str(tmp_path / "export"), *arguments]) == 0
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(logits(whole), logits(model), rtol=0.05, atol=0.05)
    assert not torch.equal(logits(whole), logits(model))
    plain = save(tmp_path / "plain", AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURES["llama"])))
    with pytest.raises(CheckpointError, match=r"no adapters \(model\.lora\); it has whole weights"):
        export(plain, "peft", tmp_path / "none")


def test_adapters_without_their_settings_are_refused(tmp_path: Path) -> None:
    settings: list[Keys] = [{"r": None}, {"r": 0}, {"r": "3"}, {"alpha": [1.0]}]
    for number, wrong in enumerate(settings):
        path, _ = run_of(tmp_path / str(number), config={"model": {"pretrained": "base", "lora": PLAIN | wrong}})
        with pytest.raises(CheckpointError, match=r"expected r and alpha in model\.lora of its config"):
            export(path, "huggingface", tmp_path / "export")
