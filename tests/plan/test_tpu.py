"""Tracing, and how plans are made; what the TPU compiler makes of many programs is in test_tpu_programs.py."""

import json
import os
import resource
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest
from programs import RESULTS, Program, table, traced

from portable_fsdp.backends.torch_xla import options
from portable_fsdp.plan import tpu_compiler
from portable_fsdp.plan.target import parse_target
from portable_fsdp.plan.tpu_compiler import compile_for, plan_compiled, trace_apart
from portable_fsdp.plan.tpu_program import Program as TracedProgram
from portable_fsdp.plan.tpu_program import part_of
from portable_fsdp.runtime.child import Child, Worker
from portable_fsdp.runtime.errors import BackendError

pytestmark = pytest.mark.xla

SMALL = Program("small", "v6e:2x4", seq_len=128)
SLICE = parse_target("v6e:2x4")


@pytest.fixture(scope="module")
def step() -> TracedProgram:
    return traced(SMALL)["train_step"]


def test_all_state_is_an_argument_that_is_updated_in_place_with_the_engines_shardings(step: TracedProgram) -> None:
    state = [argument for argument in step.arguments if argument.output is not None]
    moments = [a for a in state if part_of(a.name) == "optimizer"]
    weights = [a for a in state if part_of(a.name) == "weights"]
    assert sum(prod(a.shape) for a in weights) == SMALL.parameters
    assert sum(prod(a.shape) for a in moments) == 2 * SMALL.parameters
    assert {a.name.partition("/")[0] for a in moments} == {"exp_avg", "exp_avg_sq"}
    assert len({a.output for a in state}) == len(state)
    assert max(a.output for a in state if a.output is not None) < len(step.outputs)
    arguments = {argument.name: argument for argument in step.arguments}
    assert arguments["model.embed_tokens.weight"].sharding == "{devices=[8,1]<=[8]}"
    assert arguments["exp_avg/model.norm.weight"].sharding == "{devices=[8]<=[8]}"
    assert arguments["batch.input_ids"].sharding == "{devices=[8,1]<=[8]}"
    assert arguments["batch.input_ids"].output is None
    assert arguments["model.rotary_emb.inv_freq"].sharding == "{replicated}"
    for argument in step.arguments:
        assert argument.output is None or step.outputs[argument.output] == argument.sharding


@pytest.mark.proof
def test_accumulation_is_two_programs_over_the_same_gradients() -> None:
    programs = traced(replace(SMALL, accumulation=2))
    assert list(programs) == ["micro_batch", "update"]
    gradients = [
        {a.name for a in program.arguments if part_of(a.name) == "gradients" and a.output is not None}
        for program in programs.values()
    ]
    assert gradients[0] == gradients[1]
    assert len(gradients[0]) == 30
    assert not [a for a in programs["micro_batch"].arguments if part_of(a.name) == "optimizer"]


def test_a_model_that_no_host_could_hold_is_traced_in_little_memory_and_replicas_share_a_sharding() -> None:
    """As many replicas as there are hosts, where the config doesn't say."""
    big = Program("8b", "v5p:2x2x4", 1024, layers=8, checkpointing="full", scan=True, strategy="HYBRID_SHARD")
    programs, _ = trace_apart(big.config, 16, hosts=4)
    arguments = {argument.name: argument for argument in programs["train_step"].arguments}
    assert sum(prod(a.shape) for a in arguments.values() if a.output is not None) > 3 * 2.7e9
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 4e9  # weights and state would be 34e9
    assert arguments["lm_head.weight"].sharding == "{devices=[4,1,4]<=[4,4]T(1,0) last_tile_dim_replicate}"
    assert arguments["batch.labels"].sharding == "{devices=[16,1]<=[16]}"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("slice_", "stages", "more"),
    [
        ("v6e:4x4", 1 + 1 / 4, {}),
        ("v5p:2x2x4", 1 + 1 / 4 + 1 / 8, {"scan": True, "checkpointing": "full", "offload": "activations"}),
    ],
)
def test_gradients_are_reduce_scattered_where_the_compiler_would_all_reduce_them(
    slice_: str, stages: float, more: dict[str, Any]
) -> None:
    """`stages`: full tensors of all axes; the second axis has left to sum what the first has scattered."""
    program = Program("small", slice_, seq_len=128, **more)
    by_compiler = compile_for(trace_apart(program.config, 16).programs["train_step"], slice_).collectives
    compiled = compile_for(traced(program)["train_step"], slice_)
    by_axis = compiled.collectives
    hidden = 128 * 256 * 2  # bytes of a layer's input
    assert compiled.host_bytes == (3 * hidden if program.offload == "activations" else 0)
    weights = 2 * program.parameters
    assert by_compiler["all_reduce bf16"].bytes == pytest.approx(weights, rel=0.05)
    assert by_axis["reduce_scatter bf16"].bytes == pytest.approx(weights * stages, rel=0.05)
    assert sum(moved.bytes for kind, moved in by_axis.items() if kind.startswith("all_reduce")) < 0.02 * weights
    of_both = [sum(moved.sent_bytes for moved in kinds.values()) for kinds in (by_axis, by_compiler)]
    assert of_both[0] < 0.77 * of_both[1]


@pytest.mark.proof
@pytest.mark.parametrize("scan", [False, True])
def test_a_recomputed_layer_keeps_attention_and_runs_only_its_backward_again(scan: bool) -> None:
    """2 products of half of 1024 x 1024 x 256 in forward, 5 in backward, none in the second run; three layers."""
    recomputed = Program("small", "v6e:2x4", checkpointing="full", scan=scan)
    kernels = compile_for(traced(recomputed)["train_step"], recomputed.slice).kernel_flops
    assert kernels == {"bf16": 3 * 7 * 1024 * 1024 * 256}


def test_the_compiler_takes_the_step_to_the_end_attention_kernel_included(step: TracedProgram) -> None:
    assert b"tpu_custom_call" in step.hlo
    compile_for(step, SMALL.slice, generate_code=True)


def _as_a_run(own: str) -> dict[str, str]:
    """For a child: LIBTPU_INIT_ARGS of a run on a host of each generation."""
    os.environ.update(PJRT_DEVICE="CPU", TPU_SKIP_MDS_QUERY="1")
    import torch_xla
    from torch_xla._internal import tpu

    from portable_fsdp.backends.torch_xla import runtime

    tpu.num_available_chips = lambda: 4
    settings: dict[str, str] = {}
    for name, kind in {"v4": "v4-8", "v5p": "v5p-8", "v5e": "v5litepod-4", "v6e": "v6e-4"}.items():
        os.environ.update(TPU_ACCELERATOR_TYPE=kind, LIBTPU_INIT_ARGS=own)
        runtime._generation.cache_clear()  # another machine
        runtime.set_environment("tpu")
        cast(Any, torch_xla)._setup_libtpu_flags()  # as torch_xla does when it is imported where there are chips
        settings[name] = os.environ["LIBTPU_INIT_ARGS"]
    return settings


def test_run_and_plan_have_the_same_options() -> None:
    """Whatever the user set stays as it is, on both sides."""
    own = "--xla_tpu_enable_windowed_einsum_for_all_gather=true  --xla_tpu_max_hbm_size_mib=900"
    with Worker() as worker:
        run: dict[str, str] = worker(_as_a_run, own)
    for generation, arguments in run.items():
        plan = options.compiler_options(options.libtpu_arguments({"LIBTPU_INIT_ARGS": own}, generation))
        assert options.compiler_options(arguments) == plan
        known = options.COMPILER_OPTIONS | options.COMPILER_OPTIONS_OF[generation]
        assert plan == {**plan, **known, **options.compiler_options(own)}
    assert options.compiler_options(options.libtpu_arguments({})) == options.COMPILER_OPTIONS
    assert options.compiler_options("--a=1 -b=x=y  c --d") == {"a": "1", "b": "x=y", "c": "true", "d": "true"}


def test_the_users_own_options_reach_the_compiler(step: TracedProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_unheard_of=1")
    with pytest.raises(BackendError, match=r"libtpu .* rejects the option xla_tpu_unheard_of\."):
        compile_for(step, "v6e:2x4")


@pytest.mark.parametrize(
    ("slice_", "limit_s", "message"),
    [
        ("v6e:3x3", 900, "plan for v6e:3x3: libtpu .* doesn't know this slice"),
        ("v6e:2x2", 900, "it has 4 devices, the program is for 8"),
        ("tpu7x:2x2x1", 900, "tpu7x needs a newer libtpu"),
        ("v6e:2x4", 0.1, "the time limit stopped it"),
    ],
)
def test_a_slice_that_is_none_and_a_compiler_that_hangs_are_refused(
    step: TracedProgram, slice_: str, limit_s: float, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tpu_compiler, "LIMIT_S", limit_s)
    with pytest.raises(BackendError, match=message):
        compile_for(step, slice_)


def test_a_compiler_that_fails_leaves_a_report(
    step: TracedProgram, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BackendError, match="Its last lines") as failure:
        compile_for(replace(step, hlo=step.hlo[:1000]), "v6e:2x4")
    (report,) = (tmp_path / "portable_fsdp" / "reports").iterdir()
    assert str(report) in str(failure.value)
    assert report.read_text().splitlines()[-1][:100] in str(failure.value)


@pytest.mark.parametrize("missing", ["libtpu", "jax", "torch_xla"])
def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = tpu_compiler.importlib.util.find_spec
    monkeypatch.setattr(tpu_compiler.importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    monkeypatch.setattr(tpu_compiler, "trace_apart", lambda *_args, **_kwargs: pytest.fail("it was found too late"))
    with pytest.raises(BackendError, match=rf"not installed: {missing}.\n.*pip install '.\[plan\]'"):
        plan_compiled(SMALL.config, SLICE)


@pytest.mark.proof
def test_a_plan_made_before_is_taken_from_the_cache(
    step: TracedProgram, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs: list[str] = []
    monkeypatch.setattr(tpu_compiler, "Child", lambda *words, **named: runs.append(words[0]) or Child(*words, **named))
    first = compile_for(step, "v6e:2x4")
    assert compile_for(step, "v6e:2x4") == first
    assert len(runs) == 1
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_windowed_einsum_for_all_gather=true")
    compile_for(step, "v6e:2x4")
    assert len(runs) == 2  # other options, another plan


def test_page_shows_the_results() -> None:
    assert table(json.loads(RESULTS.read_text())) in RESULTS.with_suffix(".md").read_text()
