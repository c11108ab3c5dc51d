"""How long a GPU takes for the kernels of a recorded step.

A GPU is one stream of compute and one of communication. A kernel takes the time of its products or of its bytes of
memory, at the speeds that runs reach (`speed.Rates`), and at least LEAST_S. FSDP2 asks for the next gather when compute
has taken over the last one's weights, and compute waits where it reads what isn't gathered yet; gradients are reduced
beside compute, in turn with gathers, and a program ends when they are.
"""

from collections.abc import Mapping, Sequence

from portable_fsdp.plan.memory_trace import Block, Collective, CollectiveRun, KernelRun, Timeline
from portable_fsdp.plan.result import Expected
from portable_fsdp.plan.speed import ComputeStream, Rates

LEAST_S = 4e-6
"""Of any kernel, from its start to the next one's. A guess, which decides nothing where kernels are large."""


def expected_time(
    programs: Sequence[Timeline], sent: Mapping[Collective, Mapping[str, float]], rates: Rates, *, is_compiled: bool
) -> Expected:
    """Of the programs of a step, one after the other.

    Args:
        sent: of each collective: link -> bytes that a device sends over it.
        is_compiled: whether layers and the loss are compiled, which fuses the kernels between their products.
    """
    streams = _Streams(sent, rates)
    for program in programs:
        for entry in fused(program) if is_compiled else program:
            streams.communicate(entry) if isinstance(entry, CollectiveRun) else streams.compute(entry)
        streams.end_program()
    return streams.stream.expected({})


class _Streams:
    def __init__(self, sent: Mapping[Collective, Mapping[str, float]], rates: Rates) -> None:
        self.stream = ComputeStream()
        self._link_free = 0.0
        self._gather_used = 0.0  # when compute began with the last gather's weights
        self._gathers: dict[int, float] = {}  # under way: id of what it fills -> when it ends
        self._sent, self._rates = sent, rates

    def communicate(self, run: CollectiveRun) -> None:
        links = self._rates.links
        sent = self._sent[run.collective]
        seconds = max((size / links[link] for link, size in sent.items() if link in links), default=0.0)
        self._link_free = max(self._link_free, self._gather_used if run.result else self.stream.now) + seconds
        if run.result:
            self._gathers[id(run.result)] = self._link_free

    def compute(self, kernel: KernelRun) -> None:
        for block, _ in kernel.reads:
            if id(block) in self._gathers:
                self.stream.wait(self._gathers.pop(id(block)))
                self._gather_used = self.stream.now
        rates = self._rates
        reached = rates.peak(kernel.dtype) * (rates.attention if kernel.part == "attention" else rates.products)
        moved = sum(size for _, size in (*kernel.reads, *kernel.writes))
        self.stream.run(kernel.part, max(kernel.flops / reached, moved / rates.memory, LEAST_S))

    def end_program(self) -> None:
        self.stream.wait(self._link_free)


def fused(program: Timeline) -> Timeline:
    """As a compiler runs it: kernels without products in one, between the products and collectives."""
    entries: Timeline = []
    group: list[KernelRun] = []
    for number, entry in enumerate(program):
        if isinstance(entry, KernelRun) and not entry.flops:
            group.append(entry)
        else:
            entries += [*_as_one(group, number), entry]
            group = []
    return [*entries, *_as_one(group, len(program))]


def _as_one(kernels: list[KernelRun], end: int) -> list[KernelRun]:
    """One kernel: it reads each input once, and writes only what outlives it, to entry `end` of the timeline."""
    if not kernels:
        return []
    made: set[int] = set()
    reads: dict[int, tuple[Block, int]] = {}
    writes: dict[int, tuple[Block, int]] = {}
    for kernel in kernels:
        reads |= {id(block): (block, size) for block, size in kernel.reads if id(block) not in made | reads.keys()}
        writes |= {id(block): (block, size) for block, size in kernel.writes if block.freed > end}
        made |= {id(block) for block, _ in kernel.writes}
    return [KernelRun("elementwise", "float32", 0.0, list(reads.values()), list(writes.values()))]
