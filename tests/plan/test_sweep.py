"""The grid, and the nearest setting that fits, over plans whose memory is a formula."""

from pathlib import Path
from typing import Any

import pytest

from portable_fsdp.backends.support import require_supported
from portable_fsdp.config.load import config_text, load_config
from portable_fsdp.config.schema import Config
from portable_fsdp.plan.result import DeviceMemory, Plan, Time, Work
from portable_fsdp.plan.sweep import Settings, Tried, grid, nearest_that_fits, sweep, usual_grid
from portable_fsdp.runtime.errors import ConfigError

LIMIT = 100


def config(memory: dict[str, Any] | None = None, sharding: dict[str, Any] | None = None, **train: Any) -> Config:
    return Config.model_validate(
        {
            "memory": memory or {},
            "sharding": sharding or {},
            "model": {"architecture": {"model_type": "llama"}},
            "data": {"seq_len": 64},
            "train": {"steps": 1, "global_batch": 64, "micro_batch": 8, **train},
        }
    )


def plan(peak: int, seconds: float = 1.0) -> Plan:
    return Plan(
        on="h100:8",
        hardware="8 x NVIDIA H100",
        devices=8,
        backend="native",
        settings={},
        parameters=1,
        memory=DeviceMemory(parts={"weights": peak}, limit_bytes=LIMIT),
        work=Work(matmul_flops={}, memory_bytes=0, collectives={}, sent_bytes={}),
        time=Time(
            compute_s=seconds,
            memory_s=None,
            links_s={},
            devices=8,
            tokens_per_step=800,
            model_flops_per_device=1.0,
            peak_flops=1.0,
        ),
        method="",
        planned_in_s=0,
    )


def plan_of(settings: Settings) -> Plan:
    """30 a row, a third of it with full checkpointing; FULL_SHARD halves what is left."""
    rows = int(settings.get("train.micro_batch", "8"))
    each = 10 if settings.get("memory.gradient_checkpointing") == "full" else 30
    return plan(rows * each // (2 if settings.get("sharding.strategy") == "FULL_SHARD" else 1))


def test_larger_micro_batches_are_left_out_where_a_smaller_one_has_no_room() -> None:
    axes = {"memory.gradient_checkpointing": ["none", "full"], "train.micro_batch": ["1", "2", "4", "8", "16"]}
    settings = [
        (tried.settings["memory.gradient_checkpointing"], tried.settings["train.micro_batch"])
        for tried in sweep(grid(axes), plan_of)
    ]
    assert settings == [
        *(("none", size) for size in ("1", "2", "4")),  # 4 x 30 is too much, and the last that is tried
        *(("full", size) for size in ("1", "2", "4", "8", "16")),
    ]


def test_what_is_refused_is_kept_with_its_reason() -> None:
    def refuses(settings: Settings) -> Plan:
        if settings["train.micro_batch"] == "2":
            raise ConfigError("two is refused")
        return plan_of(settings)

    assert [tried.refusal for tried in sweep(grid({"train.micro_batch": ["1", "2", "3"]}), refuses)] == [
        "",
        "two is refused",
        "",
    ]


def test_the_nearest_that_fits_costs_least() -> None:
    """Each measure alone before the next: 8 rows of 30 are too many, of 10 they fit."""
    (tried,) = nearest_that_fits(config(), plan_of, offload=False)
    assert tried.fits
    assert tried.settings == {"memory.gradient_checkpointing": "full"}


def test_measures_are_laid_one_over_the_other() -> None:
    def larger(settings: Settings) -> Plan:
        return plan(4 * plan_of(settings).memory.peak_bytes)

    results = list(nearest_that_fits(config(), larger, offload=False))
    assert [tried.fits for tried in results] == [False, False, True]
    assert results[-1].settings == {"memory.gradient_checkpointing": "full", "train.micro_batch": "2"}


@pytest.mark.parametrize("offload", [True, False])
def test_none_fits(offload: bool) -> None:
    tried: list[Settings] = []

    def never(settings: Settings) -> Plan:
        tried.append(settings)
        return plan(LIMIT + 1)

    assert not any(tried.fits for tried in nearest_that_fits(config(), never, offload=offload))
    assert ("memory.cpu_offload" in tried[-1]) == offload
    assert tried[-1]["train.micro_batch"] == "1"


def test_the_usual_grid_divides_the_batch() -> None:
    points = usual_grid(config(global_batch=48, micro_batch=3), 8, scan=True)
    assert len(points) == 2 * (3 + 2) * 3  # scanned layers are recomputed all or none
    assert [point["train.micro_batch"] for point in points[:4]] == ["1", "2", "3", "1"]
    assert {point["compile.scan_layers"] for point in points} == {"false", "true"}
    assert {point["sharding.strategy"] for point in usual_grid(config(), 1, scan=False)} == {"NO_SHARD"}


@pytest.mark.parametrize(
    ("engine", "device", "memory"),
    [
        ("native", "cuda", {}),
        ("xla", "tpu", {}),
        ("native", "cuda", {"gradient_checkpointing": "full"}),
        ("xla", "tpu", {"gradient_checkpointing": "selective", "every": 3}),
        ("native", "cuda", {"gradient_checkpointing": "selective", "save_ops": ["attention"]}),
    ],
)
def test_no_setting_of_the_usual_grid_is_refused(
    engine: str, device: str, memory: dict[str, Any], tmp_path: Path
) -> None:
    before = config(memory)
    (tmp_path / "run.yaml").write_text(config_text(before))
    for point in usual_grid(before, 8, scan=engine == "xla"):
        tried = load_config(tmp_path / "run.yaml", [f"{key}={value}" for key, value in point.items()])
        require_supported(tried, engine=engine, device=device, devices=8, hosts=1)


def test_a_strategy_of_its_own_is_in_the_usual_grid() -> None:
    hybrid = config(sharding={"strategy": "HYBRID_SHARD"})
    strategies = {point["sharding.strategy"] for point in usual_grid(hybrid, 8, scan=False)}
    assert strategies == {"SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"}


def test_a_row_for_each_plan() -> None:
    from portable_fsdp.plan.report import sweep_text

    rows = sweep_text(
        [Tried({"train.micro_batch": "8"}, plan(2**30)), Tried({"train.micro_batch": "1"}, plan(5))],
        ["train.micro_batch"],
    )
    assert [line.split() for line in rows.splitlines()[1:]] == [
        ["8", "1.00", "does", "not", "fit", "100", "compute"],
        ["1", "0.00", "fits", "100", "compute"],
    ]
