"""Small models of many families, built, saved, opened, or given memory so that they run without an engine."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.backends.state import parameter_slots
from portable_fsdp.config.schema import Model, Precision
from portable_fsdp.layout import full_region
from portable_fsdp.models.build import build_model
from portable_fsdp.models.weights import BuiltModel

VOCABULARY, SEQ_LEN = 101, 24
_SIZES: dict[str, Any] = (
    {"vocab_size": VOCABULARY, "hidden_size": 48, "n_embd": 48, "word_embed_proj_dim": 48, "intermediate_size": 80}
    | {"ffn_dim": 80, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    | {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    | {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 20, "qk_nope_head_dim": 16, "v_head_dim": 12}
    | {"state_size": 16, "num_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
)
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 12, "attn_logit_softcapping": 2.0},
    "stablelm": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "deepseek_v3": {"num_key_value_heads": 4},
    "bloom": {"pad_token_id": None},
    "mamba2": {"head_dim": 12, "pad_token_id": None},
    "qwen3_moe": {"head_dim": 16},
    "qwen3_next": {"num_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
}
# Heads of a layer's own width, an embedding for each layer.
_GEMMA4 = (
    cases.ARCHITECTURES["gemma3_text"]
    | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
    | {"per_layer_config": {1: {"head_dim": 24}}}
)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    name: architecture | {key: size for key, size in _SIZES.items() if key in architecture} | _OWN.get(name, {})
    for name, architecture in (cases.ARCHITECTURES | {"gemma4_text": _GEMMA4}).items()
}
"""The families of tests/backends in smaller, even sizes."""

PER_COMMIT = {"llama", "qwen3", "gemma2", "gpt2", "deepseek_v3", "gpt_oss"}
"""Grouped heads; norms of heads; windows and softcaps; learned positions and Conv1D; latent attention, experts and a
persistent buffer; sinks and interleaved experts. The other families are proofs."""


def families(names: Iterable[str] = ARCHITECTURES) -> list[Any]:
    """Make `parametrize` values of these names, those outside PER_COMMIT as proofs."""
    return [name if name in PER_COMMIT else pytest.param(name, marks=pytest.mark.proof) for name in names]


def build(
    model: str | dict[str, Any],
    seed: int = 0,
    precision: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    eager: bool = True,
    packs: bool = False,
    **changes: Any,
) -> BuiltModel:
    """A family of ARCHITECTURES, or an architecture; with `changes` in it, and other keys of the config's section."""
    architecture = ARCHITECTURES[model] if isinstance(model, str) else model
    section = Model.model_validate({"architecture": architecture | changes, **(keys or {})})
    sizes: dict[str, Any] = {"seed": seed, "seq_len": SEQ_LEN, "vocabulary": VOCABULARY}
    return build_model(section, Precision(**(precision or {})), eager=eager, packs_documents=packs, **sizes)


def open_folder(
    folder: Path,
    *allow: str,
    vocabulary: int = VOCABULARY,
    keeps_ids: bool = False,
    keys: dict[str, Any] | None = None,
    **precision: Any,
) -> BuiltModel:
    section = Model(pretrained=str(folder), allow=allow, **(keys or {}))
    sizes: dict[str, Any] = {"seed": 3, "seq_len": SEQ_LEN, "vocabulary": vocabulary}
    return build_model(section, Precision(**precision), keeps_ids=lambda: keeps_ids, **sizes)


def save(folder: Path, name: str, **options: Any) -> Any:
    """A folder as transformers writes it, of a model whose weights are all off their defaults."""
    stock = stock_model(ARCHITECTURES[name])
    shake(stock)
    stock.save_pretrained(folder, **options)
    return stock


def edit(folder: Path, *without: str, **more: torch.Tensor) -> None:
    """Change the folder's single file; `__` in a name stands for a dot."""
    file = folder / "model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(file).items() if key not in without}
    save_file(tensors | {key.replace("__", "."): tensor for key, tensor in more.items()}, file, {"format": "pt"})


def whole_weight(built: BuiltModel, fqn: str) -> torch.Tensor:
    return built.fill(fqn, full_region(built.model.get_parameter(fqn).shape))


def materialise(built: BuiltModel) -> Any:
    """Fill all parameters, ties and what is frozen kept; the model then runs on the host."""
    for fqn, places in parameter_slots(built.model).items():
        is_trained = built.model.get_parameter(fqn).requires_grad
        parameter = nn.Parameter(whole_weight(built, fqn), requires_grad=is_trained)
        for place in places:
            place.module._parameters[place.leaf] = parameter
    return built.model


def shake(model: nn.Module) -> None:
    """Move every weight off its initial value, so that biases and norms matter too."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def stock_model(architecture: dict[str, Any], attention: str = "eager") -> Any:
    """transformers' own model with its own random weights."""
    config = AutoConfig.for_model(**architecture)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")


def logits(model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Return the logits, also of a model whose forward returns a loss."""
    return cast(torch.Tensor, type(model).forward(model, input_ids=input_ids, use_cache=False, **arguments).logits)


def token_ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(1))


class Operators(TorchDispatchMode):
    """Record all operators that run: names, shapes of the arguments, shape of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        shapes = [tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]
        self.calls.append((str(func), shapes, getattr(out, "shape", None)))
        return out

    def require_no_reads(self) -> None:
        """Nothing asked the host."""
        assert self.calls
        assert not {name for name, *_ in self.calls if "_local_scalar_dense" in name or "nonzero" in name}
