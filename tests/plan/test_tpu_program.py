# ruff: noqa: E501 (what a compiler writes, it writes in one line)
"""What is read from the compiler's two texts, and what a plan makes of it; on a program small enough to count by hand.

Two arguments and their updates, a batch, and temporaries of which `big` and `middle` live together.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from portable_fsdp.plan.result import Moved
from portable_fsdp.plan.tpu_compiler import load_entry as load
from portable_fsdp.plan.tpu_compiler import save_entry as save
from portable_fsdp.plan.tpu_program import (
    Argument,
    Compiled,
    Program,
    memory_of,
    notes_of,
    part_of,
    read_compiled,
    traffic_of,
    work_of,
)
from portable_fsdp.runtime.files import cache_folder

TEXT = """\
HloModule step, is_scheduled=true, input_output_alias={ {1}: (0, {}, may-alias), {2}: (1, {}, may-alias) }, entry_computation_layout={()}

%cond (p: (s32[])) -> pred[] {
  %bound = s32[] constant(4)
}

%body (p: (s32[])) -> (s32[]) {
  %send = (bf16[2,256]{1,0}, u32[]{:S(2)}, token[]) send(%x, %t), channel_id=9, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
  %fwd.1 = (f32[128,128]{1,0}, bf16[2,128,64]{2,1,0}, f32[2,128,128]{2,1,0}) custom-call(%n, %q, %k, %v), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,1,1]{2,1,0}, bf16[2,128,64]{2,1,0}, bf16[1,128,64]{2,1,0}, bf16[1,128,64]{2,1,0}}, backend_config={"custom_call_config": {"body": "TUzv", "cost_estimate": {"flops": 4194304, "transcendentals": 0, "bytes_accessed": 0}}}
  %dkv.1 = (f32[128,64]{1,0}, bf16[1,2,128,64]{3,2,1,0}, bf16[1,128,64]{2,1,0}) custom-call(%n, %q, %k, %v, %lse, %do, %di), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,1,1]{2,1,0}, bf16[2,128,64]{2,1,0}, bf16[1,128,64]{2,1,0}}, backend_config={"custom_call_config": {"body": "TUzv", "cost_estimate": {"flops": 10485760, "transcendentals": 0, "bytes_accessed": 0}}}
  %other.1 = bf16[2,128,64]{2,1,0} custom-call(%q), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[2,128,64]{2,1,0}}, backend_config={}
}

ENTRY %main (a: f32[64]) -> f32[64] {
  %a = bf16[64,16]{1,0} parameter(0)
  %b = bf16[16,8]{1,0} parameter(1)
  %big = bf16[64,8]{1,0} convolution(%a, %b), dim_labels=bf_io->bf, metadata={op_name="module..1/module.model.layers.3.2/module.model.layers.3.mlp.7/aten__mm" source_file="/x/site-packages/torch/nn/modules/linear.py" source_line=134}
  %early = bf16[2048]{0} add(%a, %b), metadata={op_name="aten__add" source_file="/x/portable_fsdp/models/loss.py" source_line=29}
  %middle = bf16[512]{0} add(%a, %b), metadata={op_name="aten__silu" source_file="/x/torch/autograd/graph.py" source_line=841}
  %copy-start.1 = bf16[512]{0} copy-start(%a)
  %loop = (s32[]) while(%t), condition=%cond, body=%body
  %gathered = bf16[128,8]{1,0} all-gather(%a), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
}
"""
BUFFERS = """\
BufferAssignment:
allocation 0: size 512, thread-local:
 value: <0 Arg_0.219 @0> (size=4,offset=0): f32[]{:T(128)}
allocation 1: size 4096, parameter 1, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <12 p.1 @0> (size=4096,offset=0): f32[1024]{0}
allocation 2: size 2048, parameter 0, shape |f32[512]| at ShapeIndex {}, maybe-live-out:
allocation 3: size 128, parameter 2, shape |s32[32]| at ShapeIndex {}:
allocation 4: size 16, output shape is |(f32[], f32[128])|, maybe-live-out:
allocation 5: size 6144, preallocated-temp:
 value: <20 early @0> (size=4096,offset=0): bf16[2048]{0}
 value: <21 big @0> (size=1024,offset=0): bf16[64,8]{1,0}
 value: <22 handed.on{1} @0> (size=1024,offset=0): bf16[64,8]{1,0}
 value: <23 middle{} @0> (size=4096,offset=1024): bf16[512]{0}
 value: <25 late @0> (size=64,offset=5120): bf16[32]{0}
allocation 6: size 8192, color 1, preallocated-temp:
 value: <24 fast @0> (size=8192,offset=0): bf16[4096]{0}

Total bytes used: 16000 (15.6KiB)

Used values:
<20 early @0>
 positions:
HloLiveRange (max 9):
  InstructionSequence:
    0:early
    1:big
    2:middle
    3:copy-start.1
    4:loop
    5:late
  BufferLiveRange:
    early{}:0-0
    big{}:1-4
    handed.on{1}:3-4
    middle{}:2-4
    fast{}:0-4
    late{}:5-5
  Live ranges at 0 (peak):
    fast{}: 8192 bytes (cumulative: 8192 bytes)
"""
PROGRAM = Program(
    "train_step",
    8,
    b"",
    (
        Argument("model.norm.weight", (4096,), "{devices=[8]<=[8]}", 1),
        Argument("exp_avg/model.norm.weight", (8192,), "{devices=[8]<=[8]}", 2),
        Argument("batch.input_ids", (8, 32), "{devices=[8,1]<=[8]}", None),
    ),
    ("{replicated}",) * 3,
)


@pytest.fixture
def compiled() -> Compiled:
    return read_compiled(PROGRAM, TEXT, BUFFERS, slices=2, compile_s=1.5)


def test_arguments_are_told_apart_by_their_names(compiled: Compiled) -> None:
    expected = {"model.norm.weight": 2048, "exp_avg/model.norm.weight": 4096, "batch.input_ids": 128}
    assert compiled.named_bytes == expected
    assert list(map(part_of, [*expected, "grad/model.norm.weight"])) == ["weights", "optimizer", "batch", "gradients"]
    assert (compiled.argument_bytes, compiled.temporary_bytes, compiled.output_bytes) == (6272, 6144, 16)


def test_the_peak_of_main_memory_and_its_biggest_buffers_have_names_and_origins(compiled: Compiled) -> None:
    """Not at 0, where the compiler's own sum over all memories has it; what hands its place on counts once."""
    assert (compiled.live_bytes, compiled.at) == (4096 + 1024, "silu in backward")
    assert [(b.name, b.bytes, b.where) for b in compiled.biggest] == [
        ("exp_avg/model.norm.weight", 4096, ""),
        ("silu bf16[512]", 4096, "backward"),
        ("model.norm.weight", 2048, ""),
        ("mm bf16[64,8]", 1024, "model.layers.3.mlp"),
        ("batch.input_ids", 128, ""),
    ]
    # Outside of modules an operation has its line.
    later = BUFFERS.replace("early{}:0-0", "early{}:0-4").replace("big{}:1-4", "big{}:0-0")
    compiled = read_compiled(PROGRAM, TEXT, later)
    assert ("add bf16[2048]", "portable_fsdp/models/loss.py:29") in [(b.name, b.where) for b in compiled.biggest]


def test_state_that_is_not_donated_and_waits_for_the_host_are_noted(compiled: Compiled) -> None:
    assert (compiled.undonated, compiled.host_transfers, notes_of({"train_step": compiled})) == ((), (), [])
    kept = read_compiled(PROGRAM, TEXT.replace(", {2}: (1, {}, may-alias)", ""), BUFFERS)
    assert kept.undonated == ("exp_avg/model.norm.weight",)
    assert "not updated in place" in notes_of({"train_step": kept})[0]
    for line in (  # the host waits
        "  %in = (f32[], token[]) infeed(%t)",
        "  %out = token[] outfeed(%x, %t)",
        "  %s = (f32[4]{0}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true",
        '  %c = f32[] custom-call(%x), custom_call_target="xla_python_cpu_callback"',
    ):
        waits = read_compiled(PROGRAM, TEXT.replace("  %big", f"{line}\n  %big"), BUFFERS)
        assert len(waits.host_transfers) == 1, line
        assert "wait for the host" in notes_of({"train_step": waits})[0], line


def test_work_counts_kernels_and_both_links(compiled: Compiled) -> None:
    """The loop turns four times: attention has 2 + 5 products of 128 x 128 x 64 over two heads, causal."""
    attention = 4 * 7 * 2 * 128 * 128 * 64
    assert compiled.kernel_flops == {"bf16": attention}
    work = work_of({"train_step": compiled}, accumulation=1)
    assert work.matmul_flops == {"bfloat16": attention + 2 * 64 * 16 * 8}
    two_slices = Moved(4, 4096, 4096)  # each sends as much as it holds
    gathered = Moved(1, 2048, 1792)
    assert work.collectives == {"all_gather bfloat16": gathered, "all_reduce bfloat16 between slices": two_slices}
    assert work.sent_bytes == {"ici": 1792, "network": 4096}
    traffic = traffic_of({"train_step": compiled}, accumulation=1)
    assert traffic == 2 * (2048 + 4096 + 5120) + 16  # the batch is only read


def test_with_accumulation_the_fuller_program_counts_beside_all_that_rests(compiled: Compiled) -> None:
    gradient = {"grad/model.norm.weight": 2048}
    micro = replace(
        compiled,
        named_bytes={"model.norm.weight": 2048, "batch.input_ids": 128, **gradient},
        temporary_bytes=9000,
        matmul_flops={"bf16 x bf16": 10, "f32 x bf16": 7},
        kernel_flops={},
        collectives={"all_gather bf16": Moved(2, 10, 8)},
        rematerialised=3,
        at="in micro",
        biggest=(),
    )
    update = replace(compiled, matmul_flops={}, kernel_flops={}, collectives={}, between_slices={}, temporary_bytes=1)
    memory = memory_of({"micro_batch": micro, "update": update}, limit_bytes=18000)
    state = {"weights": 2048, "gradients": 2048, "optimizer": 4096, "batch": 128}
    assert memory.parts == {**state, "temporaries": 9000, "outputs": 16}
    assert (memory.at, memory.verdict) == ("in micro", "fits by recomputing")
    assert "exp_avg/model.norm.weight" in [buffer.name for buffer in memory.biggest]
    work = work_of({"micro_batch": micro, "update": update}, accumulation=5)
    assert work.matmul_flops == {"bfloat16": 50, "float32": 35}
    assert work.collectives["all_gather bfloat16"].sent_bytes == 40


ENTRY = {"program": "ENTRY é" * 1000, "buffers": "allocation 0: size 4"}


def test_an_entry_comes_back_as_it_was_or_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # no folder, so nothing is kept there
    for folder, found in ((tmp_path / "new", ENTRY), (tmp_path / "file", None)):
        assert load(folder, "a") is None
        save(folder, "a", ENTRY)
        assert load(folder, "a") == found
    [path] = (tmp_path / "new").iterdir()
    assert path.name == "a.gz"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:60] + bytes([whole[60] ^ 0xFF]) + whole[61:], b""):
        path.write_bytes(damaged)  # the second: in the first text
        assert load(path.parent, "a") is None


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    for number, key in enumerate("abc"):
        save(tmp_path, key, {"program": os.urandom(1000).hex()})
        os.utime(tmp_path / f"{key}.gz", (number, number))
    assert load(tmp_path, "a") is not None  # used now
    save(tmp_path, "d", {"program": os.urandom(1000).hex()}, largest_bytes=3000)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "d"]


def test_it_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/portable_fsdp")
    expected = Path("/home/someone/.cache/portable_fsdp")
    assert cache_folder({}) == cache_folder({"XDG_CACHE_HOME": ""}) == cache_folder({"XDG_CACHE_HOME": "x"}) == expected
