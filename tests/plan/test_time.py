"""Bounds against arithmetic done by hand, against the compiler's own counts, and against what others measured."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import DEVICES, SIZES, Program
from pydantic import ValidationError

from portable_fsdp.plan import hardware
from portable_fsdp.plan import time as time_module
from portable_fsdp.plan.hardware import Hardware, Target, parse_target
from portable_fsdp.plan.result import Time, Work
from portable_fsdp.plan.time import ON_CHIP_BYTES, Step, bound, compare, model_flops, over_links, work_of
from portable_fsdp.runtime.errors import UsageError

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "benchmarks" / "results" / "tpu_programs.json"
LLAMA_8B = Step(
    parameters=8_030_261_248,
    embedding_parameters=128_256 * 4096,
    layer_parameters=8_030_261_248 - 2 * 128_256 * 4096 - 4096,
    layers=32,
    hidden=4096,
    seq_len=8192,
    sequences=16,
    vector_parameters=65 * 4096,
)


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("time_bounds", ROOT / "benchmarks" / "time_bounds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bound_of(step: Step, text: str) -> Time:
    target = parse_target(text)
    flops = model_flops(step) / target.devices
    tokens = step.sequences * step.seq_len
    return bound(work_of(step, target), target, tokens_per_step=tokens, model_flops_per_device=flops)


# ------------------------------------------------------------------------------------------------------ by hand


def test_the_greatest_bound_binds() -> None:
    work = Work(
        matmul_flops={"bfloat16": 989e12, "float32": 67e12},
        memory_bytes=3 * 3.35e12,
        collectives={},
        sent_bytes={"nvlink": 900e9, "network": 50e9, "ici": 1.0},
    )
    target = parse_target("h100:16")
    time = bound(work, target, tokens_per_step=3200, model_flops_per_device=2 * 989e12)
    assert time.bounds == pytest.approx({"compute": 2, "memory": 3, "nvlink": 1, "network": 0.5})  # halved in switches
    assert (time.seconds, time.binds) == (pytest.approx(3), "memory")
    assert time.tokens_per_second == pytest.approx(3200 / 3)
    assert time.tokens_per_second_per_device == pytest.approx(200 / 3)
    assert time.mfu == pytest.approx(2 / 3)


def test_links_without_switches_that_reduce_take_the_whole() -> None:
    work = Work(matmul_flops={}, memory_bytes=0, collectives={}, sent_bytes={"nvlink": 300e9, "ici": 350e9})
    of = lambda text: bound(work, parse_target(text), tokens_per_step=1, model_flops_per_device=1)  # noqa: E731
    assert of("a100-80gb:8").links_s == pytest.approx({"nvlink": 1})
    assert of("v5p:2x2x4").links_s == pytest.approx({"ici": 1})  # 3.5 links of 100 GB/s


def test_what_is_not_known_is_left_out() -> None:
    work = Work(matmul_flops={"bfloat16": 1e12}, memory_bytes=1e9, collectives={}, sent_bytes={"network": 1e9})
    time = bound(work, parse_target("cpu:2"), tokens_per_step=8, model_flops_per_device=1e12)
    assert time.bounds == {}
    assert (time.seconds, time.binds, time.tokens_per_second, time.mfu) == (None, None, None, None)
    assert bound(work, parse_target("2*v4-32"), tokens_per_step=8, model_flops_per_device=1).links_s == {}


@pytest.mark.parametrize(
    ("text", "dtype", "seconds"),
    [
        ("v5p:2x2x1", "float32", 1 / 459),  # no figure: no product is faster than bfloat16's
        ("h100", "float32", 1 / 67),
        ("h100", "tf32", 1 / 494.5),
        ("a100-40gb", "float16", 1 / 312),
        ("v100-16gb", "float16", None),  # no figure for bfloat16 either
    ],
)
def test_dtypes(text: str, dtype: str, seconds: float | None) -> None:
    work = Work(matmul_flops={dtype: 1e12}, memory_bytes=1, collectives={}, sent_bytes={})
    found = bound(work, parse_target(text), tokens_per_step=1, model_flops_per_device=1).compute_s
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_an_unknown_dtype_is_no_silence() -> None:
    work = Work(matmul_flops={"bf16": 1e12}, memory_bytes=1, collectives={}, sent_bytes={})
    with pytest.raises(ValueError, match="'bf16'"):
        bound(work, parse_target("h100"), tokens_per_step=1, model_flops_per_device=1)


@pytest.mark.parametrize(
    ("text", "members", "stride", "sent"),
    [
        ("h100:8", None, 1, {"nvlink": 7 / 8}),
        ("h100:64", None, 1, {"nvlink": 7 / 8, "network": 7 / 8 / 8}),  # a part crosses the network once a host
        ("h100:64", 16, 1, {"nvlink": 7 / 8, "network": 1 / 2 / 8}),
        ("h100:64", 4, 1, {"nvlink": 3 / 4}),
        ("h100:64", 8, 8, {"network": 7 / 8}),  # the same device of each host
        ("h100:64", 16, 4, {"nvlink": 1 / 2, "network": 7 / 8 / 2}),
        ("h100:6", None, 1, {"nvlink": 5 / 6}),
        ("h100", None, 1, {}),
        ("v6e-16", None, 1, {"ici": 15 / 16}),
        ("tpu7x:2x2x2", None, 1, {"ici": 7 / 8 / 2}),  # a chip's two devices share what reaches it
        ("2*v6e-16", None, 1, {"ici": 15 / 16, "network": 1 / 2 / 16}),
        ("2*v6e-16", 2, 16, {"network": 1 / 2}),
        ("cpu:2", None, 1, {}),
    ],
)
def test_traffic_is_divided_over_links(text: str, members: int | None, stride: int, sent: dict[str, float]) -> None:
    assert over_links(parse_target(text).levels, 1.0, members=members, stride=stride) == pytest.approx(sent)


@pytest.mark.parametrize(("members", "stride"), [(3, 1), (8, 3)])
def test_groups_that_do_not_fit_are_refused(members: int, stride: int) -> None:
    with pytest.raises(ValueError, match="no groups of"):
        over_links(parse_target("h100:64").levels, 1.0, members=members, stride=stride)


def test_work_of_llama_8b_on_8_gpus() -> None:
    """torchtitan's step: 51.47 GFLOPs a token with half of attention, 57.91 with all of it."""
    work = work_of(LLAMA_8B, parse_target("h100:8"))
    assert work.matmul_flops == pytest.approx({"bfloat16": 51.47e9 * 16 * 8192 / 8}, rel=1e-3)
    weights = 2 * LLAMA_8B.layer_parameters
    assert work.collectives["all_gather bfloat16"].bytes == pytest.approx(weights * (2 - 1 / 32))
    assert work.collectives["reduce_scatter float32"].bytes == pytest.approx(2 * weights)
    assert work.sent_bytes == pytest.approx({"nvlink": 7 / 8 * weights * (4 - 1 / 32)})
    state = 12 * LLAMA_8B.parameters / 8
    assert work.memory_bytes == pytest.approx(2 * (weights - ON_CHIP_BYTES) + 2 * (state - ON_CHIP_BYTES))
    assert model_flops(LLAMA_8B) == pytest.approx(57.91e9 * 16 * 8192, rel=1e-4)
    assert bound_of(LLAMA_8B, "h100:8").mfu == pytest.approx(57.91 / 51.47, rel=1e-3)


def test_strategies_move_what_the_textbook_says() -> None:
    def sent(text: str, **changes: Any) -> dict[str, float]:
        return work_of(replace(LLAMA_8B, reduce="bfloat16", **changes), parse_target(text)).sent_bytes

    layers = 2 * LLAMA_8B.layer_parameters
    assert sent("h100:8", strategy="SHARD_GRAD_OP") == pytest.approx({"nvlink": 7 / 8 * 2 * layers})
    assert sent("h100:8", strategy="NO_SHARD") == pytest.approx({"nvlink": 7 / 8 * 2 * layers})
    hybrid = sent("h100:16", strategy="HYBRID_SHARD_ZERO2", replicas=2)
    assert hybrid == pytest.approx({"nvlink": 7 / 8 * 2 * layers, "network": 1 / 2 * 2 * layers / 8})
    assert sent("v6e-16") == pytest.approx({"ici": 15 / 16 * 2 * layers})  # XLA may keep what it gathered
    assert sent("h100:8", strategy="other") == {}
    assert sent("h100") == {}
    four = sent("h100:8", accumulation=4)["nvlink"]
    assert four == pytest.approx(7 / 8 * (4 * (2 - 1 / 32) + 1) * layers)  # gradients cross once


def test_what_is_not_computed_is_not_counted() -> None:
    target = parse_target("h100:8")

    def flops(**changes: Any) -> float:
        return work_of(replace(LLAMA_8B, **changes), target).matmul_flops["bfloat16"]

    whole = flops()
    tokens = 16 * 8192 / 8
    matrices = LLAMA_8B.layer_parameters - 65 * 4096
    assert flops(gradient_checkpointing="full") - whole == pytest.approx(tokens * matrices)
    assert flops(gradient_checkpointing="selective") == whole
    met = LLAMA_8B.parameters - LLAMA_8B.embedding_parameters - LLAMA_8B.vector_parameters
    assert flops(trained_parameters=0) == pytest.approx(tokens * (2 * met + 4 * 32 * 4096 * 4096))
    assert whole - flops(keys_per_token=0) == pytest.approx(tokens * 12 * 32 * 4096 * 4096)
    half = LLAMA_8B.parameters // 2
    assert whole - flops(active_parameters=half) == pytest.approx(tokens * 6 * (LLAMA_8B.parameters - half))


def test_what_stays_on_the_chip_does_not_cross_memory() -> None:
    small = Step(1_000_000, 0, 900_000, layers=2, hidden=128, seq_len=64, sequences=8)
    assert work_of(small, parse_target("h100")).memory_bytes == 0


def test_replicas_divide_the_devices() -> None:
    with pytest.raises(ValueError, match="3 replicas"):
        work_of(replace(LLAMA_8B, strategy="HYBRID_SHARD", replicas=3), parse_target("h100:8"))


@pytest.mark.parametrize("text", ["h100:8", "h100:64", "v5p:2x2x4", "v6e-256", "2*v5e-256", "tpu7x:4x4x4", "l4:8"])
def test_more_work_never_takes_less(text: str) -> None:
    base = replace(LLAMA_8B, sequences=1024)
    seconds = bound_of(base, text).bounds
    changes: list[dict[str, Any]] = [
        *[{"sequences": 2048}, {"gradient_checkpointing": "full"}, {"accumulation": 2}, {"reduce": "float32"}],
        *[{"keys_per_token": 8192.0}, {"state_bytes": 16.0}],
    ]
    for change in changes:
        more = bound_of(replace(base, **change), text).bounds
        assert all(more[name] >= seconds[name] for name in seconds), change


# ----------------------------------------------------------------------------------------- the compiler's counts


def _step_of(program: Program, parameters: int) -> Step:
    model = SIZES[program.size]
    layers = program.layers or model["num_hidden_layers"]
    tables = model["vocab_size"] * model["hidden_size"]
    return Step(
        parameters=parameters,
        embedding_parameters=tables,
        layer_parameters=parameters - 2 * tables - model["hidden_size"],
        layers=layers,
        hidden=model["hidden_size"],
        seq_len=program.seq_len,
        sequences=DEVICES[program.slice] * program.accumulation,
        strategy=program.strategy,  # pyright: ignore[reportArgumentType]
        replicas=program.replicas or 1,
        accumulation=program.accumulation,
        gradient_checkpointing=program.checkpointing,  # pyright: ignore[reportArgumentType]
        reduce="bfloat16",
        vector_parameters=(2 * layers + 1) * model["hidden_size"],
        # The compiler's count has all keys where attention is torch's formula, and none where it is the flash kernel.
        keys_per_token=program.seq_len if program.seq_len % 1024 else 0,
    )


def _compiled() -> list[Any]:
    return json.loads(COMPILED.read_text())


@pytest.mark.parametrize("row", _compiled(), ids=lambda row: "-".join(str(v) for v in row["program"].values() if v))
def test_the_trainers_compiled_step_does_no_less(row: Any) -> None:
    """What libtpu compiled for a slice: the same products, to a millionth; with recomputation more; more is sent."""
    given: dict[str, Any] = {**row["program"], "modules": tuple(row["program"]["modules"])}
    program, found = Program(**given), row["is"]
    work = work_of(_step_of(program, row["parameters"]), parse_target(program.slice))
    flops, counted = sum(found["matmul_flops"].values()), sum(work.matmul_flops.values())
    if program.checkpointing == "full":
        assert 0.85 * flops < counted < flops
    else:
        assert counted == pytest.approx(flops, rel=1e-6)
    sent = sum(moved["sent"] for moved in found["collectives"].values())
    assert set(work.sent_bytes) == {"ici"}
    assert 0.2 * sent < work.sent_bytes["ici"] <= sent


# ------------------------------------------------------------------------------------------- published measurements


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return _benchmark()


def test_no_published_measurement_is_faster_than_its_bound(benchmark: Any) -> None:
    rows = benchmark.compare_all(benchmark.read_published())
    assert len(benchmark.read_published().runs) >= 12
    assert [row for row in rows if row["ratio"] < 1] == []
    assert max(row["ratio"] for row in rows) < 10
    assert all(len(row["source"]) >= 20 for row in rows)


def test_models_have_as_many_parameters_as_their_sources_say(benchmark: Any) -> None:
    for name, shape in benchmark.read_published().models.items():
        assert shape.counted() == pytest.approx(shape.parameters, rel=0.02 if name.startswith("maxtext") else 0.001)


def test_written_results_are_those_of_this_code(benchmark: Any) -> None:
    rows = benchmark.compare_all(benchmark.read_published())
    written = json.loads((ROOT / "benchmarks" / "results" / "time_bounds.json").read_text())
    assert written["rows"] == json.loads(json.dumps(rows))
    assert written["margins"] == benchmark.margins(rows)
    page = (ROOT / "benchmarks" / "results" / "time_bounds.md").read_text()
    assert benchmark.table(rows) in page


def _violations(benchmark: Any, change: Callable[[Hardware], Hardware], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    def changed(text: str) -> Target:
        target = parse_target(text)
        return replace(target, hardware=change(target.hardware))

    monkeypatch.setattr(benchmark, "parse_target", changed)
    return {row["hardware"] for row in benchmark.compare_all(benchmark.read_published()) if row["ratio"] < 1}


def _slower_in_host(one: Hardware) -> Hardware:
    return (
        replace(one, in_host=(one.in_host[0], one.in_host[1]._replace(bytes_per_s=one.in_host[1].bytes_per_s / 10)))
        if one.in_host
        else one
    )


def _slower_network(one: Hardware) -> Hardware:
    return replace(one, network=one.network._replace(bytes_per_s=one.network.bytes_per_s / 10)) if one.network else one


def _slower_ici(one: Hardware) -> Hardware:
    if one.chip is None or one.chip.link is None:
        return one
    return replace(one, chip=one.chip._replace(link=one.chip.link._replace(value=one.chip.link.value / 10)))


def _no_switches(one: Hardware) -> Hardware:
    return replace(one, in_host=(one.in_host[0], one.in_host[1]._replace(in_switch=False))) if one.in_host else one


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (_slower_in_host, {"h100:8", "a100-80gb:8", "a100-80gb:16"}),
        (_slower_network, {"a100-80gb:16"}),
        (_slower_ici, {"v5e:8x16"}),
        (_no_switches, {"h100:8"}),  # H100s add up faster than any ring could
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_link_that_is_too_slow_is_seen(
    benchmark: Any, change: Callable[[Hardware], Hardware], seen: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _violations(benchmark, change, monkeypatch) == seen


@pytest.mark.parametrize("factor", [2, 3])
def test_peaks_that_are_too_low_are_seen(benchmark: Any, factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time_module.peak_flops

    def lower(name: str, dtype: str) -> float | None:
        peak = real(name, dtype)
        return peak / factor if peak else None

    monkeypatch.setattr(time_module, "peak_flops", lower)
    rows = benchmark.compare_all(benchmark.read_published())
    names = {parse_target(row["hardware"]).hardware.name for row in rows if row["ratio"] < 1}
    halved = {"a100-80gb", "a100-40gb", "v5e", "v5p", "tpu7x"}
    assert names == (halved if factor == 2 else halved | {"h100", "v6e"})  # of B200 only a slow run was found


def test_all_of_attention_or_of_recomputation_is_too_much(benchmark: Any) -> None:
    """What the bound leaves out on purpose is more than some runs took."""
    published = benchmark.read_published()
    run = next(run for run in published.runs if run.hardware == "v5e:16x16" and run.model == "maxtext-32b")
    shape, target = published.models[run.model], parse_target(run.hardware)
    time = benchmark.bound_of(run, shape, target)
    assert time.compute_s == time.seconds
    assert time.seconds * 1.31 > benchmark.measured_seconds(run, time, target)


def test_a_published_run_with_a_misspelt_key_or_two_units_is_refused(benchmark: Any) -> None:
    with pytest.raises(ValidationError):
        benchmark.Measured(step_seconds=1.0, tokens_per_second_per_device=2.0)
    run = benchmark.read_published().runs[0].model_dump(exclude_unset=True)
    with pytest.raises(ValidationError):
        benchmark.Run.model_validate({**run, "sequence": 1})
    with pytest.raises(ValidationError):
        benchmark.Run.model_validate({**run, "source": "somebody"})


# ------------------------------------------------------------------------------------------------------- comparison


def rows_of(seconds: list[float], tokens: int = 131_072, mfu: float | None = 0.4) -> list[dict[str, Any]]:
    return [{"step": n, "seconds": one, "tokens": tokens, "mfu": mfu} for n, one in enumerate(seconds, start=1)]


def test_a_run_is_compared_by_its_median_without_the_first_steps() -> None:
    time = bound_of(LLAMA_8B, "h100:8")
    found = compare(time, rows_of([90.0, 9.0, 9.0, 9.0, 9.0, 2.0, 30.0, 2.5]))
    assert (found.steps, found.seconds, found.mfu) == (3, 2.5, 0.4)
    assert found.tokens_per_second == pytest.approx(131_072 / 2.5)
    assert time.seconds is not None
    assert found.ratio == pytest.approx(2.5 / time.seconds)


def test_a_short_run_and_unknown_hardware_are_compared_too() -> None:
    assert compare(bound_of(LLAMA_8B, "h100:8"), rows_of([9.0, 2.0], mfu=None)).model_dump() | {"ratio": 0} == {
        **{"steps": 1, "seconds": 2.0, "tokens_per_second": 65_536.0, "mfu": None, "ratio": 0},
    }
    assert compare(bound_of(LLAMA_8B, "cpu:2"), rows_of([9.0])).ratio is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "found 0 rows"),
        ([{"step": 1}], "found 1 rows of something else"),
        (rows_of([0.0]), "of something else"),
        (rows_of([1.0], tokens=64), "131,072 tokens a step, as planned, found 64"),
    ],
)
def test_what_cannot_be_compared_is_refused(rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compare(bound_of(LLAMA_8B, "h100:8"), rows)


def test_hardware_imports_no_torch() -> None:
    assert "torch" not in vars(hardware)
