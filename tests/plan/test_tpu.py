"""Tracing needs no TPU compiler; what that makes of a program is in test_tpu_programs.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import RESULTS, Program, table, traced

from portable_fsdp.runtime.errors import BackendError

pytestmark = pytest.mark.xla

DEVICES = 8
SMALL = Program("small", "v6e:2x4", seq_len=128)


@pytest.fixture
def leaves_nothing_behind() -> None:
    """The processes that trace are awaited; Python's own resource tracker stays."""


@pytest.fixture(scope="module")
def step() -> Any:
    return traced(SMALL)["train_step"]


def elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def test_all_state_is_an_argument_that_is_updated_in_place(step: Any) -> None:
    state = [argument for argument in step.arguments if argument.output is not None]
    moments = [a for a in state if a.name.startswith(("exp_avg/", "exp_avg_sq/"))]
    weights = [a for a in state if "/" not in a.name]
    assert sum(elements(a.shape) for a in weights) == SMALL.parameters
    assert sum(elements(a.shape) for a in moments) == 2 * SMALL.parameters
    assert len({a.output for a in state}) == len(state)
    assert max(a.output for a in state) < len(step.outputs)


def test_shardings_are_those_of_the_engine(step: Any) -> None:
    arguments = {argument.name: argument for argument in step.arguments}
    assert arguments["model.embed_tokens.weight"].sharding == "{devices=[8,1]<=[8]}"
    assert arguments["exp_avg/model.norm.weight"].sharding == "{devices=[8]<=[8]}"
    assert arguments["batch.input_ids"].sharding == "{devices=[8,1]<=[8]}"
    assert arguments["batch.input_ids"].output is None
    assert arguments["model.rotary_emb.inv_freq"].sharding == "{replicated}"
    for argument in step.arguments:
        assert argument.output is None or step.outputs[argument.output] == argument.sharding


def test_replicas_share_a_sharding() -> None:
    hybrid = Program("small", "v6e:2x4", seq_len=128, strategy="HYBRID_SHARD", replicas=2)
    arguments = {a.name: a for a in traced(hybrid)["train_step"].arguments}
    expected = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert arguments["lm_head.weight"].sharding == expected
    assert arguments["batch.labels"].sharding == "{devices=[8,1]<=[8]}"


def test_accumulation_is_two_programs_over_the_same_gradients() -> None:
    accumulating = Program("small", "v6e:2x4", seq_len=128, accumulation=2)
    programs = traced(accumulating)
    assert list(programs) == ["micro_batch", "update"]
    gradients = [
        {a.name for a in program.arguments if a.name.startswith("grad/") and a.output is not None}
        for program in programs.values()
    ]
    assert gradients[0] == gradients[1]
    assert len(gradients[0]) == 30
    assert not [a for a in programs["micro_batch"].arguments if a.name.startswith("exp_avg")]


def test_a_model_that_no_host_could_hold_is_traced_in_little_memory() -> None:
    import resource

    big = Program("8b", "v5p:2x2x4", seq_len=1024, layers=8, checkpointing="full", scan=True)
    (program,) = traced(big).values()
    assert sum(elements(a.shape) for a in program.arguments if a.output is not None) > 3 * 2.7e9
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 4e9  # weights and state would be 34e9


def test_the_compiler_takes_the_step_to_the_end_flash_kernel_included(step: Any) -> None:
    from portable_fsdp.plan.tpu import compile_for

    assert b"tpu_custom_call" in step.hlo
    compile_for(step, SMALL.slice, generate_code=True)


def test_a_slice_that_is_none_is_refused(step: Any) -> None:
    from portable_fsdp.plan.tpu import compile_for

    with pytest.raises(BackendError, match="plan for v6e:3x3: expected the TPU compiler"):
        compile_for(step, "v6e:3x3")


def test_buffers_of_other_memories_are_not_counted() -> None:
    from portable_fsdp.plan.tpu_read import allocations

    text = """\
allocation 0: size 4096, parameter 3, shape |f32[1024]| at ShapeIndex {}:
 value: <12 p.1 @0> (size=4096,offset=0): f32[1024]{0}
allocation 1: size 512, output shape is |(f32[], f32[128])|, maybe-live-out:
allocation 2: size 2048, parameter 4, shape |f32[512]| at ShapeIndex {}, maybe-live-out:
allocation 3: size 65536, preallocated-temp:
allocation 4: size 8192, color 1, preallocated-temp:
"""
    assert allocations(text) == {"arguments": 6144, "temporaries": 65536, "outputs": 512}


def test_page_shows_the_results() -> None:
    page = Path(__file__).parents[2] / "docs" / "tpu_programs.md"
    assert table(json.loads(RESULTS.read_text())) in page.read_text()
