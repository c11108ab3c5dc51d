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
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.manager import Checkpoints
from portable_fsdp.checkpoint.manifests import read_manifest
from portable_fsdp.config.schema import Lora, Model
from portable_fsdp.models.architecture import config_to_json
from portable_fsdp.models.build import build_model
from portable_fsdp.models.pretrained import fingerprint
from portable_fsdp.models.tensor_files import SafetensorsFolder
from portable_fsdp.models.weights import Base
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow  # peft takes seconds to import

_COMMON = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"model_type": "llama", "intermediate_size": 36, "num_key_value_heads": 1},
    "llama_tied": _COMMON | {"model_type": "llama", "intermediate_size": 36, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32},
}
EXPERTS = _COMMON | {"intermediate_size": 36, "num_key_value_heads": 1, "num_experts_per_tok": 2, "head_dim": 12}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | {"model_type": "qwen3_moe", "num_experts": 3, "moe_intermediate_size": 20},
    "gpt_oss": EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 3},  # transposed weights
}
IDS = torch.arange(24).view(2, 12)
LAYER = "model.layers.1.self_attn"
# transformers', of how peft 0.21 asks it.
AS_PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def train(
    folder: Path, name: str, targets: Any = "all-linear", dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[Path, Any]:
    """A base, saved to `folder`/base, and the checkpoint of a run over it, whose adapters have moved."""
    model = base_model(folder / "base", name, dtype)
    architecture = config_to_json(model.config)
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM"
    )
    peft.inject_adapter_in_model(settings, model)
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            if "lora_" in fqn:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-9, momentum=0.9)
    model(input_ids=IDS).logits.sum().backward()
    optimizer.step()  # it has state of the adapters
    ties = {"lm_head.weight": "model.embed_tokens.weight"} if name == "llama_tied" else {}
    run = opened(folder, base_of(folder / "base"), model_config=architecture, ties=ties, **changes)
    return run.save(1, model, optimizer, (0, 0)), model.eval()


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"dora": True, "rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\..*": 9.0}}
    | {"train_whole": ["model.norm", "embed_tokens"], "dropout": 0.1},
    "llama_tied": {"rslora": True, "rank_pattern": {"q_proj": 2}, "train_whole": ["embed_tokens"]},
    "gpt2": {"dora": True},
    "qwen3_moe": {"targets": ["all-linear", "experts.down_proj", "1.mlp.experts.gate_up_proj"]},
    "gpt_oss": {"targets": ["experts.down_proj", "experts.gate_up_proj"], "rank_pattern": {"down_proj": 2}},
}


def run_of_kind(folder: Path, name: str, tokens: int = 0) -> tuple[Path, Any]:
    """Save a checkpoint of adapters of a kind in KINDS; `tokens`: new tokens, whose embedding and head train."""
    base_model(folder / "base", name)
    whole = ["embed_tokens", "lm_head"] if tokens else KINDS[name].get("train_whole", [])
    lora = Lora.model_validate({"r": 3, "alpha": 5.0, **KINDS[name], "train_whole": whole})
    section = Model(pretrained=str(folder / "base"), lora=lora)
    built = build_model(section, seed=0, seq_len=12, vocabulary=61 + tokens, keeps_ids=lambda: True)
    table = "transformer.wte" if name == "gpt2" else "model.embed_tokens"
    ties = {} if name not in ("llama_tied", "gpt2") else {"lm_head.weight": f"{table}.weight"}
    trained = {fqn for fqn, weight in built.model.named_parameters() if weight.requires_grad}
    for fqn, weight in [*built.model.named_parameters()]:
        value = built.fill(fqn, tuple(slice(0, size) for size in weight.shape))
        value = value + 0.1 * torch.randn_like(value) if fqn in trained else value
        own = torch.nn.Parameter(value, requires_grad=fqn in trained)
        for place in [fqn, *(other for other, first in ties.items() if first == fqn)]:
            owner, _, leaf = place.rpartition(".")
            built.model.get_submodule(owner)._parameters[leaf] = own
    optimizer = torch.optim.SGD([w for w in built.model.parameters() if w.requires_grad], lr=1e-9, momentum=0.9)
    forward(built.model).sum().backward()
    optimizer.step()
    config = {"model": section.model_dump(mode="json")}
    run = opened(folder, built.base, model_config=built.config, ties=ties, config=config)
    path = run.save(1, built.model, optimizer, (0, 0))
    assert {key for key in read_manifest(path).tensors if "/" not in key} == trained  # and nothing of the base
    return path, built.model.eval()


def proofs(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.proof) for name in names]


def forward(model: Any) -> torch.Tensor:
    """Logits of a model whose own forward returns a loss."""
    return type(model).forward(model, input_ids=IDS, use_cache=False).logits


@AS_PEFT_ASKS
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match:RuntimeWarning")  # of experts
@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3_moe", *proofs("gpt2", "gpt_oss")])
def test_peft_opens_and_merges_every_kind_as_we_do(tmp_path: Path, name: str) -> None:
    path, model = run_of_kind(tmp_path, name)
    export(path, "peft", tmp_path / "adapters")
    export(path, "huggingface", tmp_path / "merged")
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    expected = forward(model)
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-5, atol=1e-5)
    settings = theirs.peft_config["default"]
    for ours, its in (("rslora", "use_rslora"), ("dora", "use_dora"), ("dropout", "lora_dropout")):
        assert getattr(settings, its) == KINDS[name].get(ours, 0)
    torch.testing.assert_close(logits(theirs.merge_and_unload()), expected, rtol=1e-5, atol=1e-5)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
    weights = {key.replace(".modules_to_save.default", ""): weight for key, weight in theirs.state_dict().items()}
    for key, weight in load_file(tmp_path / "merged/model.safetensors").items():
        of_theirs = weights.get(key, weights.get(f"base_model.model.{key}"))
        torch.testing.assert_close(weight, of_theirs, rtol=1e-5, atol=1e-5)


@AS_PEFT_ASKS
def test_new_tokens_leave_with_their_tables(tmp_path: Path) -> None:
    path, model = run_of_kind(tmp_path, "llama", tokens=3)
    export(path, "peft", tmp_path / "adapters")
    export(path, "huggingface", tmp_path / "merged")
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(64)
    theirs: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for whole in (theirs, merged):
        torch.testing.assert_close(logits(whole), forward(model), rtol=1e-5, atol=1e-5)


def base_model(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(MODELS | OF_EXPERTS)[name]), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def base_of(folder: Path) -> Base | None:
    section = Model(pretrained=str(folder), lora=Lora(r=3, alpha=5.0))
    return build_model(section, seed=0, seq_len=12, vocabulary=61).base


def opened(folder: Path, base: Base | None, settings: dict[str, Any] | None = None, **changes: Any) -> Checkpoints:
    """The run's checkpoints in `folder`, as it is with this base."""
    overrides = {key: changes.pop(key) for key in ("r", "alpha", "start_from") if key in changes}
    lora = {"r": 3, "alpha": 5.0} | overrides
    pretrained = base.pretrained if base else str(folder / "base")
    config = {"model": {"pretrained": pretrained, "lora": lora, "dropout": None}}
    arguments: dict[str, Any] = {"config": config, "base": base} | changes
    return checkpoints(folder / "checkpoints", PlainBackend(devices=3), settings, **arguments)


def untrained(folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    """A model over the base in `folder`, its adapters as peft makes them."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear"), model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-9, momentum=0.9)
    model(input_ids=IDS).logits.sum().backward()
    optimizer.step()
    return model, optimizer


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@AS_PEFT_ASKS
@pytest.mark.parametrize("name", MODELS)
def test_peft_opens_the_adapters(tmp_path: Path, name: str) -> None:
    path, model = train(tmp_path, name)
    (tmp_path / "base").rename(tmp_path / "away")  # no export of adapters asks for it
    export(path, "peft", tmp_path / "export", save_tokenizer=lambda folder: (folder / "tokenizer.json").touch())
    (tmp_path / "away").rename(tmp_path / "base")
    files = ["adapter_config.json", "adapter_model.safetensors", "portable_fsdp.json", "tokenizer.json"]
    assert sorted(file.name for file in (tmp_path / "export").iterdir()) == ["README.md", *files]
    card = (tmp_path / "export/README.md").read_text()
    assert "AutoPeftModelForCausalLM.from_pretrained" in card
    assert str(tmp_path) not in card  # where its base was on this host

    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = logits(base)
    whole = peft.PeftModel.from_pretrained(base, str(tmp_path / "export"))
    assert torch.equal(logits(whole), logits(model))
    assert not torch.allclose(logits(whole), plain, atol=1e-2)
    # Without naming the base: the adapters know it.
    by_name: Any = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "export"))
    assert torch.equal(logits(by_name), logits(model))
    plainly: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(logits(plainly), logits(model))
    # And a run of ours begins with them.
    lora = Lora(r=3, alpha=5.0, start_from=str(tmp_path / "export"))
    section = Model(pretrained=str(tmp_path / "base"), lora=lora)
    built = build_model(section, seed=0, seq_len=12, vocabulary=61)
    for fqn, parameter in model.named_parameters():
        assert torch.equal(built.fill(fqn, tuple(slice(0, size) for size in parameter.shape)), parameter), fqn


@pytest.mark.parametrize("name", MODELS)
def test_merged_it_is_a_plain_model(tmp_path: Path, name: str) -> None:
    path, model = train(tmp_path, name)
    export(path, "huggingface", tmp_path / "export")
    whole, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)  # type: ignore
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(whole.model if hasattr(whole, "model") else whole.transformer).__module__.startswith("transformers.")
    torch.testing.assert_close(logits(whole), logits(model), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_leaves_out_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = train(tmp_path, "llama_tied")
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
    path, model = train(tmp_path, "llama")
    old, optimizer = untrained(tmp_path / "base")
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
    path, model = train(tmp_path, "llama")
    export = ["export", str(path), str(tmp_path / "export"), "--tokenizer", "none"]
    for words in (
        ["--format", "safetensors"],
        ["--format", "dcp"],
        ["--format", "peft", "--base", str(tmp_path / "base")],
    ):
        assert main([*export, *words]) == 2
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
    _, model = train(tmp_path, "llama")
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.move(tmp_path / "base", moved)
    base_model(other, seed=1)
    resumed, optimizer = untrained(moved)
    with torch.no_grad():
        for parameter in resumed.parameters():  # a load overwrites all, the base too
            parameter.zero_()
    run = opened(tmp_path, base_of(moved))
    assert load(run, resumed, optimizer).changes == ()
    assert torch.equal(logits(resumed), logits(model))
    assert read_manifest(run.save(2, resumed, optimizer, (0, 0))).base is not None

    for settings in ({}, {"load": "weights_only", "resume": "named"}):
        elsewhere = tmp_path / "elsewhere" if settings else tmp_path
        resume = str(tmp_path / "checkpoints/step-00000002") if settings else "auto"
        with pytest.raises(CheckpointError) as error:
            load(opened(elsewhere, base_of(other), settings), resumed, optimizer, resume)
        for expected in (f"    {moved} (fingerprint ", f"    {other} (fingerprint ", "checkpoint.allow='[model.base]'"):
            assert expected in str(error.value)
        allowed = opened(elsewhere, base_of(other), {**settings, "allow": ["model.base"]})
        assert [one.name for one in load(allowed, resumed, optimizer, resume).changes] == ["model.base"]
        assert not torch.equal(logits(resumed), logits(model))
    with pytest.raises(CheckpointError, match=r"differ from those of this model(.|\n)*float32 \[61, 24\]  nothing"):
        load(opened(tmp_path, None), resumed, optimizer)
    without = {"model": {"pretrained": str(moved), "dropout": None}}
    with pytest.raises(CheckpointError, match=r'of this model:\n  model\.lora: \{"r": 3, .*, now null\n +this model'):
        load(opened(tmp_path, None, config=without), resumed, optimizer)


def test_a_run_that_holds_its_base_goes_on_holding_it(tmp_path: Path) -> None:
    """Who knows whether it is that of the files."""
    base_model(tmp_path / "base")
    held, optimizer = untrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in held.parameters():
            parameter.add_(0.1)
    opened(tmp_path, None).save(1, held, optimizer, (0, 0))
    resumed, optimizer = untrained(tmp_path / "base")
    run = opened(tmp_path, base_of(tmp_path / "base"), start_from=None)  # a key that the older release didn't know
    assert load(run, resumed, optimizer).changes == ()
    assert torch.equal(logits(resumed), logits(held))
    assert read_manifest(run.save(2, resumed, optimizer, (0, 0))).base is None


@pytest.mark.parametrize("changed", ["value", "dtype", "name", "nothing"])
def test_a_fingerprint_tells_other_weights(tmp_path: Path, changed: str) -> None:
    base_model(tmp_path / "base")
    weights = load_file(tmp_path / "base/model.safetensors")
    first = "model.layers.1.mlp.up_proj.weight"
    if changed == "value":
        weights[first] *= 1.001
    elif changed == "dtype":
        weights[first] = weights[first].bfloat16()
    elif changed == "name":
        weights["model.layers.2.mlp.up_proj.weight"] = weights.pop(first)
    (tmp_path / "other").mkdir()
    half = dict(sorted(weights.items())[::2]), dict(sorted(weights.items())[1::2])  # in two files: the same tensors
    for number, part in enumerate(half):
        save_file(part, tmp_path / f"other/model-{number}.safetensors", {"format": "pt"})
    index = {key: f"model-{number}.safetensors" for number, part in enumerate(half) for key in part}
    (tmp_path / "other/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    prints = {fingerprint(SafetensorsFolder(tmp_path / folder)) for folder in ("base", "other")}
    assert len(prints) == (1 if changed == "nothing" else 2)


def test_merging_rounds_once(tmp_path: Path) -> None:
    """In float32, and then to the base's dtype: peft's own merge computes in the base's."""
    path, model = train(tmp_path, "llama", dtype=torch.bfloat16)
    export(path, "huggingface", tmp_path / "export")
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    name = "model.layers.1.mlp.up_proj"
    layer = model.get_submodule(name)
    a, b = (half["default"].weight.float() for half in (layer.lora_A, layer.lora_B))
    expected = (layer.base_layer.weight.float() + 5 / 3 * b @ a).bfloat16()
    assert torch.equal(whole.get_submodule(name).weight, expected)


@AS_PEFT_ASKS
@pytest.mark.parametrize(
    ("targets", "pretrained", "expected"),
    [
        (["v_proj", "q_proj"], "org/name@v1.0", (["q_proj", "v_proj"], "org/name", "v1.0")),
        ([f"{LAYER}.q_proj"], "org/name@refs/pr/1", ([f"{LAYER}.q_proj"], "org/name", "refs/pr/1")),
        (["q_proj"], "org/name", (["q_proj"], "org/name", None)),
    ],
)
def test_peft_names_just_the_layers_and_the_revision_of_a_base_of_the_hub(
    tmp_path: Path, targets: list[str], pretrained: str, expected: tuple[list[str], str, str | None]
) -> None:
    config = {"model": {"pretrained": pretrained, "lora": {"r": 3, "alpha": 5.0}}}
    path, model = train(tmp_path, "llama", targets, config=config)
    export(path, "peft", tmp_path / "export")
    settings = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    names = ("target_modules", "base_model_name_or_path", "revision")
    assert tuple(settings[name] for name in names) == expected
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (3, 5, "LORA")
    whole = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "export")
    )
    assert torch.equal(logits(whole), logits(model))


def test_adapters_in_another_dtype(tmp_path: Path) -> None:
    path, model = train(tmp_path, "llama")
    arguments = ["--format", "peft", "--tokenizer", "none", "--dtype", "bfloat16"]
    assert main(["export", str(path), str(tmp_path / "export"), *arguments]) == 0
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(logits(whole), logits(model), rtol=0.05, atol=0.05)
    assert not torch.equal(logits(whole), logits(model))
    plain = save(tmp_path / "plain", AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["llama"])))
    with pytest.raises(CheckpointError, match=r"no adapters \(model\.lora\); it has whole weights"):
        export(plain, "peft", tmp_path / "none")


def test_adapters_without_their_settings_are_refused(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [{"r": None}, {"r": 0}, {"r": "3"}, {"alpha": [1.0]}]
    for number, wrong in enumerate(settings):
        path, _ = train(tmp_path / str(number), "llama", **wrong)
        with pytest.raises(CheckpointError, match=r"expected r and alpha in model\.lora of its config"):
            export(path, "huggingface", tmp_path / "export")
