"""GGUF files, written here as llama.cpp's converter writes them, and read by transformers' own loader beside ours."""

import random
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from foreign_models import MODELS, assert_same, build, tensors_in, weights
from transformers import AutoModelForCausalLM

from portable_fsdp.formats.importing import import_checkpoint
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow

TYPE = gguf.GGMLQuantizationType
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**MODELS["llama"], **WIDE},
    "llama_tied": {**MODELS["llama"], **WIDE, "tie_word_embeddings": True},
    "qwen2": {**MODELS["llama"], **WIDE, "model_type": "qwen2"},
    "qwen3": {**MODELS["qwen3"], **WIDE},
}


def write(path: Path, model: Any, quantized: Any = TYPE.F32, architecture: str | None = None) -> None:
    """As convert_hf_to_gguf.py does: q and k of llama permuted, matrices quantised, norms in float32."""
    config = model.config
    name = architecture or config.model_type
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("test")
    for add, value in (
        (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads),
        (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_vocab_size, config.vocab_size),
        (writer.add_key_length, config.head_dim),
    ):
        add(value)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.LLAMA if config.model_type == "llama" else gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers
    )
    for fqn, tensor in weights(model).items():
        array = tensor.numpy()
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        if config.model_type == "llama" and fqn.endswith(("q_proj.weight", "k_proj.weight")):
            count = heads[fqn.split(".")[-2][0]]
            array = array.reshape(count, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        kind = quantized if array.ndim > 1 else TYPE.F32
        data = gguf.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(str(names.get_name(fqn, (".weight", ".bias"))), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_it_reads_what_transformers_reads(tmp_path: Path, kind: str) -> None:
    model = build(ARCHITECTURES["llama"])
    write(tmp_path / "m.gguf", model, TYPE[kind])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    imported = tensors_in(import_checkpoint(tmp_path / "m.gguf", tmp_path / "run"))
    assert_same(imported, weights(theirs))
    expected = weights(model)
    bound = {"F16": 1e-3, "BF16": 8e-3, "Q8_0": 1e-2, "Q4_0": 2e-1}[kind]
    for key, tensor in expected.items():
        assert (imported[key] - tensor).abs().max() <= bound * tensor.abs().max(), key
    lower = tensors_in(import_checkpoint(tmp_path / "m.gguf", tmp_path / "low", dtype="bfloat16"))
    assert_same(lower, {key: tensor.bfloat16() for key, tensor in imported.items()})


def test_other_architectures_and_tensors_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", build(ARCHITECTURES["llama"]), architecture="mamba")
    with pytest.raises(CheckpointError, match=r"expected an architecture of llama, .*; found mamba"):
        import_checkpoint(tmp_path / "m.gguf", tmp_path / "run")
    write(tmp_path / "m.gguf", build(ARCHITECTURES["llama"]))
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"output_norm.weight", b"rope_freqsX.weight"))
    with pytest.raises(CheckpointError, match=r"rope_freqsX\.weight"):
        import_checkpoint(tmp_path / "m.gguf", tmp_path / "run")


def test_absurd_lengths_are_refused(tmp_path: Path) -> None:
    for content in (
        b"",
        struct.pack("<IQQ", 3, 0, 0),
        struct.pack("<IQQ", 3, 2**63, 2**63),
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62),
        struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**62),
        struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 2**62, 0, 0),
        struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<I", 2**31),
        struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<II", 9, 9) + bytes(64),
    ):
        (tmp_path / "m.gguf").write_bytes(b"GGUF" + content)
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            import_checkpoint(tmp_path / "m.gguf", tmp_path / "run")


def test_damage_is_refused_or_harmless_but_never_a_crash(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", build(ARCHITECTURES["llama"]))
    raw = (tmp_path / "m.gguf").read_bytes()
    for length in range(4, len(raw), len(raw) // 20):
        (tmp_path / "m.gguf").write_bytes(raw[:length])
        with pytest.raises(CheckpointError):
            import_checkpoint(tmp_path / "m.gguf", tmp_path / "cut")
    header = raw.index(b"output_norm.weight") + 64
    refused = 0
    for seed in range(60):
        dice = random.Random(seed)
        at = dice.randrange(header)
        (tmp_path / "m.gguf").write_bytes(raw[:at] + dice.randbytes(2) + raw[at + 2 :])
        try:
            shutil.rmtree(import_checkpoint(tmp_path / "m.gguf", tmp_path / "run", "gguf"))
        except CheckpointError:
            refused += 1
    assert 0 < refused < 60
