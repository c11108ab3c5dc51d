"""The grid, and the nearest setting that fits, over plans whose memory is a formula."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.config.describe import Settings
from portable_fsdp.config.load import config_text
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import load_config
from portable_fsdp.plan.planner import COMPILE_S, FREE, fastest_that_fits, grid, nearest_that_fits, sweep
from portable_fsdp.plan.result import Plan, Tried, sweep_text, text
from portable_fsdp.plan.target import parse_target
from portable_fsdp.runtime.errors import BackendError, ConfigError

LIMIT = 100


def config(memory: Any = None, sharding: Any = None, compiles: bool | str = False, **train: Any) -> Config:
    return Config.model_validate(
        {
            "compile": {"enabled": compiles},
            "memory": memory or {},
            "sharding": sharding or {},
            "model": {"architecture": {"model_type": "llama"}},
            "data": {"seq_len": 64},
            "train": {"steps": 1, "global_batch": 64, "micro_batch": 8, **train},
        }
    )


def plan(peak: int, *, limit: int | None = LIMIT, seconds: float | None = None, is_least: bool = False) -> Plan:
    """A plan with this peak of memory; `seconds` of a step."""
    values: dict[str, Any] = {
        **{"on": "h100:8", "hardware": "8 x NVIDIA H100", "devices": 8, "backend": "native", "settings": {}},
        **{"parameters": 1, "method": "", "planned_in_s": 0},
        "memory": {"parts": {"weights": peak}, "limit_bytes": limit, "is_least": is_least},
        "work": {"matmul_flops": {}, "collectives": {}, "sent_bytes": {}},
        **{"tokens_per_step": 800, "model_flops_per_device": 1.0, "peak_flops": 1.0},
        "expected": None if seconds is None else {"seconds": seconds, "parts": {}, "synchronous_bytes": {}},
        "expected_note": "nobody measured it",
    }
    return Plan.model_validate(values)


def plan_of(settings: Settings) -> Plan:
    """30 a row, a third of it with full checkpointing; FULL_SHARD halves what is left."""
    rows = int(settings.get("train.micro_batch", "8"))
    each = 10 if settings.get("memory.gradient_checkpointing") == "full" else 30
    return plan(rows * each // (2 if settings.get("sharding.strategy") == "FULL_SHARD" else 1))


def test_larger_micro_batches_are_left_out_where_a_smaller_one_has_no_room() -> None:
    axes = {"memory.gradient_checkpointing": ["none", "full"], "train.micro_batch": ["1", "2", "4", "8", "16"]}
    results = sweep(grid(axes), lambda settings: Tried(settings=settings, plan=plan_of(settings)))
    assert [tuple(settings.values()) for settings, _ in results] == [
        *(("none", size) for size in ("1", "2", "4")),  # 4 x 30 is too much, and the last that is tried
        *(("full", size) for size in ("1", "2", "4", "8", "16")),
    ]


def test_measures_are_laid_one_over_the_other_and_the_nearest_that_fits_costs_least() -> None:
    results = list(nearest_that_fits(config(), lambda s: plan(4 * plan_of(s).memory.peak_bytes), offload=False))
    assert [tried.fits for tried in results] == [False, False, True]
    assert results[-1].settings == {"memory.gradient_checkpointing": "full", "train.micro_batch": "2"}
    (tried,) = nearest_that_fits(config(), plan_of, offload=False)  # 8 rows of 30 are too many, of 10 they fit
    assert (tried.fits, tried.settings) == (True, {"memory.gradient_checkpointing": "full"})


H100S = parse_target("h100:8")


def search(plan_of: Callable[[Settings], Plan], progress: Callable[[str], None] = print, **train: Any) -> Tried:
    return fastest_that_fits(config(**train), H100S, plan_of, lambda *_: 1, progress)


@pytest.mark.parametrize("global_batch", [8, 24, 96, 840, 2**15])
def test_the_largest_micro_batch_is_that_of_plans_of_all_with_few_plans(global_batch: int) -> None:
    """Of 8 devices. A row takes 1; several micro batches a step take `sums` more, for sums of gradients."""
    share = global_batch // 8
    divisors = [size for size in range(1, share + 1) if share % size == 0]

    def peak(size: int, sums: int) -> int:
        return 3 + size + sums * (size < share)

    def planned(limit: int, sums: int, settings: Settings) -> Plan:
        return plan(peak(int(settings["train.micro_batch"]), sums), limit=limit)

    for limit, sums in itertools.product([4, 5, 7, 12, 20, 45, 70, 400], [0, 30]):
        noted: list[str] = []
        best = search(partial(planned, limit, sums), noted.append, global_batch=global_batch, micro_batch="auto")
        expected = max((size for size in divisors if peak(size, sums) <= (1 - FREE) * limit), default=1)
        assert best.settings == {"train.micro_batch": str(expected)}, (limit, sums)
        assert best.fits == (peak(expected, sums) <= limit)
        assert len(noted) <= 2 + math.log2(len(divisors))


def test_a_search_needs_a_batch_that_can_be_split_and_memory_with_an_upper_bound() -> None:
    with pytest.raises(ConfigError, match="expected a multiple"):
        search(plan_of, global_batch=12, task="own:task", micro_batch="auto")
    with pytest.raises(BackendError, match="memory of a device isn't known"):
        search(lambda settings: plan(1, limit=None), micro_batch="auto")
    with pytest.raises(BackendError, match="memory is a lower bound"):
        search(lambda settings: plan(LIMIT // 2, is_least=True), micro_batch="auto")

    def refuses_many_rows(settings: Settings) -> Plan:
        if int(settings["train.micro_batch"]) > 1:
            raise BackendError("the step does not fit: RESOURCE_EXHAUSTED")
        return plan(1)

    assert search(refuses_many_rows, micro_batch="auto").settings["train.micro_batch"] == "1"


BYTES = {"none": 40, "[matmul, attention]": 20, "[attention]": 8, "full": 5}
SECONDS = {"none": 1.0, "[matmul, attention]": 1.1, "[attention]": 1.25, "full": 1.3}


@pytest.mark.parametrize("rows", [2, "auto"])
@pytest.mark.parametrize("of_compiler", [False, "auto"])
def test_auto_takes_the_fastest_of_all_that_fit(rows: int | str, of_compiler: bool | str) -> None:
    """A row has a time, less recomputation saves some of it, a compiler a third; each micro batch gathers once more."""

    def planned(limit: int, point: Settings) -> Plan:
        kept = point.get("memory.save_ops", point["memory.gradient_checkpointing"])
        size = int(point.get("train.micro_batch", 2))
        seconds = 80 * SECONDS[kept] * (2 / 3 if point.get("compile.enabled") == "true" else 1) + (8 // size)
        return plan(2 + size * BYTES[kept], limit=limit, seconds=seconds)

    def step_seconds(point: Settings) -> float:
        expected = planned(LIMIT, point).expected
        assert expected is not None
        return expected.seconds

    points = [
        {"memory.gradient_checkpointing": "selective" if kept[0] == "[" else kept, "train.micro_batch": str(size)}
        | ({"memory.save_ops": kept} if kept[0] == "[" else {})
        for kept, size in itertools.product(BYTES, [1, 2, 4, 8] if rows == "auto" else [2])
    ]
    keys: dict[str, Any] = {"micro_batch": rows, "memory": {"gradient_checkpointing": "auto"}, "compiles": of_compiler}
    for limit in (6, 9, 12, 21, 24, 33, 43, 90, 200, 400):
        best = search(partial(planned, limit), **keys, steps=99)
        room = [point for point in points if planned(limit, point).memory.peak_bytes <= (1 - FREE) * limit]
        if not room:
            assert best.settings["memory.gradient_checkpointing"] == "full", limit
            continue
        settings = best.settings | ({"train.micro_batch": "2"} if rows == 2 else {})
        assert {key: value for key, value in settings.items() if not key.startswith("compile")} == min(
            room, key=step_seconds
        )
        assert best.settings.get("compile.enabled") == ("true" if of_compiler else None)


def test_layers_are_compiled_where_that_saves_time() -> None:
    assert COMPILE_S == 60

    def planned(settings: Settings) -> Plan:
        return plan(1, seconds=1.0 if settings.get("compile.enabled") == "true" else 1.5)

    for programs, steps, on, words in (
        (2, 1000, "true", "2 program(s) take about 120 s, 1000 steps save 500 s by plan"),
        (2, 200, "false", "2 program(s) take about 120 s, 200 steps save 100 s by plan"),
        ("graph break in layer 3", 1000, "false", "compile.enabled=false: graph break in layer 3"),
    ):
        noted: list[str] = []
        given = config(compiles="auto", steps=steps)
        best = fastest_that_fits(given, H100S, planned, lambda *_, programs=programs: programs, noted.append)
        assert best.settings["compile.enabled"] == on, words
        assert any(words in line for line in noted), (words, noted)


@pytest.mark.parametrize(("eager_s", "room", "on"), [(1.2, True, "true"), (0.9, False, "true"), (0.9, True, "false")])
def test_a_mode_that_compiled_layers_refuse_may_be_faster(eager_s: float, room: bool, on: str) -> None:
    """Compiled layers may refuse selective recomputation, as with dropout. The number of steps isn't known here."""

    def planned(settings: Settings) -> Plan:
        mode, is_compiled = settings["memory.gradient_checkpointing"], settings["compile.enabled"] == "true"
        if mode == "selective" and is_compiled:
            raise BackendError("a compiled layer with dropout is recomputed as a whole")
        seconds = {"none": 0.8, "selective": eager_s, "full": 1.0 if is_compiled else 1.5}[mode]
        return plan(LIMIT if mode == "none" or (mode == "selective" and not room) else 1, seconds=seconds)

    keys: dict[str, Any] = {"memory": {"gradient_checkpointing": "auto"}, "compiles": "auto", "steps": None}
    for rows in (2, "auto"):
        best = search(planned, micro_batch=rows, **keys, epochs=1)
        assert best.settings["compile.enabled"] == on
        assert best.settings["memory.gradient_checkpointing"] == ("full" if on == "true" else "selective")


@pytest.mark.parametrize("offload", [True, False])
def test_none_fits(offload: bool) -> None:
    results = list(nearest_that_fits(config(), lambda settings: plan(LIMIT + 1), offload=offload))
    assert not any(tried.fits for tried in results)
    assert ("memory.cpu_offload" in results[-1].settings) == offload
    assert results[-1].settings["train.micro_batch"] == "1"


@pytest.mark.parametrize(
    ("engine", "device", "memory"),
    [
        ("native", "cuda", {}),
        ("xla", "tpu", {}),
        ("xla", "tpu", {"gradient_checkpointing": "selective", "every": 3}),
        ("native", "cuda", {"gradient_checkpointing": "selective", "save_ops": ["attention"]}),
        ("native", "cuda", {"gradient_checkpointing": "budget", "budget": 0.3}),
        ("native", "cuda", {"gradient_checkpointing": "full", "offload": "activations"}),
    ],
)
def test_no_measure_is_refused(engine: str, device: str, memory: dict[str, Any], tmp_path: Path) -> None:
    before = config(memory, {"strategy": "SHARD_GRAD_OP"})
    (tmp_path / "run.yaml").write_text(config_text(before))
    results = list(nearest_that_fits(before, lambda settings: plan(LIMIT + 1), offload=False))
    assert results
    for tried in results:
        words = [f"{key}={value}" for key, value in tried.settings.items()]
        require_supported(load_config(tmp_path / "run.yaml", words), Deployment(engine, device, 8, 1))


def test_a_row_for_each_plan_and_one_without_a_time_or_a_limit() -> None:
    plans = {"8": plan(2**30), "1": plan(5, seconds=1.0)}
    tried = [Tried(settings={"train.micro_batch": rows}, plan=each) for rows, each in plans.items()]
    assert [line.split() for line in sweep_text(tried, ["train.micro_batch"]).splitlines()[1:]] == [
        ["8", "1.00", "does", "not", "fit", "unknown"],
        ["1", "0.00", "fits", "100"],
    ]
    unknown = text(plan(5, limit=None))
    assert "time of a step: unknown, since nobody measured it" in unknown
    assert "0.00 GiB: unknown" in unknown
