"""Parser of a compiled program: the HLO text that XLA writes after partitioning and scheduling.

Collectives and matrix products are counted for one run of the program: the body of a loop counts once per iteration.
XLA's own cost analysis counts a loop's body once. `operations_of` lists a TPU's operations in a run, in the order of
the schedule.
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
    """One line of a computation: `name = type operation(operands)rest`."""

    computation: str
    name: str
    type: str
    operation: str
    operands: str
    rest: str  # after the operands: attributes and metadata

    @property
    def reads(self) -> list[str]:
        """The names of its operands."""
        return _OPERAND.findall(self.operands)

    @property
    def callees(self) -> list[str]:
        """The names in `calls=%name`, or `calls={%name, %other}`."""
        names = ",".join(_CALLEES.findall(self.rest))
        return [name.strip(" {}%") for name in names.split(",")] if names else []


Computations = Mapping[str, list[Instruction]]
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
    """Return `all_gather bf16` -> traffic of one run, by kind (all_gather, all_reduce, reduce_scatter, all_to_all,
    collective_permute) and dtype on the wire.

    A call with tensors of several dtypes counts as `all_reduce bf16+f32`. An all-reduce that the TPU compiler fused
    with the slice after it counts as a reduce_scatter, since it sends that much. `devices`: number of devices that the
    program is partitioned over, the group size if the text names none.
    """
    seen: set[str] = set()
    totals: defaultdict[str, Moved] = defaultdict(Moved)
    for runs, instruction in all_instructions(hlo_text):
        crossing = collective_of(instruction, devices)
        if crossing is not None and crossing.part_of not in seen:
            seen |= {crossing.part_of} - {""}
            totals[f"{crossing.kind} {crossing.dtypes}"] += crossing.moved * runs
    return dict(sorted(totals.items()))


def matmul_flops(hlo_text: str) -> dict[str, int]:
    """Return dtypes of the two factors (`bf16 x bf16`) -> FLOPs of one run, on one device.

    Counts 2 x elements of the result x elements summed for each, over `dot` (CPU) and `convolution` (the TPU compiler's
    form of every dot). Products inside custom kernels (flash attention) are not counted.
    """
    computations, runs = read_program(hlo_text)
    flops: Counter[str] = Counter()
    for name, instructions in computations.items():
        for _, dtypes, count in products_of(instructions):
            flops[dtypes] += runs[name] * count
    return dict(flops)


def flash_attention_flops(hlo_text: str) -> dict[str, int]:
    """Return dtype -> FLOPs of the matrix products inside kernels of attention and experts, on one device."""
    flops: Counter[str] = Counter()
    for runs, instruction in all_instructions(hlo_text):
        if kernel := kernel_flops_of(instruction):
            flops[kernel[0]] += runs * kernel[1]
    return dict(flops)


def kernel_flops_of(instruction: Instruction) -> tuple[str, int] | None:
    """Return dtype and FLOPs of the matrix products in one call of a kernel; None for another instruction.

    The call states its FLOPs (`backends/torch_xla/spmd/`); causal attention counts half of the scores, also
    for the diagonal blocks, which are computed whole. The dtype is that of the first floating-point operand.
    """
    if 'custom_call_target="tpu_custom_call"' not in instruction.rest:
        return None
    flops = re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', instruction.rest)
    operands = shapes_in(instruction.rest.partition("operand_layout_constraints=")[2])
    dtypes = [dtype for dtype, _ in operands if "f" in dtype]
    return (dtypes[0], int(flops[1])) if flops and dtypes else None


def host_transfers(hlo_text: str) -> list[str]:
    """List instructions that exchange data with the host: infeeds, outfeeds, callbacks; not traffic between slices."""
    return [
        instruction.name
        for _, instruction in all_instructions(hlo_text)
        if instruction.operation in ("infeed", "outfeed")
        or (instruction.operation in ("send", "recv") and MEGASCALE not in instruction.rest)
        or (instruction.operation == "custom-call" and _HOST_CALL.search(instruction.rest))
    ]


def between_slices(hlo_text: str, slices: int) -> dict[str, Moved]:
    """Return the network traffic between TPU slices, in the form of `collectives_by_dtype`.

    The compiler splits such a collective into one within the slice and a `send` to the runtime, which does the rest
    over the network. `sent_bytes` is that of a ring of `slices`.
    """
    share = {"all_gather": slices - 1, "all_reduce": 2 * (slices - 1) / slices, "one_to_one": 1}
    totals: defaultdict[str, Moved] = defaultdict(Moved)
    for runs, instruction in all_instructions(hlo_text):
        if instruction.operation == "send" and MEGASCALE in instruction.rest:
            match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
            kind = match[1].lower() if match else "one_to_one"
            (dtype, shape), *_ = shapes_in(instruction.type)
            size = runs * bytes_of([(dtype, shape)])
            sent = round(size * share.get(kind, (slices - 1) / slices))
            totals[f"{kind} {dtype}"] += Moved(runs, size * slices if kind == "all_gather" else size, sent)
    return dict(sorted(totals.items()))


def aliased_parameters(hlo_text: str) -> set[int]:
    """Return the numbers of the program's parameters whose memory an output reuses."""
    header = hlo_text.partition("\n")[0]
    aliases = re.search(r"input_output_alias=\{(.*?\)) \}", header)
    return {int(number) for number in re.findall(r"\((\d+), ", aliases.group(1))} if aliases else set()


def rematerialised(hlo_text: str) -> int:
    """Count instructions that the compiler rematerialises on its own because memory is short."""
    return len(re.findall(r"%[\w.\-]*\.remat[\w.]* =", hlo_text))


@lru_cache(maxsize=1)  # every function above calls it; the largest program has 20 MB of text
def read_program(hlo_text: str) -> tuple[Computations, Counter[str]]:
    """Parse the computations, and count how often each runs. Raises ValueError for a text without an entry."""
    computations: defaultdict[str, list[Instruction]] = defaultdict(list)
    name = ""
    for line in hlo_text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.\-]+) ", line) if line.endswith("{") else None
        if start and not line.startswith("HloModule"):
            name = ENTRY if start[1] else start[2]
        elif line.startswith("}"):
            name = ""
        elif name and (match := _INSTRUCTION.match(line)):
            computations[name].append(Instruction(name, *match.groups()))
    if ENTRY not in computations:
        raise ValueError(f"expected the text of an HLO module with an ENTRY, found {hlo_text[:80]!r}")
    return computations, _times_run(computations)


def all_instructions(hlo_text: str) -> Iterator[tuple[int, Instruction]]:
    """Yield every instruction, with the number of times it runs."""
    computations, runs = read_program(hlo_text)
    for name, instructions in computations.items():
        yield from ((runs[name], instruction) for instruction in instructions)


def _times_run(computations: Computations) -> Counter[str]:
    calls = {
        name: [
            (callee, trip_count(instruction, computations) if instruction.operation == "while" else 1)
            for instruction in instructions
            for callee in instruction.callees
        ]
        for name, instructions in computations.items()
    }
    runs: Counter[str] = Counter({ENTRY: 1})
    callees = {name: {callee for callee, _ in called} for name, called in calls.items()}
    for name in reversed(tuple(TopologicalSorter(callees).static_order())):  # callers before callees
        for callee, turns in calls.get(name, ()):
            runs[callee] += runs[name] * turns
    return runs


def trip_count(loop: Instruction, computations: Computations) -> int:
    """Return the known_trip_count; the TPU compiler writes none, so fall back to the bound in the loop's condition."""
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
            todo += inner.callees
    return max(bounds, default=1)


class CollectiveCall(NamedTuple):
    kind: str  # all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute
    dtypes: str  # on the wire: `bf16`, `bf16+f32`
    moved: Moved  # traffic of one run
    # Key shared by the parts of one collective: the TPU compiler spreads it over several fusions with the same channel.
    # Empty if there is no channel id, or it is 1 (all hand-written reduce-scatters share it).
    part_of: str


def collective_of(instruction: Instruction, devices: int) -> CollectiveCall | None:
    """Return the collective that an instruction is or starts; None for another instruction."""
    match = _COLLECTIVE.fullmatch(instruction.operation)
    if match is None:
        return None
    kind, shapes = match[1], shapes_in(instruction.type)
    # Devices of one group: `replica_groups=[2,4]<=[8]`, `{{0,1},{2,3}}`, or all.
    group = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})", instruction.rest)
    members = devices if group is None else int(group[1] or len(group[2].split(",")))
    if match[2] and kind == "all-gather":  # (shards in, full tensors out)
        shapes = shapes[len(shapes) // 2 :]
    elif match[2] and kind == "collective-permute":  # (in, out, and two flags)
        shapes = shapes[:1]
    full = bytes_of(shapes) * (members if kind == "reduce-scatter" else 1)
    channel = re.search(r"channel_id=(\d+)", instruction.rest)
    part_of = f"{kind} {channel[1]}" if channel and channel[1] != "1" else ""
    if kind == "all-reduce" and instruction.computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    # In a ring each piece travels members - 1 hops, in an all-reduce twice.
    ring = full * (members - 1) // members * (2 if kind == "all-reduce" else 1)
    moved = Moved(1, full, full if kind == "collective-permute" else ring)
    return CollectiveCall(kind.replace("-", "_"), "+".join(sorted({dtype for dtype, _ in shapes})), moved, part_of)


def shapes_in(type_text: str) -> list[tuple[str, list[int]]]:
    """Return dtype and shape of each array in a type, tuples flattened; without layouts and tokens."""
    return [
        (dtype, [int(size) for size in sizes.split(",") if size])
        for dtype, sizes, _ in _ARRAY.findall(type_text)
        if dtype in ITEM_BYTES
    ]


def bytes_of(shapes: Iterable[tuple[str, list[int]]]) -> int:
    return sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in shapes)


def products_of(instructions: list[Instruction]) -> Iterator[tuple[Instruction, str, int]]:
    """Yield the matrix products of a computation, with dtypes of the factors and FLOPs."""
    arrays: dict[str, tuple[str, list[int]]] = {}
    for line in instructions:
        if shapes := [] if line.type.startswith("(") else shapes_in(line.type):
            arrays[line.name] = shapes[0]
        if line.operation in ("dot", "convolution"):
            left, right = (arrays[operand] for operand in line.reads[:2])
            contracted = re.search(r"rhs_contracting_dims=\{([\d,]+)\}", line.rest)
            axes = map(int, contracted[1].split(",")) if contracted else ()
            is_dot = line.operation == "dot"
            summed = math.prod(right[1][axis] for axis in axes) if is_dot else _convolved(line.rest, right[1])
            yield line, f"{left[0]} x {right[0]}", 2 * math.prod(arrays[line.name][1]) * summed


def _convolved(attributes: str, right: list[int]) -> int:
    """Count the elements summed per element of the result: input features, and window dimensions that aren't batches.

    The TPU compiler writes batched products as convolutions whose window is padded, strided or dilated: then each
    position of the result meets one of the window, and nothing is summed over it.
    """
    labels = re.search(r"dim_labels=\w+_(\w+)->", attributes)
    spread = re.search(r"window=\{[^}]*(?:pad|lhs_dilate|stride)", attributes)
    kernel = labels.group(1) if labels else ""
    return math.prod(
        size for size, label in zip(right, kernel, strict=False) if label == "i" or (label.isdigit() and not spread)
    )


# ------------------------------------------------------------------------------------------------ the TPU's schedule

_SLICES = {"dynamic-slice", "slice", "gather"}
_MOVES = {*_SLICES, "copy", "transpose", "dynamic-update-slice", "concatenate", "pad"}
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota", "partition-id", "custom-call"}


def operations_of(hlo_text: str, devices: int) -> list[ScheduleEntry]:
    """List one device's operations in one run of a program that the TPU compiler scheduled for `devices`.

    A chip is one stream of compute and one of links. An instruction computes its products, runs its attention kernel,
    or moves its bytes of main memory. A synchronous collective stops compute; an asynchronous one only if compute waits
    for it before it ends. Copies between main and on-chip memory that overlap with compute are free.
    Raises ValueError for a text that is no program.
    """
    computations, _ = read_program(hlo_text)
    return _Schedule(computations, devices).of(ENTRY)


class _Schedule:
    def __init__(self, computations: Computations, devices: int) -> None:
        self._computations, self._devices = computations, devices
        products = [product for instructions in computations.values() for product in products_of(instructions)]
        self._flops_of = {(product.computation, product.name): count for product, _, count in products}

    def of(self, computation: str) -> list[ScheduleEntry]:
        """List the operations of a computation; all links are free when it begins."""
        operations: list[ScheduleEntry] = []
        under_way: dict[str, tuple[str, ...]] = {}  # instruction, or `part_of` -> keys of its collectives
        types = {instruction.name: instruction.type for instruction in self._computations[computation]}
        for instruction in self._computations[computation]:
            operation = instruction.operation
            if operation == "while":
                body = next(name for name in instruction.callees if f"body=%{name}" in instruction.rest)
                operations.append(Loop(trip_count(instruction, self._computations), [self.of(body)]))
            elif operation == "conditional":
                operations.append(Loop(1, [self.of(name) for name in instruction.callees]))
            elif operation == "send" and MEGASCALE in instruction.rest:
                operations.append(Send("network", "network", {"network": _bytes(instruction.type)}))
            elif operation == "recv-done":
                operations.append(Wait("network"))
            elif operation.endswith(("-done", "-update")):
                keys = tuple(key for name in instruction.reads for key in under_way.get(name, ()))
                under_way[instruction.name] = keys
                operations += [Wait(key) for key in keys] if operation.endswith("-done") else []
            else:
                collectives = self._collectives(instruction)
                kernel = self._kernel(instruction, types, bool(collectives))
                operations += self._started(instruction, collectives, kernel, under_way) if collectives else [kernel]
        return [*operations, Drain()]

    def _started(
        self,
        instruction: Instruction,
        collectives: list[CollectiveCall],
        kernel: Compute,
        under_way: dict[str, tuple[str, ...]],
    ) -> Iterator[ScheduleEntry]:
        """Start a collective, or a part of a running one, with the compute that overlaps with it."""
        key = collectives[0].part_of or instruction.name
        inside = "".join(other.rest for other in self._called(instruction))
        is_beside = key in under_way or kernel.part == "products" or "AsyncCollective" in inside
        is_beside = is_beside or instruction.operation.endswith("-start")
        if key not in under_way:
            yield Send(key, "ici", {"ici": sum(each.moved.sent_bytes for each in collectives)})
        under_way[key] = under_way[instruction.name] = (key,)
        if not is_beside:
            yield Wait(key, tuple((each.kind, each.moved.sent_bytes) for each in collectives))
            return
        yield kernel
        if "AsyncCollectiveDone" in inside:
            yield Wait(key)

    def _called(self, instruction: Instruction) -> list[Instruction]:
        """List the instructions of the computations that an instruction calls."""
        return [other for name in instruction.callees for other in self._computations[name]]

    def _collectives(self, instruction: Instruction) -> list[CollectiveCall]:
        """List the collectives of an instruction and of the computations that it calls."""
        own = collective_of(instruction, self._devices)
        calls = [own] if own else []
        for other in self._called(instruction) if instruction.operation in ("fusion", "async-start", "call") else ():
            calls += self._collectives(other)
        return calls

    def _kernel(self, instruction: Instruction, types: Mapping[str, str], carries: bool) -> Compute:
        """Return an instruction's compute and memory traffic. If it `carries` a collective, its buffers include the
        collective's. Products count as bfloat16: XLA rounds float32 factors by default."""
        if kernel := kernel_flops_of(instruction):
            if "gmm" in instruction.name:  # megablox, of experts
                return Compute("products", kernel[1], self._moved(instruction, types))
            return Compute("attention", kernel[1], 0)
        if instruction.operation in _FREE or instruction.operation.endswith("-start"):
            return Compute("elementwise", 0, 0)
        flops = self._flops(instruction)
        moved = 0 if carries else self._moved(instruction, types)
        if flops:
            return Compute("products", flops, moved)
        inside = {other.operation for other in self._called(instruction)} or {instruction.operation}
        return Compute("copies" if inside <= _MOVES | _FREE else "elementwise", 0, moved)

    def _flops(self, instruction: Instruction) -> int:
        """Count the FLOPs of an instruction's product, and of all products in the computations that it calls."""
        own = self._flops_of.get((instruction.computation, instruction.name), 0)
        return own + sum(map(self._flops, self._called(instruction)))

    def _moved(self, instruction: Instruction, types: Mapping[str, str]) -> int:
        """Count the bytes of main memory that an instruction reads and writes; of a slice or update only that part."""
        written, read = _bytes(instruction.type), [_bytes(types.get(name, "")) for name in instruction.reads]
        if instruction.operation == "dynamic-update-slice":
            return 2 * sum(read[1:2])
        if instruction.operation in _SLICES:
            return 2 * written
        for name in instruction.callees if instruction.operation == "fusion" else ():
            inner = self._computations[name]
            for number, size in _parts_of_parameters(inner).items():
                if number < len(read):
                    read[number] = min(read[number], size)
            written = min(written, _updated(inner, written))
        return written + sum(read)


def _parts_of_parameters(fusion: list[Instruction]) -> Mapping[int, int]:
    """Return parameter -> bytes, for parameters that a fusion only slices, or updates one slice of."""
    sizes: dict[int, int] = {}
    for parameter in (instruction for instruction in fusion if instruction.operation == "parameter"):
        users = [instruction for instruction in fusion if parameter.name in instruction.reads]
        is_first = all(instruction.reads[0] == parameter.name for instruction in users)
        if is_first and all(instruction.operation in _SLICES for instruction in users):
            sizes[int(parameter.operands)] = sum(_bytes(instruction.type) for instruction in users)
        elif is_first and all(instruction.operation == "dynamic-update-slice" for instruction in users):
            sizes[int(parameter.operands)] = 0
    return sizes


def _updated(fusion: list[Instruction], written: int) -> int:
    """Return the bytes that a fusion writes; only the slice if its result is an array with one slice replaced."""
    updates = [instruction for instruction in fusion if instruction.operation == "dynamic-update-slice"]
    types = {instruction.name: instruction.type for instruction in fusion}
    if not updates or sum(_bytes(instruction.type) for instruction in updates) < written:
        return written
    return sum(_bytes(types.get(instruction.reads[1], "")) for instruction in updates)


def _bytes(type_text: str) -> int:
    """Return the bytes of a type's arrays in main memory; `S(1)` in a layout names another memory."""
    return bytes_of(shapes_in(_ARRAY.sub(lambda array: "" if "S(" in (array[3] or "") else array[0], type_text)))
