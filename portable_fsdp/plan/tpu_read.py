"""Reads what the TPU compiler wrote of a program: where memory goes, and what moves and is computed in a run of it.

Two texts: the scheduled program, and the assignment of its buffers, with the times at which each of them lives. Of all
programs of a step together they make what a plan says: `memory_of`, `work_of`, `notes_of`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from portable_fsdp.metrics import hlo
from portable_fsdp.plan.result import Buffer, Memory, Moved, Work
from portable_fsdp.plan.tpu_program import Program

SHOWN = 12  # buffers of a plan
PARTS = ("weights", "gradients", "optimizer", "batch", "temporaries", "outputs")
DTYPES = {"bf16": "bfloat16", "f32": "float32", "f16": "float16", "s32": "int32", "u32": "uint32", "pred": "bool"}


@dataclass(frozen=True)
class Compiled:
    """What one device of the slice needs for one run of a program."""

    slice: str
    argument_bytes: int  # weights, optimizer state, batch; their updates take the same place
    temporary_bytes: int
    output_bytes: int  # that take no argument's place
    collectives: dict[str, hlo.Moved]  # kind and dtype: `all_gather bf16`
    matmul_flops: dict[str, int]  # dtypes of the factors: `bf16 x bf16`
    rematerialised: int  # instructions that the compiler repeats by itself, because memory was short
    compile_s: float  # of processor time, up to the assignment of buffers, or with code generation
    named_bytes: dict[str, int]  # of each argument, by its name; constants together
    parts: dict[str, str]  # name of an argument -> weights, optimizer, gradients, batch
    updated_bytes: int  # of the arguments whose update takes their place
    live_bytes: int  # of temporaries, when most of them are alive; the rest are gaps between them
    at: str  # the operation that runs then
    biggest: tuple[Buffer, ...]  # the largest of arguments, and of temporaries that live then
    undonated: tuple[str, ...]  # arguments whose update is put elsewhere
    host_transfers: tuple[str, ...]  # instructions that speak to the host
    between_slices: dict[str, hlo.Moved]  # as `collectives`, over the network
    kernel_flops: dict[str, int]  # matrix products inside flash attention, by dtype

    @property
    def bytes(self) -> int:
        """What must fit into a device's memory, the program's own code aside."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes


def read_compiled(
    program: Program, topology: str, text: str, assignment: str, *, slices: int = 1, compile_s: float = 0.0
) -> Compiled:
    """What the compiler's two texts say; raises ValueError where they are not what it writes."""
    memory = allocations(assignment)
    named: dict[str, int] = {}
    sizes = argument_sizes(assignment)
    for number, size in sizes.items():
        name = program.arguments[number].name
        named[name] = named.get(name, 0) + size
    peak = _peak(assignment)
    described = _described(text, [*(buffer.instruction for buffer in peak.buffers), *peak.before])
    temporaries = [_named_buffer(buffer, described) for buffer in peak.buffers]
    arguments = [Buffer(name=name, bytes=size, where="") for name, size in named.items()]
    aliased = hlo.aliased_parameters(text)
    return Compiled(
        topology,
        argument_bytes=memory["arguments"],
        temporary_bytes=memory["temporaries"],
        output_bytes=memory["outputs"],
        collectives=hlo.collectives_by_dtype(text, program.devices),
        matmul_flops=hlo.matmul_flops(text),
        rematerialised=hlo.rematerialised(text),
        compile_s=compile_s,
        named_bytes=named,
        parts={argument.name: argument.part for argument in program.arguments},
        updated_bytes=sum(sizes.get(number, 0) for number in aliased),
        live_bytes=sum(buffer.bytes for buffer in peak.buffers),
        at=_moment(peak, described),
        biggest=largest([*arguments, *temporaries]),
        undonated=tuple(
            argument.name
            for number, argument in enumerate(program.arguments)
            if argument.output is not None and number not in aliased
        ),
        host_transfers=tuple(hlo.host_transfers(text)),
        between_slices=hlo.between_slices(text, slices),
        kernel_flops=hlo.flash_attention_flops(text),
    )


# --------------------------------------------------------------------------------------------------------- memory


def allocations(buffer_assignment: str) -> dict[str, int]:
    """Bytes of a device's main memory by what they hold: `arguments`, `temporaries`, `outputs` (not aliased)."""
    found: dict[str, int] = {"arguments": 0, "temporaries": 0, "outputs": 0}
    for size, rest in _allocations(buffer_assignment):
        if "parameter" in rest:
            found["arguments"] += size
        elif "preallocated-temp" in rest:
            found["temporaries"] += size
        elif "maybe-live-out" in rest:
            found["outputs"] += size
    return found


def argument_sizes(buffer_assignment: str) -> dict[int, int]:
    """Number of a parameter -> its bytes in a device's main memory."""
    found: dict[int, int] = {}
    for size, rest in _allocations(buffer_assignment):
        number = re.search(r"parameter (\d+)", rest)
        if number:
            found[int(number.group(1))] = size
    return found


def _allocations(buffer_assignment: str) -> Iterator[tuple[int, str]]:
    """Sizes and what follows; what has a color lies in another memory (VMEM, SMEM)."""
    for size, rest in re.findall(r"^allocation \d+: size (\d+)(.*)", buffer_assignment, re.MULTILINE):
        if "color" not in rest:
            yield int(size), rest


@dataclass(frozen=True)
class _Live:
    """A temporary that lives at the peak."""

    instruction: str
    bytes: int
    type: str  # bf16[4096,128256]


@dataclass(frozen=True)
class _Peak:
    before: tuple[str, ...]  # the instructions that ran last, the one that runs then first
    buffers: tuple[_Live, ...]


def _peak(buffer_assignment: str) -> _Peak:
    """When most bytes of temporaries live in main memory, and which."""
    values = _temporaries(buffer_assignment)
    schedule, ranges = _schedule(buffer_assignment)
    events: list[tuple[int, int, str]] = []
    for name in values.keys() & ranges.keys():
        first, last = ranges[name]
        events += [(first, 1, name), (last + 1, 0, name)]
    alive: dict[int, dict[str, int]] = {}  # offset -> what lies there: one value may pass its place on to the next
    total = best = at = 0
    for time, begins, name in sorted(events):
        size, offset, _ = values[name]
        here = alive.setdefault(offset, {})
        total -= max(here.values(), default=0)
        if begins:
            here[name] = size
        else:
            here.pop(name)
        total += max(here.values(), default=0)
        if total > best:
            best, at = total, time
    before = tuple(schedule[time] for time in range(at, max(at - 200, -1), -1) if time in schedule)
    return _Peak(before, tuple(_alive(values, ranges, at)))


def _alive(values: dict[str, tuple[int, int, str]], ranges: dict[str, tuple[int, int]], at: int) -> Iterator[_Live]:
    largest: dict[int, tuple[int, str]] = {}  # offset -> the largest value there
    for name in sorted(values.keys() & ranges.keys(), key=lambda name: ranges[name]):
        size, offset, _ = values[name]
        if ranges[name][0] <= at <= ranges[name][1] and size > largest.get(offset, (0, ""))[0]:
            largest[offset] = size, name
    for size, name in largest.values():
        yield _Live(name.partition("{")[0], size, values[name][2])


def _temporaries(buffer_assignment: str) -> dict[str, tuple[int, int, str]]:
    """Value -> size, offset and type, of those in the temporaries of main memory."""
    found: dict[str, tuple[int, int, str]] = {}
    inside = False
    for line in buffer_assignment.splitlines():
        if line.startswith("allocation "):
            inside = "preallocated-temp" in line and "color" not in line
        elif line.startswith("Total bytes used"):
            break
        elif inside:
            value = re.match(r" value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\): (\w+\[[\d,]*\])?", line)
            if value:
                name = value.group(1).removesuffix("{}")
                found[name] = int(value.group(2)), int(value.group(3)), value.group(4) or "tuple"
    return found


def _schedule(buffer_assignment: str) -> tuple[dict[int, str], dict[str, tuple[int, int]]]:
    """Time -> instruction, and value -> first and last time at which it lives."""
    _, _, text = buffer_assignment.rpartition("\nHloLiveRange")
    order, _, ranges = text.partition("BufferLiveRange:")
    ranges, _, _ = ranges.partition("Live ranges at")
    times = {int(time): name for time, name in re.findall(r"^ +(\d+):(\S+)$", order, re.MULTILINE)}
    found = re.findall(r"^ +(\S+?)(?:\{\})?:(\d+)-(\d+)$", ranges, re.MULTILINE)
    return times, {name: (int(first), int(last)) for name, first, last in found}


# ---------------------------------------------------------------------------------------------------------- names


def largest(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    """As many as a plan shows, the largest first."""
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.bytes, buffer.name))[:SHOWN])


def _moment(peak: _Peak, described: dict[str, tuple[str, str]]) -> str:
    """The last operation begun that says where it comes from; copies between memories say nothing."""
    for instruction in peak.before:
        operation, where = described.get(instruction, ("", ""))
        if where:
            return f"{operation} in {where}"
    return ""


def _named_buffer(buffer: _Live, described: dict[str, tuple[str, str]]) -> Buffer:
    operation, where = described.get(buffer.instruction, (buffer.instruction, ""))
    return Buffer(name=f"{operation} {buffer.type}", bytes=buffer.bytes, where=where)


def _described(text: str, instructions: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Instruction -> what it does (`mm`, `all-gather`), and the module or the source line that asked for it."""
    wanted = set(instructions)
    found: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = ", line)
        if match and match.group(1) in wanted:
            found[match.group(1)] = _operation(match.group(1), line), _origin(line)
    return found


def _operation(name: str, line: str) -> str:
    if name.startswith(("async-collective", "all-gather", "all-reduce", "reduce-scatter")):
        return "collective of " + (_op_name(line).rpartition("/")[2].partition("__")[2] or name)
    return _op_name(line).rpartition("/")[2].partition("__")[2] or name


def _op_name(line: str) -> str:
    found = re.search(r'op_name="([^"]*)"', line)
    return found.group(1) if found else ""


def _origin(line: str) -> str:
    """The module that the operation is traced in, the innermost; else the source line; in backward there is none."""
    modules = re.findall(r"\bmodule\.([^/]*)\.\d+/", _op_name(line))
    if modules:
        return modules[-1]
    source = re.search(r'source_file="([^"]*)" source_line=(\d+)', line)
    if source is None:
        return ""
    path = Path(source.group(1))
    if path.parts[-3:] == ("torch", "autograd", "graph.py"):
        return "backward"
    return f"{'/'.join(path.parts[-3:])}:{source.group(2)}"


# ---------------------------------------------------------------------------------------------------- what it means


def memory_of(programs: Mapping[str, Compiled], limit_bytes: int | None) -> Memory:
    """Of the fuller program; what only the other one takes as arguments stays on the device all the same."""
    arguments: dict[str, int] = {}
    part_of: dict[str, str] = {}
    for compiled in programs.values():
        arguments = {**arguments, **compiled.named_bytes}
        part_of = {**part_of, **compiled.parts}
    fuller = max(programs.values(), key=lambda compiled: compiled.temporary_bytes + compiled.output_bytes)
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for name, size in arguments.items():
        parts[part_of[name]] += size
    parts["temporaries"], parts["outputs"] = fuller.temporary_bytes, fuller.output_bytes
    resting = [
        Buffer(name=name, bytes=arguments[name], where="") for name in arguments.keys() - fuller.named_bytes.keys()
    ]
    return Memory(
        parts={part: size for part, size in parts.items() if size},
        limit_bytes=limit_bytes,
        at=fuller.at,
        biggest=largest([*fuller.biggest, *resting]),
        rematerialised=max(compiled.rematerialised for compiled in programs.values()),
    )


def work_of(programs: Mapping[str, Compiled], accumulation: int) -> Work:
    """Of a step: with accumulation `micro_batch` runs several times, `update` once."""
    flops: dict[str, float] = {}
    collectives: dict[str, Moved] = {}
    memory_bytes = 0.0
    for name, compiled in programs.items():
        times = accumulation if name == "micro_batch" else 1
        for factors, count in [*compiled.matmul_flops.items(), *compiled.kernel_flops.items()]:
            flops[_dtype_of(factors)] = flops.get(_dtype_of(factors), 0) + times * count
        for link, moves in (("", compiled.collectives), (" between slices", compiled.between_slices)):
            for key, moved in moves.items():
                kind, _, dtypes = key.partition(" ")
                words = f"{kind} {'+'.join(DTYPES.get(dtype, dtype) for dtype in dtypes.split('+'))}{link}"
                more = Moved(calls=times * moved.calls, bytes=times * moved.bytes, sent_bytes=times * moved.sent)
                collectives[words] = _sum(collectives.get(words), more)
        memory_bytes += times * _least_traffic(compiled)
    sent = {"ici": 0.0, "network": 0.0}
    for words, moved in collectives.items():
        sent["network" if words.endswith("between slices") else "ici"] += moved.sent_bytes
    return Work(
        matmul_flops=flops,
        memory_bytes=memory_bytes,
        collectives=dict(sorted(collectives.items())),
        sent_bytes={link: size for link, size in sent.items() if size},
    )


def _sum(one: Moved | None, other: Moved) -> Moved:
    if one is None:
        return other
    return Moved(
        calls=one.calls + other.calls, bytes=one.bytes + other.bytes, sent_bytes=one.sent_bytes + other.sent_bytes
    )


def _dtype_of(factors: str) -> str:
    """Of a product `bf16 x f32` the wider: the narrower factor is cast first."""
    names = [DTYPES.get(name, name) for name in factors.split(" x ")]
    return "float32" if "float32" in names else names[0]


def _least_traffic(compiled: Compiled) -> float:
    """All that is updated in its place is read and written, and so is what lies in memory as a temporary at the peak.

    What is only read is left out: of a table it may be a few rows.
    """
    return 2.0 * (compiled.updated_bytes + compiled.live_bytes) + compiled.output_bytes


def notes_of(programs: Mapping[str, Compiled]) -> tuple[str, ...]:
    """What is wrong with a program: state that isn't updated where it lies, and waits for the host."""
    notes: list[str] = []
    for name, compiled in programs.items():
        if compiled.undonated:
            notes.append(
                f"{name}: {len(compiled.undonated)} tensors are not updated where they lie, which takes their memory "
                f"twice: {', '.join(compiled.undonated[:3])}"
            )
        if compiled.host_transfers:
            notes.append(
                f"{name}: it waits for the host {len(compiled.host_transfers)} times inside the step: "
                f"{', '.join(compiled.host_transfers[:3])}"
            )
    return tuple(notes)
