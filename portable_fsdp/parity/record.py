"""JSON forms of a place's task, its record and the certificate; the verdict's bounds, and the culprit. No torch here.

`find_culprit` finds the first operation that differs in two records of the same steps although its inputs agree. Events
are in chronological order, so an event's inputs come before it. Rounding grows gradually; a wrong operation is a jump:
a difference beyond the bound, and JUMP times that of every earlier event.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from portable_fsdp.config.describe import with_settings
from portable_fsdp.config.schema import Config

Stage = Literal["data", "weights", "forward", "backward", "gradient", "update"]


class Bounds(NamedTuple):
    """Largest relative differences of losses up to step 20 and up to the last step, as README.md promises, and of
    gradient norms, as in the project's tests of loss curves."""

    loss: float
    loss_after_20: float
    norm: float
    steps: int


def bounds(config: Config) -> Bounds:
    precision = config.precision
    used = {precision.master, precision.reduce, precision.output, *config.precision.dtypes}
    if used <= {"float32", "auto"} and precision.matmul == "highest":
        return Bounds(1e-5, 5e-5, 2e-3, 50)
    return Bounds(2e-3, 2e-3, 1e-1, 20)


class _Json(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")  # JSON has no inf and NaN


def without_side_effects(config: Config) -> Config:
    """Return the config of a run whose first steps are compared: it resumes nothing, and no tracker or profile runs."""
    return with_settings(config, {"checkpoint.resume": "none", "observe.trackers": "[]", "observe.profile": "null"})


class Place(_Json):
    device: str
    engine: str
    devices: int

    def __str__(self) -> str:
        return f"{self.engine}:{self.devices}"


class RunTask(_Json):
    config: str  # JSON
    steps: int
    records: bool = False  # record each module's tensors too


class PlaceTask(_Json):
    place: Place
    runs: list[RunTask]
    module: str  # the worker


class PlaceRecord(_Json):
    """Results of one place. Lists are by step; `state` has one more item, from before the first step."""

    place: Place
    device_name: str
    versions: dict[str, str]
    losses: list[float] = []
    grad_norms: list[float] = []
    seconds: list[float] = []
    cpu_seconds: list[float] = []  # processor time of process 0
    memory_bytes: int | None = None  # peak of the fullest device of process 0
    modules: list[dict[str, list[float]]] = []
    state: list[dict[str, list[float]]] = []


class Culprit(_Json):
    """The first operation that differs although its inputs agree."""

    step: int
    kind: Stage
    layer: str  # name of the module; empty: the model itself, or all parameters
    parameter: str  # the parameter whose update in that step differs most
    what: str
    key: str  # key of the recorded tensor
    relative: float
    before: float  # the largest difference of earlier events


class Deviation(_Json):
    """Relative differences of one place from the first, by step."""

    place: Place
    losses: list[float]
    grad_norms: list[float]
    first_step: int | None  # first step beyond a bound
    culprit: Culprit | None = None
    remark: str = ""


class Certificate(_Json):
    schema_version: Literal[1] = 1
    verdict: Literal["equal", "differs", "not compared"]
    config: str  # JSON
    records: list[PlaceRecord]
    deviations: list[Deviation]


def deviation(config: Config, first: PlaceRecord, other: PlaceRecord) -> Deviation:
    """Compare two places step by step. Raises ValueError for records of different lengths."""
    limit, first_step = bounds(config), None
    skips = "float16" in config.precision.dtypes  # both places skip a step whose gradients overflow
    losses = [*map(relative_difference, first.losses, other.losses)]
    norms = [
        0.0 if skips and not any(map(math.isfinite, pair)) else relative_difference(*pair)
        for pair in zip(first.grad_norms, other.grad_norms, strict=True)
    ]
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        if loss > (limit.loss if step <= 20 else limit.loss_after_20) or norm > limit.norm:
            first_step = first_step or step
    return Deviation(place=other.place, losses=losses, grad_norms=norms, first_step=first_step)


def relative_difference(first: float, other: float) -> float:
    """Return the relative difference; infinite unless both are finite."""
    if not (math.isfinite(first) and math.isfinite(other)):
        return math.inf
    return abs(first - other) / (max(abs(first), abs(other)) or 1.0)


# ---------------------------------------------------------------------------------------------------------- the culprit

JUMP = 10
ALIKE = 100
"""Multiple of the bound that the median difference of all gradients, or updates, never exceeds by rounding."""

_SMALL = 1e-3
"""A gradient below this share of the largest one counts as that large: a gradient that should be 0 is only rounding."""

_SENTENCES = {
    "weights": "has other initial values",
    "gradient": "has another gradient although those of all activations agree: a product, a sum over devices, clipping",
    "update": "gets another update from the same gradient: the optimizer",
}

Values = Mapping[str, Any]
"""Key -> array of [element count, sum of squares, projections]."""

Pair = Sequence[Values]
"""Values of the first place and of another."""


class Jump(NamedTuple):
    """A difference that stands out; an empty key means all parameters alike."""

    kind: Stage
    key: str
    relative: float
    before: float


def find_culprit(first: PlaceRecord, other: PlaceRecord, bound: float) -> Culprit | None:
    """Return the culprit of the earliest step that has one; None if no difference stands out."""
    for step in range(1, len(first.modules) + 1):
        modules = [_arrays(record.modules[step - 1]) for record in (first, other)]
        old, new = ([_arrays(record.state[at]) for record in (first, other)] for at in (step - 1, step))
        changes = [{key: _update(old[i][key], new[i][key]) for key in _parameters(old)} for i in (0, 1)]
        updates = _differences(changes, list(changes[0]))
        for jump in _jumps(step, modules, old, new, updates, bound):
            layer, what = _words(jump, modules[0])
            named = jump.key if jump.kind in _SENTENCES else ""
            parameter = named or max(updates, key=lambda key: updates[key])
            return Culprit(step=step, layer=layer, parameter=parameter, what=what, **jump._asdict())
    return None


def _jumps(
    step: int, modules: Pair, old: Pair, new: Pair, updates: Mapping[str, float], bound: float
) -> Iterator[Jump]:
    weights = _parameters(old)
    if step == 1:
        yield from _outlier("weights", _differences(old, weights), bound)
    drift = _relative(*(sum(state[key] for key in weights) for state in old))
    for kind in ("forward", "backward"):
        keys, before = [key for key in modules[0] if key in modules[1] and key.startswith(kind)], drift
        small = _SMALL if kind == "backward" else 0.0
        parts = modules if small else [{key: _once(part[key], modules, key) for key in keys} for part in modules]
        for key, relative in _differences(parts, keys, small).items():
            if not relative <= max(bound, JUMP * before):
                yield Jump("data" if "|in||" in key else kind, key, relative, before)
            before = max(before, relative)
    moments = [key for key in new[0] if "/" in key and key in new[1]]
    yield from _outlier("gradient", _differences(new, moments, _SMALL), bound)
    yield from _outlier("update", updates, bound)


def _outlier(kind: Stage, differences: Mapping[str, float], bound: float) -> Iterator[Jump]:
    """Yield the key that differs most, if it stands out; or an empty key if most differ."""
    if not differences:
        return
    key, typical = max(differences, key=lambda key: differences[key]), median(differences.values())
    if not typical <= ALIKE * bound:
        yield Jump(kind, "", typical, 0.0)
    elif not differences[key] <= JUMP * max(bound, typical):
        yield Jump(kind, key.rpartition("/")[2], differences[key], typical)


def _once(value: Any, modules: Pair, key: str) -> Any:
    """Scale back a tensor whose copies were summed: in a forward each data shard may have the same tensor."""
    return value * (min(part[key][0] for part in modules) / value[0])


def _differences(parts: Pair, keys: list[str], small: float = 0.0) -> dict[str, float]:
    floor = small**2 * max((parts[0][key][1] for key in keys), default=0.0)
    return {key: _relative(parts[0][key], parts[1][key], floor) for key in keys}


def _arrays(values: Mapping[str, list[float]]) -> Values:
    return {key: np.array(row) for key, row in values.items()}


def _parameters(state: Pair) -> list[str]:
    return [key for key in state[0] if "/" not in key and key in state[1]]


def _update(old: Any, new: Any) -> Any:
    """Return a step's change. Sums of squares don't subtract: the mean square of the projections replaces theirs."""
    return np.array([new[0], np.mean((new - old)[2:] ** 2), *(new - old)[2:]])


def _relative(first: Any, other: Any, floor: float = 0.0) -> float:
    """Return the root mean square of the projections' differences, which estimates the norm of the tensors' difference,
    over the larger norm (`floor`: its least square). Infinite if one isn't finite, 0 if neither is."""
    if not (np.isfinite(first[1:]).all() or np.isfinite(other[1:]).all()):
        return 0.0
    square = np.mean((first[2:] - other[2:]) ** 2) / (max(first[1], other[1], floor) or 1.0)
    return float(np.sqrt(square)) if np.isfinite(square) else np.inf


def _words(jump: Jump, modules: Values) -> tuple[str, str]:
    """Return the module at fault, and a sentence about it."""
    if jump.kind == "data":
        return "", "the batches differ: the data, not the model"
    if jump.kind in _SENTENCES:
        return jump.key.rpartition(".")[0], f"{jump.key or 'each parameter alike'} {_SENTENCES[jump.kind]}"
    _, place, name, *_ = jump.key.split("|")
    forward = jump.kind == "forward"
    if (place == "out") == forward:
        result = "output" if forward else "gradient of the input"
        return name, f"{name}: its {result} differs, although its inputs agree"
    known = {"", *(key.split("|")[2] for key in modules)}
    caller = name.rpartition(".")[0]
    while caller not in known:  # a list of layers has no forward of its own
        caller = caller.rpartition(".")[0]
    what = f"the input of {name}" if forward else f"the gradient of the output of {name}"
    return caller, f"{caller or 'the model'}: its own forward makes {what} differ, although everything before it agrees"
