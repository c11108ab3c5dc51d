"""Reads a compiled program: what XLA writes after partitioning and scheduling, as text.

Counted are the collectives and matrix products of one run of the program: what stands in a loop counts as often as
the loop turns. XLA's own cost analysis counts a loop's body once.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from graphlib import TopologicalSorter
from typing import NamedTuple


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
MEGASCALE = '_xla_host_transfer_handler_name="xla_megascale_runtime"'


@dataclass(frozen=True)
class Moved:
    """What collectives of one kind move in one run of the program."""

    calls: int = 0
    bytes: int = 0  # of the full tensors that are gathered or reduced; all-to-all, collective-permute: of one device's
    sent_bytes: int = 0  # by one device, in a ring

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.calls + other.calls, self.bytes + other.bytes, self.sent_bytes + other.sent_bytes)

    def __mul__(self, times: int) -> "Moved":
        return Moved(self.calls * times, self.bytes * times, self.sent_bytes * times)


def collectives_by_dtype(hlo_text: str, devices: int) -> dict[str, Moved]:
    """Kind (all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute) and dtype that crosses, as
    `all_gather bf16` -> what one run moves.

    A call that moves tensors of several dtypes counts under `all_reduce bf16+f32`. An all-reduce that the TPU compiler
    fused with the slice that follows it is a reduce_scatter, which it sends as.

    Args:
        hlo_text: an HloModule after optimization, as XLA writes it.
        devices: that the program is partitioned over: the size of a group that the text leaves open.
    """
    return _summed(_moves(hlo_text, devices))


def matmul_flops(hlo_text: str) -> dict[str, int]:
    """Dtypes of the two factors (`bf16 x bf16`) -> floating point operations of one run, on one device.

    2 x elements of the result x elements that are summed, over `dot` (CPU) and `convolution` (the TPU compiler's form
    of every dot). Products inside custom kernels (flash attention) are not counted.
    """
    computations, runs = read_program(hlo_text)
    flops: Counter[str] = Counter()
    for name, instructions in computations.items():
        for dtypes, count in products_of(instructions):
            flops[dtypes] += runs[name] * count
    return dict(flops)


def flash_attention_flops(hlo_text: str) -> dict[str, int]:
    """Dtype -> floating point operations of the products inside attention kernels, on one device."""
    flops: Counter[str] = Counter()
    for runs, instruction in _instructions(hlo_text):
        if work := kernel_flops_of(instruction):
            flops[work[0]] += runs * work[1]
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
    """Instructions that exchange data with the host: infeeds, outfeeds, callbacks.

    Traffic between TPU slices crosses hosts too, but is no such transfer: see `between_slices`.
    """
    return [instruction.name for _, instruction in _instructions(hlo_text) if _is_with_host(instruction)]


def _is_with_host(instruction: Instruction) -> bool:
    match instruction.operation:
        case "infeed" | "outfeed":
            return True
        case "send" | "recv":
            return MEGASCALE not in instruction.rest
        case "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
            return target is not None and re.search("callback|host", target[1], re.IGNORECASE) is not None
        case _:
            return False


def between_slices(hlo_text: str, slices: int) -> dict[str, Moved]:
    """What devices of several TPU slices exchange over the network, as `collectives_by_dtype` gives it.

    The compiler splits such a collective: a collective of the program within the slice, and a `send` to the runtime,
    which does the rest over the network. `sent_bytes` is that of a ring of `slices`.
    """
    share = {"all_gather": slices - 1, "all_reduce": 2 * (slices - 1) / slices, "one_to_one": 1}
    moves: list[tuple[str, Moved]] = []
    for runs, instruction in _instructions(hlo_text):
        if instruction.operation == "send" and MEGASCALE in instruction.rest:
            match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
            kind = match[1].lower() if match else "one_to_one"
            (dtype, shape), *_ = shapes_in(instruction.type)
            size = runs * ITEM_BYTES[dtype] * math.prod(shape)
            sent = round(size * share.get(kind, (slices - 1) / slices))
            moves.append((f"{kind} {dtype}", Moved(runs, size * slices if kind == "all_gather" else size, sent)))
    return _summed(moves)


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
    computations = read_computations(hlo_text)
    return computations, times_run(computations)


def _instructions(hlo_text: str) -> Iterator[tuple[int, Instruction]]:
    """Every instruction, and how often it runs."""
    computations, runs = read_program(hlo_text)
    for name, instructions in computations.items():
        yield from ((runs[name], instruction) for instruction in instructions)


def read_computations(hlo_text: str) -> Computations:
    """The computations of a module; raises ValueError for a text that has no entry."""
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


def times_run(computations: Computations) -> Counter[str]:
    """How often each computation runs when the program runs once."""
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


# ----------------------------------------------------------------------------------------------------- collectives


def _summed(moves: Iterable[tuple[str, Moved]]) -> dict[str, Moved]:
    totals: defaultdict[str, Moved] = defaultdict(Moved)
    for key, moved in moves:
        totals[key] += moved
    return dict(sorted(totals.items()))


def _moves(hlo_text: str, devices: int) -> Iterator[tuple[str, Moved]]:
    """Kind and dtype, and what it moves in all its turns, for each collective of the program."""
    computations, runs = read_program(hlo_text)
    seen: set[str] = set()
    for name, instructions in computations.items():
        for instruction in instructions:
            crossing = collective_of(name, instruction, devices)
            if crossing is None or crossing.part_of in seen:
                continue
            seen |= {crossing.part_of} - {""}
            yield f"{crossing.kind} {crossing.dtypes}", crossing.moved * runs[name]


class CollectiveCall(NamedTuple):
    """A collective of a program."""

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
    kind, members = match[1], _group_size(instruction.rest, devices)
    shapes = shapes_in(instruction.type)
    if match[2] and kind == "all-gather":  # (pieces that go in, full tensors that come out)
        shapes = shapes[len(shapes) // 2 :]
    elif match[2] and kind == "collective-permute":  # (in, out, and two flags)
        shapes = shapes[:1]
    full = sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in shapes)
    full *= members if kind == "reduce-scatter" else 1
    channel = re.search(r"channel_id=(\d+)", instruction.rest)
    part_of = f"{kind} {channel[1]}" if channel and channel[1] != "1" else ""
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    moved = Moved(1, full, _sent(kind, full, members))
    return CollectiveCall(kind.replace("-", "_"), "+".join(sorted({dtype for dtype, _ in shapes})), moved, part_of)


def _group_size(attributes: str, devices: int) -> int:
    """Devices that take part together: `replica_groups=[2,4]<=[8]`, `{{0,1},{2,3}}`, or all."""
    group = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})", attributes)
    if group is None:
        return devices
    return int(group.group(1)) if group.group(1) else len(group.group(2).split(","))


def _sent(kind: str, full: int, members: int) -> int:
    """Bytes that one of `members` sends: a ring passes each piece on to all but one, an all-reduce does so twice."""
    if kind == "collective-permute":
        return full
    return full * (members - 1) // members * (2 if kind == "all-reduce" else 1)


# -------------------------------------------------------------------------------------------------- matrix products


def shapes_in(type_text: str) -> list[tuple[str, list[int]]]:
    """Dtype and shape of each array in a type, tuples taken apart; layouts and tokens left out."""
    parts = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", type_text)
    return [(dtype, [int(size) for size in sizes.split(",") if size]) for dtype, sizes in parts if dtype in ITEM_BYTES]


def products_of(instructions: list[Instruction]) -> Iterator[tuple[str, int]]:
    """Dtypes of the factors and floating point operations of each matrix product of a computation."""
    arrays: dict[str, tuple[str, list[int]]] = {}
    for name, type_text, operation, operands, rest in instructions:
        if shapes := [] if type_text.startswith("(") else shapes_in(type_text):
            arrays[name] = shapes[0]
        if operation in ("dot", "convolution"):
            left, right = (arrays[operand] for operand in re.findall(r"%([\w.\-]+)", operands)[:2])
            summed = _contracted(rest, right[1]) if operation == "dot" else _convolved(rest, right[1])
            yield f"{left[0]} x {right[0]}", 2 * math.prod(arrays[name][1]) * summed


def _contracted(attributes: str, right: list[int]) -> int:
    dimensions = re.search(r"rhs_contracting_dims=\{([\d,]*)\}", attributes)
    return math.prod(right[int(axis)] for axis in dimensions.group(1).split(",") if axis) if dimensions else 1


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
