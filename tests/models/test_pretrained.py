"""Hugging Face folders and GGUF files: which they fill bit for bit, keys too many and too few, broken ones, grown
tokenizers.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import GGML, WIDE, write_gguf
from foreign_models import build as build_foreign
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
from transformers import AutoModelForCausalLM

from portable_fsdp.config.schema import Model
from portable_fsdp.layout import full_region, rows_of_shard
from portable_fsdp.models import tensor_files
from portable_fsdp.models.build import build_model
from portable_fsdp.models.pretrained import fingerprint
from portable_fsdp.models.tensor_files import GgufFile
from portable_fsdp.models.weights import BuiltModel
from portable_fsdp.runtime.errors import ConfigError

pytestmark = pytest.mark.slow

NORM, HEAD, TABLE = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
WEIGHTS = "model.safetensors"


def assert_filled_from(built: BuiltModel, stock: Any, dtype: torch.dtype = torch.float32) -> None:
    expected = dict(stock.named_parameters())
    assert expected.keys() == dict(built.model.named_parameters()).keys()
    for fqn, weight in expected.items():
        filled = whole_weight(built, fqn)
        assert filled.dtype == dtype
        assert torch.equal(filled, weight.to(dtype)), fqn
        rows = slice(len(weight) // 3, len(weight) // 2)
        assert torch.equal(built.fill(fqn, (rows, *full_region(weight.shape)[1:])), weight[rows].to(dtype)), fqn


# -------------------------------------------------------------------------------------------------------- layouts


AS_SAVED, AS_ON_THE_HUB = ("llama", "llama_tied", "gpt2", "opt", "gemma2"), ("mixtral", "qwen3_moe", "deepseek_v3")
"""The hub has each expert of the latter by itself."""


@pytest.mark.parametrize(
    "name", families([*AS_SAVED, *AS_ON_THE_HUB, "gpt_oss", "qwen3_next", "phi", "falcon", "olmo2"])
)
def test_a_folder_fills_bit_for_bit(tmp_path: Path, name: str) -> None:
    stock = save(tmp_path, name).eval()
    built = open_folder(tmp_path)
    assert_filled_from(built, stock)
    for fqn, buffer in stock.named_buffers():
        assert torch.equal(built.model.get_buffer(fqn), buffer), fqn
    if name in AS_SAVED:
        ids = token_ids()
        torch.testing.assert_close(logits(materialise(built).eval(), ids), logits(stock, ids), rtol=1e-5, atol=1e-5)
    if name in AS_ON_THE_HUB:  # without transformers' tables the folder has no expert of ours
        held = set(load_file(tmp_path / WEIGHTS))
        assert any(".experts.1." in key for key in held)
        assert not any(".experts." in key for key in held & set(stock.state_dict()))


class _Counting:
    """A safetensors file, or a slice of it, that counts the bytes of each tensor that it gives."""

    def __init__(self, inside: Any, taken: list[int]) -> None:
        self._inside, self._taken = inside, taken

    def __getattr__(self, name: str) -> Any:  # get_slice, get_tensor, keys, get_shape, get_dtype
        return lambda *arguments: self._counted(getattr(self._inside, name)(*arguments))

    def __getitem__(self, slices: Any) -> torch.Tensor:
        return self._counted(self._inside[slices])

    def __enter__(self) -> "_Counting":
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)

    def _counted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._taken.append(value.nbytes)
        return _Counting(value, self._taken) if hasattr(value, "get_shape") else value


def test_a_process_reads_its_slices_of_a_sharded_folder_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = save(tmp_path, "llama", max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    taken: list[int] = []
    real = tensor_files.safe_open
    monkeypatch.setattr(tensor_files, "safe_open", lambda *args, **keys: _Counting(real(*args, **keys), taken))
    built = open_folder(tmp_path)
    assert taken == [], "building alone reads no weight"
    total = 0
    for process in range(4):
        for fqn, weight in stock.named_parameters():
            rows = rows_of_shard(weight.shape[0], process, 4)
            assert torch.equal(built.fill(fqn, (rows, *full_region(weight.shape)[1:])), weight[rows])
        assert sum(taken) - total < 0.27 * 4 * built.size.parameters
        total = sum(taken)
    assert total == 4 * built.size.parameters
    assert_filled_from(built, stock)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_cast_to_the_dtype_of_masters(tmp_path: Path, stored: torch.dtype) -> None:
    stock = stock_model(ARCHITECTURES["llama"]).to(stored)
    stock.save_pretrained(tmp_path)
    for master in ("float32", "bfloat16"):
        assert_filled_from(open_folder(tmp_path, master=master), stock, getattr(torch, master))


def test_names_without_the_base_models_prefix_are_found(tmp_path: Path) -> None:
    """GPT-2's own folder: saved from the base model, with a mask that is a buffer no longer."""
    stock = save(tmp_path, "gpt2")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / WEIGHTS, {"format": "pt"})
    assert "wte.weight" in load_file(tmp_path / WEIGHTS)
    assert_filled_from(open_folder(tmp_path), stock)


def test_a_tied_weight_may_have_its_other_name_or_both_but_one_content(tmp_path: Path) -> None:
    stock = save(tmp_path, "llama_tied")
    table = load_file(tmp_path / WEIGHTS)[TABLE]
    for head, without in ((table.clone(), ()), (table, (TABLE,))):
        edit(tmp_path, *without, lm_head__weight=head)
        assert_filled_from(open_folder(tmp_path), stock)
    edit(tmp_path, lm_head__weight=table + torch.eye(*table.shape), model__embed_tokens__weight=table)
    with pytest.raises(ConfigError, match=r"tied weights model\.embed_tokens\.weight and lm_head\.weight differ\.\n"):
        open_folder(tmp_path)


def test_a_persistent_buffer_is_read(tmp_path: Path) -> None:
    stock, bias = stock_model(ARCHITECTURES["deepseek_v3"]), "model.layers.1.mlp.gate.e_score_correction_bias"
    stock.get_buffer(bias).copy_(torch.arange(4.0))
    stock.save_pretrained(tmp_path, save_original_format=False)
    assert torch.equal(open_folder(tmp_path).model.get_buffer(bias), torch.arange(4.0))


# --------------------------------------------------------------------------------------- keys too few, and too many


def test_missing_weights_that_are_allowed_are_drawn_as_in_a_new_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock = save(tmp_path, "llama")
    edit(tmp_path, HEAD, NORM)
    _set(tmp_path, vendor=1)
    with pytest.raises(ConfigError, match=r"are missing: lm_head\.weight, and 1 more.*\n.*model\.allow"):
        open_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"are missing: model\.norm\.weight\.\n"):
        open_folder(tmp_path, "lm_head")
    built = open_folder(tmp_path, "lm_head", "*norm.weight")
    assert f"missing, and drawn from run.seed: {NORM}, {HEAD}" in caplog.text
    assert "model.pretrained: LlamaConfig declares no vendor: probably without effect" in caplog.text
    assert torch.equal(whole_weight(built, HEAD), whole_weight(build("llama", seed=3), HEAD))
    assert torch.equal(whole_weight(built, NORM), torch.ones(48))
    assert torch.equal(whole_weight(built, TABLE), stock.get_parameter(TABLE))


def test_what_the_model_has_no_place_for_is_refused_unless_allowed(tmp_path: Path) -> None:
    stock = save(tmp_path, "llama")
    edit(tmp_path, vision__tower__weight=torch.ones(2), extra=torch.ones(2))
    with pytest.raises(ConfigError, match=r": 2 .* LlamaForCausalLM: extra, vision\.tower\.weight\.\n.*allow"):
        open_folder(tmp_path)
    with pytest.raises(ConfigError, match=r": 1 tensor\(s\) don't belong to LlamaForCausalLM: extra\."):
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
    assert f"left out by transformers' rules or model.allow: {key.replace('__', '.')}" in caplog.text


# ---------------------------------------------------------------------------------------------- broken folders


def _set(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def _without_an_expert(folder: Path) -> None:
    edit(folder, next(key for key in load_file(folder / WEIGHTS) if ".experts.1." in key))


def _index(folder: Path, **more: str) -> None:
    names = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS) | more
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))


def _write(name: str, content: str | None) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_text(content)


TABLE_IN_FLOAT8 = {"model__embed_tokens__weight": torch.ones(VOCABULARY, 48).to(torch.float8_e4m3fn)}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
PICKLE = r"expected model\.safetensors or .*found pytorch_model\.bin\.\n.*A pickle may.*\n.*\n.* import "
BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: edit(f, NORM), r"of the model's 21 tensors these are missing: model\.norm\.weight\."),
    (lambda f: edit(f, HEAD), r"these are missing: lm_head\.weight\."),
    (lambda f: edit(f, model__norm__weight=torch.ones(47)), r"norm\.weight: expected \[48\] \(config.*found \[47\] in"),
    (lambda f: _set(f, intermediate_size=96), r"0\.mlp\.gate_proj\.weight: expected \[96, 48\].*found \[80, 48\]"),
    (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), PICKLE),
    (_write(WEIGHTS, None), r"expected model\.safetensors or .*found neither\."),
    (_write(WEIGHTS, "\0" * 5), r"model\.safetensors: its 5 bytes are not a complete safetensors file"),
    (lambda f: _index(f, x="model-2.safetensors"), r"no such file: model-2\.safetensors, which .*index\.json lists"),
    (lambda f: _index(f, x=WEIGHTS), r"model\.safetensors doesn't have x, which model\.safetensors\.index\.json lists"),
    (_write(f"{WEIGHTS}.index.json", "[]"), r"index\.json: can't read .*weight_map"),
    (_write("config.json", None), r"no config\.json in "),
    (_write("config.json", "{"), r"config\.json: .*JSON"),
    (_write("config.json", "{}"), r"config\.json: .*model"),
    (lambda f: _set(f, model_type="t5"), r"config\.json: expected a causal language model.*found model_type 't5'"),
    (lambda f: (f / "config.json").rename(f / "adapter_config.json"), r"no config\.json in .*\n.*for an adapter"),
    (lambda f: edit(f, **TABLE_IN_FLOAT8), r"tokens\.weight: expected F32, .* found F8_E4M3 .*: a quantised model"),
    (lambda f: _set(f, **FP8), r"expected weights in float32, .*quantised.*: fp8\)"),
    (_without_an_expert, r".*experts"),
    (shutil.rmtree, r": no such folder: .*\n  Name a local folder or a hub id"),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN)
def test_a_broken_folder_is_refused(tmp_path: Path, breaks: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "model"
    save(folder, "mixtral" if breaks is _without_an_expert else "llama")
    breaks(folder)
    with pytest.raises(ConfigError, match=f"(?s)model.pretrained.*{message}") as caught:
        open_folder(folder)
    assert str(folder) in str(caught.value)


def test_code_in_the_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "llama")
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    _set(tmp_path, model_type="own", auto_map={"AutoConfig": "own.Own"})
    monkeypatch.setattr("builtins.input", lambda prompt: "y")  # transformers would ask whether to run it
    with pytest.raises(ConfigError, match=r"config\.json: .*trust_remote_code"):
        open_folder(tmp_path)


# ---------------------------------------------------------------------------------------- a tokenizer that has grown

GROWN = VOCABULARY + 6


@pytest.mark.parametrize(
    ("name", "master"),
    [("llama", "float32"), ("llama", "bfloat16"), ("llama_tied", "float32"), ("phi", "float32"), ("gpt2", "float32")],
)  # phi's head has a bias
def test_new_rows_are_the_mean_of_the_old_ones(
    tmp_path: Path, name: str, master: str, caplog: pytest.LogCaptureFixture
) -> None:
    stock, dtype = save(tmp_path, name).eval(), getattr(torch, master)
    with caplog.at_level(logging.INFO):
        built = open_folder(tmp_path, vocabulary=GROWN, keeps_ids=True, master=master)
    assert "the tokenizer has 107 ids, the model rows for 101: embedding and head grow by 6 rows" in caplog.text
    assert built.config["vocab_size"] == GROWN
    for fqn, weight in stock.named_parameters():
        filled = whole_weight(built, fqn)
        if len(weight) == VOCABULARY:
            mean = weight.double().mean(0).float()
            expected = torch.cat([weight, mean.expand(6, *mean.shape)]).to(dtype)
            assert torch.equal(filled, expected), fqn
            for process in range(4):  # some shards are all old, one is both, and of 60 some are all new
                for count in (4, 60):
                    rows = rows_of_shard(GROWN, process * count // 4, count)
                    assert torch.equal(built.fill(fqn, (rows, *full_region(weight.shape)[1:])), expected[rows])
        else:
            assert torch.equal(filled, weight.to(dtype)), fqn
    if master == "float32":
        ids = token_ids()
        grown, expected = logits(materialise(built).eval(), ids), logits(stock, ids)
        torch.testing.assert_close(grown[..., :VOCABULARY], expected, rtol=1e-5, atol=1e-5)


def test_another_tokenizer_makes_nothing_grow_and_a_smaller_one_nothing_shrink(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"vocab_size of at least 107 .*, found 101\.(?s:.)*grows only .* tokenizer"):
        open_folder(tmp_path, vocabulary=GROWN)
    assert open_folder(tmp_path, vocabulary=50, keeps_ids=True).config["vocab_size"] == VOCABULARY
    with pytest.raises(ConfigError, match="vocab_size of at least 107"):
        build_model(
            Model(architecture=ARCHITECTURES["llama"]), seed=0, seq_len=8, vocabulary=GROWN, keeps_ids=lambda: True
        )


QWEN3 = {"model_type": "qwen3"}


def open_file(folder: Path, file: str = "m.gguf", vocabulary: int = 4, **options: Any) -> BuiltModel:
    return open_folder(folder, vocabulary=vocabulary, keys={"gguf_file": file}, **options)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({}, "Q4_0"), ({"tie_word_embeddings": True}, "Q8_0"), ({"model_type": "qwen2"}, "F16"), (QWEN3, "F32")],
    ids=str,
)
def test_it_fills_what_transformers_reads_in_the_masters_dtype(
    tmp_path: Path, changes: dict[str, Any], kind: str
) -> None:
    theirs = build_foreign(WIDE | changes)
    write_gguf(tmp_path / "m.gguf", theirs, GGML[kind])
    if changes is not QWEN3:  # whose head_dim transformers 5.23 doesn't read from a GGUF; ours is the model as it was
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
    model = build_foreign(WIDE)
    actual: list[str] = []
    for name in ("a.gguf", "same.gguf", "other.gguf"):
        if name == "other.gguf":
            with torch.no_grad():
                model.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(-1)
        write_gguf(tmp_path / name, model, GGML.Q8_0)
        actual.append(fingerprint(GgufFile(tmp_path / name)))
    assert actual[0] == actual[1] != actual[2]


def test_what_is_not_there_or_not_done_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", build_foreign(WIDE))
    with pytest.raises(ConfigError, match=r"model\.gguf_file: no such file in .*: other\.gguf\."):
        open_file(tmp_path, "other.gguf")
    with pytest.raises(ConfigError, match=r"no config\.json in .*\n.*model\.gguf_file"):
        open_folder(tmp_path)
