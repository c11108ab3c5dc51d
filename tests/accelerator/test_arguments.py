"""What configures an Accelerator beside accelerate's arguments, without opening an engine."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from portable_fsdp.accelerator.front import refuse_arguments
from portable_fsdp.accelerator.state import resolved_config, with_variable
from portable_fsdp.config.describe import value_of
from portable_fsdp.runtime.errors import ConfigError


def test_a_plugin_sets_what_it_says() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        activation_checkpointing=True,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    config = resolved_config(None, ["precision.output=bfloat16"], plugin)
    assert {key: value_of(config, key) for key in ("sharding.strategy", "sharding.wrap_classes")} == {
        "sharding.strategy": "SHARD_GRAD_OP",
        "sharding.wrap_classes": ("Block",),
    }
    assert config.memory.gradient_checkpointing == "full"
    assert (config.precision.compute, config.precision.output) == ("bfloat16", "bfloat16")  # overrides count


@pytest.mark.parametrize(
    ("words", "strategy", "offloads"),
    [
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, "HYBRID_SHARD_ZERO2", False),
        ({"sharding_strategy": "NO_SHARD"}, "NO_SHARD", False),
        ({"cpu_offload": True}, "FULL_SHARD", True),
    ],
)
def test_a_plugin_of_fsdp1(words: dict[str, Any], strategy: str, offloads: bool) -> None:
    config = resolved_config(None, [], FullyShardedDataParallelPlugin(fsdp_version=1, **words))
    assert (config.sharding.strategy, config.memory.cpu_offload) == (strategy, offloads)


def test_a_policy_that_is_a_function_is_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=ModuleWrapPolicy([torch.nn.Linear]))
    with pytest.raises(ConfigError, match=r"auto_wrap_policy is a ModuleWrapPolicy.\n  Name the classes"):
        resolved_config(None, [], plugin)


def test_a_file_of_ours_or_of_accelerate_and_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours.yaml").write_text("sharding: {strategy: NO_SHARD}\nrun: {seed: 3}\n")
    (tmp_path / "theirs.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n"
    )
    assert resolved_config(tmp_path / "ours.yaml", ["run.seed=4"], None).run.seed == 4
    assert resolved_config(tmp_path / "ours.yaml", [], None).sharding.strategy == "NO_SHARD"
    assert resolved_config(tmp_path / "theirs.yaml", [], None).memory.cpu_offload
    monkeypatch.setenv("PORTABLE_FSDP", "device=cpu num_devices=3 run.seed=7")
    overrides, start = with_variable({"run": {"seed": 5}}, {"device": "auto", "backend": "auto", "num_devices": None})
    assert start == {"device": "cpu", "backend": "auto", "num_devices": 3}
    assert resolved_config(tmp_path / "ours.yaml", overrides, None).run.seed == 7
    monkeypatch.setenv("PORTABLE_FSDP", "devices=3")
    with pytest.raises(ConfigError, match="PORTABLE_FSDP: expected device="):
        with_variable({}, {})


def test_a_device_chosen_for_accelerate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    with pytest.raises(ConfigError, match=r"ACCELERATE_TORCH_DEVICE=cuda:1 isn't read.\n  Unset it, and set PORTABLE"):
        refuse_arguments({}, "no", "devices")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a word for a section": ({"sharding": "FULL_SHARD"}, "Accelerator: sharding='FULL_SHARD': expected a dict"),
    "steps": (
        {"gradient_accumulation_steps": "two"},
        "gradient_accumulation_steps=two: expected an integer, at least 1",
    ),
    "a misspelt keyword": ({"shardings": {}}, "Accelerator: got an unexpected keyword argument 'shardings'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_a_sentence(name: str) -> None:
    from portable_fsdp import Accelerator

    given, message = WRONG[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        Accelerator(device="cpu", backend="native", **given)


def test_cpu_true_and_what_prepare_refuses() -> None:
    from portable_fsdp import Accelerator

    acc = Accelerator(cpu=True, num_devices=1)
    assert acc.device.type == "cpu"
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(ConfigError, match=r"backward: no model is prepared.\n  Call accelerator.prepare"):
        acc.backward(loss)
    with pytest.raises(ConfigError, match=r"the model is a DataParallel.\n  Pass the model itself: model.module"):
        acc.prepare(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="a DataLoader with batch_size=None has no batches"):
        acc.prepare(DataLoader(cast(Any, range(4)), batch_size=None))
    acc.end_training()
