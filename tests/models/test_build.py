"""Models as they are built, random weights, sizes and FLOPs, and refused architectures."""

import json
import math
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from small_models import (
    ARCHITECTURES,
    SEQ_LEN,
    VOCABULARY,
    build,
    families,
    logits,
    materialise,
    open_folder,
    stock_model,
    token_ids,
    whole_weight,
)
from transformers import AutoConfig

from portable_fsdp.backends.state import dropouts, parameter_slots
from portable_fsdp.models.architecture import config_from_json
from portable_fsdp.models.flops import PEAKS, model_flops_per_token, peak_flops
from portable_fsdp.runtime.errors import ConfigError

# --------------------------------------------------------------------------------------------------- architecture


@pytest.mark.parametrize("name", families())
def test_parameters_are_on_meta_and_buffers_and_config_are_transformers_own(name: str) -> None:
    """The config survives JSON, too: Mamba 2's time_step_limit is [0.0, inf], which JSON lacks."""
    built = build(name)
    assert {parameter.device.type for parameter in built.model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.float32}
    assert built.model.training
    expected, buffers = dict(stock_model(ARCHITECTURES[name]).named_buffers()), dict(built.model.named_buffers())
    assert expected.keys() == buffers.keys()
    for fqn, buffer in expected.items():
        assert buffers[fqn].dtype == buffer.dtype
        assert torch.equal(buffers[fqn], buffer), fqn
    assert_config_survives(name, built.config)


def assert_config_survives(name: str, stored: dict[str, Any]) -> None:
    stored = json.loads(json.dumps(stored, allow_nan=False))
    architecture = dict(ARCHITECTURES[name])
    expected = AutoConfig.for_model(architecture.pop("model_type"), **architecture).to_dict()
    assert config_from_json(stored).to_dict() == expected
    assert config_from_json(expected).to_dict() == expected  # manifests of earlier releases


def test_a_config_with_an_infinity_survives_json() -> None:
    stored = build("mamba2").config
    assert_config_survives("mamba2", stored)
    assert stored["time_step_limit"][1] == {"__float__": "Infinity"}
    assert config_from_json(stored).time_step_limit[1] == math.inf


def test_ties_and_sizes() -> None:
    tied, untied = build("llama_tied"), build("llama")
    assert tied.model.get_parameter("lm_head.weight") is tied.model.get_parameter("model.embed_tokens.weight")
    table = VOCABULARY * 48
    assert untied.size.parameters == tied.size.parameters + table
    assert untied.size.embedding_parameters == table
    assert tied.size.embedding_parameters == 0  # the table is the head's matrix
    assert (untied.size.layers, untied.size.hidden) == (2, 48)
    assert build("gpt2").size.embedding_parameters == 64 * 48  # positions
    assert build("qwen3").size.hidden == 4 * 16


FALCON = {key: value for key, value in ARCHITECTURES["falcon"].items() if key != "num_kv_heads"}


def test_the_attention_is_the_requested_one() -> None:
    for model, attention, expected in (
        ("llama", "auto", "portable_fsdp_static"),
        ("llama", "static", "portable_fsdp_static"),
        ("llama", "sdpa", "sdpa"),
        ("llama", "eager", "eager"),
        (FALCON, "auto", "sdpa"),  # which has one of its own
    ):
        config: Any = build(model, keys={"attention": attention}).model.config
        assert config._attn_implementation == expected, attention


LLAMA = ARCHITECTURES["llama"]
_ENCODER: dict[str, Any] = {"is_decoder": True, "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "intermediate_size": 80,
}

MPT: dict[str, Any] = {"model_type": "mpt", "vocab_size": VOCABULARY, "d_model": 48, "n_heads": 4, "n_layers": 2}
BAMBA = {"mamba_n_heads": 2, "mamba_d_head": "auto", "z_loss_coefficient": 0.1}
UNSET = r"attention_dropout: expected 0, found 0\.1, but model\.dropout is 0\.\n  Set model\.dropout=published"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA | {"model_type": "resnet"}, {}, r"expected a causal language model of transformers, found 'resnet'"),
    (_ENCODER | {"model_type": "bert", "is_decoder": False}, {}, r"encoder, .*causal\.\n.*is_decoder=true"),
    (LLAMA | {"max_position_embeddings": 8}, {}, r"data\.seq_len: expected at most 8 .*found 24"),
    (MPT | {"max_seq_len": 16}, {}, r"MptForCausalLM can't run a row of 24 tokens .*: RuntimeError: .*\n.*Compare its"),
    (LLAMA | {"vocab_size": 50}, {}, r"vocab_size of at least 101.*found 50\.\n.*architecture\.vocab_size=101"),
    (LLAMA | {"num_key_value_heads": 3}, {}, r"num_key_value_heads that divides num_attention_heads=4, found 3"),
    (LLAMA | {"hidden_size": "wide"}, {}, r"transformers refuses it: .*hidden_size.*int"),
    (LLAMA | {"hidden_act": "sillu"}, {}, r"LlamaConfig: can't build a model .*sillu"),
    (LLAMA | {"attention_dropout": 0.1}, {}, UNSET),
    (LLAMA | {"model_type": "bamba", **BAMBA}, {}, r"z_loss_coefficient=0, found 0.1"),
    (LLAMA, {"dropout": 0.3}, r"found only attention_dropout.*\n  Set model\.attention=static"),
    (FALCON, {"attention": "static"}, r"model\.attention: Falcon.*own.*model\.attention=auto"),
    (LLAMA, {"freeze": ("embed",)}, r"model\.freeze: .*'embed' matches nothing.*\n.*nearest: .*embed_tokens"),
    (LLAMA, {"freeze": ("qqqqq",)}, r"'qqqqq' matches nothing.*\n  the first names: model\.embed_tokens"),
    (LLAMA, {"freeze": ("*",)}, r"model\.freeze: \['\*'\] freeze all 21 parameters, but one must train"),
    (LLAMA, {"train_only": ("embed",)}, r"model\.train_only: .*'embed' matches nothing.*\n.*nearest: .*embed_tokens"),
]


@pytest.mark.parametrize(("architecture", "keys", "message"), REFUSED)
def test_a_model_that_cannot_be_is_refused(architecture: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(architecture, keys=keys)


OPT = ARCHITECTURES["opt"]
DROPOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, float]]] = {
    "none": (OPT, {}, "", {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}),
    "published": (
        OPT | {"dropout": 0.2, "layerdrop": 0.1},
        {"dropout": "published"},
        "model.dropout: 0.2 (published: dropout); layerdrop: 0, since masks leave out no whole layers",
        {"dropout": 0.2, "layerdrop": 0.0},
    ),
    "a number": (
        OPT,
        {"dropout": 0.3},
        "model.dropout: 0.3 (dropout); attention_dropout: 0, since no kernel draws; model.attention=static does",
        {"dropout": 0.3, "layerdrop": 0.0},
    ),
    "of attention": (
        LLAMA,
        {"dropout": 0.3, "attention": "static"},
        "model.dropout: 0.3 (attention_dropout)",
        {"attention_dropout": 0.3},
    ),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_rates_of_dropout_are_those_of_the_config_or_one_number(name: str) -> None:
    architecture, keys, described, rates = DROPOUTS[name]
    built = build(architecture, keys=keys)
    config = vars(cast(Any, built.model).config)
    assert built.dropout == described
    assert {key: config[key] for key in rates} == rates
    assert bool(dropouts(built.model)) == bool(described)
    for key in rates.keys() & architecture.keys():  # exports have them as published
        assert built.config[key] == architecture[key]


def test_an_encoder_as_decoder_is_taken() -> None:
    ids = token_ids(1).clamp(min=2)  # 1 is RoBERTa's padding
    later = ids.clone()
    later[0, 10:] = 0
    roberta = {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 26}
    for architecture in ({"model_type": "bert"}, roberta):
        model = materialise(build(_ENCODER | architecture))
        torch.testing.assert_close(logits(model, ids)[:, :10], logits(model, later)[:, :10])


def test_a_weight_without_an_initial_value_comes_from_a_folder_only(tmp_path: Path) -> None:
    """GPT-1's. The model looks for padding, too, which the trial row can't follow and doesn't refuse."""
    architecture: dict[str, Any] = {"model_type": "openai-gpt", "vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2}
    architecture |= {"n_head": 4, "pad_token_id": 0}
    with pytest.raises(ConfigError, match=r"one by one: transformer\.h\.0\.attn\.c_attn\.weight \(Conv1D\) has no"):
        whole_weight(build(architecture), "transformer.h.0.attn.c_attn.weight")
    stock = stock_model(architecture).eval()
    stock.save_pretrained(tmp_path)
    ids = token_ids()
    torch.testing.assert_close(logits(materialise(open_folder(tmp_path)).eval(), ids), logits(stock, ids))


def test_the_trial_row_leaves_nothing_behind() -> None:
    """NTK rotary embeddings change their frequencies with the row that they see."""
    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    built = build("llama", max_position_embeddings=SEQ_LEN, **rope)
    expected = dict(stock_model(LLAMA | {"max_position_embeddings": SEQ_LEN} | rope).named_buffers())
    for name, buffer in built.model.named_buffers():
        assert torch.equal(buffer, expected[name])


# ------------------------------------------------------------------------------------------- freezing, precision


def frozen(name: str, *patterns: str) -> set[str]:
    model = build(name, keys={"freeze": patterns}).model
    return {fqn for fqn, parameter in model.named_parameters() if not parameter.requires_grad}


def test_frozen_weights_have_no_gradient_and_the_rest_does() -> None:
    assert frozen("llama") == set()
    assert frozen("llama", "lm_head", "*norm*") == {
        "lm_head.weight",
        "model.norm.weight",
        *(f"model.layers.{n}.{norm}_layernorm.weight" for n in (0, 1) for norm in ("input", "post_attention")),
    }
    assert all(name.startswith("model.layers.1.") for name in frozen("llama", "model.layers.1"))
    assert len(frozen("llama", "model.layers.1")) == 9
    for name in ("model.embed_tokens", "lm_head"):  # tied: in all its places
        assert frozen("llama_tied", name) == {"model.embed_tokens.weight"}


def test_only_weights_that_are_named_train() -> None:
    def trained(name: str, *patterns: str, **precision: str) -> dict[str, torch.dtype]:
        model = build(name, keys={"train_only": patterns}, precision=precision).model
        return {fqn: parameter.dtype for fqn, parameter in model.named_parameters() if parameter.requires_grad}

    assert len(trained("llama", "model.layers.1")) == 9
    assert trained("llama", "lm_head", "*.0.*norm*", frozen="bfloat16") == dict.fromkeys(
        [*(f"model.layers.0.{norm}_layernorm.weight" for norm in ("input", "post_attention")), "lm_head.weight"],
        torch.float32,
    )
    assert set(trained("llama_tied", "lm_head")) == {"model.embed_tokens.weight"}  # under any of its names


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "deepseek_v3"])
def test_bfloat16_masters_are_the_float32_ones_rounded(name: str) -> None:
    exact, rounded = build(name), build(name, precision={"master": "bfloat16"})
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.bfloat16}
    for fqn in dict(exact.model.named_parameters()):
        assert torch.equal(whole_weight(rounded, fqn), whole_weight(exact, fqn).bfloat16()), fqn
    ties = [len(places) for places in parameter_slots(rounded.model).values()]
    assert ties == [len(places) for places in parameter_slots(exact.model).values()]
    for fqn, buffer in exact.model.named_buffers():  # rotary frequencies, a router's bias: as they were
        assert rounded.model.get_buffer(fqn).dtype == buffer.dtype
        assert torch.equal(rounded.model.get_buffer(fqn), buffer)


# ------------------------------------------------------------------------------------------------- random weights

NAMES = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"]


def test_weights_depend_on_seed_and_name_alone() -> None:
    first, second, other = build("llama"), build("llama"), build("llama", seed=1)
    expected = {name: whole_weight(first, name) for name in NAMES}
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for name in reversed(NAMES):
        assert torch.equal(whole_weight(second, name), expected[name])
        assert not torch.equal(whole_weight(other, name), expected[name])
    assert torch.equal(torch.get_rng_state(), before), "drawing leaves the caller's random state alone"
    assert torch.equal(whole_weight(build("llama", num_hidden_layers=5), NAMES[0]), expected[NAMES[0]])
    assert not torch.equal(whole_weight(first, NAMES[0].replace("up", "gate")), expected[NAMES[0]])


def test_a_slice_is_that_of_the_whole_and_its_own_memory() -> None:
    built = build("llama")
    weight = whole_weight(built, NAMES[0]).clone()
    pieces = [built.fill(NAMES[0], (slice(begin, begin + 40), slice(3, 17))) for begin in (40, 0)]
    assert torch.equal(torch.cat([pieces[1], pieces[0]]), weight[:, 3:17])
    pieces[0].zero_()
    assert torch.equal(whole_weight(built, NAMES[0]), weight)


@pytest.mark.parametrize("name", families(["llama", "llama_tied", "gpt2", "opt", "gemma2", "deepseek_v3"]))
def test_weights_are_spread_as_transformers_spreads_them(name: str) -> None:
    built = build(name)
    for fqn, expected in stock_model(ARCHITECTURES[name]).named_parameters():
        weight = whole_weight(built, fqn)
        if expected.std(unbiased=False) == 0:  # norms and biases
            assert torch.equal(weight, expected), fqn
            continue
        assert weight.std() == pytest.approx(expected.std().item(), rel=6 / math.sqrt(weight.numel())), fqn
        assert abs(weight.mean()) < 6 * weight.std() / math.sqrt(weight.numel()), fqn


def test_a_billion_parameters_take_no_memory_to_build() -> None:
    build("llama")  # imports what a build needs
    process = psutil.Process()
    before = process.memory_info().rss
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    built = build({"model_type": "llama", "vocab_size": 32000, "num_key_value_heads": 8, **sizes})
    for layer in (15, 3):
        built.fill(f"model.layers.{layer}.mlp.up_proj.weight", (slice(0, 100), slice(0, 2048)))
    assert built.size.parameters > 1.0e9
    assert process.memory_info().rss - before < 200 * 2**20  # two weights of 64 MiB, one after the other


H100, A100, V100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-16GB"
# dtype, TFLOP/s (None: never guessed) -> devices. GB200 has another power limit than B200.
KNOWN: dict[tuple[str, float | None], list[str]] = {
    ("bfloat16", 989): [H100, "NVIDIA H200"],
    ("bfloat16", 756): ["NVIDIA H100 PCIe"],
    ("bfloat16", 312): [A100],
    ("bfloat16", 2250): ["NVIDIA B200"],
    ("bfloat16", 61.5): ["TPU v3"],
    ("bfloat16", 197): ["TPU v5 lite"],
    ("bfloat16", 459): ["TPU v5"],
    ("bfloat16", 918): ["TPU v6 lite"],
    ("bfloat16", 1153.5): ["TPU7x"],
    ("float16", 312): [A100],
    ("float16", 125): [V100],
    ("float32", 67): [H100],
    ("float32", 19.5): ["NVIDIA A100-PCIE-40GB"],
    ("tf32", 494.5): [H100],
    ("bfloat16", None): [
        *(f"NVIDIA {name}" for name in ("H100 64GB HBM2", "H20", "A100-SXM-64GB", "A10", "L40", "GB200")),
        *("NVIDIA A100-SXM4-40GB MIG 1g.5gb", V100, "TPU v4 lite", ""),
    ],
    ("float32", None): ["TPU v6e", "cpu"],
    ("float8", None): ["NVIDIA H200"],
}


@pytest.mark.parametrize(("dtype", "tera"), KNOWN)
def test_peaks_of_devices(dtype: str, tera: float | None) -> None:
    for name in KNOWN[dtype, tera]:
        assert peak_flops(name, dtype) == (None if tera is None else tera * 1e12), name


def test_every_row_has_a_source_and_can_be_reached() -> None:
    for place, row in enumerate(PEAKS):
        assert len(row.source) > 20
        assert not [earlier for earlier in PEAKS[:place] if set(earlier.words) <= set(row.words)], row.words


def test_llama_3_8b_at_8192_tokens() -> None:
    """8,030,261,248 parameters, untied embedding of 128256 x 4096: 57.9 GFLOPs a token, as torchtitan counts."""
    flops = model_flops_per_token(8_030_261_248, 128_256 * 4096, layers=32, hidden=4096, seq_len=8192)
    assert flops == pytest.approx(57.91e9, rel=1e-4)
