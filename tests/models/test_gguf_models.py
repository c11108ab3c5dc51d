"""`model.gguf_file`: weights, config and shapes as transformers reads them from the same file, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import build
from test_gguf import ARCHITECTURES, TYPE, write
from transformers import AutoModelForCausalLM

from portable_fsdp.config.schema import Model, Precision
from portable_fsdp.layout import full_region, rows_of_shard
from portable_fsdp.models.build import BuiltModel, build_model
from portable_fsdp.models.pretrained import fingerprint
from portable_fsdp.models.tensor_files import GgufFile
from portable_fsdp.runtime.errors import ConfigError

SEQ_LEN = 16


def open_file(folder: Path, file: str = "m.gguf", vocabulary: int = 4, **precision: Any) -> BuiltModel:
    section = Model(pretrained=str(folder), gguf_file=file)
    return build_model(section, Precision(**precision), seed=0, seq_len=SEQ_LEN, vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "Q4_0"), ("llama_tied", "Q8_0"), ("qwen2", "F16"), ("qwen3", "F32")]
)
def test_it_fills_what_transformers_reads_in_the_masters_dtype(tmp_path: Path, name: str, kind: str) -> None:
    theirs = build(ARCHITECTURES[name])
    write(tmp_path / "m.gguf", theirs, TYPE[kind])
    if name != "qwen3":  # whose head_dim transformers 5.23 doesn't read from a GGUF; ours is the model as it was
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    built, rounded = open_file(tmp_path), open_file(tmp_path, master="bfloat16")
    assert dict(built.model.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    for fqn, weight in theirs.named_parameters():
        assert torch.equal(built.fill(fqn, full_region(weight.shape)), weight), fqn
        assert torch.equal(rounded.fill(fqn, full_region(weight.shape)), weight.bfloat16()), fqn
        for process in range(3):
            rows = rows_of_shard(len(weight), process, 3)
            assert torch.equal(built.fill(fqn, (rows, *full_region(weight.shape)[1:])), weight[rows]), fqn
    config = theirs.config.to_dict()
    for key in ("vocab_size", "hidden_size", "rms_norm_eps", "num_key_value_heads", "tie_word_embeddings"):
        assert built.config[key] == pytest.approx(config[key], rel=1e-7)  # GGUF has float32
    assert "quantization_config" not in built.config  # what is trained and exported is not quantised


def test_its_fingerprint_tells_other_weights(tmp_path: Path) -> None:
    model = build(ARCHITECTURES["llama"])
    actual: list[str] = []
    for name in ("a.gguf", "same.gguf", "other.gguf"):
        if name == "other.gguf":
            with torch.no_grad():
                model.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(-1)
        write(tmp_path / name, model, TYPE.Q8_0)
        actual.append(fingerprint(GgufFile(tmp_path / name)))
    assert actual[0] == actual[1] != actual[2]


def test_it_grows_with_its_tokenizer(tmp_path: Path) -> None:
    model = build(ARCHITECTURES["llama_tied"])
    write(tmp_path / "m.gguf", model)
    ids = model.config.vocab_size
    section = Model(pretrained=str(tmp_path), gguf_file="m.gguf")
    built = build_model(section, seed=0, seq_len=SEQ_LEN, vocabulary=ids + 2, keeps_ids=lambda: True)
    table = model.get_input_embeddings().weight
    actual = built.fill("model.embed_tokens.weight", full_region((ids + 2, table.shape[1])))
    assert torch.equal(actual[:ids], table)
    assert torch.equal(actual[ids:], table.double().mean(0).float().expand(2, -1))


def test_what_is_not_there_or_not_done_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", build(ARCHITECTURES["llama"]))
    with pytest.raises(ConfigError, match=r"model\.gguf_file: expected a file of .* the name other\.gguf\."):
        open_file(tmp_path, "other.gguf")
    with pytest.raises(ConfigError, match=r"config\.json, found none in it: .*\n.*model\.gguf_file"):
        build_model(Model(pretrained=str(tmp_path)), seed=0, seq_len=SEQ_LEN, vocabulary=4)
    write(tmp_path / "b.gguf", build(ARCHITECTURES["llama"]), architecture="bloom")
    with pytest.raises(ConfigError, match=r"b\.gguf: expected an architecture of llama, qwen2, qwen3; found bloom"):
        open_file(tmp_path, "b.gguf")
    (tmp_path / "c.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:500])
    with pytest.raises(ConfigError, match=r"c\.gguf: expected a GGUF file"):
        open_file(tmp_path, "c.gguf")
