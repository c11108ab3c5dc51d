"""What is built, where its weights come from, and what is refused."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
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
    shake,
    stock_model,
    token_ids,
    whole_weight,
)
from transformers import AutoConfig

from portable_fsdp.backends.base import full_region, parameter_slots, rows_of_shard
from portable_fsdp.config.schema import Model, Precision
from portable_fsdp.models import safetensors_folder
from portable_fsdp.models.architecture import config_from_json
from portable_fsdp.models.build import BuiltModel, build_model
from portable_fsdp.runtime.errors import ConfigError

# --------------------------------------------------------------------------------------------------- architecture


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_on_meta_and_buffers_are_transformers_own(name: str) -> None:
    model = build(name).model
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.training
    expected, found = dict(stock_model(ARCHITECTURES[name]).named_buffers()), dict(model.named_buffers())
    assert expected.keys() == found.keys()
    for fqn, buffer in expected.items():
        assert found[fqn].dtype == buffer.dtype
        assert torch.equal(found[fqn], buffer), fqn


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_config_survives_json(name: str) -> None:
    """Mamba 2's time_step_limit is [0.0, inf], which JSON lacks."""
    stored = json.loads(json.dumps(build(name).config, allow_nan=False))
    architecture = dict(ARCHITECTURES[name])
    expected = AutoConfig.for_model(architecture.pop("model_type"), **architecture).to_dict()
    assert config_from_json(stored).to_dict() == expected
    assert config_from_json(expected).to_dict() == expected  # manifests of before
    assert name != "mamba2" or (stored["time_step_limit"][1], expected["time_step_limit"][1]) == (
        {"__float__": "Infinity"},
        math.inf,
    )


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_nothing_is_dropped_out(name: str) -> None:
    model = materialise(build(name))
    ids = token_ids()
    assert torch.equal(logits(model.train(), ids), logits(model, ids))
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    stock = stock_model(ARCHITECTURES[name]).train()
    assert not torch.equal(logits(stock, ids), logits(stock, ids)), "the check would show dropout"


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


@pytest.mark.parametrize("wanted", ["auto", "static", "sdpa", "eager"])
def test_the_attention_is_the_one_asked_for(wanted: str) -> None:
    section = Model.model_validate({"architecture": ARCHITECTURES["llama"], "attention": wanted})
    config: Any = build_model(section, seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY).model.config
    static = "portable_fsdp_static"
    assert config._attn_implementation == {"auto": static, "static": static}.get(wanted, wanted)


FALCON = {"model_type": "falcon", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2} | {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_a_model_with_its_own_attention_keeps_it() -> None:
    config: Any = build_model(Model(architecture=FALCON), seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY).model.config
    assert config._attn_implementation == "sdpa"
    with pytest.raises(ConfigError, match=r"model\.attention: Falcon.*own.*model\.attention=auto"):
        build_model(Model(architecture=FALCON, attention="static"), seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY)


LLAMA = ARCHITECTURES["llama"]
_ENCODER: dict[str, Any] = {"is_decoder": True, "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "intermediate_size": 80,
}
ROBERTA = _ENCODER | {"model_type": "roberta", "pad_token_id": 1}
MPT: dict[str, Any] = {"model_type": "mpt", "vocab_size": VOCABULARY, "d_model": 48, "n_heads": 4, "n_layers": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (LLAMA | {"model_type": "lama"}, r"model_type.*'lama'\.\n.*nearest: llama"),
    (LLAMA | {"model_type": "resnet"}, r"expected a causal language model of transformers, found 'resnet'"),
    (_ENCODER | {"model_type": "bert", "is_decoder": False}, r"causal.*encoder\.\n.*is_decoder=true"),
    (LLAMA | {"hidden_sise": 48}, r"model\.architecture\.hidden_sise: unknown key.*\n.*nearest: hidden_size"),
    (LLAMA | {"zzzzzz": 48}, r"model\.architecture\.zzzzzz: unknown key of LlamaConfig.*\n.*It has: .*vocab_size"),
    (LLAMA | {"max_position_embeddings": 8}, r"data\.seq_len: expected at most 8 .*found 24"),
    (ROBERTA | {"max_position_embeddings": 25}, r"data\.seq_len: expected at most 23 .*found 24"),
    (
        MPT | {"max_seq_len": 16},
        r"MptForCausalLM can't run a row of 24 tokens .*: RuntimeError: .*\n.*Compare the sizes",
    ),
    (LLAMA | {"vocab_size": 50}, r"vocab_size of at least 101.*found 50\.\n.*architecture\.vocab_size=101"),
    (LLAMA | {"num_attention_heads": 5}, r"transformers refuses it: .*hidden size.*48.*attention heads.*5"),
    (LLAMA | {"hidden_size": "wide"}, r"transformers refuses it: .*hidden_size.*int"),
    (LLAMA | {"hidden_act": "sillu"}, r"LlamaConfig: no model can be built .*sillu"),
]


@pytest.mark.parametrize(("architecture", "message"), REFUSED)
def test_an_architecture_that_cannot_be_is_refused(architecture: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(Model(architecture=architecture), seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY)


@pytest.mark.parametrize(
    "architecture",
    [_ENCODER | {"model_type": "bert"}, ROBERTA | {"max_position_embeddings": 26}],
    ids=["bert", "roberta"],
)
def test_an_encoder_as_decoder_is_taken(architecture: dict[str, Any]) -> None:
    section = Model(architecture=architecture)
    model = materialise(build_model(section, seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY))
    ids = token_ids(1).clamp(min=2)  # 1 is RoBERTa's padding
    later = ids.clone()
    later[0, 10:] = 0
    torch.testing.assert_close(logits(model, ids)[:, :10], logits(model, later)[:, :10])


OPENAI: dict[str, Any] = {"model_type": "openai-gpt", "vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4}


def test_a_weight_without_an_initial_value_comes_from_a_folder_only(tmp_path: Path) -> None:
    """GPT-1's. The model looks for padding, too, which the row that is tried can't follow and doesn't refuse."""
    architecture = OPENAI | {"pad_token_id": 0}
    built = build_model(Model(architecture=architecture), seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY)
    with pytest.raises(ConfigError, match=r"found that transformer\.h\.0\.attn\.c_attn\.weight \(Conv1D\) has no"):
        whole_weight(built, "transformer.h.0.attn.c_attn.weight")
    stock = stock_model(architecture).eval()
    stock.save_pretrained(tmp_path)
    ids = token_ids()
    torch.testing.assert_close(logits(materialise(open_folder(tmp_path)), ids), logits(stock, ids))


def test_the_row_that_is_tried_leaves_nothing_behind() -> None:
    """NTK rotary embeddings change their frequencies with the row that they see."""
    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    built = build("llama", max_position_embeddings=SEQ_LEN, **rope)
    expected = dict(stock_model(ARCHITECTURES["llama"] | {"max_position_embeddings": SEQ_LEN} | rope).named_buffers())
    for name, buffer in built.model.named_buffers():
        assert torch.equal(buffer, expected[name])


# ------------------------------------------------------------------------------------------- what doesn't train


def frozen(name: str, *patterns: str) -> set[str]:
    section = Model(architecture=ARCHITECTURES[name], freeze=patterns)
    model = build_model(section, seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY).model
    return {fqn for fqn, parameter in model.named_parameters() if not parameter.requires_grad}


def test_what_is_frozen_has_no_gradient_and_the_rest_does() -> None:
    assert frozen("llama") == set()
    assert frozen("llama", "lm_head", "*norm*") == {
        "lm_head.weight",
        "model.norm.weight",
        *(f"model.layers.{n}.{norm}_layernorm.weight" for n in (0, 1) for norm in ("input", "post_attention")),
    }
    assert all(name.startswith("model.layers.1.") for name in frozen("llama", "model.layers.1"))
    assert len(frozen("llama", "model.layers.1")) == 9


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_a_frozen_tied_weight_is_frozen_in_all_its_places(name: str) -> None:
    assert frozen("llama_tied", name) == {"model.embed_tokens.weight"}


def test_a_pattern_of_nothing_and_a_model_all_frozen_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.freeze: .*'embed', which matches nothing.*\n.*nearest: .*embed_tokens"
    ):
        frozen("llama", "embed")
    with pytest.raises(ConfigError, match=r"'qqqqq', which matches nothing.*\n  the first names: model\.embed_tokens"):
        frozen("llama", "qqqqq")
    with pytest.raises(ConfigError, match=r"model\.freeze: expected at least one .* found all 21 frozen by \['\*'\]"):
        frozen("llama", "*")


# ------------------------------------------------------------------------------------------------------ precision


def precisely(name: str = "llama", **precision: Any) -> BuiltModel:
    section = Model(architecture=ARCHITECTURES[name])
    return build_model(section, Precision(**precision), seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY)


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "deepseek_v3"])
def test_bfloat16_masters_are_the_float32_ones_rounded(name: str) -> None:
    exact, rounded = precisely(name), precisely(name, master="bfloat16")
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.bfloat16}
    for fqn in dict(exact.model.named_parameters()):
        assert torch.equal(whole_weight(rounded, fqn), whole_weight(exact, fqn).bfloat16()), fqn
    ties = [len(places) for places in parameter_slots(rounded.model).values()]
    assert ties == [len(places) for places in parameter_slots(exact.model).values()]
    for fqn, buffer in exact.model.named_buffers():  # rotary frequencies, a router's bias: as they were
        assert rounded.model.get_buffer(fqn).dtype == buffer.dtype
        assert torch.equal(rounded.model.get_buffer(fqn), buffer)


def test_a_folder_fills_bfloat16_masters(tmp_path: Path) -> None:
    stock = save(tmp_path, "llama")
    section = Model(pretrained=str(tmp_path))
    built = build_model(section, Precision(master="bfloat16"), seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY)
    for fqn, weight in stock.named_parameters():
        assert torch.equal(whole_weight(built, fqn), weight.bfloat16()), fqn


# ------------------------------------------------------------------------------------------------- random weights

NAMES = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"]


def test_weights_depend_on_seed_and_name_alone() -> None:
    first, second = build("llama"), build("llama")
    expected = {name: whole_weight(first, name) for name in NAMES}
    torch.manual_seed(99)
    for name in reversed(NAMES):
        assert torch.equal(whole_weight(second, name), expected[name])
    for name in NAMES:
        assert not torch.equal(whole_weight(build("llama", seed=1), name), expected[name])
    assert torch.equal(whole_weight(build("llama", num_hidden_layers=5), NAMES[0]), expected[NAMES[0]])
    assert not torch.equal(whole_weight(first, NAMES[0].replace("up", "gate")), expected[NAMES[0]])


def test_drawing_leaves_the_callers_random_state_alone() -> None:
    built = build("llama")
    before = torch.get_rng_state()
    whole_weight(built, NAMES[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_slice_is_that_of_the_whole_and_its_own_memory() -> None:
    built = build("llama")
    weight = whole_weight(built, NAMES[0]).clone()
    pieces = [built.fill(NAMES[0], (slice(begin, begin + 40), slice(3, 17))) for begin in (40, 0)]
    assert torch.equal(torch.cat([pieces[1], pieces[0]]), weight[:, 3:17])
    pieces[0].zero_()
    assert torch.equal(whole_weight(built, NAMES[0]), weight)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "opt", "gemma2"])
def test_weights_are_spread_as_transformers_spreads_them(name: str) -> None:
    built = build(name)
    for fqn, expected in stock_model(ARCHITECTURES[name]).named_parameters():
        found = whole_weight(built, fqn)
        if expected.std(unbiased=False) == 0:  # norms and biases
            assert torch.equal(found, expected), fqn
            continue
        assert found.std() == pytest.approx(expected.std().item(), rel=6 / math.sqrt(found.numel())), fqn
        assert abs(found.mean()) < 6 * found.std() / math.sqrt(found.numel()), fqn


def test_gpt2_scales_its_residual_projections() -> None:
    built = build("gpt2")
    scaled = whole_weight(built, "transformer.h.0.mlp.c_proj.weight")
    plain = whole_weight(built, "transformer.wte.weight")
    assert (scaled.std() / plain.std()).item() == pytest.approx(1 / math.sqrt(2 * 2), rel=0.1)


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTER_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_a_persistent_buffer_has_its_initial_value() -> None:
    built = build_model(Model(architecture=DEEPSEEK), seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY)
    assert not built.model.get_buffer(ROUTER_BIAS).any()
    assert ROUTER_BIAS in built.model.state_dict()
    assert whole_weight(built, "model.layers.1.mlp.experts.down_proj").std().item() == pytest.approx(0.02, rel=0.1)


GROWTH = """
import psutil
from portable_fsdp.config.schema import Model
from portable_fsdp.models.build import build_model
import small_models
small_models.build("llama")
process = psutil.Process()
before = process.memory_info().rss
sizes = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32)
built = build_model(
    Model(architecture=dict(model_type="llama", vocab_size=32000, num_key_value_heads=8, **sizes)),
    seed=0, seq_len=24, vocabulary=256,
)
built.fill("model.layers.15.mlp.up_proj.weight", (slice(0, 100), slice(0, 2048)))
built.fill("model.layers.3.mlp.up_proj.weight", (slice(0, 100), slice(0, 2048)))
print(built.size.parameters, process.memory_info().rss - before)
"""


@pytest.mark.slow
def test_a_billion_parameters_take_no_memory_to_build() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", GROWTH], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout
    parameters, growth_bytes = map(int, printed.split())
    assert parameters > 1.0e9
    assert growth_bytes < 200 * 2**20  # two weights of 64 MiB, one after the other


# --------------------------------------------------------------------------------------------- pretrained weights


def save(folder: Path, name: str, **options: Any) -> Any:
    """A folder as transformers writes it, of a model whose weights are all off their defaults."""
    stock = stock_model(ARCHITECTURES[name])
    shake(stock)
    stock.save_pretrained(folder, **options)
    return stock


def open_folder(folder: Path) -> BuiltModel:
    return build_model(Model(pretrained=str(folder)), seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY)


def assert_filled_from(built: BuiltModel, stock: Any) -> None:
    expected = dict(stock.named_parameters())
    assert expected.keys() == dict(built.model.named_parameters()).keys()
    for fqn, weight in expected.items():
        found = whole_weight(built, fqn)
        assert found.dtype == torch.float32
        assert torch.equal(found, weight.float()), fqn
        rows = slice(len(weight) // 3, len(weight) // 2)
        assert torch.equal(built.fill(fqn, (rows, *full_region(weight.shape)[1:])), weight[rows].float()), fqn


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "opt", "gemma2"])
def test_a_folder_fills_bit_for_bit(tmp_path: Path, name: str) -> None:
    stock = save(tmp_path, name).eval()
    built = open_folder(tmp_path)
    assert_filled_from(built, stock)
    ids = token_ids()
    torch.testing.assert_close(logits(materialise(built), ids), logits(stock, ids), rtol=1e-5, atol=1e-5)


def test_a_sharded_folder_fills_bit_for_bit(tmp_path: Path) -> None:
    stock = save(tmp_path, "llama", max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_filled_from(open_folder(tmp_path), stock)


class _CountingFile:
    """A safetensors file that says how many bytes were taken from it."""

    def __init__(self, file: Any, taken: list[int]) -> None:
        self._file, self._taken = file, taken

    def __enter__(self) -> "_CountingFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return self._file.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._count(self._file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        inside, count = self._file.get_slice(name), self._count

        class Slice:
            def get_shape(self) -> list[int]:
                return inside.get_shape()

            def get_dtype(self) -> str:
                return inside.get_dtype()

            def __getitem__(self, slices: Any) -> torch.Tensor:
                return count(inside[slices])

        return Slice()

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self._taken.append(tensor.nbytes)
        return tensor


def test_a_process_reads_its_slices_of_a_sharded_folder_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = save(tmp_path, "llama", max_shard_size="50KB")
    taken: list[int] = []
    real = safetensors_folder.safe_open
    monkeypatch.setattr(
        safetensors_folder, "safe_open", lambda path, framework: _CountingFile(real(path, framework), taken)
    )
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


def test_bfloat16_files_become_float32_masters(tmp_path: Path) -> None:
    stock = stock_model(ARCHITECTURES["llama"]).to(torch.bfloat16)
    stock.save_pretrained(tmp_path)
    assert_filled_from(open_folder(tmp_path), stock)


def test_names_without_the_base_models_prefix_are_found(tmp_path: Path) -> None:
    """GPT-2's own folder: saved from the base model, with a mask that is a buffer no longer."""
    stock = save(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, file, {"format": "pt"})
    assert "wte.weight" in load_file(file)
    assert_filled_from(open_folder(tmp_path), stock)


def test_a_tied_weight_is_found_under_its_other_name(tmp_path: Path) -> None:
    stock = save(tmp_path, "llama_tied")
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    _edit(tmp_path, lambda tensors: {head if name == table else name: tensor for name, tensor in tensors.items()})
    assert_filled_from(open_folder(tmp_path), stock)


def test_a_persistent_buffer_is_read(tmp_path: Path) -> None:
    stock = stock_model(DEEPSEEK)
    stock.get_buffer(ROUTER_BIAS).copy_(torch.arange(4.0))
    stock.save_pretrained(tmp_path, save_original_format=False)
    assert torch.equal(open_folder(tmp_path).model.get_buffer(ROUTER_BIAS), torch.arange(4.0))


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: _edit(folder, lambda tensors: {key: t for key, t in tensors.items() if key != name})


def _cut_norm(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors | {"model.norm.weight": torch.ones(47)})


def _only_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _index_of_a_missing_file(folder: Path) -> None:
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _wider_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (_without("model.norm.weight"), r"for each of the model's 21 tensors, found none for model\.norm\.weight\."),
    (_without("lm_head.weight"), r"found none for lm_head\.weight\."),
    (_cut_norm, r"model\.norm\.weight: expected \[48\] \(config\.json\), found \[47\] in model\.safetensors"),
    (_wider_config, r"model\.layers\.0\.mlp\.gate_proj\.weight: expected \[96, 48\].*found \[80, 48\]"),
    (_only_pickle, r"expected model\.safetensors or .*found pytorch_model\.bin: a pickle.*\n.*save_pretrained"),
    (lambda folder: (folder / "model.safetensors").unlink(), r"expected model\.safetensors or .*found neither\."),
    (_index_of_a_missing_file, r"expected model-00002-of-00002\.safetensors .*found no such file"),
    (lambda folder: (folder / "config.json").unlink(), r"with config\.json, found none in it"),
    (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: .*JSON"),
    (lambda folder: (folder / "config.json").write_text("{}"), r"config\.json: .*model"),
    (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 5),
        r"model\.safetensors: .*found 5 bytes that are not one",
    ),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), r"index\.json: expected .*weight_map"),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN)
def test_a_broken_folder_is_refused(tmp_path: Path, breaks: Callable[[Path], object], message: str) -> None:
    save(tmp_path, "llama")
    breaks(tmp_path)
    with pytest.raises(ConfigError, match=f"(?s)model.pretrained.*{message}") as caught:
        open_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.pretrained: expected a local folder or a hub id.*found no such folder"
    ):
        open_folder(tmp_path / "nothing")


def test_a_folder_of_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": VOCABULARY}))
    with pytest.raises(ConfigError, match=r"config\.json: expected a causal language model.*found model_type 't5'"):
        open_folder(tmp_path)


def test_dropout_is_refused_and_not_dropped() -> None:
    with pytest.raises(ConfigError, match=r"attention_dropout: expected 0, found 0\.1"):
        build_model(
            Model(architecture={"model_type": "llama", "attention_dropout": 0.1}), seed=0, seq_len=8, vocabulary=256
        )


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    architecture = LLAMA | {"num_key_value_heads": 3}
    with pytest.raises(ConfigError, match="num_key_value_heads that divides num_attention_heads=4, found 3"):
        build_model(Model(architecture=architecture), seed=0, seq_len=8, vocabulary=256)
