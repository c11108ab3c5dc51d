"""GGUF files, written as llama.cpp's converter writes them, and read by transformers' own loader beside ours."""

import struct
from pathlib import Path

import gguf
import pytest
import torch
from foreign_models import WIDE, assert_same, build, tensors_in, weights, write_gguf
from transformers import AutoModelForCausalLM

from portable_fsdp.formats.importing import import_checkpoint
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow

TYPE = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_it_reads_what_transformers_reads(tmp_path: Path, kind: str) -> None:
    model = build(WIDE)
    write_gguf(tmp_path / "m.gguf", model, TYPE[kind])
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
    write_gguf(tmp_path / "m.gguf", build(WIDE), architecture="mamba")
    with pytest.raises(CheckpointError, match=r"expected an architecture of llama, .*; found mamba"):
        import_checkpoint(tmp_path / "m.gguf", tmp_path / "run")
    write_gguf(tmp_path / "m.gguf", build(WIDE))
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
