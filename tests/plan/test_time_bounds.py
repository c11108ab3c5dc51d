"""The textbook's and the planner's bounds: against the TPU compiler's counts, and against others' runs."""

import json
from typing import Any

import pytest
import step_time
import time_bounds
from programs import RESULTS as COMPILED
from programs import SIZES, Program, program_of
from textbook import Step, work_of

from portable_fsdp.plan.target import parse_target
from portable_fsdp.runtime.child import Worker

RESULTS = time_bounds.HERE / "results" / "time_bounds.json"
WRITTEN: dict[str, Any] = json.loads(RESULTS.read_text())
PUBLISHED = time_bounds.read_published()
EXPRESSIBLE = [
    (run, PUBLISHED.models[run.model])
    for run in PUBLISHED.runs
    if time_bounds.is_expressible(run, PUBLISHED.models[run.model])
]
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


# ------------------------------------------------------------------------------------------------------ expected steps

STEPS: dict[str, dict[str, Any]] = json.loads(step_time.RESULTS.read_text())


def test_the_table_has_every_shape_and_its_page() -> None:
    assert list(STEPS) == [f"{case.name} on {case.on}" for case in step_time.CASES]
    assert step_time.RESULTS.with_suffix(".md").read_text() == step_time.page(STEPS)


@pytest.mark.proof
@pytest.mark.xla
@pytest.mark.timeout(1800)
def test_no_shape_got_slower_or_larger_or_sends_more() -> None:
    assert step_time.losses(STEPS, step_time.plan_all()) == []
