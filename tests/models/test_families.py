"""Each family of models trains as transformers' own does; families that can't be trained are refused by name."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_models import ARCHITECTURES, VOCABULARY, build, families, logits, materialise, shake, stock_model, token_ids
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.config.schema import Model
from portable_fsdp.models.attention import STATIC, STATIC_TYPES
from portable_fsdp.models.build import build_model, make_model
from portable_fsdp.models.tasks import CAUSAL_LM
from portable_fsdp.models.trials import find_difference
from portable_fsdp.runtime.errors import ConfigError

STEPS = 4
# Options that transformers' own sdpa lacks: softcap, sinks, ALiBi; mamba2 attends to nothing.
EAGER = {"gemma2", "gpt_oss", "bloom", "mamba2"}


def curve(model: nn.Module, loss: Any) -> list[float]:
    """Losses of a few steps of AdamW, each on rows of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for step in range(STEPS):
        ids = token_ids(4).roll(step, dims=1)
        value: Tensor = loss(ids)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
def test_it_trains_as_transformers_own(name: str) -> None:
    ours = materialise(build(name))
    shake(ours)
    assert ours.config._attn_implementation == ("sdpa" if "falcon" in name else "eager" if name == "bloom" else STATIC)
    stock = stock_model(ARCHITECTURES[name], "eager" if name in EAGER else "sdpa")
    stock.load_state_dict(ours.state_dict())
    for module in stock.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # OPT's layers call the function
            module.dropout = 0.0
    stock.train()

    def our_loss(ids: Tensor) -> Tensor:
        total, count = ours(ids, ids)
        return total / count

    def stock_loss(ids: Tensor) -> Tensor:
        return F.cross_entropy(logits(stock, ids).flatten(0, 1), ids.flatten())

    expected = curve(stock, stock_loss)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3), "it learnt nothing: the curve would show no fault"
    assert curve(ours, our_loss) == pytest.approx(expected, rel=2e-6)


_SMALL: dict[str, Any] = (
    {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
)
_PER_LAYER: dict[str, Any] = {"head_dim": 8, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0} | {
    "vocab_size_per_layer_input": VOCABULARY,
    "sliding_window": 8,
}
FROM_FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    # Masks that only the model describes: a bias for each key, and chunks.
    "doge": ("eager", {}),
    "llama4_text": (
        "eager",
        {"intermediate_size_mlp": 64, "head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 8},
    ),
    # Buffers that are set by a part of the model, heads that differ by layer.
    "gemma3n_text": (STATIC, _PER_LAYER | {"activation_sparsity_pattern": [0.0, 0.0]}),
    "falcon_h1": (
        STATIC,
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
        | {"mamba_chunk_size": 8, "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9]},
    ),
    "gemma4_text": (STATIC, _PER_LAYER | {"num_hidden_layers": 6, "global_head_dim": 16}),
    # An index that reads the mask, and a model that knows one attention.
    "deepseek_v32": (
        "eager",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
        | {"v_head_dim": 8, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 4, "n_routed_experts": 4}
        | {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    ),
    "git": (
        "eager",
        {"num_key_value_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        | {"vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 32}},
    ),
    # Positions that a new model doesn't train.
    "marian": (
        STATIC,
        {"d_model": 32, "decoder_ffn_dim": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
        | {"dropout": 0.0, "decoder_start_token_id": 0},
    ),
    # Ids that may not be null.
    "cwm": (STATIC, {"head_dim": 8, "sliding_window": 8}),
}


def folder_of(model_type: str, folder: Path) -> Any:
    """Save a small model, and return it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_SMALL | FROM_FOLDERS[model_type][1]))
    shake(model)
    model.save_pretrained(folder)
    return model.train()


@pytest.mark.parametrize(
    ("model_type", "attention"), [("llama4_text", "eager"), *((name, "auto") for name in FROM_FOLDERS)]
)
def test_a_model_from_a_folder_computes_what_transformers_own_does(
    model_type: str, attention: Any, tmp_path: Path
) -> None:
    folder_of(model_type, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").train()
    section = Model(pretrained=str(tmp_path), attention=attention)
    built = build_model(section, seed=0, seq_len=24, vocabulary=0)
    assert cast(Any, built.model).config._attn_implementation == FROM_FOLDERS[model_type][0]
    assert all(weight.requires_grad for weight in built.model.parameters()) == all(
        weight.requires_grad for weight in stock.parameters()
    )
    ours = materialise(built)
    expected = curve(stock, lambda ids: F.cross_entropy(logits(stock, ids).flatten(0, 1), ids.flatten()))
    assert curve(ours, lambda ids: torch.div(*ours(ids, ids))) == pytest.approx(expected, rel=2e-6)


_STATIC = r"model\.attention=static: it isn't that of .*\n.*attention=auto"


@pytest.mark.parametrize(
    ("model_type", "keys", "options", "message"),
    [
        ("doge", {"attention": "static"}, {}, _STATIC),
        ("doge", {}, {"context": 2}, "its own attention"),
        ("git", {"attention": "static"}, {}, _STATIC),
        ("llama4_text", {"attention": "static"}, {}, _STATIC),
        ("llama4_text", {}, {"packs_documents": True}, "doesn't keep the documents of a row apart"),
        ("llama4_text", {}, {"context": 2}, "its own attention"),
        ("llama4_text", {}, {"eager": False}, r"reads values on the host in each step\.\n.*native"),
    ],
)
def test_a_mask_of_its_own_is_never_left_out(
    model_type: str, keys: Any, options: Any, message: str, tmp_path: Path
) -> None:
    folder_of(model_type, tmp_path)
    with pytest.raises(ConfigError, match=message):
        build_model(Model(pretrained=str(tmp_path), **keys), seed=0, seq_len=24, vocabulary=0, **options)


@pytest.mark.parametrize("model_type", sorted(STATIC_TYPES))
def test_static_attention_is_that_of_these_types(model_type: str) -> None:
    name = next(name for name, sizes in ARCHITECTURES.items() if sizes["model_type"] == model_type)

    def make(config: Any, attention: str) -> Any:
        return make_model(config, attention, CAUSAL_LM)

    assert find_difference(build(name).model, make) == ""


PAGE = (Path(__file__).parents[2] / "docs/features.md").read_text()
REASONS = {
    model_type: reason
    for cells, reason in re.findall(r"^\| (`[\w`, -]+`) \| refused: `(.+?)` \|", PAGE, re.MULTILINE)
    for model_type in re.findall(r"`([\w-]+)`", cells)
}
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, dict[str, Any]] = {
    "bert": _SIZES | {"intermediate_size": 80},
    "t5": {},
    "jetmoe": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2}
    | {"kv_channels": 8, "intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
    "longcat_flash": {"vocab_size": VOCABULARY, "hidden_size": 48, "num_attention_heads": 4}
    | {"n_routed_experts": 4, "num_layers": 1, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 20},
    "openai-gpt": {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4},
    "rwkv": {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "context_length": 64},
    "apertus": _SIZES | {"num_key_value_heads": 2, "intermediate_size": 80},
    "blt": {"vocab_size": VOCABULARY},
}


def test_the_page_lists_refused_families() -> None:
    assert REASONS.keys() == REFUSED.keys()


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_cannot_be_trained_is_refused(model_type: str) -> None:
    with pytest.raises(ConfigError) as error:
        materialise(build({"model_type": model_type, **REFUSED[model_type]}))
    assert REASONS[model_type] in str(error.value)
