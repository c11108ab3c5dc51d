"""Equal layers are traced once or twice: the step runs with few of them, and its log is extended to all.

`find_pattern` compares the layers of a model, `keep` removes most of those that repeat, and `extend` inserts their
entries into the log of the step. The trace has two periods of the pattern. Unless the second does in each pass over
the layers what the first does, for its own blocks, `extend` raises IrregularError: the caller traces all layers.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import compress
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.plan.memory_trace import Block, CollectiveRun, Entry, KernelRun

T = TypeVar("T")

LONGEST_PERIOD = 12
_UNCOMPARED = {"layer_idx", "layer_id", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}

Home = tuple[int, int, int]
"""Pass, layer, and number within that layer of a block that a layer allocates."""


class IrregularError(Exception):
    """The layers that should be equal do different things."""


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

    @cached_property
    def _number(self) -> re.Pattern[str]:
        return re.compile(rf"\b{re.escape(self.layers)}\.(\d+)(?=\.|$)")

    def layer_of(self, name: str) -> int | None:
        """Return the number of the layer that a name is about."""
        match = self._number.search(name)
        return int(match[1]) if match else None

    def in_model(self, name: str) -> str:
        """Rename a layer of the traced model to the layer of the whole model that it is."""
        return self.renamed(name, lambda n: n if n < self.end else n + self.left_out)

    def renamed(self, name: str, number: Callable[[int], Any]) -> str:
        return self._number.sub(lambda match: f"{self.layers}.{number(int(match[1]))}", name)

    def is_left_out(self, name: str) -> bool:
        layer = self.layer_of(name)
        return layer is not None and self.end <= layer < self.end + self.left_out

    def as_kept(self, names: Sequence[str]) -> tuple[str, ...]:
        """Rename a model's modules or weights to those of the model that is traced; leave out those without."""
        later = self.end + self.left_out
        here = [name for name in names if not self.is_left_out(name)]
        return tuple(self.renamed(name, lambda n: n if n < later else n - self.left_out) for name in here)

    def times(self, name: str) -> int:
        """Return how many weights of the model a weight of the traced model stands for."""
        layer = self.layer_of(name)
        is_template = layer is not None and self.begin + self.period <= layer < self.end
        return 1 + self.left_out // self.period if is_template else 1


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
    if isinstance(value, partial):
        return value.func, value.args, tuple(value.keywords.items())
    if isinstance(value, MethodType):
        return value.__func__
    return repr(value) if _is_plain(value) else id(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (int, float, str, type(None))) or (isinstance(value, dict) and not value)


def keep(model: nn.Module, policy: ShardPolicy, pattern: Pattern) -> ShardPolicy:
    """Remove the layers that the pattern leaves out from the model; return its policy for the rest."""
    layers: Any = model.get_submodule(pattern.layers)
    left = [*layers[: pattern.end], *layers[pattern.end + pattern.left_out :]]
    layers._modules.clear()
    layers.extend(left)

    def kept(by_name: Mapping[str, T]) -> dict[str, T]:
        here = [name for name in by_name if not pattern.is_left_out(name)]
        return dict(zip(pattern.as_kept(here), map(by_name.__getitem__, here), strict=True))

    tensor = policy.tensor
    if tensor is not None:
        tensor = replace(
            tensor,
            words=kept(tensor.words),
            parts=kept(tensor.parts),
            summed=frozenset(pattern.as_kept([*tensor.summed])),
            blocks=pattern.as_kept(tensor.blocks),
            attributes=kept(tensor.attributes),
            whole_heads=kept(tensor.whole_heads),
            layers=pattern.as_kept(tensor.layers),
            whole_blocks=pattern.as_kept(tensor.whole_blocks),
        )
    return replace(
        policy,
        units=pattern.as_kept(policy.units),
        layers=pattern.as_kept(policy.layers),
        recompute=pattern.as_kept(policy.recompute),
        layouts=kept(policy.layouts),
        modules=kept(policy.modules),
        tensor=tensor,
    )


# ------------------------------------------------------------------------------------------------------- the log


def extend(log: Sequence[Entry], pattern: Pattern) -> list[Entry]:
    """Return the log of a step of the whole model. Raises IrregularError unless the pattern holds."""
    try:
        return _Extension(log, pattern).entries
    except (KeyError, IndexError) as error:
        raise IrregularError(f"no counterpart: {error!r}") from error


class _Extension:
    def __init__(self, log: Sequence[Entry], pattern: Pattern) -> None:
        self._pattern, self._log = pattern, log
        self._homes: dict[int, Home] = {}  # by the block's id
        self._blocks: dict[Home, Block] = {}
        self._copies: dict[tuple[Home, int], Block] = {}
        self._directions: dict[int, int] = {}
        self._chunks: defaultdict[tuple[int, int], list[Entry]] = defaultdict(list)  # (pass, layer) -> entries
        self._keys: dict[Any, int] = {}
        self._names: dict[tuple[str, int], str] = {}
        self.entries: list[Entry] = []
        places = self._places(self._labels())
        # Only the last step's work counts, of the others the memory that they leave.
        last = max((at for at, entry in enumerate(log) if entry.change == "step"), default=0)
        counted = [at > last or entry.change != "runs" for at, entry in enumerate(log)]
        self._log, places = list(compress(log, counted)), list(compress(places, counted))
        self._settle(places)
        self._grown = self._concatenated(places)
        self._compare()
        self._emit(places)
        self._check()
        self._update_blocks()

    def _labels(self) -> Iterator[tuple[int | None, str]]:
        """Yield each entry's layer and phase: that of the running module, else in no pass that of its blocks."""
        writers = {
            id(block): (entry.what, at)
            for entry in reversed(self._log)
            if isinstance(entry.what, KernelRun)
            for at, (block, _) in enumerate(entry.what.writes)
        }
        layers: dict[int, int | None] = {}  # of blocks

        def of_blocks(blocks: Sequence[Block]) -> int | None:
            numbers = {layers.get(id(block)) for block in blocks} - {None}
            return numbers.pop() if len(numbers) == 1 else None

        for entry in self._log:
            what, layer = entry.what, self._pattern.layer_of(entry.module)
            phase = "backward" if entry.moment in ("backward", "recomputation") else entry.moment
            is_pass = phase in ("forward", "backward")
            if layer is None and not is_pass:
                phase = "other"
                if isinstance(what, KernelRun):
                    layer = of_blocks([block for block, _ in (*what.reads, *what.writes)])
                elif isinstance(what, CollectiveRun):
                    layer = of_blocks([what.result] if what.result else [])
                elif entry.change == "freed":
                    layer = layers.get(id(what))
                elif isinstance(what, Block):
                    layer = self._pattern.layer_of(what.name)
                    if layer is None and id(what) in writers:
                        kernel, at = writers[id(what)]
                        reads = [block for block, _ in kernel.reads]
                        is_list = len(kernel.writes) > 1 and reads and len(reads) % len(kernel.writes) == 0
                        layer = layers.get(id(reads[at])) if is_list else of_blocks(reads)
            if entry.change == "made":
                layers[id(what)] = layer
            yield layer, phase

    def _places(self, labels: Iterator[tuple[int | None, str]]) -> list[tuple[int, int, bool]]:
        """Return each entry's pass over the layers, its layer there (-1: none yet), and whether it belongs to that."""
        pattern, number, layer, direction, running = self._pattern, 0, -1, 1, ""
        places: list[tuple[int, int, bool]] = []
        for label, phase in labels:
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
                    raise IrregularError(f"layer {label} after {layer} in {phase}")
            is_middle = pattern.begin <= layer < pattern.end
            places.append((number, layer, label is not None or is_middle))
        return places

    def _settle(self, places: Sequence[tuple[int, int, bool]]) -> None:
        """Find the entries and the blocks of each layer in each pass."""
        counts: Counter[Any] = Counter()
        for entry, (number, layer, is_inside) in zip(self._log, places, strict=True):
            if not is_inside:
                continue
            self._chunks[number, layer].append(entry)
            if entry.change == "made" and isinstance(block := entry.what, Block):
                key = (block.bytes, block.stream, block.part, self._anonymous(block.name), self._anonymous(block.where))
                counts[number, layer, key] += 1
                same = key, counts[number, layer, key]
                home = number, layer, self._keys.setdefault(same, len(self._keys))
                self._homes[id(block)], self._blocks[home] = home, block

    def _concatenated(self, places: Sequence[tuple[int, int, bool]]) -> dict[int, int]:
        """Return id -> bytes to add, of blocks into which a block of each layer is concatenated."""
        turns, grown = self._pattern.left_out // self._pattern.period, dict[int, int]()
        for entry, (_, _, is_inside) in zip(self._log, places, strict=True):
            what = entry.what
            if not is_inside and isinstance(what, KernelRun) and len(what.writes) == 1:
                block, size = what.writes[0]
                repeated = self._repeated({home for read, _ in what.reads if (home := self._homes.get(id(read)))})
                more = sum(read for source, read in what.reads if self._homes.get(id(source)) in repeated) * turns
                if more and size == sum(read for _, read in what.reads):
                    grown[id(block)] = more
        return grown

    def _repeated(self, homes: set[Home]) -> set[Home]:
        """Return those of the second period of which the first has a counterpart."""
        period, begin, end = self._pattern.period, self._pattern.begin, self._pattern.end
        return {
            home for home in homes if begin + period <= home[1] < end and (home[0], home[1] - period, home[2]) in homes
        }

    def _anonymous(self, name: str) -> str:
        return self._pattern.renamed(name, lambda _: "")

    def _compare(self) -> None:
        """Raise IrregularError unless the second period does in each pass what the first does."""
        pattern = self._pattern
        for number in {number for number, layer in self._chunks if pattern.begin <= layer < pattern.end}:
            for layer in range(pattern.begin, pattern.begin + pattern.period):
                first, second = self._chunks[number, layer], self._chunks[number, layer + pattern.period]
                if len(first) != len(second):
                    raise IrregularError(f"{len(first)} and {len(second)} entries of layer {layer} in pass {number}")
                for one, other in zip(first, second, strict=True):
                    same = one.change == other.change and _facts(one.what) == _facts(other.what)
                    pairs = list(zip(_blocks_of(one), _blocks_of(other), strict=False))
                    if not same or not all(self._correspond(*pair) for pair in pairs):
                        raise IrregularError(f"{one} and {other}")

    def _correspond(self, one: Block, other: Block) -> bool:
        if one is other:
            return True
        home, homes = self._homes.get(id(one)), self._homes
        return home is not None and homes.get(id(other)) == (home[0], home[1] + self._pattern.period, home[2])

    # -------------------------------------------------------------------------------------------- the longer log

    def _emit(self, places: Sequence[tuple[int, int, bool]]) -> None:
        """Add the entries in order, and the layers left out after the template going up, before it going down."""
        pattern, before = self._pattern, (0, -1)
        template = range(pattern.begin + pattern.period, pattern.end)
        turns = range(1, pattern.left_out // pattern.period + 1)
        for entry, (number, layer, _) in zip(self._log, places, strict=True):
            if (number, layer) != before:
                if before[1] == template[-1] and self._directions[before[0]] > 0:
                    self._add_layers(before[0], [(inner, turn) for turn in turns for inner in template])
                if layer == template[-1] and self._directions[number] < 0:
                    self._add_layers(number, [(inner, turn) for turn in turns[::-1] for inner in template[::-1]])
                if pattern.begin <= layer < pattern.end:
                    self._add_layers(number, [(layer, 0)])
                before = number, layer
            if not pattern.begin <= layer < pattern.end:
                self._add_outside(entry, len(turns) if layer >= pattern.end else 0)

    def _add_layers(self, number: int, layers: Iterable[tuple[int, int]]) -> None:
        """Add the entries that layers have in a pass; `layers`: of the traced model, and which copy."""
        for layer, turn in layers:
            is_first = layer < self._pattern.begin + self._pattern.period
            twins = self._chunks[number, layer + self._pattern.period * (1 if is_first else -1)]
            for entry, twin in zip(self._chunks[number, layer], twins, strict=True):
                self._add(entry, twin, turn)

    def _add(self, entry: Entry, twin: Entry, turn: int) -> None:
        """Add an entry of a repeated layer, its `turn`th copy; `twin` shows which blocks belong to all layers."""
        block = entry.what
        if entry.change == "made" and isinstance(block, Block):
            if turn:
                name, where = self._later(block.name, turn), self._later(block.where, turn)
                block = Block(block.bytes, block.stream, block.part, name, where)
                self._copies[self._homes[id(entry.what)], turn] = block
            self.entries.append(Entry("made", block))
            return
        twins = iter(_blocks_of(twin))

        def counterpart(block: Block) -> Block:
            if block is next(twins):
                return block
            number, layer, key = self._homes[id(block)]
            return self._at(number, layer + turn * self._pattern.period, key)

        self.entries.append(Entry(entry.change, _mapped(entry.what, counterpart)))

    def _later(self, name: str, turn: int) -> str:
        if (name, turn) not in self._names:
            self._names[name, turn] = self._pattern.renamed(name, lambda n: n + turn * self._pattern.period)
        return self._names[name, turn]

    def _at(self, number: int, layer: int, key: int) -> Block:
        """Return a block of a layer by its number in the whole model."""
        pattern = self._pattern
        if layer < pattern.end:
            return self._blocks[number, layer, key]
        if layer >= pattern.end + pattern.left_out:
            return self._blocks[number, layer - pattern.left_out, key]
        turn = (layer - pattern.end) // pattern.period + 1
        return self._copies[(number, layer - turn * pattern.period, key), turn]

    def _add_outside(self, entry: Entry, times: int) -> None:
        """Add an entry of another layer, or of none; what takes blocks of both periods takes those of all."""
        pattern, what = self._pattern, entry.what
        homes = {home for block in _blocks_of(entry) if (home := self._homes.get(id(block)))}
        middle = {home for home in homes if pattern.begin <= home[1] < pattern.end}
        if isinstance(what, CollectiveRun) and what.block and (more := self._grown.get(id(what.block))):
            collective = replace(what.collective, bytes=what.collective.bytes + more)
            entry = replace(entry, what=replace(what, collective=collective))
        if not middle or entry.change == "made":
            self.entries.append(entry)
            return
        both = self._repeated(middle)
        if both and isinstance(what, KernelRun):
            turns = range(1, pattern.left_out // pattern.period + 1)

            def with_copies(blocks: list[tuple[Block, int]]) -> list[tuple[Block, int]]:
                homes = [(self._homes.get(id(block)), size) for block, size in blocks]
                repeated = [(home, size) for home, size in homes if home and home in both]
                grown = [(block, size + self._grown.get(id(block), 0)) for block, size in blocks]
                return grown + [(self._copies[home, turn], size) for home, size in repeated for turn in turns]

            if what.flops:
                raise IrregularError(f"products of several layers at once: {what.part}")
            what = replace(what, reads=with_copies(what.reads), writes=with_copies(what.writes))
            self.entries.append(replace(entry, what=what))
            return

        def counterpart(block: Block) -> Block:
            home = self._homes.get(id(block))
            if not home or home not in middle:
                return block
            return self._at(home[0], home[1] + times * pattern.period, home[2])

        self.entries.append(replace(entry, what=_mapped(what, counterpart)))

    def _check(self) -> None:
        """Raise IrregularError unless each copy is freed like its original, and only what lives is freed."""
        live: set[int] = set()
        for entry in self.entries:
            if entry.change == "freed" and id(entry.what) not in live:
                raise IrregularError(f"freed again: {entry}")
            if isinstance(entry.what, Block):
                (live.add if entry.change == "made" else live.remove)(id(entry.what))
        for (home, _), copy in self._copies.items():
            if (id(copy) in live) != (id(self._blocks[home]) in live):
                raise IrregularError(f"freed unlike its original: {copy}")

    def _update_blocks(self) -> None:
        """Give blocks their size in the whole model, and the layers after the pattern their numbers."""
        for entry in self._log:
            if entry.change == "made" and isinstance(block := entry.what, Block):
                block.bytes += self._grown.get(id(block), 0)
                block.name, block.where = map(self._pattern.in_model, (block.name, block.where))


def _blocks_of(entry: Entry) -> list[Block]:
    match what := entry.what:
        case Block():
            return [] if entry.change == "made" else [what]
        case KernelRun():
            return [block for block, _ in (*what.reads, *what.writes)]
        case CollectiveRun():
            return [what.block] if what.block else []
        case None:
            return []


def _facts(what: Any) -> Any:
    """Return what equal entries have in common besides their blocks."""
    match what:
        case KernelRun():
            sizes = [size for _, size in what.reads], [size for _, size in what.writes]
            return what.part, what.dtype, what.flops, sizes
        case CollectiveRun():
            return what.collective, what.block is None, what.is_waited_for
        case Block():
            return what.bytes, what.stream, what.part
        case _:
            return None


def _mapped(what: Any, counterpart: Callable[[Block], Block]) -> Any:
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
