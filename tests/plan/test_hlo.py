"""Programs cut down from what the TPU compiler (v6e:2x4) and XLA on CPU wrote of real steps."""

import re

import pytest

from portable_fsdp.plan.hlo import collectives_by_dtype, matmul_flops, read_program, rematerialised
from portable_fsdp.plan.result import Moved

# A loop of three layers: its bound stands in the condition alone. One gather is spread over two fusions.
TPU = """\
HloModule train_step, is_scheduled=true, num_partitions=8

%region_29.1807.clone (Arg_0.7: bf16[], Arg_1.7: bf16[]) -> bf16[] {
  %Arg_1.7 = bf16[]{:T(256)} parameter(1), metadata={op_name="scatter.3034"}
  %Arg_0.7 = bf16[]{:T(256)} parameter(0), metadata={op_name="scatter.3034"}
  ROOT %add.383 = bf16[]{:T(256)} add(%Arg_0.7, %Arg_1.7), metadata={op_name="add.3033"}
}

%all-reduce-scatter.10 (input_0.1: bf16[1024,256], input_1.1: bf16[1024,256]) -> (bf16[128,256], bf16[128,256]) {
  %input_0.1 = bf16[1024,256]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %input_1.1 = bf16[1024,256]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-reduce.92 = (bf16[1024,256]{1,0:T(8,128)(2,1)}, bf16[1024,256]{1,0:T(8,128)(2,1)}) \
all-reduce(%input_0.1, %input_1.1), channel_id=137, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, \
to_apply=%region_29.1807.clone
}

%async_collective_fusion.1 (param_0.2496: bf16[1,16,256]) -> bf16[8,16,256] {
  %param_0.2496 = bf16[1,16,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.163 = bf16[8,16,256]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.2496), channel_id=109, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true
}

%async_collective_fusion.2 (param_0.2500: bf16[1,16,256]) -> bf16[8,16,256] {
  %param_0.2500 = bf16[1,16,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.165 = bf16[8,16,256]{2,1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.2500), channel_id=109, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true
}

%fused_computation.7 (param_0.9: bf16[512,256], param_1.9: bf16[256,512]) -> bf16[512,512] {
  %param_0.9 = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1.9 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.87 = bf16[512,512]{1,0:T(8,128)(2,1)} convolution(%param_0.9, %param_1.9), \
dim_labels=bf_io->bf, operand_precision={highest,highest}, metadata={op_name="dot.946"}
}

%region_5.282.sunk (param.1: (u32[], bf16[512,256])) -> (u32[], bf16[512,256]) {
  %param.1 = (u32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %fusion.1 = bf16[8,16,256]{2,1,0:T(8,128)(2,1)} fusion(%p), kind=kCustom, calls=%async_collective_fusion.1
  %fusion.2 = bf16[8,16,256]{2,1,0:T(8,128)(2,1)} fusion(%p), kind=kCustom, calls=%async_collective_fusion.2
  %fusion.3.remat = bf16[512,512]{1,0:T(8,128)(2,1)} fusion(%p, %q), kind=kOutput, calls=%fused_computation.7
}

%wide.region_6.305 (wide.param: (u32[], bf16[512,256])) -> pred[] {
  %constant.2250 = s32[]{:T(128)} constant(0), metadata={op_name="call.737/compare.713"}
  %constant.2252 = u32[]{:T(128)} constant(3), metadata={op_name="call.737"}
  ROOT %compare.308 = pred[]{:T(512)S(6)} compare(%i, %constant.2252), direction=LT
}

ENTRY %main.4829 (p.1: f32[128,256]) -> f32[128,256] {
  %p.1 = f32[128,256]{1,0:T(8,128)} parameter(0)
  %while.11 = (u32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}) while(%tuple.322), condition=%wide.region_6.305, \
body=%region_5.282.sunk
  %fusion.434 = (bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, bf16[128,256]{1,0:T(8,128)(2,1)S(1)}) \
fusion(%fusion.1, %fusion.214), kind=kCustom, calls=%all-reduce-scatter.10, metadata={op_name="scatter.3034"}
  %all-reduce.97 = (f32[256]{0:T(256)S(1)}, f32[256]{0:T(256)S(1)}) all-reduce(%fusion.650, %fusion.651), \
channel_id=107, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%region_29.1807.clone
  ROOT %copy.1 = f32[128,256]{1,0:T(8,128)} copy(%p.1)
}
"""

CPU = """\
HloModule SyncTensorsGraph.12, is_scheduled=true, num_partitions=4

ENTRY %main.1 (p.1: f32[64,64], p.2: f32[16,64]) -> f32[64,64] {
  %p.1 = f32[64,64]{1,0} parameter(0)
  %p.2 = f32[16,64]{1,0} parameter(1)
  %all-gather = f32[64,64]{1,0} all-gather(%p.2), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %reduce-scatter = f32[16,64]{1,0} reduce-scatter(%p.1), channel_id=1, replica_groups=[2,2]<=[4], dimensions={0}
  %by-hand = f32[16,64]{1,0} reduce-scatter(%p.1), channel_id=1, replica_groups=[2,2]<=[4], dimensions={0}
  %ag-start = (f32[16,64]{1,0}, f32[64,64]{1,0}) all-gather-start(%p.2), channel_id=5, replica_groups=[1,4]<=[4]
  %ag-done = f32[64,64]{1,0} all-gather-done(%ag-start)
  %permute = (f32[64,64]{1,0}, f32[64,64]{1,0}, u32[], u32[]) collective-permute-start(%p.1), channel_id=6, \
source_target_pairs={{0,1},{1,2}}
  %sum = f32[64,64]{1,0} all-reduce(%p.1), channel_id=7, to_apply=%add
  ROOT %dot = f32[64,64]{1,0} dot(%all-gather, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""


def test_a_loop_counts_as_often_as_it_turns() -> None:
    _, runs = read_program(TPU)
    names = ("region_5.282.sunk", "async_collective_fusion.1", "all-reduce-scatter.10")
    assert [runs[name] for name in names] == [3, 3, 1]
    with_count = TPU.replace(
        "body=%region_5.282.sunk", 'body=%region_5.282.sunk, backend_config={"known_trip_count":{"n":"7"}}'
    )
    assert read_program(with_count)[1]["region_5.282.sunk"] == 7, "the compiler's own count goes first"


def test_computations_stand_in_any_order_and_one_is_the_entry() -> None:
    """The TPU compiler puts clones behind the entry, where it computes things twice."""
    header, *blocks = re.split(r"\n\n", TPU.rstrip("\n"))
    turned = "\n\n".join([header, *reversed(blocks)])
    assert turned != TPU
    assert read_program(turned)[1] == read_program(TPU)[1]
    assert matmul_flops(turned) == matmul_flops(TPU)
    assert collectives_by_dtype(turned, 8) == collectives_by_dtype(TPU, 8)
    with pytest.raises(ValueError, match="ENTRY"):
        read_program("HloModule nothing")


def test_collectives_as_the_tpu_compiler_writes_them() -> None:
    gather, scatter, reduce = 8 * 16 * 256 * 2, 2 * 1024 * 256 * 2, 2 * 256 * 4
    assert collectives_by_dtype(TPU, 8) == {
        "all_gather bf16": Moved(3, 3 * gather, 3 * gather * 7 // 8),  # spread over two fusions: once a turn
        "all_reduce f32": Moved(1, reduce, 2 * reduce * 3 // 4),  # within groups of four, sent twice
        "reduce_scatter bf16": Moved(1, scatter, scatter * 7 // 8),  # an all-reduce fused with its slice
    }


def test_kinds_as_the_cpu_writes_them() -> None:
    full, moved = 64 * 64 * 4, collectives_by_dtype(CPU, 4)
    assert moved["all_gather f32"] == Moved(2, 2 * full, 2 * full * 3 // 4)  # both, though one is asynchronous
    assert moved["reduce_scatter f32"] == Moved(2, full, full // 2)  # groups of two, both on channel 1
    assert moved["collective_permute f32"] == Moved(1, full, full)
    assert moved["all_reduce f32"] == Moved(1, full, 2 * full * 3 // 4)  # no groups: all devices


def test_matrix_products() -> None:
    assert matmul_flops(TPU) == {"bf16 x bf16": 3 * 2 * 512 * 512 * 256}
    assert matmul_flops(CPU) == {"f32 x f32": 2 * 64 * 64 * 64}
    # A padded window dimension is a batch, and not summed.
    batched = TPU.replace("bf16[256,512]", "bf16[8,256,512]").replace(
        "dim_labels=bf_io->bf", "window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=bf_0io->bf"
    )
    assert matmul_flops(batched) == matmul_flops(TPU)
    assert (rematerialised(TPU), rematerialised(CPU)) == (1, 0)
