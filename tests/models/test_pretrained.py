"""What real folders hold: other layouts, keys too many and too few, quantised weights, tokenizers that have grown."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import (
    ARCHITECTURES,
    SEQ_LEN,
    VOCABULARY,
    build,
    logits,
    materialise,
    stock_model,
    token_ids,
    whole_weight,
)
from test_build import assert_filled_from, save

from portable_fsdp.backends.base import full_region, rows_of_shard
from portable_fsdp.config.schema import Model, Precision
from portable_fsdp.models.build import BuiltModel, build_model
from portable_fsdp.runtime.errors import ConfigError

NORM, HEAD, TABLE = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


def open_folder(
    folder: Path, *allow: str, vocabulary: int = VOCABULARY, keeps_ids: bool = False, **precision: Any
) -> BuiltModel:
    section = Model(pretrained=str(folder), allow=allow)
    return build_model(
        section,
        Precision(**precision),
        seed=3,
        seq_len=SEQ_LEN,
        vocabulary=vocabulary,
        keeps_ids=lambda: keeps_ids,
    )


def edit(folder: Path, *without: str, **more: torch.Tensor) -> None:
    """Change the folder's single file; `__` in a name stands for a dot."""
    file = folder / "model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(file).items() if key not in without}
    save_file(tensors | {key.replace("__", "."): tensor for key, tensor in more.items()}, file, {"format": "pt"})


# ---------------------------------------------------------------------------------------------------- other layouts


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "phi", "falcon", "olmo2"]
)
def test_a_folder_as_it_lies_on_the_hub_fills_bit_for_bit(tmp_path: Path, name: str) -> None:
    stock = save(tmp_path, name).eval()
    built = open_folder(tmp_path)
    assert_filled_from(built, stock)
    for fqn, buffer in stock.named_buffers():
        assert torch.equal(built.model.get_buffer(fqn), buffer), fqn


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_lie_there_one_by_one(tmp_path: Path, name: str) -> None:
    """What the test above is about: without transformers' tables these folders have none of the model's experts."""
    stock = save(tmp_path, name)
    held = set(load_file(tmp_path / "model.safetensors"))
    assert any(".experts.1." in key for key in held)
    assert not any(".experts." in key for key in held & set(stock.state_dict()))


def test_an_expert_that_is_missing_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    lost = next(key for key in load_file(tmp_path / "model.safetensors") if ".experts.1." in key)
    edit(tmp_path, lost)
    with pytest.raises(ConfigError, match=r"model\.pretrained: .*experts"):
        open_folder(tmp_path)


def test_bfloat16_is_kept_under_bfloat16_masters(tmp_path: Path) -> None:
    stock = stock_model(ARCHITECTURES["llama"]).to(torch.bfloat16)
    stock.save_pretrained(tmp_path)
    built = open_folder(tmp_path, master="bfloat16")
    for fqn, weight in stock.named_parameters():
        assert whole_weight(built, fqn).dtype == torch.bfloat16
        assert torch.equal(whole_weight(built, fqn), weight), fqn


# --------------------------------------------------------------------------------------- keys too few, and too many


def test_what_may_be_missing_is_drawn_as_in_a_new_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock = save(tmp_path, "llama")
    edit(tmp_path, HEAD, NORM)
    with pytest.raises(ConfigError, match=r"none for lm_head\.weight, and 1 more.*\n.*model\.allow"):
        open_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"none for model\.norm\.weight\.\n"):
        open_folder(tmp_path, "lm_head")
    built = open_folder(tmp_path, "lm_head", "*norm.weight")
    assert f"missing, and drawn from run.seed: {NORM}, {HEAD}" in caplog.text
    assert torch.equal(whole_weight(built, HEAD), whole_weight(build("llama", seed=3), HEAD))
    assert torch.equal(whole_weight(built, NORM), torch.ones(48))
    assert torch.equal(whole_weight(built, TABLE), stock.get_parameter(TABLE))


def test_what_the_model_has_no_place_for_is_refused_unless_allowed(tmp_path: Path) -> None:
    stock = save(tmp_path, "llama")
    edit(tmp_path, vision__tower__weight=torch.ones(2), extra=torch.ones(2))
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM alone, found 2 .*: extra, vision\.tower\.weight\.\n.*allow"
    ):
        open_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"found 1 that it has no place for: extra\."):
        open_folder(tmp_path, "vision")
    assert_filled_from(open_folder(tmp_path, "vision", "ext*"), stock)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "model__layers__1__self_attn__rotary_emb__inv_freq"),  # of releases before 4.32
        ("gpt_neox", "gpt_neox__layers__0__attention__masked_bias"),
        ("gpt2", "transformer__h__0__attn__bias"),
        ("qwen3_next", "mtp__fc__weight"),  # a head that predicts a second token, which transformers leaves out
        ("deepseek_v3", "model__layers__61__enorm__weight"),
    ],
)
def test_what_transformers_leaves_out_is_left_out(
    tmp_path: Path, name: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    stock = save(tmp_path, name)
    edit(tmp_path, **{key: torch.ones(2, 2)})
    with caplog.at_level(logging.INFO):
        assert_filled_from(open_folder(tmp_path), stock)
    assert f"left out, as transformers does or model.allow says: {key.replace('__', '.')}" in caplog.text


def test_a_tied_head_may_be_saved_too_but_must_be_the_embedding(tmp_path: Path) -> None:
    stock = save(tmp_path, "llama_tied")
    table = load_file(tmp_path / "model.safetensors")[TABLE]
    edit(tmp_path, lm_head__weight=table.clone())
    assert_filled_from(open_folder(tmp_path), stock)
    edit(tmp_path, lm_head__weight=table + torch.eye(*table.shape))
    with pytest.raises(
        ConfigError, match=r"one content for tied weights, .* model\.embed_tokens\.weight and lm_head\.weight\.\n"
    ):
        open_folder(tmp_path)


# ---------------------------------------------------------------------------------------------- what isn't a model


def _set(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_quantised_folders_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    edit(tmp_path, TABLE, model__embed_tokens__weight=torch.ones(VOCABULARY, 48).to(torch.float8_e4m3fn))
    with pytest.raises(
        ConfigError, match=r"embed_tokens\.weight: expected F32, .* found F8_E4M3 .*: a quantised model"
    ):
        open_folder(tmp_path)
    _set(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match=r"config\.json: expected weights in float32, .*quantised ones .*: fp8\)"):
        open_folder(tmp_path)


def test_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json, found none in it: .*\n  It is an adapter"):
        open_folder(tmp_path)


def test_code_in_the_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "llama")
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    _set(tmp_path, model_type="own", auto_map={"AutoConfig": "own.Own"})
    monkeypatch.setattr("builtins.input", lambda prompt: "y")  # transformers would ask whether to run it
    with pytest.raises(ConfigError, match=r"config\.json: .*trust_remote_code"):
        open_folder(tmp_path)


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama", max_shard_size="50KB")
    index = tmp_path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["model.extra"] = found["weight_map"][NORM]
    index.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"expected model\.extra in model-.*\.safetensors .*, found none"):
        open_folder(tmp_path, "model.extra")


# ---------------------------------------------------------------------------------------- a tokenizer that has grown

GROWN = VOCABULARY + 6


@pytest.mark.parametrize("name", ["llama", "llama_tied", "phi", "gpt2"])  # phi's head has a bias
def test_new_rows_are_the_mean_of_the_old_ones(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    stock = save(tmp_path, name).eval()
    with caplog.at_level(logging.INFO):
        built = open_folder(tmp_path, vocabulary=GROWN, keeps_ids=True)
    assert "the tokenizer has 107 ids, the model rows for 101: embedding and head grow by 6 rows" in caplog.text
    assert built.config["vocab_size"] == GROWN
    for fqn, weight in stock.named_parameters():
        found = whole_weight(built, fqn)
        if len(weight) == VOCABULARY:
            mean = weight.double().mean(0).float()
            expected = torch.cat([weight, mean.expand(6, *mean.shape)])
            assert torch.equal(found, expected), fqn
            for process in range(4):  # some shards are all old, one is both, and of 60 some are all new
                for count in (4, 60):
                    rows = rows_of_shard(GROWN, process * count // 4, count)
                    assert torch.equal(built.fill(fqn, (rows, *full_region(weight.shape)[1:])), expected[rows])
        else:
            assert torch.equal(found, weight), fqn
    ids = token_ids()
    found, expected = logits(materialise(built), ids), logits(stock, ids)
    torch.testing.assert_close(found[..., :VOCABULARY], expected, rtol=1e-5, atol=1e-5)


def test_new_rows_of_bfloat16_weights_are_the_float32_mean_rounded(tmp_path: Path) -> None:
    stock = save(tmp_path, "llama")
    built = open_folder(tmp_path, vocabulary=GROWN, keeps_ids=True, master="bfloat16")
    mean = stock.get_parameter(TABLE).double().mean(0).float()
    assert torch.equal(whole_weight(built, TABLE)[VOCABULARY:], mean.bfloat16().expand(6, -1))


def test_another_tokenizer_makes_nothing_grow_and_a_smaller_one_nothing_shrink(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with pytest.raises(
        ConfigError, match=r"vocab_size of at least 107 .*, found 101\.(?s:.)*grows only with a tokenizer"
    ):
        open_folder(tmp_path, vocabulary=GROWN)
    assert open_folder(tmp_path, vocabulary=50, keeps_ids=True).config["vocab_size"] == VOCABULARY
    with pytest.raises(ConfigError, match="vocab_size of at least 107"):
        build_model(
            Model(architecture=ARCHITECTURES["llama"]), seed=0, seq_len=8, vocabulary=GROWN, keeps_ids=lambda: True
        )
