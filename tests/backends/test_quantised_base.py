"""A frozen base in 4 or 8 bits trains adapters as its dequantised copy does in a plain loop, on every engine.

The copies are bitsandbytes' own.
"""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from cases import ARCHITECTURES, Case, assemble
from reference import reference
from safetensors.torch import load_file
from test_curves import BF16_20_STEPS, assert_equal_curves
from test_engine_checkpoints import assert_travels
from transformers import AutoConfig, AutoModelForCausalLM
from workers import GetWorkers, Group, JobFailed, marked

from portable_fsdp.checkpoint.__main__ import main

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": ARCHITECTURES["llama"] | SIZES,
    "one key": ARCHITECTURES["llama"] | SIZES | {"num_key_value_heads": 1},  # sharding.tensor leaves it whole
    "uneven": ARCHITECTURES["llama"],  # 64 divides no size
    "mixtral": ARCHITECTURES["mixtral"] | SIZES,
    "phi3": ARCHITECTURES["phi3"] | SIZES,
    "gpt2": ARCHITECTURES["gpt2"] | {"n_embd": 128, "n_head": 4},
}
OPTIM = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}


def dequantised(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    if scheme == "float32":
        return weight
    from bitsandbytes import functional  # seconds, which a collection of tests doesn't need

    if scheme == "int8":
        codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight.flatten(0, -2))
        return torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales).view_as(weight)
    codes, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=scheme == "nf4_double"
    )
    state.shape = torch.Size([weight.numel()])  # on some CPUs wrong scales are used if a row ends within a block
    return functional.dequantize_4bit(codes, state).view_as(weight)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`folders(model, scheme)`: a base, and the same with its layers' weights quantised and dequantised."""

    def get(model: str, scheme: str) -> tuple[str, str]:
        both = root / model, root / f"{model}-{scheme}"
        if not both[1].exists():
            torch.manual_seed(3)
            sizes = dict(MODELS[model])
            whole: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(sizes.pop("model_type"), **sizes))
            whole.save_pretrained(both[0])
            with torch.no_grad():
                for name, weight in whole.named_parameters():
                    if weight.dim() > 1 and any(part in name for part in ("proj", "experts", "c_attn", "c_fc")):
                        weight.copy_(dequantised(weight, scheme))
            whole.save_pretrained(both[1])
        return str(both[0]), str(both[1])

    root = tmp_path_factory.mktemp("bases")
    return get


def cases_of(folders: Any, model: str, scheme: str, **settings: Any) -> tuple[Case, Case]:
    """A run over quantised weights, and one over their dequantised copy."""
    plain, copy = folders(model, scheme)
    targets = {"targets": ["q_proj", "o_proj"]} if model == "mixtral" else {}
    common = {"model.lora": {"r": 4} | targets, "model.architecture": None, "model.dropout": 0} | settings
    quantised = Case(settings=common | {"model.pretrained": plain, "precision.frozen": scheme}, optim=OPTIM)
    return quantised, replace(quantised, settings=common | {"model.pretrained": copy})


@pytest.mark.parametrize(
    ("group", "model", "scheme"),
    [
        marked(Group("native", 3), "llama", "nf4"),
        marked(Group("xla", 3), "llama", "nf4", in_suite=False),  # a resume on it trains in the suite
        *(
            marked(Group(engine, devices), model, scheme, in_suite=False)
            for engine, devices in (("native", 1), ("native", 3), ("xla", 1), ("xla", 4))
            for model, scheme in (("llama", "nf4"), ("uneven", "nf4"), ("llama", "nf4_double"), ("llama", "int8"))
            if (engine, devices, model, scheme) != ("native", 3, "llama", "nf4")
        ),
    ],
)
def test_adapters_train_as_over_the_dequantised_base(
    group: Group, model: str, scheme: str, workers: GetWorkers, folders: Any
) -> None:
    case, copy = cases_of(folders, model, scheme)
    answers = workers(group).run(jobs.train, case=case)
    assert_equal_curves(answers, copy)
    assert not [key for key in answers[0]["final"] if "lora_" not in key and "proj" in key]


def assert_merges(folder: Path, copy: str, saved: dict[str, torch.Tensor], scale: float) -> None:
    """An export of the newest checkpoint has the dequantised base, with adapters merged, rounded once."""
    assert main(["export", str(folder), str(folder / "export"), "--tokenizer", "none"]) == 0
    merged, base = (load_file(Path(path) / "model.safetensors") for path in (folder / "export", copy))
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in saved:
            a, b = (saved[f"{layer}.lora_{half}.default.weight"] for half in "AB")
            weight = (weight + scale * b @ a).bfloat16()
        assert torch.equal(merged[name], weight.to(merged[name].dtype)), name
        assert (merged[name].dtype == torch.bfloat16) == ("proj" in name)


@pytest.mark.xla
def test_a_resume_on_another_engine_trains_on_bit_for_bit_from_the_saved_adapters(
    workers: GetWorkers, folders: Any, tmp_path: Path
) -> None:
    case, _ = cases_of(folders, "llama", "nf4_double", **{"model.lora": {"r": 4, "dropout": 0.1}})
    case = replace(case, steps=6)
    here, there = Group("native", 3), Group("xla", 4)
    saved, _ = assert_travels(workers, here, case, [(there, case)], tmp_path, at=3)
    assert not [key for key in saved if key.endswith("proj.base_layer.weight")]
    assert_merges(tmp_path, folders("llama", "nf4_double")[1], saved, 32.0 / 4)
    for scheme, words in (("int8", "quantised by int8"), ("auto", "not quantised")):
        other = replace(case, settings=case.settings | {"precision.frozen": scheme})
        with pytest.raises(JobFailed, match=f"its base was quantised by nf4_double, and this run's is {words}"):
            workers(here).run(jobs.read, case=other, folders={"it": str(tmp_path)}, at=3)


MESHES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "tensor": ("llama", "nf4", 2, {"sharding.tensor": 2}),
    "tensor of packed layers": ("phi3", "nf4", 2, {"sharding.tensor": 2}),
    "transposed layers": ("gpt2", "nf4", 2, {}),
    "experts": ("mixtral", "nf4", 2, {}),
    "expert": ("mixtral", "nf4", 2, {"sharding.expert": 2, "model.lora": None, "model.freeze": ["*proj*"]}),
    "recomputed": ("llama", "nf4", 2, {"memory.gradient_checkpointing": "full"}),
    "experts, recomputed": ("mixtral", "nf4_double", 2, {"memory.gradient_checkpointing": "full"}),
    "kept gathered": ("mixtral", "nf4", 2, {"sharding.strategy": "SHARD_GRAD_OP"}),
    "replicas": ("mixtral", "nf4", 2, {"sharding.strategy": "NO_SHARD"}),
}
OF_NATIVE = {
    "compiled": ("llama", "nf4_double", 2, {"compile.enabled": True, "compile.backend": "aot_eager"}),
    "offloaded": ("llama", "int8", 2, {"memory.cpu_offload": True}),
}
OF_XLA = {"scanned": ("llama", "nf4", 2, {"compile.scan_layers": True})}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("group", "name"),
    [
        marked(Group(engine, 2), name)
        for engine, cases in (("native", MESHES | OF_NATIVE), ("xla", MESHES | OF_XLA))
        for name in cases
    ],
)
def test_it_trains_so_in_every_form_of_a_run(group: Group, name: str, workers: GetWorkers, folders: Any) -> None:
    model, scheme, _, settings = (MESHES | OF_NATIVE | OF_XLA)[name]
    # GPT-2 doubles a difference by rounding in each step at this learning rate.
    steps = 10 if model == "gpt2" else 20
    case, copy = (replace(each, steps=steps) for each in cases_of(folders, model, scheme, **settings))
    assert_equal_curves(workers(group.for_case(case)).run(jobs.train, case=case), copy)


@pytest.mark.proof
@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_a_checkpoint_of_frozen_layers_leaves_them_out_and_exports_them(
    workers: GetWorkers, folders: Any, tmp_path: Path, scheme: str
) -> None:
    case, _ = cases_of(folders, "llama", scheme, **{"model.lora": None, "model.freeze": ["*proj*"]})
    case = replace(case, steps=2, optim=OPTIM | {"lr": 1e-30, "weight_decay": 0.0})
    for folder, group in ((tmp_path / "a", Group("native", 2)), (tmp_path / "b", Group("xla", 1))):
        answers = workers(group).run(jobs.write, case=case, folder=str(folder), at=1)
        saved = assemble([answer["state"] for answer in answers])
        assert "model.norm.weight" in saved
        assert not [key for key in saved if "proj" in key]
        assert_merges(folder, folders("llama", scheme)[1], saved, 0.0)


@pytest.mark.parametrize("group", [marked(Group(engine, 3), in_suite=False) for engine in ("native", "xla")])
def test_in_bfloat16_as_the_dequantised_base_in_bfloat16(group: Group, workers: GetWorkers, folders: Any) -> None:
    runs = [replace(case, compute="bfloat16") for case in cases_of(folders, "llama", "nf4")]
    losses = [[row["loss"] for row in workers(group).run(jobs.train, case=case)[0]["metrics"]] for case in runs]
    assert losses[0] == pytest.approx(losses[1], rel=BF16_20_STEPS)


KINDS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"dora": True}, "one adapter": {"targets": ["o_proj"]}}
AXES = {
    "tensor": {"sharding.tensor": 2},
    "whole rows": {"sharding.tensor": 2, "sharding.sequence_parallel": False},
    "context": {"sharding.context": 2, "model.attention": "static"},
}
PAIRS_IN_SUITE = [("native", "llama", "nf4", "lora", "tensor"), ("native", "one key", "float32", "lora", "whole rows")]


@pytest.mark.parametrize(
    ("group", "model", "scheme", "kind", "axis"),
    [
        marked(Group(pair[0], 2), *pair[1:], in_suite=pair in PAIRS_IN_SUITE)
        for pair in itertools.product(
            ("native", "xla"),
            ("llama", "one key", "phi3", "gpt2"),
            ("float32", "nf4", "nf4_double", "int8"),
            KINDS,
            AXES,
        )
    ],
)
def test_no_axis_changes_an_adapters_dropout(
    group: Group, model: str, scheme: str, kind: str, axis: str, workers: GetWorkers, folders: Any
) -> None:
    lora = (
        {"r": 4, "dropout": 0.2}
        | KINDS[kind]
        | ({"targets": ["c_proj"]} if (model, kind[:3]) == ("gpt2", "one") else {})
    )
    case, copy = cases_of(folders, model, scheme, **{"model.lora": lora})
    case = replace(case, steps=3, settings=case.settings | AXES[axis])
    if any(workers(group).run(jobs.is_refused, case=case)):
        return
    is_refused = axis != "context" and (
        model == "gpt2" or scheme == "nf4_double"
    )  # no plan; 256 weights a scale's scale
    with pytest.raises(JobFailed, match=r"ConfigError: .*sharding\.tensor") if is_refused else nullcontext():
        losses = [row["loss"] for row in workers(group).run(jobs.train, case=case)[0]["metrics"]]
        assert losses == pytest.approx(reference(replace(copy, steps=3)).losses, rel=1e-5)
