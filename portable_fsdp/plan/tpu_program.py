"""A program of a step for a TPU slice: as it is traced (`Program`), and as the TPU compiler made it (`Compiled`).

The compiler writes two texts: the scheduled program, and the assignment of its buffers, with the times at which each of
them lives. `read_compiled` reads from them where memory goes, and what moves and is computed in a run; `memory_of`,
`work_of` and `notes_of` say it of a step, which may be two programs.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from portable_fsdp.plan import hlo
from portable_fsdp.plan.result import Buffer, DeviceMemory, ModelFacts, Moved, Work
from portable_fsdp.plan.time import ScheduleEntry

SHOWN = 12  # buffers of a plan
PARTS = ("weights", "gradients", "optimizer", "batch", "temporaries", "outputs")
DTYPES = {"bf16": "bfloat16", "f32": "float32", "f16": "float16", "s32": "int32", "u32": "uint32", "pred": "bool"}
_VALUE = re.compile(r" value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\w+\[[\d,]*\])?")


def part_of(name: str) -> str:
    """The part of a device's memory that an argument takes, a key of `result.DeviceMemory.parts`."""
    before, slash, _ = name.partition("/")
    if slash:
        return "gradients" if before == "grad" else "optimizer"
    is_weight = not name.startswith("batch.") and " " not in name and name != "constant"
    return "weights" if is_weight else "batch"


@dataclass(frozen=True)
class Argument:
    """An input of a program, in the order of its parameters."""

    name: str  # as Backend.state's keys, with `grad/<FQN>` besides; `batch.<key>`; or `constant`
    shape: tuple[int, ...]
    sharding: str  # in XLA's words
    output: int | None  # number of the output that takes its place in memory


@dataclass(frozen=True)
class Program:
    """One global program, not yet partitioned."""

    name: str
    devices: int
    hlo: bytes  # a serialized HloModuleProto
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]  # shardings


class Traced(NamedTuple):
    """A config's step: `train_step`, or `micro_batch` and `update`; and the model that it trains."""

    programs: dict[str, Program]
    model: ModelFacts


@dataclass(frozen=True)
class Compiled:
    """What one device of the slice needs for one run of a program."""

    slice: str
    argument_bytes: int  # weights, optimizer state, batch; their updates take the same place
    temporary_bytes: int
    output_bytes: int  # that take no argument's place
    host_bytes: int  # in the host's memory, of `memory.offload`
    collectives: dict[str, Moved]  # kind and dtype: `all_gather bf16`
    matmul_flops: dict[str, int]  # dtypes of the factors: `bf16 x bf16`
    rematerialised: int  # instructions that the compiler repeats by itself, because memory was short
    compile_s: float  # of processor time, up to the assignment of buffers, or with code generation
    named_bytes: dict[str, int]  # of each argument, by its name; constants together
    updated_bytes: int  # of the arguments whose update takes their place
    live_bytes: int  # of temporaries, when most of them are alive; the rest are gaps between them
    at: str  # the operation that runs then
    biggest: tuple[Buffer, ...]  # the largest of arguments, and of temporaries that live then
    undonated: tuple[str, ...]  # arguments whose update is put elsewhere
    host_transfers: tuple[str, ...]  # instructions that communicate with the host
    between_slices: dict[str, Moved]  # as `collectives`, over the network
    kernel_flops: dict[str, int]  # matrix products inside flash attention, by dtype
    operations: Sequence[ScheduleEntry]  # what a device does, by the program's schedule


def read_compiled(
    program: Program, topology: str, text: str, assignment: str, *, slices: int = 1, compile_s: float = 0.0
) -> Compiled:
    """Parses the compiler's two texts; raises ValueError where they are not what it writes."""
    sizes, temporary_bytes, output_bytes, host_bytes = _allocations(assignment)
    named: Counter[str] = Counter()
    for number, size in sizes.items():
        named[program.arguments[number].name] += size
    before, living = _peak(assignment)
    described = _described(text, {*before, *(value.instruction for value in living)})
    temporaries: list[Buffer] = []
    for value in living:
        operation, where = described.get(value.instruction, (value.instruction, ""))
        if value.is_carried:
            operation = "kept over the turns of a loop:"
        temporaries.append(Buffer(name=f"{operation} {value.type}", bytes=value.bytes, where=where))
    # Copies between memories have no known origin.
    origins = [described[instruction] for instruction in before if described.get(instruction, ("", ""))[1]]
    arguments = [Buffer(name=name, bytes=size, where="") for name, size in named.items()]
    aliased = hlo.aliased_parameters(text)
    return Compiled(
        topology,
        argument_bytes=sum(sizes.values()),
        temporary_bytes=temporary_bytes,
        output_bytes=output_bytes,
        host_bytes=host_bytes,
        collectives=hlo.collectives_by_dtype(text, program.devices),
        matmul_flops=hlo.matmul_flops(text),
        rematerialised=hlo.rematerialised(text),
        compile_s=compile_s,
        named_bytes=dict(named),
        updated_bytes=sum(sizes.get(number, 0) for number in aliased),
        live_bytes=sum(value.bytes for value in living),
        at=" in ".join(origins[0]) if origins else "",
        biggest=largest([*arguments, *temporaries]),
        undonated=tuple(
            argument.name
            for number, argument in enumerate(program.arguments)
            if argument.output is not None and number not in aliased
        ),
        host_transfers=tuple(hlo.host_transfers(text)),
        between_slices=hlo.between_slices(text, slices),
        kernel_flops=hlo.flash_attention_flops(text),
        operations=hlo.operations_of(text, program.devices),
    )


# --------------------------------------------------------------------------------------------------------- memory


def _allocations(assignment: str) -> tuple[dict[int, int], int, int, int]:
    """Bytes of each parameter by its number, of temporaries, of outputs (not aliased); and on the host."""
    parameters: dict[int, int] = {}
    temporary_bytes = output_bytes = host_bytes = 0
    for size, rest in re.findall(r"^allocation \d+: size (\d+)(.*)", assignment, re.MULTILINE):
        if "color" in rest:  # in another memory: VMEM, SMEM; 5 is the host's
            host_bytes += int(size) * ("color 5," in rest)
        elif number := re.search(r"parameter (\d+)", rest):
            parameters[int(number[1])] = int(size)
        elif "preallocated-temp" in rest:
            temporary_bytes += int(size)
        elif "maybe-live-out" in rest:
            output_bytes += int(size)
    return parameters, temporary_bytes, output_bytes, host_bytes


class _Temporary(NamedTuple):
    """A value in the temporaries of main memory."""

    instruction: str
    bytes: int
    offset: int
    type: str  # bf16[4096,128256]
    first: int  # time at which it lives, and the last
    last: int
    is_carried: bool  # an element of a loop's state: of scanned layers, what each of them keeps


def _peak(assignment: str) -> tuple[list[str], list[_Temporary]]:
    """When most bytes of temporaries live in main memory: the last instructions, newest first, and what lives."""
    schedule, values = _temporaries(assignment)
    events = [(value.first, 1, value) for value in values] + [(value.last + 1, 0, value) for value in values]
    alive: dict[int, list[int]] = {}  # offset -> sizes there: one value may pass its place on to the next
    total = best = at = 0
    for time, begins, value in sorted(events):
        here = alive.setdefault(value.offset, [])
        total -= max(here, default=0)
        if begins:
            here.append(value.bytes)
        else:
            here.remove(value.bytes)
        total += max(here, default=0)
        if total > best:
            best, at = total, time
    living = [value for value in values if value.first <= at <= value.last and value.bytes]
    by_offset: dict[int, _Temporary] = {}  # the largest value there
    for value in sorted(living, key=lambda value: (value.bytes, -value.first, -value.last)):
        by_offset[value.offset] = value
    before = [schedule[time] for time in range(at, max(at - 200, -1), -1) if time in schedule]
    return before, list(by_offset.values())


def _temporaries(assignment: str) -> tuple[dict[int, str], list[_Temporary]]:
    """Time -> instruction, and the temporaries whose times are known."""
    _, _, text = assignment.rpartition("\nHloLiveRange")
    order, _, text = text.partition("BufferLiveRange:")
    lifetimes, _, _ = text.partition("Live ranges at")
    schedule = {int(time): name for time, name in re.findall(r"^ +(\d+):(\S+)$", order, re.MULTILINE)}
    ranges = {
        name: (int(first), int(last))
        for name, first, last in re.findall(r"^ +(\S+?)(?:\{\})?:(\d+)-(\d+)$", lifetimes, re.MULTILINE)
    }
    values: list[_Temporary] = []
    inside = False
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            inside = "preallocated-temp" in line and "color" not in line
        elif line.startswith("Total bytes used"):
            break
        elif inside:
            value = _VALUE.match(line)
            name = value[1].removesuffix("{}") if value else ""
            if value and name in ranges:
                instruction, kind = name.partition("{")[0], value[4] or "tuple"
                place = int(value[2]), int(value[3])
                values.append(_Temporary(instruction, *place, kind, *ranges[name], "(phi)" in line))
    return schedule, values


# ---------------------------------------------------------------------------------------------------------- names


def largest(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    """The largest buffers, as many as a plan shows."""
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.bytes, buffer.name))[:SHOWN])


def _described(text: str, instructions: Collection[str]) -> dict[str, tuple[str, str]]:
    """Instruction -> what it does (`mm`, `all-gather`), and the module or the source line that it comes from."""
    described: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = ", line)
        if match and match[1] in instructions:
            name, path = match[1], re.search(r'op_name="([^"]*)"', line)
            op_name = path[1] if path else ""
            operation = op_name.rpartition("/")[2].partition("__")[2] or name
            is_collective = name.startswith(("async-collective", "all-gather", "all-reduce", "reduce-scatter"))
            described[name] = f"collective of {operation}" if is_collective else operation, _origin(op_name, line)
    return described


def _origin(op_name: str, line: str) -> str:
    """The innermost module that the operation is traced in, else the source line; in backward neither is known."""
    modules = re.findall(r"\bmodule\.([^/]*)\.\d+/", op_name)
    if modules:
        return modules[-1]
    source = re.search(r'source_file="([^"]*)" source_line=(\d+)', line)
    if source is None:
        return ""
    path = Path(source[1])
    if path.parts[-3:] == ("torch", "autograd", "graph.py"):
        return "backward"
    return f"{'/'.join(path.parts[-3:])}:{source[2]}"


# ------------------------------------------------------------------------------------------------- the whole step


def memory_of(programs: Mapping[str, Compiled], limit_bytes: int | None) -> DeviceMemory:
    """The memory of the fuller program, with the arguments of the other one, which stay on the device all the same."""
    arguments: dict[str, int] = {}
    for compiled in programs.values():
        arguments |= compiled.named_bytes
    fuller = max(programs.values(), key=lambda compiled: compiled.temporary_bytes + compiled.output_bytes)
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for name, size in arguments.items():
        parts[part_of(name)] += size
    parts["temporaries"], parts["outputs"] = fuller.temporary_bytes, fuller.output_bytes
    others = arguments.keys() - fuller.named_bytes.keys()
    resting = [Buffer(name=name, bytes=arguments[name], where="") for name in others]
    return DeviceMemory(
        parts={part: size for part, size in parts.items() if size},
        limit_bytes=limit_bytes,
        at=fuller.at,
        biggest=largest([*fuller.biggest, *resting]),
        rematerialised=max(compiled.rematerialised for compiled in programs.values()),
        host_bytes=max(compiled.host_bytes for compiled in programs.values()),
    )


def work_of(programs: Mapping[str, Compiled], accumulation: int) -> Work:
    """The work of a step: with accumulation `micro_batch` runs several times, `update` once."""
    flops: defaultdict[str, float] = defaultdict(float)
    collectives: defaultdict[str, Moved] = defaultdict(Moved)
    sent: Counter[str] = Counter()
    memory_bytes = 0.0
    for name, compiled in programs.items():
        times = times_run(name, accumulation)
        for factors, count in (*compiled.matmul_flops.items(), *compiled.kernel_flops.items()):
            names = [DTYPES.get(name, name) for name in factors.split(" x ")]
            dtype = "float32" if "float32" in names else names[0]  # the narrower factor is cast first
            if dtype != "bool":  # of masks (T5's); no vendor gives their speed
                flops[dtype] += times * count
        by_link = (("ici", "", compiled.collectives), ("network", " between slices", compiled.between_slices))
        for link, suffix, moves in by_link:
            for key, moved in moves.items():
                kind, _, dtypes = key.partition(" ")
                words = "+".join(DTYPES.get(dtype, dtype) for dtype in dtypes.split("+"))
                collectives[f"{kind} {words}{suffix}"] += moved * times
                sent[link] += moved.sent_bytes * times
        # What is updated in its place, and temporaries at the peak, are written and read, outputs written. What is
        # only read is left out: of a table it may be a few rows.
        memory_bytes += times * (2.0 * (compiled.updated_bytes + compiled.live_bytes) + compiled.output_bytes)
    return Work(
        matmul_flops=flops,
        memory_bytes=memory_bytes,
        collectives=dict(sorted(collectives.items())),
        sent_bytes={link: size for link, size in sent.items() if size},
    )


def times_run(program: str, accumulation: int) -> int:
    """How often a step runs one of its programs."""
    return accumulation if program == "micro_batch" else 1


def notes_of(programs: Mapping[str, Compiled]) -> list[str]:
    """What is wrong with a program: state that isn't updated in place, waits for the host, copies of unknown speed."""
    notes: list[str] = []
    for name, compiled in programs.items():
        for found, problem in (
            (compiled.undonated, "tensors are not updated in place, which takes their memory twice"),
            (compiled.host_transfers, "instructions inside the step wait for the host"),
        ):
            if found:
                notes.append(f"{name}: {len(found)} {problem}: {', '.join(found[:3])}")
        if compiled.host_bytes:
            notes.append(f"{name}: copies to the host are taken to hide behind compute: their speed is unknown")
    return notes
