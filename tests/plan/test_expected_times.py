"""Expected times against others' runs, and the textbook's counts against the TPU compiler's and the planner's."""

import json
from typing import Any

import expected_times
import pytest
import step_time
from expected_times import Step, work_of
from programs import RESULTS as COMPILED
from programs import SIZES, Program, program_of

from portable_fsdp.plan.target import parse_target
from portable_fsdp.runtime.child import Worker

RESULTS = expected_times.RESULTS
WRITTEN: list[dict[str, Any]] = json.loads(RESULTS.read_text())
PUBLISHED = expected_times.read_published()
RUNS = [(run, PUBLISHED.models[run.model]) for run in PUBLISHED.runs]
STEPS: dict[str, dict[str, Any]] = json.loads(step_time.RESULTS.read_text())


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


def test_the_tables_have_every_published_run_and_every_shape_and_their_pages() -> None:
    assert [(row["name"], row["hardware"]) for row in WRITTEN] == [(run.name, run.hardware) for run in PUBLISHED.runs]
    kinds = [parse_target(row["hardware"]).hardware.kind for row in WRITTEN]
    assert (kinds.count("cuda") >= 6, kinds.count("tpu") >= 2) == (True, True)
    assert RESULTS.with_suffix(".md").read_text() == expected_times.page(WRITTEN)
    assert list(STEPS) == [f"{case.name} on {case.on}" for case in step_time.CASES]
    assert step_time.RESULTS.with_suffix(".md").read_text() == step_time.page(STEPS)


def test_plans_of_published_runs_do_no_less_than_the_textbook() -> None:
    """Two counts of the same step: by formula, and what the trainer's own step does. They share no arithmetic."""
    for name, shape in PUBLISHED.models.items():  # parameters as their sources say
        assert shape.counted == pytest.approx(shape.parameters, rel=0.02 if name.startswith("maxtext") else 0.001)
    for row, (run, shape) in zip(WRITTEN, RUNS, strict=True):
        assert row["parameters"] == pytest.approx(shape.counted, rel=1e-3), row["what"]
        assert 1 <= row["flops_over_textbook"] < 1.3, row["what"]
        assert row["measured_s"] == expected_times.measured_seconds(run, shape, parse_target(run.hardware))


def test_the_expected_time_of_every_third_run_was_not_fitted_and_is_near() -> None:
    assert [row["held_out"] for row in WRITTEN] == [number % 3 == 2 for number in range(len(WRITTEN))]
    for row in WRITTEN:
        assert row["expected_ratio"] == row["expected_s"] / row["measured_s"]
        assert sum(row["expected_parts_s"].values()) == pytest.approx(row["expected_s"])
    tolerance = expected_times.TOLERANCE
    assert [row["what"] for row in WRITTEN if row["held_out"] and abs(row["expected_ratio"] - 1) > tolerance] == []


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("index", range(len(RUNS)), ids=lambda n: WRITTEN[n]["what"])
def test_each_published_run_is_planned_as_written(index: int) -> None:
    (run, shape), written = RUNS[index], WRITTEN[index]
    with Worker() as worker:
        row = expected_times.plan_run(run, shape, worker, is_held_out=written["held_out"])
    assert row["expected_s"] == pytest.approx(written["expected_s"], rel=0.05)
    assert row["flops_over_textbook"] == pytest.approx(written["flops_over_textbook"], rel=1e-6)


@pytest.mark.proof
@pytest.mark.xla
@pytest.mark.timeout(1800)
def test_no_shape_got_slower_or_larger_or_sends_more() -> None:
    assert step_time.losses(STEPS, step_time.plan_all()) == []
