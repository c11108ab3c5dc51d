"""`make proof`: what the TPU compiler makes of the trainer's own step, for slices that aren't there.

Bounds hold for torch_xla 2.9.0 with libtpu 0.0.21; benchmarks/results/tpu_programs.md has the figures.
"""

from dataclasses import replace
from functools import cache
from math import prod

import programs as cases
import pytest
from programs import Program, compiled, traced

from portable_fsdp.plan.tpu_compiler import compile_for
from portable_fsdp.plan.tpu_program import Compiled, memory_of, part_of
from portable_fsdp.runtime.errors import BackendError

pytestmark = [pytest.mark.proof, pytest.mark.xla, pytest.mark.timeout(1800)]
FULL, FULL_RECOMPUTED, GRAD_OP, NONE, HYBRID = cases.STRATEGIES
STATE = 12  # bytes of a parameter and AdamW's two moments
GIBIBYTE = 2**30
ONE_SLICE = [program for program in cases.SLICES if program.slices == 1]
TWO_SLICES, TWO_REPLICAS = (program for program in cases.SLICES if program.slices == 2)


def words(program: Program) -> str:
    return f"{program.slice} x {program.slices}, {program.words}"


@cache
def of(program: Program) -> Compiled:
    return compiled(program)


def moved(program: Program, kind: str) -> int:
    """Bytes of full tensors that collectives of a kind gather or reduce in a step."""
    return sum(moved.bytes for key, moved in of(program).collectives.items() if key.startswith(kind))


@pytest.mark.parametrize(
    ("program", "shards", "gathers"),
    [
        (FULL, 8, (1.0, 2.0)),
        (FULL_RECOMPUTED, 8, (1.5, 2.0)),
        (GRAD_OP, 8, (1.0, 1.0)),
        (NONE, 1, (0.0, 0.0)),
        (HYBRID, 4, (0.0, 2.0)),
    ],
)
def test_strategies_hold_gather_and_reduce_what_they_say(
    program: Program, shards: int, gathers: tuple[float, float]
) -> None:
    weights = 2 * program.parameters
    assert of(program).argument_bytes == pytest.approx(STATE * program.parameters / shards, rel=0.05)
    assert of(program).output_bytes < 4096  # all state is updated where it lies
    assert gathers[0] - 0.03 < moved(program, "all_gather") / weights < gathers[1] + 0.03
    copies = 1.25 if program is HYBRID else 1  # the shards of each replica are summed once more, over the replicas
    scattered = moved(program, "reduce_scatter")
    assert scattered + moved(program, "all_reduce") == pytest.approx(weights * copies, rel=0.05)
    if program in (FULL, NONE):
        assert scattered > 0.9 * weights if program is FULL else scattered == 0


def test_matrix_products_and_collectives_are_in_the_dtypes_asked_for() -> None:
    assert set(of(FULL).matmul_flops) == {"bf16 x bf16"}
    flops = of(cases.FLOAT32).matmul_flops
    tokens, head = cases.FLOAT32.seq_len, 1024 * 256
    in_float32 = sum(count for dtypes, count in flops.items() if "f32" in dtypes.split(" x "))
    assert in_float32 == pytest.approx(3 * 2 * tokens * head, rel=0.01)  # forward, and two in backward
    assert of(cases.FLOAT32).collectives["all_gather f32"].bytes == pytest.approx(4 * head, rel=0.02)
    assert of(cases.FLOAT32).collectives["reduce_scatter f32"].bytes == pytest.approx(4 * head, rel=0.02)
    assert of(cases.SUMMED).collectives["reduce_scatter f32"].bytes > 0.9 * 4 * cases.SUMMED.parameters
    assert set(of(cases.SUMMED).matmul_flops) == {"bf16 x bf16"}


@pytest.mark.parametrize("program", [*cases.SLICES, *cases.SHAPES, *cases.STRATEGIES, cases.SUMMED], ids=words)
def test_the_step_never_meets_the_host_and_updates_state_where_it_lies(program: Program) -> None:
    assert of(program).host_transfers == ()
    assert of(program).undonated == ()
    updated = [argument for argument in traced(program)["train_step"].arguments if argument.output is not None]
    assert {part_of(argument.name) for argument in updated} == {"weights", "optimizer"}


@pytest.mark.parametrize("program", ONE_SLICE, ids=words)
def test_every_slice_gathers_and_reduces_by_the_textbook(program: Program) -> None:
    weights = 2 * program.parameters
    assert 1 - 0.03 < moved(program, "all_gather") / weights < 2 + 0.03
    # One axis after the other: on each, what the ones before have left of the gradients.
    scattered = {"v6e:2x4": 1, "v6e:4x4": 1 + 1 / 4, "v5e:4x4": 1 + 1 / 4}.get(program.slice, 1 + 1 / 4 + 1 / 8)
    assert moved(program, "reduce_scatter") == pytest.approx(weights * scattered, rel=0.05)
    assert moved(program, "all_reduce") < 0.05 * weights  # of norms
    assert of(program).argument_bytes == pytest.approx(STATE * program.parameters / program.devices, rel=0.08)
    assert of(program).between_slices == {}


def test_slices_exchange_what_the_strategy_says_over_the_network() -> None:
    """A device sends its part of the gradients, a 16th; with FULL_SHARD half of it, and for each gather of weights."""
    part = 2 * TWO_REPLICAS.parameters / 16
    replicas, sharded = of(TWO_REPLICAS).between_slices, of(TWO_SLICES).between_slices
    assert sum(moved.sent_bytes for moved in replicas.values()) == pytest.approx(part, rel=0.05)
    assert not [key for key in replicas if key.startswith("all_gather")]
    gathered = sum(moved.sent_bytes for key, moved in sharded.items() if key.startswith("all_gather"))
    assert 0.5 * part < gathered < 1.03 * part
    assert sum(moved.sent_bytes for moved in sharded.values()) - gathered == pytest.approx(0.5 * part, rel=0.05)


@pytest.mark.parametrize("program", cases.SHAPES, ids=words)
def test_shapes_of_other_models_compile(program: Program) -> None:
    state = [a for a in traced(program)["train_step"].arguments if part_of(a.name) in ("weights", "optimizer")]
    elements = sum(prod(a.shape) for a in state)
    held = sum(size for name, size in of(program).named_bytes.items() if part_of(name) != "batch")
    assert held == pytest.approx(4 * elements / program.devices, rel=0.01)
    assert of(program).matmul_flops


LIMITED = Program("wide", "v6e:2x4", 768, optimizer="sgd")


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9, 0.96, 1.03, 1.06, 1.2, 2.0])
def test_the_verdict_is_that_of_a_full_compile(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around what the step takes when nothing limits it; short of that the compiler recomputes what it can."""
    step, limit = traced(LIMITED)["train_step"], round(share * memory_of({"": of(LIMITED)}, None).peak_bytes / 2**20)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_tpu_max_hbm_size_mib={limit}")
    verdict = memory_of({"": compile_for(step, LIMITED.slice)}, limit * 2**20).verdict
    if verdict == "does not fit":
        with pytest.raises(BackendError, match="the step does not fit: RESOURCE_EXHAUSTED"):
            compile_for(step, LIMITED.slice, generate_code=True)
    else:
        compile_for(step, LIMITED.slice, generate_code=True)


@pytest.mark.parametrize(
    "programs", [cases.PLAIN, cases.PLAIN_V6E, cases.FLASH, *cases.RECOMPUTED], ids=lambda programs: words(programs[0])
)
def test_gradient_checkpointing_frees_memory_and_computes_layers_again(programs: list[Program]) -> None:
    none, full = (of(program).temporary_bytes for program in programs)
    assert full <= (0.36 if programs is cases.FLASH else 0.55) * none
    if programs in (cases.PLAIN, cases.FLASH):
        none, full = (sum(of(program).matmul_flops.values()) for program in programs)
        assert 1.15 * none < full < 1.34 * none


@pytest.mark.parametrize("programs", [cases.KEPT[:3], cases.KEPT[3:]], ids=["unrolled", "scanned"])
def test_products_whose_outputs_are_kept_run_once(programs: list[Program]) -> None:
    """And twice in backward: each of a layer's 218 million weights is in 3 products, and with `full` in 3.73."""
    none, kept, full = (sum(of(program).matmul_flops.values()) for program in programs)
    assert kept == pytest.approx(none, rel=1e-3)
    assert full - kept == pytest.approx(2 * 2 * 8192 * 0.73 * 218.1e6, rel=0.01)
    none, kept, full = (of(program).temporary_bytes for program in programs)
    outputs = 2 * 2 * 8192 * (3 * 4096 + 2 * 1024 + 2 * 14336 - 4096)  # but for the last one's, which nothing reads
    assert full < kept < none
    assert kept - full < 1.15 * outputs


def test_what_a_loops_layers_take_waits_on_the_host() -> None:
    """The hidden states of 4 layers, 8,192 tokens of 4,096 values each; copies run beside compute."""
    stays, waits = of(replace(cases.OFFLOADED, offload="none")), of(cases.OFFLOADED)
    assert (stays.host_bytes, waits.host_bytes) == (0, 4 * 8192 * 4096 * 2)
    assert stays.temporary_bytes - waits.temporary_bytes > 0.9 * waits.host_bytes
    assert waits.matmul_flops == stays.matmul_flops
    assert waits.host_transfers == ()


def test_a_layer_more_costs_little_memory() -> None:
    four, eight = (of(program).temporary_bytes for program in cases.SHALLOW)
    assert (eight - four) / 4 <= 0.1 * GIBIBYTE
    assert (of(cases.FLASH[1]).temporary_bytes - four) / 28 <= 0.1 * GIBIBYTE


def test_scanned_layers_compile_once_and_do_the_same_work() -> None:
    """In processor time of the whole compilation, most of which is the layers' code."""
    four, all_layers = (compiled(program, generate_code=True).compile_s for program in cases.SCAN)
    assert all_layers <= 3 * four
    loop, unrolled = of(cases.SCAN[1]), of(cases.FLASH[1])
    assert sum(loop.matmul_flops.values()) == pytest.approx(sum(unrolled.matmul_flops.values()), rel=1e-3)
    assert loop.temporary_bytes <= 0.36 * of(cases.FLASH[0]).temporary_bytes
    assert [of(program).rematerialised for program in (*cases.FLASH, *cases.SCAN)] == [0, 0, 0, 0]


@pytest.mark.parametrize("program", cases.PACKED[:2], ids=words)
def test_packed_documents_take_the_attention_kernel_and_no_mask(program: Program) -> None:
    """The same products as without documents, all in the kernel, and nothing of [rows, seq, seq] besides."""
    stream, packed = of(replace(program, packing="stream")), compiled(program, generate_code=True)
    assert packed.kernel_flops == stream.kernel_flops != {}
    assert packed.temporary_bytes < stream.temporary_bytes + program.seq_len**2
    assert packed.host_transfers == ()
    batch = {a.name for a in traced(program)["train_step"].arguments if part_of(a.name) == "batch"}
    assert {"batch.positions", "batch.segments"} <= batch
    assert of(cases.PACKED[2]).kernel_flops == {}  # its rows are no multiple of the kernel's blocks
    assert of(cases.PACKED[2]).host_transfers == ()


@pytest.mark.parametrize("program", cases.KERNELS, ids=words)
def test_code_is_generated_for_each_attention_kernel(program: Program) -> None:
    assert compiled(program, generate_code=True).kernel_flops


def test_a_window_costs_the_kernel_what_it_lets_see() -> None:
    """Of two layers with 4 heads of 256 one has a window of 512 in 2048 tokens; 2 products forward, 5 in backward."""
    everything, within = 2048**2 // 2, 512**2 // 2 + (2048 - 512) * 512
    assert of(cases.KERNELS[3]).kernel_flops == {"bf16": 7 * 2 * 4 * 256 * (everything + within)}
