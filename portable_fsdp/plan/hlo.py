"""Reads a compiled program: what XLA writes after partitioning and scheduling, as text.

Collectives and matrix products are those of one run of the program: what stands in a loop counts as often as the loop
turns. XLA's own cost analysis counts a loop's body once. `operations_of` lists what a TPU does in a run, in the order
of the schedule.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from graphlib import TopologicalSorter
from typing import NamedTuple

from portable_fsdp.plan.result import Moved
from portable_fsdp.plan.time import Compute, Drain, Loop, ScheduleEntry, Send, Wait


class Instruction(NamedTuple):
    """`name = type operation(operands)rest`: a line of the program."""

    name: str
    type: str
    operation: str
    operands: str
    rest: str  # after the operands: attributes and metadata


Computations = dict[str, list[Instruction]]
"""Name -> instructions; the entry's name is ENTRY."""

ENTRY = "ENTRY"

ITEM_BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2},
    **{"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8},
}
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)?(.*)")
_COLLECTIVE = re.compile(r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?")
_CALLEES = re.compile(
    r"\b(?:calls|body|condition|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_HOST_CALL = re.compile(r'custom_call_target="[^"]*(callback|host)', re.IGNORECASE)
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
MEGASCALE = '_xla_host_transfer_handler_name="xla_megascale_runtime"'


def collectives_by_dtype(hlo_text: str, devices: int) -> dict[str, Moved]:
    """Kind (all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute) and dtype that crosses, as
    `all_gather bf16` -> what one run moves.

    A call that moves tensors of several dtypes counts under `all_reduce bf16+f32`. An all-reduce that the TPU compiler
    fused with the slice that follows it is a reduce_scatter, which it sends as. `devices`: that the program is
    partitioned over, the size of a group that the text leaves open.
    """
    seen: set[str] = set()
    totals: defaultdict[str, Moved] = defaultdict(Moved)
    for name, runs, instruction in _instructions(hlo_text):
        crossing = collective_of(name, instruction, devices)
        if crossing is not None and crossing.part_of not in seen:
            seen |= {crossing.part_of} - {""}
            totals[f"{crossing.kind} {crossing.dtypes}"] += crossing.moved * runs
    return dict(sorted(totals.items()))


def matmul_flops(hlo_text: str) -> dict[str, int]:
    """Dtypes of the two factors (`bf16 x bf16`) -> floating point operations of one run, on one device.

    2 x elements of the result x elements that are summed, over `dot` (CPU) and `convolution` (the TPU compiler's form
    of every dot). Products inside custom kernels (flash attention) are not counted.
    """
    computations, runs = read_program(hlo_text)
    flops: Counter[str] = Counter()
    for name, instructions in computations.items():
        for _, dtypes, count in products_of(instructions):
            flops[dtypes] += runs[name] * count
    return dict(flops)


def flash_attention_flops(hlo_text: str) -> dict[str, int]:
    """Dtype -> floating point operations of the products inside attention kernels, on one device."""
    flops: Counter[str] = Counter()
    for _, runs, instruction in _instructions(hlo_text):
        if kernel := kernel_flops_of(instruction):
            flops[kernel[0]] += runs * kernel[1]
    return dict(flops)


def kernel_flops_of(instruction: Instruction) -> tuple[str, int] | None:
    """Dtype and floating point operations of the products inside one call of an attention kernel; None: it is none.

    The call itself says how many (`backends/torch_xla/spmd/splash.py`), half of the scores counted where attention is
    causal. The blocks on the diagonal, computed whole, count half. The dtype is that of the first operand that is no
    integer.
    """
    if 'custom_call_target="tpu_custom_call"' not in instruction.rest:
        return None
    flops = re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', instruction.rest)
    operands = shapes_in(instruction.rest.partition("operand_layout_constraints=")[2])
    dtypes = [dtype for dtype, _ in operands if "f" in dtype]
    return (dtypes[0], int(flops[1])) if flops and dtypes else None


def host_transfers(hlo_text: str) -> list[str]:
    """Instructions that exchange data with the host: infeeds, outfeeds, callbacks; not traffic between TPU slices."""
    return [
        instruction.name
        for *_, instruction in _instructions(hlo_text)
        if instruction.operation in ("infeed", "outfeed")
        or (instruction.operation in ("send", "recv") and MEGASCALE not in instruction.rest)
        or (instruction.operation == "custom-call" and _HOST_CALL.search(instruction.rest))
    ]


def between_slices(hlo_text: str, slices: int) -> dict[str, Moved]:
    """What devices of several TPU slices exchange over the network, as `collectives_by_dtype` gives it.

    The compiler splits such a collective: a collective of the program within the slice, and a `send` to the runtime,
    which does the rest over the network. `sent_bytes` is that of a ring of `slices`.
    """
    share = {"all_gather": slices - 1, "all_reduce": 2 * (slices - 1) / slices, "one_to_one": 1}
    totals: defaultdict[str, Moved] = defaultdict(Moved)
    for _, runs, instruction in _instructions(hlo_text):
        if instruction.operation == "send" and MEGASCALE in instruction.rest:
            match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
            kind = match[1].lower() if match else "one_to_one"
            (dtype, shape), *_ = shapes_in(instruction.type)
            size = runs * bytes_of([(dtype, shape)])
            sent = round(size * share.get(kind, (slices - 1) / slices))
            totals[f"{kind} {dtype}"] += Moved(runs, size * slices if kind == "all_gather" else size, sent)
    return dict(sorted(totals.items()))


def aliased_parameters(hlo_text: str) -> set[int]:
    """Numbers of the program's parameters whose memory an output takes."""
    header = hlo_text.partition("\n")[0]
    aliases = re.search(r"input_output_alias=\{(.*?\)) \}", header)
    return {int(number) for number in re.findall(r"\((\d+), ", aliases.group(1))} if aliases else set()


def rematerialised(hlo_text: str) -> int:
    """Instructions that the compiler itself computes a second time, because memory was short."""
    return len(re.findall(r"%[\w.\-]*\.remat[\w.]* =", hlo_text))


@lru_cache(maxsize=1)  # every question about a program begins here; the largest has 20 MB of text
def read_program(hlo_text: str) -> tuple[Computations, Counter[str]]:
    """The computations, and how often each runs. Raises ValueError for a text that has no entry."""
    computations = _read_computations(hlo_text)
    return computations, _times_run(computations)


def _instructions(hlo_text: str) -> Iterator[tuple[str, int, Instruction]]:
    """Every instruction, with its computation and how often it runs."""
    computations, runs = read_program(hlo_text)
    for name, instructions in computations.items():
        yield from ((name, runs[name], instruction) for instruction in instructions)


def _read_computations(hlo_text: str) -> Computations:
    computations: Computations = {}
    instructions: list[Instruction] | None = None
    for line in hlo_text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.\-]+) ", line) if line.endswith("{") else None
        if start and not line.startswith("HloModule"):
            instructions = computations[ENTRY if start.group(1) else start.group(2)] = []
        elif line.startswith("}"):
            instructions = None
        elif instructions is not None and (match := _INSTRUCTION.match(line)):
            instructions.append(Instruction(*match.groups()))
    if ENTRY not in computations:
        raise ValueError(f"expected the text of an HLO module with an ENTRY, found {hlo_text[:80]!r}")
    return computations


def _times_run(computations: Computations) -> Counter[str]:
    calls = {
        name: [
            (callee, trip_count(instruction, computations) if instruction.operation == "while" else 1)
            for instruction in instructions
            for callee in callees_of(instruction)
        ]
        for name, instructions in computations.items()
    }
    runs: Counter[str] = Counter({ENTRY: 1})
    callees = {name: {callee for callee, _ in called} for name, called in calls.items()}
    for name in reversed(tuple(TopologicalSorter(callees).static_order())):  # callers before what they call
        for callee, turns in calls.get(name, ()):
            runs[callee] += runs[name] * turns
    return runs


def callees_of(instruction: Instruction) -> Iterator[str]:
    """The names in `calls=%name`, or `calls={%name, %other}`."""
    for names in _CALLEES.findall(instruction.rest):
        yield from (name.strip().lstrip("%") for name in names.strip("{}").split(","))


def trip_count(loop: Instruction, computations: Computations) -> int:
    """The count that the compiler noted; the TPU compiler notes none, so else the bound in the loop's condition."""
    known = re.search(r'known_trip_count\D*"?(\d+)', loop.rest)
    if known:
        return int(known.group(1))
    condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
    todo = [condition.group(1)] if condition else []
    bounds: list[int] = []
    while todo:
        for inner in computations.get(todo.pop(), []):
            if inner.operation == "constant" and re.match(r"[su]32\[\]", inner.type) and inner.operands.isdecimal():
                bounds.append(int(inner.operands))
            todo += callees_of(inner)
    return max(bounds, default=1)


class CollectiveCall(NamedTuple):
    kind: str  # all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute
    dtypes: str  # that cross: `bf16`, `bf16+f32`
    moved: Moved  # by one run
    # What the parts of one collective share: the TPU compiler spreads one over several fusions, which then name the
    # same channel. Empty for channel 1, which every reduce-scatter written by hand has, and where none is named.
    part_of: str


def collective_of(computation: str, instruction: Instruction, devices: int) -> CollectiveCall | None:
    """The collective that an instruction of this computation is or starts; None where it is none."""
    match = _COLLECTIVE.fullmatch(instruction.operation)
    if match is None:
        return None
    kind, shapes = match[1], shapes_in(instruction.type)
    # Devices that take part together: `replica_groups=[2,4]<=[8]`, `{{0,1},{2,3}}`, or all.
    group = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})", instruction.rest)
    members = devices if group is None else int(group[1] or len(group[2].split(",")))
    if match[2] and kind == "all-gather":  # (pieces that go in, full tensors that come out)
        shapes = shapes[len(shapes) // 2 :]
    elif match[2] and kind == "collective-permute":  # (in, out, and two flags)
        shapes = shapes[:1]
    full = bytes_of(shapes) * (members if kind == "reduce-scatter" else 1)
    channel = re.search(r"channel_id=(\d+)", instruction.rest)
    part_of = f"{kind} {channel[1]}" if channel and channel[1] != "1" else ""
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    # A ring passes each piece on to all but one, an all-reduce does so twice.
    ring = full * (members - 1) // members * (2 if kind == "all-reduce" else 1)
    moved = Moved(1, full, full if kind == "collective-permute" else ring)
    return CollectiveCall(kind.replace("-", "_"), "+".join(sorted({dtype for dtype, _ in shapes})), moved, part_of)


def shapes_in(type_text: str) -> list[tuple[str, list[int]]]:
    """Dtype and shape of each array in a type, tuples taken apart; layouts and tokens left out."""
    return [
        (dtype, [int(size) for size in sizes.split(",") if size])
        for dtype, sizes, _ in _ARRAY.findall(type_text)
        if dtype in ITEM_BYTES
    ]


def bytes_of(shapes: Iterable[tuple[str, list[int]]]) -> int:
    return sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in shapes)


def products_of(instructions: list[Instruction]) -> Iterator[tuple[str, str, int]]:
    """Name, dtypes of the factors and floating point operations of each matrix product of a computation."""
    arrays: dict[str, tuple[str, list[int]]] = {}
    for name, type_text, operation, operands, rest in instructions:
        if shapes := [] if type_text.startswith("(") else shapes_in(type_text):
            arrays[name] = shapes[0]
        if operation in ("dot", "convolution"):
            left, right = (arrays[operand] for operand in _OPERAND.findall(operands)[:2])
            contracted = re.search(r"rhs_contracting_dims=\{([\d,]+)\}", rest)
            axes = map(int, contracted[1].split(",")) if contracted else ()
            summed = _convolved(rest, right[1]) if operation != "dot" else math.prod(right[1][axis] for axis in axes)
            yield name, f"{left[0]} x {right[0]}", 2 * math.prod(arrays[name][1]) * summed


def _convolved(attributes: str, right: list[int]) -> int:
    """Elements summed for one of the result: input features, and window dimensions that aren't batch in disguise.

    The TPU compiler writes batched products as convolutions whose window is padded, strided or dilated: each position
    of the result then meets one of the window's, and nothing is summed over it.
    """
    labels = re.search(r"dim_labels=\w+_(\w+)->", attributes)
    spread = re.search(r"window=\{[^}]*(?:pad|lhs_dilate|stride)", attributes)
    kernel = labels.group(1) if labels else ""
    return math.prod(
        size for size, label in zip(right, kernel, strict=False) if label == "i" or (label.isdigit() and not spread)
    )


# ------------------------------------------------------------------------------------------------ the TPU's schedule

_MOVES = {"copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "gather", "concatenate", "pad"}
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota", "partition-id", "custom-call"}


def operations_of(hlo_text: str, devices: int) -> list[ScheduleEntry]:
    """One run on one device, of a program that the TPU compiler has scheduled for `devices`.

    A chip is one stream of compute and one of links. An instruction computes its products, runs its attention kernel,
    or moves its bytes of main memory. A synchronous collective stops compute, an asynchronous one only where its end is
    waited for too early. Copies between main and on-chip memory that run beside compute are free.
    Raises ValueError for a text that is no program.
    """
    computations, _ = read_program(hlo_text)
    return _Schedule(computations, devices).of(ENTRY)


class _Schedule:
    def __init__(self, computations: Computations, devices: int) -> None:
        self._computations, self._devices = computations, devices
        self._products = {
            name: {product: count for product, _, count in products_of(instructions)}
            for name, instructions in computations.items()
        }
        self._flops_in: dict[str, int] = {}

    def of(self, computation: str) -> list[ScheduleEntry]:
        """A computation from beginning to end; all links are free when it begins."""
        operations: list[ScheduleEntry] = []
        under_way: dict[str, tuple[str, ...]] = {}  # instruction, or what parts share -> keys of its collectives
        types = {instruction.name: instruction.type for instruction in self._computations[computation]}
        for instruction in self._computations[computation]:
            operands, callees = _OPERAND.findall(instruction.operands), self._callees(instruction)
            if instruction.operation in ("while", "conditional"):
                operations.append(self._loop(instruction, callees))
            elif instruction.operation == "send" and MEGASCALE in instruction.rest:
                operations.append(Send("network", "network", {"network": _bytes(instruction.type)}))
            elif instruction.operation == "recv-done":
                operations.append(Wait("network"))
            elif instruction.operation.endswith(("-done", "-update")):
                keys = under_way[instruction.name] = tuple(key for name in operands for key in under_way.get(name, ()))
                operations += [Wait(key) for key in keys] if instruction.operation.endswith("-done") else []
            else:
                collectives = self._collectives(computation, instruction, callees)
                read = [types.get(name, "") for name in operands]
                kernel = self._kernel(computation, instruction, callees, read, bool(collectives))
                if collectives:
                    operations += self._collective(instruction, callees, collectives, kernel, under_way)
                else:
                    operations.append(kernel)
        return [*operations, Drain()]

    def _collective(
        self,
        instruction: Instruction,
        callees: list[str],
        collectives: list[CollectiveCall],
        kernel: Compute,
        under_way: dict[str, tuple[str, ...]],
    ) -> Iterator[ScheduleEntry]:
        """A collective that begins, or a part of one that is under way, with what is computed beside it."""
        key = collectives[0].part_of or instruction.name
        inside = "".join(other.rest for name in callees for other in self._computations[name])
        is_beside = key in under_way or kernel.part == "products" or "AsyncCollective" in inside
        is_beside = is_beside or instruction.operation.endswith("-start")
        if key not in under_way:
            yield Send(key, "ici", {"ici": sum(each.moved.sent_bytes for each in collectives)})
        under_way[key] = under_way[instruction.name] = (key,)
        if is_beside:
            yield kernel
            if "AsyncCollectiveDone" in inside:
                yield Wait(key)
            return
        yield Wait(key, tuple((each.kind, each.moved.sent_bytes) for each in collectives))

    def _loop(self, instruction: Instruction, callees: list[str]) -> Loop:
        if instruction.operation == "while":
            body = next(name for name in callees if f"body=%{name}" in instruction.rest)
            return Loop(trip_count(instruction, self._computations), [self.of(body)])
        return Loop(1, [self.of(name) for name in callees])

    def _callees(self, instruction: Instruction) -> list[str]:
        return [name for name in callees_of(instruction) if name in self._computations]

    def _collectives(self, computation: str, instruction: Instruction, callees: list[str]) -> list[CollectiveCall]:
        """The collectives that an instruction is, or that stand in what it calls."""
        own = collective_of(computation, instruction, self._devices)
        calls = [own] if own else []
        for name in callees if instruction.operation in ("fusion", "async-start", "call") else ():
            for other in self._computations[name]:
                calls += self._collectives(name, other, self._callees(other))
        return calls

    def _kernel(
        self, computation: str, instruction: Instruction, callees: list[str], types: list[str], carries: bool
    ) -> Compute:
        """What an instruction computes and moves. One that `carries` a collective has the collective's buffers among
        its own. Products count as bfloat16's: XLA rounds factors of float32 by default."""
        if kernel := kernel_flops_of(instruction):
            return Compute("attention", kernel[1], 0)
        if instruction.operation in _FREE or instruction.operation.endswith("-start"):
            return Compute("elementwise", 0, 0)
        flops = self._products[computation].get(instruction.name, 0) + sum(self._flops(name) for name in callees)
        moved = 0 if carries else self._moved(instruction, callees, types)
        if flops:
            return Compute("products", flops, moved)
        inside = {other.operation for name in callees for other in self._computations[name]} or {instruction.operation}
        return Compute("copies" if inside <= _MOVES | _FREE else "elementwise", 0, moved)

    def _flops(self, computation: str) -> int:
        """Operations of all products in a computation and in what it calls."""
        if computation not in self._flops_in:
            called = [name for inner in self._computations[computation] for name in self._callees(inner)]
            own = sum(self._products[computation].values())
            self._flops_in[computation] = own + sum(self._flops(name) for name in called)
        return self._flops_in[computation]

    def _moved(self, instruction: Instruction, callees: list[str], types: list[str]) -> int:
        """Bytes of main memory that an instruction reads and writes: of what it slices or updates, only that part."""
        written = _bytes(instruction.type)
        if instruction.operation == "dynamic-update-slice":
            return 2 * sum(_bytes(kind) for kind in types[1:2])
        if instruction.operation in ("dynamic-slice", "slice", "gather"):
            return 2 * written
        read = [_bytes(kind) for kind in types]
        for name in callees if instruction.operation == "fusion" else ():
            for number, size in self._parts_of_parameters(name).items():
                if number < len(read):
                    read[number] = min(read[number], size)
            written = min(written, self._updated(name, written))
        return written + sum(read)

    def _parts_of_parameters(self, computation: str) -> Mapping[int, int]:
        """Parameter -> bytes, of those that a fusion only takes slices from, or writes a slice into."""
        inner = self._computations[computation]
        sizes: dict[int, int] = {}
        for parameter in (instruction for instruction in inner if instruction.operation == "parameter"):
            users = [instruction for instruction in inner if parameter.name in _OPERAND.findall(instruction.operands)]
            first = all(_OPERAND.findall(instruction.operands)[0] == parameter.name for instruction in users)
            if first and all(instruction.operation in ("dynamic-slice", "slice", "gather") for instruction in users):
                sizes[int(parameter.operands)] = sum(_bytes(instruction.type) for instruction in users)
            elif first and all(instruction.operation == "dynamic-update-slice" for instruction in users):
                sizes[int(parameter.operands)] = 0
        return sizes

    def _updated(self, computation: str, written: int) -> int:
        """Bytes that a fusion writes whose result is an array with one slice replaced."""
        inner = self._computations[computation]
        updates = [instruction for instruction in inner if instruction.operation == "dynamic-update-slice"]
        types = {instruction.name: instruction.type for instruction in inner}
        if not updates or sum(_bytes(instruction.type) for instruction in updates) < written:
            return written
        return sum(_bytes(types.get(_OPERAND.findall(instruction.operands)[1], "")) for instruction in updates)


def _bytes(type_text: str) -> int:
    """Bytes of a type's arrays in main memory; `S(1)` in a layout names another memory."""
    return bytes_of(shapes_in(_ARRAY.sub(lambda array: "" if "S(" in (array[3] or "") else array[0], type_text)))
