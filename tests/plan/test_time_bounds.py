"""The textbook's and the planner's bounds: by hand, against the TPU compiler's counts, and against others' runs."""

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import step_time
import time_bounds
from programs import RESULTS as COMPILED
from programs import SIZES, Program, program_of
from pydantic import ValidationError
from textbook import ON_CHIP_BYTES, Step, model_flops, work_of

from portable_fsdp.plan import time as time_module
from portable_fsdp.plan.result import Time
from portable_fsdp.plan.target import Figure, Hardware, Target, parse_target
from portable_fsdp.plan.time import bound
from portable_fsdp.runtime.child import Worker

RESULTS = time_bounds.HERE / "results" / "time_bounds.json"
WRITTEN: dict[str, Any] = json.loads(RESULTS.read_text())
PUBLISHED = time_bounds.read_published()
EXPRESSIBLE = [
    (run, PUBLISHED.models[run.model])
    for run in PUBLISHED.runs
    if time_bounds.is_expressible(run, PUBLISHED.models[run.model])
]
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


def bound_of(step: Step, text: str) -> Time:
    target = parse_target(text)
    flops = model_flops(step) / target.devices
    tokens = step.sequences * step.seq_len
    return bound(work_of(step, target), target, tokens_per_step=tokens, model_flops_per_device=flops)


# -------------------------------------------------------------------------------------------- the textbook by hand


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
        sequences=program.devices * program.accumulation,
        strategy=program.strategy,  # pyright: ignore[reportArgumentType]
        replicas=program.replicas or 1,
        accumulation=program.accumulation,
        gradient_checkpointing=program.checkpointing,  # pyright: ignore[reportArgumentType]
        reduce="bfloat16",
        vector_parameters=(2 * layers + 1) * model["hidden_size"],
        # The compiler's count has all keys where attention is torch's formula, and none where it is the kernel.
        keys_per_token=program.seq_len if program.seq_len % 1024 else 0,
    )


def test_the_trainers_compiled_step_does_no_less() -> None:
    """What libtpu compiled for a slice: the same products, to a millionth; with recomputation more; more is sent."""
    for row in json.loads(COMPILED.read_text()):
        program, compiled = program_of(row), row["is"]
        work = work_of(_step_of(program, row["parameters"]), parse_target(program.slice))
        flops, counted = sum(compiled["matmul_flops"].values()), sum(work.matmul_flops.values())
        if program.checkpointing == "full":
            assert 0.85 * flops < counted < flops, program
        else:
            assert counted == pytest.approx(flops, rel=1e-6), program
        sent = sum(moved["sent_bytes"] for moved in compiled["collectives"].values())
        assert set(work.sent_bytes) == {"ici"}
        assert 0.2 * sent < work.sent_bytes["ici"] <= sent, program


# ------------------------------------------------------------------------------------------- published measurements


def test_no_published_measurement_is_faster_than_its_bound_and_results_are_those_of_this_code() -> None:
    rows = time_bounds.compare_all(PUBLISHED)
    assert len(PUBLISHED.runs) >= 12
    assert [row for row in rows if row["ratio"] < 1] == []
    assert max(row["ratio"] for row in rows) < 10
    assert all(len(row["source"]) >= 20 for row in rows)
    assert WRITTEN["rows"] == json.loads(json.dumps(rows))
    assert WRITTEN["margins"] == time_bounds.margins(rows)
    assert WRITTEN["plans_margins"] == time_bounds.margins(WRITTEN["plans"])
    assert RESULTS.with_suffix(".md").read_text() == time_bounds.page(rows, WRITTEN["plans"])


def test_models_have_as_many_parameters_as_their_sources_say() -> None:
    for name, shape in PUBLISHED.models.items():
        assert shape.counted() == pytest.approx(shape.parameters, rel=0.02 if name.startswith("maxtext") else 0.001)


def _with_link(name: str, change: Callable[[Figure], Figure]) -> Callable[[Hardware], Hardware]:
    return lambda h: replace(h, links={**h.links, name: change(h.links[name])} if name in h.links else h.links)


def _slower(link: Figure) -> Figure:
    return link._replace(value=link.value / 10)


def _with_slower_ici(hardware: Hardware) -> Hardware:
    chip = hardware.chip
    return replace(hardware, chip=replace(chip, link=_slower(chip.link))) if chip and chip.link else hardware


CHANGES: dict[str, tuple[Callable[[Hardware], Hardware], set[str]]] = {
    "slower in a host": (_with_link("nvlink", _slower), {"h100:8", "a100-80gb:8", "a100-80gb:16"}),
    "slower network": (_with_link("network", _slower), {"a100-80gb:16"}),
    "slower ici": (_with_slower_ici, {"v5e:8x16"}),
    # H100s add up faster than any ring could.
    "no switches": (_with_link("nvlink", lambda link: link._replace(in_switch=False)), {"h100:8"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_link_that_is_too_slow_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, violations = CHANGES[name]

    def changed(text: str) -> Target:
        target = parse_target(text)
        return replace(target, hardware=change(target.hardware))

    monkeypatch.setattr(time_bounds, "parse_target", changed)
    assert {row["hardware"] for row in time_bounds.compare_all(PUBLISHED) if row["ratio"] < 1} == violations


@pytest.mark.parametrize("factor", [2, 3])
def test_peaks_that_are_too_low_are_seen(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time_module.peak_flops

    def lower(name: str, dtype: str) -> float | None:
        peak = real(name, dtype)
        return peak / factor if peak else None

    monkeypatch.setattr(time_module, "peak_flops", lower)
    rows = time_bounds.compare_all(PUBLISHED)
    names = {parse_target(row["hardware"]).hardware.name for row in rows if row["ratio"] < 1}
    halved = {"a100-80gb", "a100-40gb", "v5e", "v5p", "tpu7x"}
    assert names == (halved if factor == 2 else halved | {"h100", "v6e"})  # of B200 only a slow run was found


def test_all_of_attention_or_of_recomputation_is_too_much() -> None:
    """What the bound leaves out on purpose is more than some runs took."""
    run = next(run for run in PUBLISHED.runs if run.hardware == "v5e:16x16" and run.model == "maxtext-32b")
    shape, target = PUBLISHED.models[run.model], parse_target(run.hardware)
    time = time_bounds.bound_of(run, shape, target)
    assert time.seconds is not None
    assert time.compute_s == time.seconds
    assert time.seconds * 1.31 > time_bounds.measured_seconds(run, time, target)


def test_plans_of_published_runs_are_no_longer_than_these_and_do_no_less_than_the_textbook() -> None:
    """Two counts of the same step: by formula, and what the trainer's own step does. They share no arithmetic."""
    rows = WRITTEN["plans"]
    assert [(row["name"], row["hardware"]) for row in rows] == [(run.name, run.hardware) for run, _ in EXPRESSIBLE]
    kinds = [parse_target(row["hardware"]).hardware.kind for row in rows]
    assert (kinds.count("cuda") >= 6, kinds.count("tpu") >= 2) == (True, True)
    for row, (run, shape) in zip(rows, EXPRESSIBLE, strict=True):
        assert (row["bound_s"], row["binds"]) == max((seconds, name) for name, seconds in row["bounds_s"].items())
        assert 1 <= row["measured_s"] / row["bound_s"] == row["ratio"] < 10, row["what"]
        assert row["parameters"] == pytest.approx(shape.counted(), rel=1e-3), row["what"]
        textbook = time_bounds.bound_of(run, shape, parse_target(run.hardware))
        assert textbook.compute_s is not None
        assert textbook.compute_s <= row["bounds_s"]["compute"] < 1.3 * textbook.compute_s, row["what"]
        for link, seconds in textbook.links_s.items():
            assert row["bounds_s"][link] >= seconds, row["what"]
        assert row["measured_s"] == time_bounds.measured_seconds(run, textbook, parse_target(run.hardware))


def test_the_expected_time_of_every_third_run_was_not_fitted_and_is_near() -> None:
    rows = WRITTEN["plans"]
    assert [row["held_out"] for row in rows] == [number % 3 == 2 for number in range(len(rows))]
    for row in rows:
        assert row["expected_ratio"] == row["expected_s"] / row["measured_s"]
        assert sum(row["expected_parts_s"].values()) == pytest.approx(row["expected_s"])
        assert row["expected_s"] > row["bound_s"]
    far = [row["what"] for row in rows if row["held_out"] and abs(row["expected_ratio"] - 1) > time_bounds.TOLERANCE]
    assert far == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [({}, 0), ({"ratio": 0.99}, 1), ({"expected_ratio": 1.3, "held_out": True}, 1), ({"expected_ratio": 0.7}, 0)],
)
def test_the_benchmark_ends_with_1_where_a_bound_is_too_long_or_an_expected_time_far(
    changes: dict[str, Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = deepcopy(WRITTEN)
    written["plans"][3] |= changes
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / RESULTS.name).write_text(json.dumps(written))
    monkeypatch.setattr(time_bounds, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["time_bounds.py", "--plans=no"])
    assert time_bounds.main() == code
    assert json.loads((tmp_path / "results" / RESULTS.name).read_text()) == written
    assert "## The planner's bounds" in (tmp_path / "results" / "time_bounds.md").read_text()


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("index", range(len(EXPRESSIBLE)), ids=lambda n: WRITTEN["plans"][n]["what"])
def test_each_published_run_is_planned_as_written(index: int) -> None:
    (run, shape), written = EXPRESSIBLE[index], WRITTEN["plans"][index]
    with Worker() as worker:
        row = time_bounds.plan_run(run, shape, worker, is_held_out=written["held_out"])
    assert row["ratio"] >= 1
    assert row["expected_s"] == pytest.approx(written["expected_s"], rel=0.05)
    assert row["bounds_s"]["compute"] == pytest.approx(written["bounds_s"]["compute"], rel=1e-6)
    assert row["bounds_s"] == pytest.approx(written["bounds_s"], rel=0.05)  # another torch keeps other activations


def test_a_published_run_with_a_misspelt_key_or_two_units_is_refused() -> None:
    with pytest.raises(ValidationError):
        time_bounds.Measured(step_seconds=1.0, tokens_per_second_per_device=2.0)
    run = PUBLISHED.runs[0].model_dump(exclude_unset=True)
    for wrong in ({"sequence": 1}, {"source": "somebody"}):
        with pytest.raises(ValidationError):
            time_bounds.Run.model_validate({**run, **wrong})


# ------------------------------------------------------------------------------------------------------ expected steps

STEPS: dict[str, dict[str, Any]] = json.loads(step_time.RESULTS.read_text())


def test_the_table_has_every_shape_and_its_page() -> None:
    assert list(STEPS) == [f"{case.name} on {case.on}" for case in step_time.CASES]
    assert step_time.RESULTS.with_suffix(".md").read_text() == step_time.page(STEPS)


def test_more_time_memory_or_traffic_is_a_loss_and_so_is_a_collective_that_newly_stops_compute() -> None:
    assert step_time.losses(STEPS, STEPS) == []
    for figure in step_time.FIGURES:
        now = deepcopy(STEPS)
        row = next(row for row in now.values() if row[figure])
        row[figure] *= 1.02
        assert step_time.losses(STEPS, now) == []
        row[figure] *= 1.02
        (found,) = step_time.losses(STEPS, now)
        assert figure in found
    now = deepcopy(STEPS)
    next(iter(now.values()))["waited_gib"]["all_to_all"] = 0.1
    (found,) = step_time.losses(STEPS, now)
    assert "all_to_all" in found


@pytest.mark.proof
@pytest.mark.xla
@pytest.mark.timeout(1800)
def test_no_shape_got_slower_or_larger_or_sends_more() -> None:
    assert step_time.losses(STEPS, step_time.plan_all()) == []
