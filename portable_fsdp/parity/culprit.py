"""Finds the first operation that differs in two records of the same steps, although all that it depends on agrees.

Events stand in the order in which they happened: what an event depends on comes before it. Rounding grows little by
little; a wrong operation is a jump. So an event is the culprit if its difference is beyond the bound, and JUMP times
that of every event before it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from portable_fsdp.parity.record import Culprit, Kind, RunRecord

JUMP = 10
ALIKE = 100
"""Bounds: no rounding makes the gradients of all parameters differ by so much."""

_SMALL = 1e-3
"""A gradient below this share of the largest one counts as that large: one that should be 0 is rounding alone."""

Values = Mapping[str, list[float]]


class Jump(NamedTuple):
    """Where a difference stands out."""

    kind: Kind
    key: str
    relative: float
    before: float


def find_culprit(first: RunRecord, other: RunRecord, bound: float) -> Culprit | None:
    """In the earliest step that has one; None where no difference stands out."""
    for step, modules in enumerate(zip(first.modules, other.modules, strict=True), start=1):
        old, new = ((first.state[at], other.state[at]) for at in (step - 1, step))
        jump = next(_jumps(step, modules, old, new, bound), None)
        if jump is not None:
            updates = _updates(old, new)
            parameter = jump.key if jump.kind in ("weights", "gradient", "update") else ""
            parameter = parameter or max(updates, key=updates.__getitem__)
            layer, what = _words(jump, list(modules[0]))
            return Culprit(step=step, layer=layer, parameter=parameter, what=what, **jump._asdict())
    return None


def _jumps(
    step: int, modules: tuple[Values, Values], old: tuple[Values, Values], new: tuple[Values, Values], bound: float
) -> Iterator[Jump]:
    differences = {key: _difference(old[0][key], old[1][key]) for key in _parameters(old)}
    key = max(differences, key=differences.__getitem__)
    if step == 1 and not differences[key] <= bound / JUMP:
        yield Jump("weights", key, differences[key], 0.0)
    drift = _difference(*(_joined(state, differences) for state in old))
    for kind, compare in (("forward", _mean_difference), ("backward", _difference)):
        keys = [key for key in modules[0] if key in modules[1] and key.startswith(kind)]
        largest = max((modules[0][key][1] for key in keys), default=0.0) if kind == "backward" else 0.0
        before = drift
        for key in keys:
            relative = compare(modules[0][key], modules[1][key], largest)
            if not relative <= max(bound, JUMP * before):
                yield Jump("data" if "|in||" in key else kind, key, relative, before)
            before = max(before, relative)
    moments = [key for key in new[0] if "/" in key and key in new[1]]
    largest = max((new[0][key][1] for key in moments), default=0.0)
    gradients = {key: _difference(new[0][key], new[1][key], largest) for key in moments}
    for kind, differences in (("gradient", gradients), ("update", _updates(old, new))):
        if differences:
            key, typical = max(differences, key=differences.__getitem__), median(differences.values())
            if not typical <= ALIKE * bound:
                yield Jump(kind, "", typical, drift)
            elif not differences[key] <= JUMP * max(bound, typical):
                yield Jump(kind, key.rpartition("/")[2], differences[key], typical)


def _joined(state: Values, keys: Iterable[str]) -> list[float]:
    """All parameters as one tensor."""
    return [math.fsum(column) for column in zip(*(state[key] for key in keys), strict=True)]


def _parameters(state: tuple[Values, Values]) -> list[str]:
    return [key for key in state[0] if "/" not in key and key in state[1]]


def _updates(old: tuple[Values, Values], new: tuple[Values, Values]) -> dict[str, float]:
    """Parameter -> the relative difference of what the step added to it."""
    differences: dict[str, float] = {}
    for key in _parameters(new):
        first, other = (
            [b - a for a, b in zip(o[key][2:], n[key][2:], strict=True)] for o, n in zip(old, new, strict=True)
        )
        # The projections' own mean square stands for the sum of squares, which no difference of two sums gives.
        squares = max(_mean_square(first), _mean_square(other))
        differences[key] = _distance(first, other) / math.sqrt(squares) if squares else 0.0
    return differences


def _difference(first: list[float], other: list[float], largest: float = 0.0) -> float:
    """Relative to the tensor's norm, of tensors that are sums over data shards; `largest`: a sum of squares."""
    squares = max(first[1], other[1], _SMALL**2 * largest)
    return _distance(first[2:], other[2:]) / math.sqrt(squares) if squares else 0.0


def _mean_difference(first: list[float], other: list[float], _: float = 0.0) -> float:
    """The same of tensors that each data shard may have whole: a row's mean, by the smaller number of elements."""
    elements = min(first[0], other[0])
    scaled = [[value * elements / values[0] for value in values] for values in (first, other)]
    # Copies of one tensor add up as its rows would: projections and squares both grow with their number.
    norms = [math.sqrt(values[1]) for values in scaled]
    largest = max(norms)
    return max(_distance(scaled[0][2:], scaled[1][2:]), abs(norms[0] - norms[1])) / largest if largest else 0.0


def _distance(first: list[float], other: list[float]) -> float:
    """Root of the mean square; an estimate of the norm of the tensors' difference. Infinite where one isn't finite."""
    distance = math.sqrt(_mean_square([a - b for a, b in zip(first, other, strict=True)]))
    return distance if math.isfinite(distance) else math.inf


def _mean_square(values: list[float]) -> float:
    return math.fsum(value * value for value in values) / len(values)


def _words(jump: Jump, keys: list[str]) -> tuple[str, str]:
    """The module at fault, and a sentence about it."""
    match jump:
        case Jump("data"):
            return "", "the batches differ: the data, not the model"
        case Jump("gradient" | "update", ""):
            return (
                "",
                f"the {jump.kind}s of all parameters differ alike: their sum over devices, clipping or the optimizer",
            )
        case Jump("weights" | "gradient" | "update"):
            sentence = {
                "weights": "starts with other values",
                "gradient": "gets another gradient, although the gradients of all activations agree",
                "update": "gets another update from the same gradient: the optimizer",
            }[jump.kind]
            return jump.key.rpartition(".")[0], f"{jump.key} {sentence}"
        case _:
            _, place, name, *_ = jump.key.split("|")
    given, made = ("input", "output") if jump.kind == "forward" else ("gradient of the output", "gradient of the input")
    if (place == "out") == (jump.kind == "forward"):
        return name, f"{name or 'the model'}: the {made} differs, although its {given} and all that it calls agree"
    known = {key.split("|")[2] for key in keys}  # a list of layers has no forward of its own
    caller = name.rpartition(".")[0]
    while caller not in known:
        caller = caller.rpartition(".")[0]
    side = "before" if jump.kind == "forward" else "after"
    what = f"{caller or 'the model'}: what its own forward computes {side} {name} differs, although all {given}s agree"
    return caller, what if jump.kind == "forward" else what.replace("computes", "sends back from")
