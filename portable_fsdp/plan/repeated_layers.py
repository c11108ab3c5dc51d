"""Equal layers are traced once or twice: the step runs with few of them, and its log is extended to all.

`find_pattern` compares the layers of a model, `keep` removes most of those that repeat, and `Extension` inserts their
entries into the log of the step. The trace has two periods of the pattern. Unless the second does in each pass over
the layers what the first does, for its own blocks, `Extension` raises an error: the caller traces all layers.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from types import MethodType
from typing import Any

from torch import nn

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.plan.memory_trace import Block, CollectiveRun, Entry, KernelRun
from portable_fsdp.tensor_plan import TensorPlan

LONGEST_PERIOD = 12
_UNCOMPARED = {"layer_idx", "layer_id", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}

Home = tuple[int, int, int]
"""Pass, layer, and number within that layer of a block that a layer allocates."""


@dataclass(frozen=True)
class Pattern:
    """Layers that repeat: those from `begin` to `begin + 2 * period` are traced twice, the second time for all others.

    Layers of the model that is traced are numbered from 0 to `kept`, without the `left_out` ones after the second
    period.
    """

    layers: str  # FQN of the list of layers
    begin: int
    period: int
    kept: int
    left_out: int

    @property
    def end(self) -> int:
        return self.begin + 2 * self.period

    @property
    def traced(self) -> range:
        """The layers of the two periods."""
        return range(self.begin, self.end)

    @property
    def template(self) -> range:
        """The layers of the second period."""
        return self.traced[self.period :]

    @property
    def turns(self) -> range:
        """Numbers of the copies of the second period."""
        return range(1, self.left_out // self.period + 1)

    @cached_property
    def _number(self) -> re.Pattern[str]:
        return re.compile(rf"\b{re.escape(self.layers)}\.(\d+)(?=\.|$)")

    def layer_of(self, name: str) -> int | None:
        """Return the number of the layer that a name is about."""
        match = self._number.search(name)
        return int(match[1]) if match else None

    def in_model(self, name: str) -> str:
        """Rename a layer of the traced model to the layer of the whole model that it is."""
        return self.renamed(name, self.number_in_model)

    def number_in_model(self, layer: int) -> int:
        return layer if layer < self.end else layer + self.left_out

    def renamed(self, name: str, number: Callable[[int], Any]) -> str:
        return self._number.sub(lambda match: f"{self.layers}.{number(int(match[1]))}", name)

    def as_kept(self, names: Sequence[str]) -> tuple[str, ...]:
        """Rename a model's modules or weights to those of the model that is traced; leave out those without."""
        later = self.end + self.left_out
        here = [name for name in names if self.layer_of(name) not in range(self.end, later)]
        return tuple(self.renamed(name, lambda n: n if n < later else n - self.left_out) for name in here)

    def times(self, name: str) -> int:
        """Return how many weights of the model a weight of the traced model stands for."""
        return 1 + len(self.turns) if self.layer_of(name) in self.template else 1


def find_pattern(model: nn.Module, policy: ShardPolicy) -> Pattern | None:
    """Return the pattern of the model's layers with the fewest traced layers; None unless they repeat.

    Keeps at least one layer before and after the two periods, though equal to them, and more for a longer prefetch:
    layers gather and free for their neighbours.
    """
    edge = 1 + max(policy.forward_prefetch, policy.backward_prefetch_units - 1)
    edge += policy.tensor is not None  # the first layer splits rows, and the last gathers them before its neighbour
    container = policy.layers[0].rpartition(".")[0] if policy.layers else ""
    count = len(policy.layers)
    is_list = policy.layers == tuple(f"{container}.{number}" for number in range(count))
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    # Another list as long may have a module for each layer.
    others = [name for name in lists if len(lists[name]) == count and not name.startswith(container)]
    if not is_list or container not in lists or others or policy.offload_activations:
        return None
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    kinds = [_kind(model.get_submodule(name), name, policy, uses) for name in policy.layers]
    if None in kinds:
        return None
    best: Pattern | None = None
    for period in range((edge + 1) // 2, min(LONGEST_PERIOD, count // 3) + 1):
        equal = [kinds[at] == kinds[at + period] for at in range(count - period)]
        middle = count // 2
        if not all(equal[middle - period : middle]):
            continue
        first, last = middle - period, middle - 1  # the equal pairs around the middle
        while first and equal[first - 1]:
            first -= 1
        while last + 1 < len(equal) and equal[last + 1]:
            last += 1
        least = first + edge + 2 * period + edge + count - (last + 1 + period)
        kept = least + (count - least) % period
        if kept < count and (best is None or kept < best.kept):
            best = Pattern(container, first + edge, period, kept, count - kept)
    types = getattr(getattr(model, "config", None), "layer_types", None) or []  # models may look them up by position
    if best and [*types[: best.end], *types[best.end + best.left_out :]][: best.kept] != [*types[: best.kept]]:
        return None
    return best


def _kind(layer: nn.Module, name: str, policy: ShardPolicy, uses: Counter[int]) -> Any:
    """Return all that distinguishes a layer from others; None if it shares a weight."""
    if any(uses[id(weight)] > 1 for weight in layer.parameters()):
        return None
    modules: list[Any] = []
    for inner, module in layer.named_modules():
        fqn = f"{name}.{inner}" if inner else name
        options = {key: _value(value) for key, value in vars(module).items() if key not in _UNCOMPARED}
        weights = [(leaf, w.shape, w.dtype, w.requires_grad) for leaf, w in module.named_parameters(recurse=False)]
        buffers = [(leaf, b.shape, b.dtype) for leaf, b in module.named_buffers(recurse=False)]
        roles = (fqn in policy.units, fqn in policy.recompute, policy.modules.get(fqn))
        modules.append((inner, type(module), sorted(options.items(), key=str), weights, buffers, roles))
    return modules


def _value(value: object) -> Any:
    """Return what equal options of equal modules have in common."""
    match value:
        case partial():
            return value.func, value.args, tuple(value.keywords.items())
        case MethodType():
            return value.__func__
        case Mapping():
            return [(key, _value(inner)) for key, inner in value.items()]
        case list() | tuple():
            return [_value(inner) for inner in value]
        case int() | float() | str() | None:
            return repr(value)
        case _:
            return id(value)


def keep(model: nn.Module, policy: ShardPolicy, pattern: Pattern) -> ShardPolicy:
    """Remove the layers that the pattern leaves out from the model; return its policy for the rest."""
    layers: Any = model.get_submodule(pattern.layers)
    left = [*layers[: pattern.end], *layers[pattern.end + pattern.left_out :]]
    layers._modules.clear()
    layers.extend(left)

    def kept(value: Any) -> Any:
        """Rename and drop names in all collections of a policy and its tensor plan; other texts stay."""
        match value:
            case Mapping():
                return {new: value[name] for name in value for new in pattern.as_kept([name])}
            case tuple() | frozenset():
                return type(value)(pattern.as_kept([*value]))
            case ShardPolicy() | TensorPlan():
                return replace(value, **{field.name: kept(getattr(value, field.name)) for field in fields(value)})
            case _:
                return value

    return kept(policy)


# ------------------------------------------------------------------------------------------------------- the log


class Extension:
    """The log of a step of the whole model: `entries`. Raises ValueError, KeyError or IndexError unless the pattern
    holds."""

    def __init__(self, log: Sequence[Entry], pattern: Pattern) -> None:
        self._pattern, self._log = pattern, log
        self._homes: dict[Block, Home] = {}
        self._blocks: dict[Home, Block] = {}  # with the number of the layer in the whole model
        self._directions: dict[int, int] = {}
        self._chunks: defaultdict[tuple[int, int], list[Entry]] = defaultdict(list)  # (pass, layer) -> entries
        self.entries: list[Entry] = []
        # Only the last step's work counts, of the others the memory that they leave.
        last = max((at for at, entry in enumerate(log) if entry.change == "step"), default=0)
        places = zip(log, self._places(), strict=True)
        self._placed = [
            (entry, *place) for at, (entry, place) in enumerate(places) if at > last or entry.change != "runs"
        ]
        self._settle()
        self._grown = self._concatenated()
        self._compare()
        self._emit()
        self._check()
        self._update_blocks()

    def _labels(self) -> Iterator[tuple[int | None, str]]:
        """Yield each entry's layer and phase: that of the running module, else in no pass that of its blocks."""
        writers = {
            block: (entry.what, at)
            for entry in reversed(self._log)
            if isinstance(entry.what, KernelRun)
            for at, (block, _) in enumerate(entry.what.writes)
        }
        layers: dict[Block, int | None] = {}

        def of_blocks(blocks: Sequence[Block]) -> int | None:
            numbers = {layers.get(block) for block in blocks} - {None}
            return numbers.pop() if len(numbers) == 1 else None

        for entry in self._log:
            what, layer = entry.what, self._pattern.layer_of(entry.module)
            phase = "backward" if entry.moment in ("backward", "recomputation") else entry.moment
            if layer is None and phase not in ("forward", "backward"):
                phase = "other"
                if isinstance(what, CollectiveRun):
                    layer = of_blocks([what.result] if what.result else [])
                elif entry.change != "made":
                    layer = of_blocks(_blocks_of(entry))
                elif isinstance(what, Block):
                    layer = self._pattern.layer_of(what.name)
                    if layer is None and what in writers:
                        kernel, at = writers[what]
                        reads = [block for block, _ in kernel.reads]
                        is_list = len(kernel.writes) > 1 and reads and len(reads) % len(kernel.writes) == 0
                        layer = layers.get(reads[at]) if is_list else of_blocks(reads)
            if entry.change == "made" and isinstance(what, Block):
                layers[what] = layer
            yield layer, phase

    def _places(self) -> Iterator[tuple[int, int, bool]]:
        """Yield each entry's pass over the layers, its layer there (-1: none yet), and whether it belongs to that."""
        pattern, number, layer, direction, running = self._pattern, 0, -1, 1, ""
        for label, phase in self._labels():
            if label is not None and (phase != running or label != layer):
                ends = layer >= pattern.end - 1 if direction > 0 else layer <= pattern.begin
                if phase != running or (phase == "other" and ends and direction * (label - layer) < -1):
                    number, direction, layer, running = number + 1, -1 if phase == "backward" else 1, label, phase
                    self._directions[number] = direction
                elif label == layer + direction:
                    layer = label
                elif ends and label == layer - direction and phase == "other":
                    number, direction, layer = number + 1, -direction, label
                    self._directions[number] = direction
                elif label != layer - direction:
                    raise ValueError(f"layer {label} after {layer} in {phase}")
            yield number, layer, label is not None or layer in pattern.traced

    def _settle(self) -> None:
        """Find the entries and the blocks of each layer in each pass."""
        counts: Counter[Any] = Counter()
        keys: dict[Any, int] = {}
        for entry, number, layer, is_inside in self._placed:
            if not is_inside:
                continue
            self._chunks[number, layer].append(entry)
            if entry.change == "made" and isinstance(block := entry.what, Block):
                names = [self._pattern.renamed(name, lambda _: "") for name in (block.name, block.where)]
                key = (*_facts(block), *names)
                counts[number, layer, key] += 1
                alike = keys.setdefault((key, counts[number, layer, key]), len(keys))
                self._homes[block] = number, layer, alike
                self._blocks[number, self._pattern.number_in_model(layer), alike] = block

    def _concatenated(self) -> dict[Block | None, int]:
        """Return the bytes to add, of blocks into which a block of each layer is concatenated."""
        grown: dict[Block | None, int] = {}
        for entry, _, _, is_inside in self._placed:
            what = entry.what
            if not is_inside and isinstance(what, KernelRun) and len(what.writes) == 1:
                [(block, size)] = what.writes
                repeated = self._repeated(read for read, _ in what.reads)
                more = sum(read for source, read in what.reads if source in repeated) * len(self._pattern.turns)
                if more and size == sum(read for _, read in what.reads):
                    grown[block] = more
        return grown

    def _repeated(self, blocks: Iterable[Block]) -> set[Block]:
        """Return those of the second period of which the first has a counterpart."""
        homes = {block: home for block in blocks if (home := self._homes.get(block))}
        later = {self._home(block, 1) for block in homes}
        return {block for block, home in homes.items() if home[1] in self._pattern.template and home in later}

    def _compare(self) -> None:
        """Raise ValueError unless the second period does in each pass what the first does."""
        pattern = self._pattern
        for number in {number for number, layer in self._chunks if layer in pattern.traced}:
            for layer in pattern.traced[: pattern.period]:
                first, second = self._chunks[number, layer], self._chunks[number, layer + pattern.period]
                for one, other in zip(first, second, strict=True):
                    same = one.change == other.change and _mapped(one.what, _facts) == _mapped(other.what, _facts)
                    pairs = zip(_blocks_of(one), _blocks_of(other), strict=False)
                    if not same or not all(a is b or self._homes[b] == self._home(a, 1) for a, b in pairs):
                        raise ValueError(f"{one} and {other}")

    def _emit(self) -> None:
        """Add the entries in order, and the layers left out after the template going up, before it going down."""
        pattern, before = self._pattern, (0, -1)
        template, turns = pattern.template, pattern.turns
        for entry, number, layer, _ in self._placed:
            if (number, layer) != before:
                if before[1] == template[-1] and self._directions[before[0]] > 0:
                    self._add_layers(before[0], [(inner, turn) for turn in turns for inner in template])
                if layer == template[-1] and self._directions[number] < 0:
                    self._add_layers(number, [(inner, turn) for turn in turns[::-1] for inner in template[::-1]])
                if layer in pattern.traced:
                    self._add_layers(number, [(layer, 0)])
                before = number, layer
            if layer not in pattern.traced:
                self._add_outside(entry, len(turns) if layer >= pattern.end else 0)

    def _add_layers(self, number: int, layers: Iterable[tuple[int, int]]) -> None:
        """Add the entries that layers have in a pass; `layers`: of the traced model, and which copy."""
        for layer, turn in layers:
            is_first = layer in self._pattern.traced[: self._pattern.period]
            twins = self._chunks[number, layer + self._pattern.period * (1 if is_first else -1)]
            for entry, twin in zip(self._chunks[number, layer], twins, strict=True):
                self._add(entry, twin, turn)

    def _add(self, entry: Entry, twin: Entry, turn: int) -> None:
        """Add an entry of a repeated layer, its `turn`th copy; `twin` shows which blocks belong to all layers."""
        block = entry.what
        if entry.change == "made" and isinstance(block, Block):
            if turn:
                home, more = self._home(block, turn), turn * self._pattern.period
                name, where = (self._pattern.renamed(text, lambda n: n + more) for text in (block.name, block.where))
                self._blocks[home] = block = Block(block.bytes, block.stream, block.part, name, where)
            self.entries.append(Entry("made", block))
            return
        twins = iter(_blocks_of(twin))
        what = _mapped(entry.what, lambda block: block if block is next(twins) else self._later(block, turn))
        self.entries.append(Entry(entry.change, what))

    def _home(self, block: Block, turns: int) -> Home:
        """Return the home of the counterpart of a block, so many periods later."""
        number, layer, key = self._homes[block]
        return number, layer + turns * self._pattern.period, key

    def _later(self, block: Block, turns: int) -> Block:
        """Return the counterpart of a block, so many periods later in the whole model."""
        return self._blocks[self._home(block, turns)]

    def _add_outside(self, entry: Entry, times: int) -> None:
        """Add an entry of another layer, or of none; what takes blocks of both periods takes those of all."""
        what, blocks = entry.what, _blocks_of(entry)
        middle = {block for block in blocks if block in self._homes and self._homes[block][1] in self._pattern.traced}
        if isinstance(what, CollectiveRun) and (more := self._grown.get(what.block)):
            what = replace(what, collective=replace(what.collective, bytes=what.collective.bytes + more))
        both, turns = self._repeated(middle), self._pattern.turns
        if both and isinstance(what, KernelRun):

            def with_copies(blocks: list[tuple[Block, int]]) -> list[tuple[Block, int]]:
                grown = [(block, size + self._grown.get(block, 0)) for block, size in blocks]
                return grown + [(self._later(block, n), size) for block, size in blocks if block in both for n in turns]

            if what.flops:
                raise ValueError(f"products of several layers at once: {what.part}")
            what = replace(what, reads=with_copies(what.reads), writes=with_copies(what.writes))
        elif middle:
            what = _mapped(what, lambda block: self._later(block, times) if block in middle else block)
        self.entries.append(replace(entry, what=what))

    def _check(self) -> None:
        """Raise ValueError unless each copy is freed like its original, and KeyError if a block is freed again."""
        live: set[Block] = set()
        for entry in self.entries:
            if isinstance(entry.what, Block):
                (live.add if entry.change == "made" else live.remove)(entry.what)
        for block in (block for block, home in self._homes.items() if home[1] in self._pattern.template):
            for copy in (self._later(block, turn) for turn in self._pattern.turns):
                if (copy in live) != (block in live):
                    raise ValueError(f"freed unlike its original: {copy}")

    def _update_blocks(self) -> None:
        """Give blocks their size in the whole model, and the layers after the pattern their numbers."""
        for entry in self._log:
            if entry.change == "made" and isinstance(block := entry.what, Block):
                block.bytes += self._grown.get(block, 0)
                block.name, block.where = map(self._pattern.in_model, (block.name, block.where))


def _blocks_of(entry: Entry) -> list[Block]:
    match what := entry.what:
        case Block() if entry.change == "freed":
            return [what]
        case KernelRun():
            return [block for block, _ in (*what.reads, *what.writes)]
        case CollectiveRun(block=Block() as block):
            return [block]
        case _:
            return []


def _facts(block: Block) -> Any:
    """Return what counterparts have in common."""
    return block.bytes, block.stream, block.part


def _mapped(what: Any, counterpart: Callable[[Block], Any]) -> Any:
    match what:
        case Block():
            return counterpart(what)
        case KernelRun():
            reads = [(counterpart(block), size) for block, size in what.reads]
            writes = [(counterpart(block), size) for block, size in what.writes]
            return KernelRun(what.part, what.dtype, what.flops, reads, writes)
        case CollectiveRun() if what.block:
            return replace(what, block=counterpart(what.block))
        case _:
            return what
