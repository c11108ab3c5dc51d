"""Codes, scales and values of quantised weights are bitsandbytes' own, piece by piece, and from its folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.backends.torch_xla.spmd.quantised import nf4_values
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import full_region
from portable_fsdp.models.build import build_model
from portable_fsdp.models.quantised import TableFill, with_tables
from portable_fsdp.quantised import ByteTable, constants, dequantise, expand, expanded, place, scaled
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.train.build import shard_policy

SCHEMES = ("nf4", "nf4_double", "int8")
SHAPES = [(1, 1), (5, 64), (33, 65), (31, 100), (70, 896), (20, 1024)]
MORE = [
    *((64, 64), (7, 128), (3, 1), (10, 63), (64, 96), (256, 256), (129, 513), (1000, 3)),
    *((rows, columns) for rows in (1, 2, 17, 70, 130) for columns in (2, 66, 127, 512, 640, 2048)),
]


def tables_of(shape: tuple[int, ...], scheme: str) -> list[ByteTable]:
    """Every form that a weight of this shape may have."""
    units = [unit for unit in (64, 256, 1024) if unit >= 256 or scheme != "nf4_double"]
    flat = [ByteTable(scheme, shape, unit, is_flat=True) for unit in units if scheme != "int8"]
    rows = [ByteTable(scheme, shape, unit) for unit in units if shape[-1] % unit == 0]
    return [*flat, *rows] or [ByteTable(scheme, shape, shape[-1])]


def theirs(weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Packed codes and values of bitsandbytes, which takes seconds to import."""
    from bitsandbytes import functional as bitsandbytes

    if scheme == "int8":
        codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight.clone())
        return codes, torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales)
    codes, state = bitsandbytes.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=scheme == "nf4_double"
    )
    return codes, values_of(codes, state).reshape(weight.shape)


def values_of(codes: Tensor, state: Any) -> Tensor:
    """Dequantise as one row: on some CPUs bitsandbytes 0.50 uses wrong scales if a row ends within a block."""
    from bitsandbytes import functional as bitsandbytes

    state.shape = torch.Size([state.shape.numel()])
    with torch.compiler.set_stance("force_eager"):  # it compiles what its kernel doesn't take: odd rows
        return bitsandbytes.dequantize_4bit(codes, state)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(s, marks=pytest.mark.proof) for s in MORE)], ids=str)
def test_codes_and_values_are_those_of_bitsandbytes_and_pieces_those_of_the_whole(
    shape: tuple[int, int], scheme: str
) -> None:
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape) * 0.02
    codes, values = theirs(weight, scheme)
    for table in tables_of(shape, scheme):
        fill = TableFill(lambda _, slices: weight[slices], {"w": table}, lambda _: None)
        stored = fill("w", ())
        assert tuple(stored.shape) == table.stored_shape
        ours = stored.view(torch.uint8)[..., : table.unit if scheme == "int8" else table.code_bytes].flatten()
        assert torch.equal(ours[: codes.numel()], codes.flatten().view(torch.uint8))
        actual = dequantise(stored, table, torch.float32, constants(scheme))
        assert torch.equal(actual, values)
        assert torch.equal(without_look_ups(expand(stored, table), expanded(table)), values)
        whole, cut = full_region(stored.shape), len(stored) // 2
        parts = [fill("w", (slice(*rows), *whole[1:])) for rows in ((0, cut), (cut, len(stored)))]
        assert torch.equal(torch.cat(parts), stored)
        if not table.is_flat and stored.shape[1] > 1:
            parts = [fill("w", (whole[0], slice(at, at + 1), whole[2])) for at in range(stored.shape[1])]
            assert torch.equal(torch.cat(parts, dim=1), stored)


def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.zeros(4, 128)
    for scheme in SCHEMES:
        for table in tables_of((4, 128), scheme):
            stored = TableFill(lambda _, slices: weight[slices], {"w": table}, lambda _: None)("w", ())
            assert torch.equal(dequantise(stored, table, torch.float32, constants(scheme)), weight)


def without_look_ups(stored: Tensor, table: ByteTable) -> Tensor:
    """Dequantise as XLA's programs do."""
    rows = stored.view(torch.uint8)
    codes, scales = rows[..., : table.code_bytes].view(torch.int8), rows[..., table.code_bytes :].view(torch.float32)
    return scaled(codes if table.scheme == "int8" else nf4_values(codes), scales, table, torch.float32)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_keeps_the_bytes_and_no_weight(scheme: str) -> None:
    layer, weight = nn.Linear(256, 64, device="meta"), torch.randn(64, 256)
    table = next(table for table in tables_of((64, 256), scheme) if not table.is_flat)
    place(nn.ModuleDict({"layer": layer}), {"layer.weight": table})
    stored = TableFill(lambda _, slices: weight[slices], {"w": table}, lambda _: None)("w", ())
    layer.weight, layer.bias = (nn.Parameter(value, requires_grad=False) for value in (stored, torch.randn(64)))
    x, kept = torch.randn(5, 256, requires_grad=True), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(x)
    out.sum().backward()
    plain = dequantise(stored, table, torch.float32, constants(scheme))
    assert torch.equal(out, nn.functional.linear(x, plain, layer.bias))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(5, 64) @ plain)
    assert not [tensor for tensor in kept if tensor.is_floating_point() and tensor.numel() >= weight.numel()]
    assert any(tensor is layer.weight or torch.equal(tensor, stored) for tensor in kept if tensor.dtype == torch.int8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_more_than_a_few_mb_of_a_weight_are_read_at_a_time(scheme: str) -> None:
    weight, sizes = torch.randn(3 * 1024, 1024), list[int]()

    def fill(_: str, slices: tuple[slice, ...]) -> Tensor:
        sizes.append(weight[slices].numel())
        return weight[slices]

    table = ByteTable(scheme, tuple(weight.shape), 256)
    TableFill(fill, {"weight": table}, lambda _: None)("weight", ())
    assert sum(sizes) == weight.numel() * (2 if scheme == "nf4_double" else 1)
    assert max(sizes) <= 2**20


# ------------------------------------------------------------------------------------------------------------ folders

SIZES = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SKIPPED = "model.layers.1.mlp.up_proj.weight"


def write_folder(folder: Path, scheme: str, storage: torch.dtype = torch.uint8) -> dict[str, Tensor]:
    """A folder as transformers saves one that bitsandbytes quantised; returns the values of its weights."""
    from bitsandbytes import functional as bitsandbytes

    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, **HEADS))
    model.save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name in [name for name in tensors if "proj" in name and name != SKIPPED]:
        weight = tensors.pop(name)
        if scheme == "int8":
            codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight)
            tensors |= {name: codes, f"{name.removesuffix('weight')}SCB": scales}
            tensors[f"{name}_format"] = torch.tensor(0, dtype=torch.uint8)
            values[name] = torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales)
        else:
            codes, state = bitsandbytes.quantize_4bit(
                weight,
                blocksize=64,
                quant_type="nf4",
                compress_statistics=scheme == "nf4_double",
                quant_storage=storage,
            )
            tensors[name] = codes
            tensors |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
            values[name] = values_of(codes.view(torch.uint8).reshape(-1, 1), state).reshape(weight.shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": scheme != "int8"}
    config["quantization_config"] |= {"load_in_8bit": scheme == "int8"}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def config_of(folder: Path, frozen: str) -> Config:
    return Config.model_validate(
        {"model": {"pretrained": str(folder), "lora": {"r": 2}}, "precision": {"frozen": frozen}, "train": {"steps": 1}}
    )


def built_of(config: Config) -> Any:
    built = build_model(config.model, config.precision, seed=0, seq_len=8, vocabulary=0)
    policy = shard_policy(config, built.model, built.base)
    return with_tables(built, policy.tables, config), policy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "storage"),
    [*((scheme, torch.uint8) for scheme in SCHEMES), ("nf4", torch.bfloat16), ("nf4_double", torch.float32)],
    ids=str,
)
def test_a_folder_of_bitsandbytes_is_read_bit_for_bit(tmp_path: Path, scheme: str, storage: torch.dtype) -> None:
    values = write_folder(tmp_path, scheme, storage)
    built, policy = built_of(config_of(tmp_path, scheme))
    assert {fqn.replace(".base_layer.", ".") for fqn in policy.tables} == values.keys()
    for fqn, table in policy.tables.items():
        actual = dequantise(built.fill(fqn, ()), table, torch.float32, constants(scheme))
        assert torch.equal(actual, values[fqn.replace(".base_layer.", ".")]), fqn
    skipped = SKIPPED.replace("weight", "base_layer.weight")
    assert built.fill(skipped, full_region((96, 64))).dtype == torch.float32
    others = [other for other in (*SCHEMES, "auto") if other != scheme]
    for other in others:
        with pytest.raises(ConfigError, match=f"expected precision.frozen={scheme}, found {other}"):
            built_of(config_of(tmp_path, other))
