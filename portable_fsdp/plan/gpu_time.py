"""How long a GPU takes for the kernels of a recorded step.

A GPU is one stream of compute and one of communication. A kernel takes the time of its products or of its bytes of
memory, at the speeds that runs reach (`time.Rates`), and at least LEAST_S. FSDP2 asks for the next gather when compute
has taken over the last one's weights, and compute waits where it reads what isn't gathered yet; gradients are reduced
beside compute, in turn with gathers, and a program ends when they are.
"""

from collections.abc import Mapping, Sequence

from portable_fsdp.plan.memory_trace import Block, Collective, CollectiveRun, KernelRun, Timeline
from portable_fsdp.plan.result import Expected
from portable_fsdp.plan.time import Rates, Streams

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
    streams = Streams()
    gathered: dict[int, float] = {}  # id of what a gather fills, until it is read -> when the gather ends
    last_used = 0.0  # when compute began with the last gather's weights
    for program in programs:
        for entry in fused(program) if is_compiled else program:
            if isinstance(entry, CollectiveRun):
                seconds = _seconds_to_send(sent[entry.collective], rates)
                end = streams.send("links", seconds, since=last_used if entry.result else None)
                if entry.result:
                    gathered[id(entry.result)] = end
                continue
            for block, _ in entry.reads:
                if id(block) in gathered:
                    streams.wait(gathered.pop(id(block)))
                    last_used = streams.now
            streams.run(entry.part, _seconds_of(entry, rates))
        streams.wait_for("links")
    return streams.expected({})


def _seconds_to_send(sent: Mapping[str, float], rates: Rates) -> float:
    return max((size / rates.links[link] for link, size in sent.items() if link in rates.links), default=0.0)


def _seconds_of(kernel: KernelRun, rates: Rates) -> float:
    reached = rates.peak(kernel.dtype) * (rates.attention if kernel.part == "attention" else rates.products)
    moved = sum(size for _, size in (*kernel.reads, *kernel.writes))
    return max(kernel.flops / reached, moved / rates.memory, LEAST_S)


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
