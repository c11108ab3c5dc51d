"""What a TPU does in a run of a compiled program, in the order of the compiler's schedule.

A chip is one stream of compute and one of links. An instruction computes its products, runs its attention kernel, or
moves its bytes of main memory. A synchronous collective stops compute, an asynchronous one only where its end is waited
for too early. Copies between main and on-chip memory that run beside compute are free.
"""

import math
import re
from collections.abc import Iterator, Mapping

from portable_fsdp.plan import hlo
from portable_fsdp.plan.hlo import CollectiveCall, Computations, Instruction
from portable_fsdp.plan.time import Compute, Drain, Loop, ScheduleEntry, Send, Wait

_MOVES = {"copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "gather", "concatenate", "pad"}
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota", "partition-id", "custom-call"}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")


def operations_of(hlo_text: str, devices: int) -> list[ScheduleEntry]:
    """One run on one device, of a program that the TPU compiler has scheduled for `devices`.

    Raises ValueError for a text that is no program.
    """
    computations, _ = hlo.read_program(hlo_text)
    return _Schedule(computations, devices).of(hlo.ENTRY)


class _Schedule:
    def __init__(self, computations: Computations, devices: int) -> None:
        self._computations, self._devices = computations, devices
        self._flops_in: dict[str, int] = {}

    def of(self, computation: str) -> list[ScheduleEntry]:
        """A computation from beginning to end; all links are free when it begins."""
        operations: list[ScheduleEntry] = []
        under_way: dict[str, tuple[str, ...]] = {}  # instruction, or what parts share -> keys of its collectives
        types: dict[str, str] = {}
        for instruction in self._computations[computation]:
            types[instruction.name] = instruction.type
            operands, callees = _OPERAND.findall(instruction.operands), self._callees(instruction)
            if instruction.operation in ("while", "conditional"):
                operations.append(self._loop(instruction, callees))
            elif instruction.operation == "send" and hlo.MEGASCALE in instruction.rest:
                operations.append(Send("network", "network", {"network": _bytes(instruction.type)}))
            elif instruction.operation == "recv-done":
                operations.append(Wait("network"))
            elif instruction.operation.endswith(("-done", "-update")):
                keys = under_way[instruction.name] = tuple(key for name in operands for key in under_way.get(name, ()))
                operations += [Wait(key) for key in keys] if instruction.operation.endswith("-done") else []
            else:
                collectives = self._collectives(computation, instruction, callees)
                kernel = self._kernel(
                    instruction, callees, [types.get(name, "") for name in operands], bool(collectives)
                )
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
        key, inside = collectives[0].part_of or instruction.name, self._attributes_in(callees)
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
            return Loop(hlo.trip_count(instruction, self._computations), [self.of(body)])
        return Loop(1, [self.of(name) for name in callees])

    def _callees(self, instruction: Instruction) -> list[str]:
        return [name for name in hlo.callees_of(instruction) if name in self._computations]

    def _collectives(self, computation: str, instruction: Instruction, callees: list[str]) -> list[CollectiveCall]:
        """The collectives that an instruction is, or that stand in what it calls."""
        own = hlo.collective_of(computation, instruction, self._devices)
        calls = [own] if own else []
        for name in callees if instruction.operation in ("fusion", "async-start", "call") else ():
            for other in self._computations[name]:
                calls += self._collectives(name, other, self._callees(other))
        return calls

    def _attributes_in(self, callees: list[str]) -> str:
        return "".join(other.rest for name in callees for other in self._computations[name])

    def _kernel(self, instruction: Instruction, callees: list[str], types: list[str], carries: bool) -> Compute:
        """What an instruction computes and moves. One that `carries` a collective has the collective's buffers among
        its own. Products count as bfloat16's: XLA rounds factors of float32 by default."""
        if kernel := hlo.kernel_flops_of(instruction):
            return Compute("attention", kernel[1], 0)
        if instruction.operation in _FREE or instruction.operation.endswith("-start"):
            return Compute("elementwise", 0, 0)
        flops = sum(self._flops(name) for name in callees)
        if instruction.operation in ("convolution", "dot"):
            flops += sum(count for _, count in hlo.products_of([*self._typed(types, instruction), instruction]))
        moved = 0 if carries else self._moved(instruction, callees, types)
        if flops:
            return Compute("products", flops, moved)
        inside = {other.operation for name in callees for other in self._computations[name]} or {instruction.operation}
        return Compute("copies" if inside <= _MOVES | _FREE else "elementwise", 0, moved)

    def _typed(self, types: list[str], instruction: Instruction) -> list[Instruction]:
        """Parameters in place of an instruction's operands."""
        names = _OPERAND.findall(instruction.operands)
        return [Instruction(name, kind, "parameter", "", "") for name, kind in zip(names, types, strict=True)]

    def _flops(self, computation: str) -> int:
        """Operations of all products in a computation and in what it calls."""
        if computation not in self._flops_in:
            inner = self._computations[computation]
            called = sum(self._flops(name) for instruction in inner for name in self._callees(instruction))
            self._flops_in[computation] = called + sum(count for _, count in hlo.products_of(inner))
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
    return sum(
        hlo.ITEM_BYTES[dtype] * math.prod(int(size) for size in sizes.split(",") if size)
        for dtype, sizes, layout in _ARRAY.findall(type_text)
        if dtype in hlo.ITEM_BYTES and "S(" not in layout
    )
