"""A program of a step for a TPU slice: as traced (`Program`), and as compiled by the TPU compiler (`Compiled`).

The compiler writes two texts: the scheduled program, and the buffer assignment with the live range of each buffer.
`read_compiled` parses memory, traffic and compute of one run from them; `memory_of`, `work_of` and `notes_of` combine
them for a step, which may be two programs.
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

SHOWN = 12  # buffers listed in a plan
PARTS = ("weights", "gradients", "optimizer", "batch", "temporaries", "outputs")
DTYPES = {"bf16": "bfloat16", "f32": "float32", "f16": "float16", "s32": "int32", "u32": "uint32", "pred": "bool"}
_VALUE = re.compile(r" value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\w+\[[\d,]*\])?")


def part_of(name: str) -> str:
    """Return the part of a device's memory that an argument belongs to, a key of `result.DeviceMemory.parts`."""
    before, slash, _ = name.partition("/")
    if slash:
        return "gradients" if before == "grad" else "optimizer"
    is_weight = not name.startswith("batch.") and " " not in name and name != "constant"
    return "weights" if is_weight else "batch"


@dataclass(frozen=True)
class Argument:
    """An input of a program, in the order of its parameters."""

    name: str  # a key of Backend.state, `grad/<FQN>`, `batch.<key>`, or `constant`
    shape: tuple[int, ...]
    sharding: str  # in XLA's notation
    output: int | None  # number of the output that reuses its memory


@dataclass(frozen=True)
class Program:
    """One global program, not yet partitioned."""

    name: str
    devices: int
    hlo: bytes  # a serialized HloModuleProto
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]  # shardings


class Traced(NamedTuple):
    """Programs of a config's step, `train_step` or `micro_batch` and `update`; and the facts of its model."""

    programs: dict[str, Program]
    model: ModelFacts


@dataclass(frozen=True)
class Compiled:
    """Memory and work of one device of the slice for one run of a program."""

    argument_bytes: int  # weights, optimizer state, batch; their updates are in place
    temporary_bytes: int
    output_bytes: int  # outputs that reuse no argument's memory
    host_bytes: int  # in the host's memory, of `memory.offload`
    collectives: dict[str, Moved]  # kind and dtype: `all_gather bf16`
    matmul_flops: dict[str, int]  # dtypes of the factors: `bf16 x bf16`
    rematerialised: int  # instructions that the compiler repeats on its own because memory is short
    compile_s: float  # processor time up to buffer assignment, or including code generation
    named_bytes: dict[str, int]  # of each argument, by name; constants together
    updated_bytes: int  # of the arguments updated in place
    live_bytes: int  # of temporaries at their peak; the rest of temporary_bytes are gaps between them
    at: str  # the operation that runs at the peak
    biggest: tuple[Buffer, ...]  # the largest arguments, and temporaries at the peak
    undonated: tuple[str, ...]  # arguments not updated in place
    host_transfers: tuple[str, ...]  # instructions that communicate with the host
    between_slices: dict[str, Moved]  # as `collectives`, over the network
    kernel_flops: dict[str, int]  # matrix products inside flash attention, by dtype
    operations: Sequence[ScheduleEntry]  # a device's operations in the program's schedule


def read_compiled(program: Program, text: str, assignment: str, *, slices: int = 1, compile_s: float = 0.0) -> Compiled:
    """Parse the compiler's two texts. Raises ValueError if they aren't such texts."""
    sizes, temporary_bytes, output_bytes, host_bytes = _allocations(assignment)
    named: Counter[str] = Counter()
    for number, size in sizes.items():
        named[program.arguments[number].name] += size
    before, living = _peak(assignment)
    described = _described(text, {*before, *(value.instruction for value in living)})
    buffers = [Buffer(name=name, bytes=size, where="") for name, size in named.items()]
    for value in living:
        operation, where = described.get(value.instruction, (value.instruction, ""))
        operation = "carried through a loop:" if value.is_carried else operation
        buffers.append(Buffer(name=f"{operation} {value.type}", bytes=value.bytes, where=where))
    # Copies between memories have no known origin.
    origins = [described[instruction] for instruction in before if described.get(instruction, ("", ""))[1]]
    aliased = hlo.aliased_parameters(text)
    return Compiled(
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
        biggest=largest(buffers),
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
    """Return the bytes of each parameter by number, of temporaries, of unaliased outputs, and on the host."""
    parameters: dict[int, int] = {}
    temporary_bytes = output_bytes = host_bytes = 0
    for size, rest in re.findall(r"^allocation \d+: size (\d+)(.*)", assignment, re.MULTILINE):
        if "color" in rest:  # another memory: VMEM, SMEM; 5 is the host's
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
    first: int  # first time of its live range
    last: int
    is_carried: bool  # an element of a loop's state: for scanned layers, the values saved by each layer


def _peak(assignment: str) -> tuple[list[str], list[_Temporary]]:
    """Find the peak of temporaries in main memory: return the last instructions, newest first, and the live values."""
    schedule, values = _temporaries(assignment)
    events = [(value.first, 1, value) for value in values] + [(value.last + 1, 0, value) for value in values]
    alive: defaultdict[int, list[int]] = defaultdict(list)  # offset -> sizes: a value may hand its place on
    total = best = at = 0
    for time, begins, value in sorted(events):
        here = alive[value.offset]
        total -= max(here, default=0)
        if begins:
            here.append(value.bytes)
        else:
            here.remove(value.bytes)
        total += max(here, default=0)
        if total > best:
            best, at = total, time
    living = [value for value in values if value.first <= at <= value.last and value.bytes]
    living.sort(key=lambda value: (value.bytes, -value.first, -value.last))
    before = [schedule[time] for time in range(at, max(at - 200, -1), -1) if time in schedule]
    return before, list({value.offset: value for value in living}.values())  # the largest at each offset


def _temporaries(assignment: str) -> tuple[dict[int, str], list[_Temporary]]:
    """Return time -> instruction, and the temporaries with known live ranges."""
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
    """Return the largest buffers, as many as a plan lists."""
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.bytes, buffer.name))[:SHOWN])


def _described(text: str, instructions: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return instruction -> its operation (`mm`, `all-gather`), and the module or source line of its origin."""
    described: dict[str, tuple[str, str]] = {}
    for _, instruction in hlo.all_instructions(text):
        if (name := instruction.name) in instructions:
            path = re.search(r'op_name="([^"]*)"', instruction.rest)
            op_name = path[1] if path else ""
            operation = op_name.rpartition("/")[2].partition("__")[2] or name
            if name.startswith(("async-collective", "all-gather", "all-reduce", "reduce-scatter")):
                operation = f"collective of {operation}"
            described[name] = operation, _origin(op_name, instruction.rest)
    return described


def _origin(op_name: str, metadata: str) -> str:
    """Return the innermost module of the operation, else its source line; in backward neither is known."""
    modules = re.findall(r"\bmodule\.([^/]*)\.\d+/", op_name)
    if modules:
        return modules[-1]
    source = re.search(r'source_file="([^"]*)" source_line=(\d+)', metadata)
    if source is None:
        return ""
    path = Path(source[1])
    if path.parts[-3:] == ("torch", "autograd", "graph.py"):
        return "backward"
    return f"{'/'.join(path.parts[-3:])}:{source[2]}"


# ------------------------------------------------------------------------------------------------- the whole step


def memory_of(programs: Mapping[str, Compiled], limit_bytes: int | None) -> DeviceMemory:
    """Return the memory of the fuller program, with the arguments of the other, which stay on the device meanwhile."""
    arguments: dict[str, int] = {}
    for compiled in programs.values():
        arguments |= compiled.named_bytes
    fuller = max(programs.values(), key=lambda compiled: compiled.temporary_bytes + compiled.output_bytes)
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for name, size in arguments.items():
        parts[part_of(name)] += size
    parts |= {"temporaries": fuller.temporary_bytes, "outputs": fuller.output_bytes}
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
    """Sum up the work of a step: with accumulation `micro_batch` runs several times, `update` once."""
    flops: defaultdict[str, float] = defaultdict(float)
    collectives: defaultdict[str, Moved] = defaultdict(Moved)
    sent: Counter[str] = Counter()
    for name, compiled in programs.items():
        times = times_run(name, accumulation)
        for factors, count in (*compiled.matmul_flops.items(), *compiled.kernel_flops.items()):
            names = [DTYPES.get(name, name) for name in factors.split(" x ")]
            dtype = "float32" if "float32" in names else names[0]  # the narrower factor is cast first
            if dtype != "bool":  # masks (T5's); no vendor states their speed
                flops[dtype] += times * count
        by_link = (("ici", "", compiled.collectives), ("network", " between slices", compiled.between_slices))
        for link, suffix, moves in by_link:
            for key, moved in moves.items():
                kind, _, dtypes = key.partition(" ")
                words = "+".join(DTYPES.get(dtype, dtype) for dtype in dtypes.split("+"))
                collectives[f"{kind} {words}{suffix}"] += moved * times
                sent[link] += moved.sent_bytes * times
    return Work(
        matmul_flops=flops,
        collectives=dict(sorted(collectives.items())),
        sent_bytes={link: size for link, size in sent.items() if size},
    )


def traffic_of(programs: Mapping[str, Compiled], accumulation: int) -> float:
    """Return the bytes that a step moves to and from memory at least.

    Arguments updated in place and temporaries at the peak are written and read, outputs written. Arguments that are
    only read are left out: of a table it may be a few rows.
    """
    return sum(
        times_run(name, accumulation) * (2.0 * (each.updated_bytes + each.live_bytes) + each.output_bytes)
        for name, each in programs.items()
    )


def times_run(program: str, accumulation: int) -> int:
    """Return how often a step runs one of its programs."""
    return accumulation if program == "micro_batch" else 1


def notes_of(programs: Mapping[str, Compiled]) -> list[str]:
    """List problems of the programs: state not updated in place, waits for the host, copies of unknown speed."""
    notes: list[str] = []
    for name, compiled in programs.items():
        for items, problem in (
            (compiled.undonated, "tensors are not updated in place, which takes their memory twice"),
            (compiled.host_transfers, "instructions inside the step wait for the host"),
        ):
            if items:
                notes.append(f"{name}: {len(items)} {problem}: {', '.join(items[:3])}")
        if compiled.host_bytes:
            notes.append(f"{name}: copies to the host are assumed to overlap with compute: their speed is unknown")
    return notes
