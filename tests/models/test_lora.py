"""Adapters (LoRA): which layers get them, their initial values, and what is refused.

What they compute is compared with peft in tests/checkpoint/test_adapters.py, kind by kind.
"""

import json
import logging
import math
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import (
    ARCHITECTURES,
    VOCABULARY,
    build,
    edit,
    families,
    logits,
    materialise,
    open_folder,
    save,
    stock_model,
    token_ids,
    whole_weight,
)

from portable_fsdp.config.schema import Config, Lora
from portable_fsdp.layout import full_region
from portable_fsdp.models.lora import read_as_experts, start_from
from portable_fsdp.models.weights import BuiltModel, plain_name
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.train.build import shard_policy

pytestmark = pytest.mark.slow

Q = "model.layers.0.self_attn.q_proj"


def adapted(name: str = "llama", seed: int = 0, precision: dict[str, Any] | None = None, **lora: Any) -> BuiltModel:
    return build(name, seed, precision, keys={"lora": Lora(**lora)})


def trained(built: BuiltModel) -> list[str]:
    return [fqn for fqn, weight in built.model.named_parameters() if weight.requires_grad]


def layers(built: BuiltModel) -> set[str]:
    return {fqn.partition(".lora_A")[0] for fqn in trained(built) if ".lora_A" in fqn}


@pytest.mark.parametrize("name", families(["llama", "llama_tied", "gpt2", "qwen3_moe", "falcon"]))
def test_the_model_begins_as_its_base_and_only_adapters_train(name: str) -> None:
    base, built = build(name), adapted(name, r=3)
    names = trained(built)
    assert names
    if name == "gpt2":  # whose weights are [in, out]
        shapes = {fqn: tuple(weight.shape) for fqn, weight in built.model.named_parameters()}
        assert shapes["transformer.h.0.attn.c_attn.lora_A.default.weight"] == (3, 48)
        assert shapes["transformer.h.0.attn.c_attn.lora_B.default.weight"] == (144, 3)
    assert all(".lora_A.default.weight" in fqn or ".lora_B.default.weight" in fqn for fqn in names)
    for fqn, weight in built.model.named_parameters():
        if fqn not in names:
            assert torch.equal(whole_weight(built, fqn), whole_weight(base, plain_name(fqn))), fqn
        elif ".lora_B" in fqn:
            assert not whole_weight(built, fqn).any()
        else:
            drawn = whole_weight(built, fqn)
            assert drawn.shape == weight.shape
            # kaiming_uniform with a = sqrt(5) is uniform within 1 / sqrt(fan in).
            assert 0.8 / math.sqrt(drawn.shape[1]) < drawn.abs().max() <= 1 / math.sqrt(drawn.shape[1])
    ids = token_ids()
    assert torch.equal(logits(materialise(built), ids), logits(materialise(base), ids))


def test_size_counts_what_trains() -> None:
    base, built = build("llama_tied").size, adapted("llama_tied", r=3).size
    assert built.trained_parameters == built.parameters - base.parameters > 0
    assert built.frozen_parameters == base.parameters  # the tied table is the head's matrix
    assert base.trained_parameters == base.parameters
    assert base.frozen_parameters == 0


def test_an_adapter_depends_on_seed_and_name_alone() -> None:
    built, again, other = adapted(r=3), adapted(r=3, targets=("q_proj",)), adapted(r=3, seed=1)
    name = f"{Q}.lora_A.default.weight"
    full = whole_weight(built, name)
    assert torch.equal(full, whole_weight(again, name))
    assert not torch.equal(full, whole_weight(other, name))
    assert not torch.equal(full, whole_weight(built, name.replace("layers.0", "layers.1")))
    rows = (slice(1, 3), *full_region(full.shape)[1:])
    assert torch.equal(built.fill(name, rows), full[1:3])


def test_dropout_is_of_the_adapters_inputs_in_training() -> None:
    model = materialise(adapted(r=4, dropout=0.25, targets=(Q,)))
    layer: Any = model.get_submodule(Q)
    drop = layer.lora_dropout["default"]
    assert isinstance(drop, torch.nn.Dropout)
    assert (drop.p, drop.training) == (0.25, True)
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(5, 48)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("llama", {"rank_pattern": {"k_porj": 4}}, r"rank_pattern: 'k_porj' matches no layer .*(.|\n)*k_proj"),
        ("llama", {"rank_pattern": {"*q_proj": 4}}, r"rank_pattern: '\*q_proj' isn't a regular expression"),
        ("llama", {"alpha_pattern": {"lm_head": 4}}, r"alpha_pattern: 'lm_head' matches no layer with an adapter"),
        ("llama", {"train_whole": ("embed",)}, r"train_whole: the pattern 'embed' matches nothing(.|\n)*embed_tokens"),
        ("qwen3_moe", {"targets": ("experts.down_proj",), "dropout": 0.1}, r"dropout: adapters of experts "),
        ("qwen3_moe", {"targets": ("experts.down_proj",), "dora": True}, r"dora: adapters of experts "),
        ("llama", {"train_whole": ("mlp",)}, r"train_whole: model.layers.0.mlp.gate_proj gets an adapter"),
        (
            "llama",
            {"targets": "q_proj"},
            r"targets: 'q_proj' matches no .* such as model\.layers\.0\.self_attn\.q_proj\.\n",
        ),
        ("llama", {"targets": "*q_proj"}, r"targets: '\*q_proj' isn't a regular expression"),
        (
            "llama",
            {"targets": ".*mlp.*"},
            r"targets: '\.\*mlp\.\*' matches model\.layers\.0\.mlp, which is no linear layer",
        ),
        *(
            (name, {"targets": (target,)}, rf"targets: .*{expected}")
            for name, target, expected in (
                ("llama", "q_porj", r"matches nothing in the model\.\n  nearest: "),
                ("llama", "mlp", r"matches nothing in the model\.\n  nearest: model\.layers\.0\.mlp"),
                ("llama", "model.norm", r"'model\.norm' matches model\.norm, but no linear layer\."),
                ("llama", "embed_tokens", r"model\.embed_tokens, but no linear layer\.\n  model\.lora\.train_whole"),
                ("qwen3_moe", "experts", r"\n.*the names of weights: experts\.down_proj, experts\.gate_up_proj\."),
                ("llama", "experts.down_proj", r"matches nothing in the model\."),
                ("llama_tied", "lm_head", r"lm_head can't have an adapter: its weight is tied to the embedding"),
            )
        ),
    ],
)
def test_settings_that_cannot_be(name: str, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.lora\.{expected}"):
        adapted(name, **settings)


def test_layers_beside_experts_get_their_own_adapters() -> None:
    """Which peft would take for adapters of the experts: it refuses them, so that an export is a merged model."""
    built = adapted("deepseek_v3")
    assert {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.down_proj"} <= layers(built)
    assert not any(".mlp.experts." in fqn for fqn in trained(built))
    base: Any = materialise(build("deepseek_v3"))
    assert read_as_experts(base, ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"])
    assert read_as_experts(base, ["model.layers.0.mlp.gate_proj"])
    assert not read_as_experts(base, ["model.layers.0.self_attn.o_proj"])
    assert not read_as_experts(materialise(build("llama")), ["model.layers.0.mlp.gate_proj"])


DORA, OF_EXPERTS = {"dora": True}, {"targets": ("experts.down_proj",)}
AS_UNITS, LINEAR = {"sharding": {"wrap_modules": ["*.lora_A.default"]}}, {"sharding": {"wrap_classes": ["Linear"]}}
EXPORT = {"checkpoint": {"export": True}}
LAYOUTS: list[tuple[str, dict[str, Any], dict[str, dict[str, Any]], str]] = [
    ("llama", DORA, LINEAR, r"base_layer can't be a unit: the layer"),
    ("llama", DORA, AS_UNITS, r"lora_A\.default can't be a unit"),
    ("llama", {}, LINEAR, ""),
    ("qwen3_moe", OF_EXPERTS, AS_UNITS, r"experts\.lora_of\.down_proj\.lora_A\.default can't be a unit"),
    ("qwen3_moe", OF_EXPERTS, {"sharding": {"tensor": 2}}, r"adapters of experts can't be split"),
    ("deepseek_v3", {}, EXPORT, r"^checkpoint\.export: peft would take(.|\n)*merge_adapters=true"),
    ("deepseek_v3", {}, {"checkpoint": {"export": True, "merge_adapters": True}}, ""),
    ("qwen3_moe", {}, EXPORT, ""),
]


@pytest.mark.parametrize(("name", "settings", "changes", "expected"), LAYOUTS)
def test_what_the_layout_and_the_export_refuse(
    name: str, settings: dict[str, Any], changes: dict[str, dict[str, Any]], expected: str
) -> None:
    sizes: dict[str, Any] = {"train": {"steps": 1, "global_batch": 2}, "data": {"seq_len": 16}}
    model = {"architecture": ARCHITECTURES[name], "lora": settings}
    config = Config.model_validate({"model": model} | sizes | changes)
    with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
        shard_policy(config, adapted(name, **settings).model)


def test_new_tokens_train_with_their_tables(tmp_path: Path) -> None:
    """The old rows are the base's, new ones their mean; no checkpoint has any other weight of the base."""
    save(tmp_path, "llama")
    more: dict[str, Any] = {"vocabulary": VOCABULARY + 3, "keeps_ids": True}
    built = open_folder(tmp_path, **more, keys={"lora": Lora(train_whole=("embed_tokens", "lm_head"))})
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {fqn for fqn in trained(built) if "lora_" not in fqn} == tables
    for fqn in tables:
        weight, before = whole_weight(built, fqn), whole_weight(open_folder(tmp_path), fqn)
        assert torch.equal(weight[:VOCABULARY], before)
        torch.testing.assert_close(weight[VOCABULARY:], before.mean(0).expand(3, -1))
    assert built.base is not None
    assert not tables & built.base.names
    assert {"model.norm.weight", f"{Q}.base_layer.weight"} <= built.base.names
    with pytest.raises(ConfigError, match=r"rows for new tokens in lm_head\.weight(.|\n)*Name lm_head in"):
        open_folder(tmp_path, **more, keys={"lora": Lora(train_whole=("embed_tokens",))})


def test_targets_are_patterns_or_ends_of_names() -> None:
    def named(first: str, which: str, *numbers: int) -> set[str]:
        return {f"model.layers.{n}.{first}.{name}_proj" for n in numbers for name in which.split()}

    for targets, expected in (
        (("q_proj", "v_proj"), named("self_attn", "q v", 0, 1)),
        (("self_attn.q_proj",), named("self_attn", "q", 0, 1)),
        (("model.layers.1.mlp",), named("mlp", "gate up down", 1)),
        (
            r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|q)_proj",
            named("self_attn", "q", 0, 1) | named("mlp", "up", 0, 1),
        ),
        (r".*\.layers\.1\.mlp\.(gate|up)_proj", named("mlp", "gate up", 1)),
        (("*.0.*.down_proj", "lm_head"), {"model.layers.0.mlp.down_proj", "lm_head"}),
        # Without the head.
        (("all-linear",), named("self_attn", "q k v o", 0, 1) | named("mlp", "gate up down", 0, 1)),
    ):
        assert layers(adapted(targets=targets)) == expected, targets
    listed = layers(adapted("qwen3_moe", targets=("q_proj", "experts.down_proj")))
    assert layers(adapted("qwen3_moe", targets=r".*\.(self_attn\.q_proj|experts\.down_proj)")) == listed


def test_a_base_that_others_do_not_have_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    for vocabulary, problem in (
        (VOCABULARY + 3, r"rows for new tokens in model\.embed_tokens\.weight would be drawn"),
        (VOCABULARY, r"model\.norm\.weight \(model\.allow\) would be drawn"),
    ):
        with pytest.raises(ConfigError, match=rf"^model\.lora: .* doesn't hold the whole base: {problem}"):
            open_folder(tmp_path, "model.norm", vocabulary=vocabulary, keeps_ids=True, keys={"lora": Lora()})
        edit(tmp_path, "model.norm.weight")


def test_what_does_not_train_may_rest_in_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        built = adapted(r=3, precision={"frozen": "bfloat16"})
    assert not caplog.records
    without = build("llama", precision={"frozen": "bfloat16"}, keys={"freeze": ["model.layers.0"]})
    assert not [fqn for fqn in trained(without) if ".layers.0." in fqn]
    for model in (built, without):
        for fqn, weight in model.model.named_parameters():
            expected = torch.float32 if weight.requires_grad else torch.bfloat16
            assert weight.dtype == whole_weight(model, fqn).dtype == expected, fqn
    base = build("llama")
    assert torch.equal(whole_weight(built, f"{Q}.base_layer.weight"), whole_weight(base, f"{Q}.weight").bfloat16())
    some = build("llama", keys={"lora": Lora(), "freeze": ["model.layers.0"]})
    assert layers(some)
    assert all(".layers.1." in fqn for fqn in trained(some))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_other_adapters_are_refused_by_name(tmp_path: Path) -> None:
    import peft  # takes seconds

    folder = str(tmp_path / "adapters")
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(stock_model(ARCHITECTURES["llama"]), settings).save_pretrained(folder)
    config, weights = (Path(folder) / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    saved, tensors = json.loads(config.read_text()), load_file(weights)
    kinds = {"bias": "lora_only", "lora_bias": True, "peft_type": "IA3"}
    kinds |= {"init_lora_weights": "pissa", "task_type": "SEQ_CLS", "a_kind_of_tomorrow": {"x": 1}}
    for key, value in kinds.items():
        config.write_text(json.dumps({**saved, key: value}))
        refused(folder, rf"expected plain LoRA adapters \({key}: .*found {key}: {re.escape(json.dumps(value))}")
    others = {"dora": ("use_dora", True), "rslora": ("use_rslora", True)}
    others |= {key: (key, {"q_proj": 8}) for key in ("rank_pattern", "alpha_pattern")}
    for ours, (key, value) in others.items():
        config.write_text(json.dumps({**saved, key: value}))
        refused(folder, rf"expected model\.lora\.{ours}=(false|{{}}), found .*\n.*Set model\.lora\.{ours} to ")
    config.write_text("[]")
    refused(folder, "expected a JSON object in adapter_config.json")
    config.write_text(json.dumps(saved))

    refused(folder, r"expected model.lora.r=4, found 3(.|\n)*Set model.lora.r to 3", r=4)
    refused(folder, r"expected model.lora.alpha=6.0, found 5(.|\n)*Set model.lora.alpha to 5", alpha=6.0)
    refused(folder, r"the 2 layers .* found \S*v_proj.lora_A.weight too \(4 in all\)", targets=("q_proj",))
    refused(folder, r"the 14 layers .* found none for \S*down_proj\S* \(20 in all\)", targets=("all-linear",))
    first = f"base_model.model.{Q}.lora_A.weight"
    for change, problem in (
        ({f"base_model.model.{Q}.lora_magnitude_vector": tensors[first][0].clone()}, "lora_magnitude_vector too"),
        ({first: tensors[first][:, 1:].contiguous()}, r"F32 \[3, 47\]"),
        ({first: tensors[first].to(torch.float8_e4m3fn)}, r"F8_E4M3 \[3, 48\]"),
    ):
        save_file({**tensors, **change}, weights)
        refused(folder, problem)
    weights.write_bytes(b"no")
    refused(folder, r"adapter_model.safetensors: its 2 bytes are not a complete safetensors file")
    weights.rename(weights.with_name("adapter_model.bin"))
    refused(folder, r"found adapter_model.bin, a pickle")
    weights.with_name("adapter_model.bin").unlink()
    refused(folder, "expected adapter_model.safetensors, found none")
    refused(str(tmp_path), r"adapter_config.json of peft, found .*No such file")
    with pytest.raises(ConfigError, match=r"^model\.lora\.start_from: no such folder: no/such/folder"):
        adapted(start_from="no/such/folder")


new_adapters = cache(adapted)  # a folder's are compared with them


def refused(folder: str, expected: str, **changes: Any) -> None:
    settings: dict[str, Any] = {"r": 3, "alpha": 5.0, "targets": ("q_proj", "v_proj")} | changes
    built = new_adapters(**settings)
    with pytest.raises(ConfigError, match=rf"^model\.lora\.start_from: (.|\n)*{expected}(.|\n)*\.$"):
        start_from(Lora(**settings, start_from=folder), built.model, built.fill)
