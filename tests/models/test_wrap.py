"""Units, layers, and modules of their own dtype, by their names in the unwrapped model."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from small_models import VOCABULARY, build
from torch import nn
from torch.distributed.fsdp.wrap import (
    _recursive_wrap,  # pyright: ignore[reportPrivateUsage]
    size_based_auto_wrap_policy,
)
from transformers import PreTrainedConfig, PreTrainedModel

from portable_fsdp.config.schema import Memory, Precision, Sharding
from portable_fsdp.models.wrap import find_layers, find_units, modules_of_own_dtype, recomputed_layers, table_weights
from portable_fsdp.runtime.errors import ConfigError

LLAMA_LAYERS = ("model.layers.0", "model.layers.1")
MLPS = ("model.layers.0.mlp", "model.layers.1.mlp")


def sharding(**keys: Any) -> Sharding:
    return Sharding.model_validate(keys)


@cache
def model_of(name: str) -> nn.Module:
    """A family, built once: nothing here changes it."""
    return build("gemma2", tie_word_embeddings=False).model if name == "gemma2_untied" else build(name).model


class Layer(nn.Module):
    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.inside = nn.ModuleList(inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_layer_inside_a_layer_belongs_to_the_outer_one() -> None:
    model = nn.Sequential(Layer(Layer()), nn.Linear(2, 2), Layer())
    model._no_split_modules = ["Layer"]  # pyright: ignore[reportArgumentType]
    assert find_layers(model, Sharding()) == ("0", "2")


def test_a_dict_of_modules_is_no_layer() -> None:
    model = nn.ModuleList(nn.ModuleDict({"layer": nn.Linear(2, 2)}) for _ in range(2))
    assert find_layers(model, Sharding()) == ()


def test_a_model_of_transformers_may_have_no_layer_and_no_vocabulary() -> None:
    class Regression(PreTrainedModel):
        def __init__(self) -> None:
            super().__init__(PreTrainedConfig())
            self.head = nn.Linear(2, 2)

    assert find_layers(Regression(), Sharding()) == ()
    assert table_weights(Regression()) == []


def test_a_model_without_the_layers_that_it_names_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model._no_split_modules = ["Layer"]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"(?s)found no layer of the class.*sharding\.wrap_classes.*Linear"):
        find_layers(model, Sharding())


BIOGPT: dict[str, Any] = {"model_type": "biogpt", "vocab_size": VOCABULARY, "hidden_size": 32} | {
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
OPENAI: dict[str, Any] = {"model_type": "openai-gpt", "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2}


@pytest.mark.parametrize(("architecture", "block"), [(BIOGPT, "BioGptDecoderLayer"), (OPENAI, "Block")])
def test_a_model_that_names_no_blocks_asks_for_them_and_takes_them(architecture: dict[str, Any], block: str) -> None:
    model = build(architecture).model
    with pytest.raises(ConfigError, match=rf"\(none named\).*\n.*Set sharding\.wrap_classes .*: {block}\.$"):
        find_layers(model, Sharding())
    named = sharding(wrap_classes=[block])
    assert len(find_layers(model, named)) == 2
    assert find_layers(model, named) == find_units(model, named)  # the embedding is tied to the head


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ({}, ()),
        ({"gradient_checkpointing": "full"}, ("a", "b", "c")),
        ({"gradient_checkpointing": "selective", "save_ops": ["matmul"]}, ("a", "b", "c")),
        ({"gradient_checkpointing": "selective", "every": 2}, ("a", "c")),
        ({"gradient_checkpointing": "selective", "every": 3}, ("a",)),
    ],
)
def test_layers_that_are_recomputed(memory: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert recomputed_layers(nn.Module(), ("a", "b", "c"), Memory.model_validate(memory)) == expected


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ({"classes": ["LlamaMLP"]}, MLPS),
        ({"classes": ["LlamaMLP"], "gradient_checkpointing": "selective", "every": 2}, MLPS[:1]),
        ({"classes": ["LlamaMLP", "LlamaDecoderLayer"]}, LLAMA_LAYERS),  # the outermost
        ({"classes": ["SiLUActivation"]}, tuple(f"{name}.act_fn" for name in MLPS)),  # no weights
        ({"classes": ["LlamaModel"]}, ("model",)),  # holds all layers
    ],
)
def test_modules_of_chosen_classes_are_recomputed_in_place_of_layers(
    memory: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert recomputed("llama", {"gradient_checkpointing": "full", **memory}) == expected


def recomputed(name: str, memory: dict[str, Any]) -> tuple[str, ...]:
    return recomputed_layers(model_of(name), LLAMA_LAYERS, Memory.model_validate(memory))


# ---------------------------------------------------------------------------------- units by class, by hand, by size


def units_of(name: str, keys: dict[str, Any]) -> tuple[str, ...]:
    return find_units(model_of(name), sharding(**keys))


TABLE, HEAD = "model.embed_tokens", "lm_head"
TIED_LISTS = [("llama_tied", "model.layers"), ("gpt2", "transformer.h"), ("opt", "model.decoder.layers")]
UNITS: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ("llama", {}, (TABLE, *LLAMA_LAYERS, HEAD), LLAMA_LAYERS),
    *((name, {}, (f"{list_}.0", f"{list_}.1"), (f"{list_}.0", f"{list_}.1")) for name, list_ in TIED_LISTS),
    (
        "llama",
        {"wrap_classes": ["LlamaMLP", "LlamaDecoderLayer"]},
        (TABLE, LLAMA_LAYERS[0], MLPS[0], LLAMA_LAYERS[1], MLPS[1], HEAD),
        LLAMA_LAYERS,
    ),
    ("llama", {"wrap_classes": ["LlamaMLP"]}, (TABLE, *MLPS, HEAD), MLPS),
    ("llama", {"wrap_classes": ["LlamaDecoderLayer", "Embedding"]}, (TABLE, *LLAMA_LAYERS, HEAD), LLAMA_LAYERS),
    ("llama", {"wrap": "NO_WRAP"}, (), LLAMA_LAYERS),
    (
        "llama",
        {"wrap": "NO_WRAP", "wrap_modules": ["*.mlp", "model.layers.1"]},
        (MLPS[0], LLAMA_LAYERS[1], MLPS[1]),
        LLAMA_LAYERS,
    ),
    ("llama", {"wrap": "NO_WRAP", "wrap_modules": ["model.layers.*"]}, LLAMA_LAYERS, LLAMA_LAYERS),
    ("llama", {"wrap_modules": [MLPS[1]]}, (TABLE, *LLAMA_LAYERS, MLPS[1], HEAD), LLAMA_LAYERS),
    ("llama", {"wrap_modules": ["model"]}, ("model", *LLAMA_LAYERS, HEAD), LLAMA_LAYERS),  # the embedding is inside
    # 4,848 parameters in the table, 11,520 in an MLP, 18,528 in a layer.
    ("llama_tied", {"wrap": "SIZE_BASED_WRAP", "min_num_params": 12_000}, LLAMA_LAYERS, LLAMA_LAYERS),
]


@pytest.mark.parametrize(("name", "keys", "units", "layers"), UNITS)
def test_units_outer_before_inner_and_layers(
    name: str, keys: dict[str, Any], units: tuple[str, ...], layers: tuple[str, ...]
) -> None:
    """Embedding and head are units of their own, and with the root where they are tied; they are no layers, even where
    the user names their class. Classes of the user take the place of the layers; modules by pattern don't."""
    assert units_of(name, keys) == units
    assert find_layers(model_of(name), sharding(**keys)) == layers


@pytest.mark.parametrize("find", [find_layers, find_units])
@pytest.mark.parametrize("name", ["BertLayer", "ModuleList", "LlamaRotaryEmbedding", "LlamaForCausalLM"])
def test_a_class_that_can_be_no_unit_is_refused_and_not_offered(find: Any, name: str) -> None:
    """A list of layers doesn't run, a rotary embedding has nothing to gather, the root is a unit in any case."""
    with pytest.raises(ConfigError, match=rf"run and hold parameters, found {name}\.") as caught:
        find(model_of("llama"), sharding(wrap_classes=["LlamaDecoderLayer", name]))
    offered = str(caught.value).partition("The model has: ")[2]
    assert offered == "Embedding, Linear, LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel, LlamaRMSNorm."


def torchs_units(model: nn.Module, min_num_params: int) -> list[str]:
    """Those of torch's own size-based policy, as FSDP (version 1) would wrap them."""
    names = {id(module): name for name, module in model.named_modules()}
    wrapped: list[str] = []

    def wrap(module: nn.Module, **_: Any) -> nn.Module:
        wrapped.append(names[id(module)])
        return module

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params)

    _recursive_wrap(model, policy, wrap, set(), set(), only_wrap_children=True)  # pyright: ignore[reportArgumentType]
    return sorted(wrapped)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2_untied"])
def test_units_by_size_are_those_of_torchs_policy(name: str) -> None:
    for least in (1, 2_000, 4_000, 10_000, 12_000, 20_000, 40_000, 10**9):
        actual = find_units(model_of(name), sharding(wrap="SIZE_BASED_WRAP", min_num_params=least))
        assert sorted(actual) == torchs_units(model_of(name), least), least


def test_by_size_a_tied_weight_is_in_one_unit_or_the_root() -> None:
    every = find_units(model_of("llama_tied"), sharding(wrap="SIZE_BASED_WRAP", min_num_params=1))
    assert "model.layers.0.mlp.up_proj" in every
    assert not {"model", "model.embed_tokens", "lm_head"} & set(every)

    class Both(nn.Module):
        """A model whose tie lies inside one part of it."""

        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.part[1].weight = self.part[0].weight

    # 64 + 2 * 8 numbers: a linear alone has 8 that are its own.
    assert find_units(Both(), sharding(wrap="SIZE_BASED_WRAP", min_num_params=60)) == ("part",)
    assert find_units(Both(), sharding(wrap="SIZE_BASED_WRAP", min_num_params=81)) == ()


# --------------------------------------------------------------------------------------------- dtypes of their own


def dtypes(name: str, modules: dict[str, str]) -> dict[str, str]:
    return modules_of_own_dtype(model_of(name), Precision.model_validate({"modules": modules}))


TIED = {"lm_head": "float32", "model.embed_tokens": "float32"}
NORMS = [f"model.layers.{layer}.{norm}_layernorm" for layer in (0, 1) for norm in ("input", "post_attention")]


@pytest.mark.parametrize(
    ("name", "modules", "expected"),
    [
        ("llama", {"*": "bfloat16"}, {"model": "bfloat16", "lm_head": "bfloat16"}),
        ("llama", {"*.mlp": "float32"}, dict.fromkeys(MLPS, "float32")),
        ("llama", {"*norm": "float32"}, dict.fromkeys([*NORMS, "model.norm"], "float32")),
        ("mixtral", {"*.gate": "float32"}, {f"model.layers.{n}.mlp.gate": "float32" for n in (0, 1)}),
        (  # the first pattern that matches counts
            "llama",
            {"lm_head": "float32", "model.layers.0": "float32", "*.mlp": "bfloat16"},
            {"model.layers.0": "float32", "model.layers.1.mlp": "bfloat16", "lm_head": "float32"},
        ),
        *(("llama_tied", {name: "float32"}, TIED) for name in TIED),
    ],
)
def test_the_outermost_modules_of_a_pattern_have_its_dtype(
    name: str, modules: dict[str, str], expected: dict[str, str]
) -> None:
    """With those that share a weight with them; in the order of the model."""
    actual = dtypes(name, modules)
    assert actual == expected
    order = [fqn for fqn, _ in model_of(name).named_modules() if fqn in expected]
    assert list(actual) == order


SELECTIVE: dict[str, Any] = {"gradient_checkpointing": "selective"}
TYPOS = SELECTIVE | {"classes": ["LlamaMlp", "Attention"]}
REFUSED: list[tuple[Callable[[str, dict[str, Any]], object], str, dict[str, Any], str]] = [
    (
        recomputed,
        "llama",
        SELECTIVE | {"every": 3},
        r"memory\.every: expected at most 2 \(the layers of the model, .*found 3",
    ),
    (recomputed, "llama", TYPOS, r"memory\.classes: .*, found LlamaMlp, Attention\.\n.*has: .*LlamaMLP"),
    *(
        (units_of, "llama_tied", keys, r"(?s)can't be a unit: .*model\.embed_tokens\.weight.*lm_head\.weight")
        for keys in ({"wrap_classes": ["LlamaDecoderLayer", "Embedding"]}, {"wrap_modules": ["lm_head"]})
    ),
    (units_of, "llama", {"wrap_modules": ["model.layers"]}, r"layers, a ModuleList, has no .*\n.*model\.layers\.\*"),
    (units_of, "llama", {"wrap_modules": ["*.mpl"]}, r"sharding\.wrap_modules: .*'\*\.mpl' matches nothing"),
    (dtypes, "llama", {"*.mlp": "float32", "model.layers.0": "bfloat16"}, r"\(bfloat16\), which contains .*0\.mlp"),
    (dtypes, "llama", {"*act_fn": "float32"}, r"precision\.modules: .*'\*act_fn' matches nothing"),
    (dtypes, "llama", {"*norm*": "float32", "model.norm": "bfloat16"}, r"modules that 'model.norm' matches also"),
    (dtypes, "llama_tied", TIED | {TABLE: "bfloat16"}, r"one dtype for .* and lm_head.*bfloat16 and"),
]


@pytest.mark.parametrize(("find", "name", "keys", "message"), REFUSED)
def test_what_cannot_be_is_refused(
    find: Callable[[str, dict[str, Any]], object], name: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find(name, keys)
