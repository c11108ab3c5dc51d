"""What a worker is given and writes, and the certificate, as JSON; and the bounds of the verdict. No torch here."""

import math
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from portable_fsdp.config.schema import Config

Stage = Literal["data", "weights", "forward", "backward", "gradient", "update"]


class Bounds(NamedTuple):
    """Relative differences of losses up to step 20 and up to the last step, as README.md promises them, and of gradient
    norms, as the project's own tests of curves hold them."""

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
    model_config = ConfigDict(ser_json_inf_nan="strings")  # JSON has no number for them


class Place(_Json):
    device: str
    engine: str
    devices: int

    def __str__(self) -> str:
        return f"{self.engine}:{self.devices}"


class RunTask(_Json):
    config: str  # JSON
    steps: int
    records: bool = False  # each module's tensors too


class PlaceTask(_Json):
    place: Place
    runs: list[RunTask]
    module: str  # the worker
    out: str  # a file of as many lines, PlaceRecords


class PlaceRecord(_Json):
    """What one place computed. Lists are by step; `state` has one more, from before the first step."""

    place: Place
    device_name: str
    versions: dict[str, str]
    losses: list[float] = []
    grad_norms: list[float] = []
    modules: list[dict[str, list[float]]] = []
    state: list[dict[str, list[float]]] = []


class Culprit(_Json):
    """The first thing that differs although all that it depends on agrees."""

    step: int
    kind: Stage
    layer: str  # the module's name; empty: the model itself, or all parameters
    parameter: str  # whose update in that step differs most
    what: str
    key: str  # of the recorded tensor
    relative: float
    before: float  # the largest difference of what comes before it


class Deviation(_Json):
    """Relative differences of one place from the first, by step."""

    place: Place
    losses: list[float]
    grad_norms: list[float]
    first_step: int | None  # beyond a bound
    culprit: Culprit | None = None
    remark: str = ""


class Certificate(_Json):
    schema_version: Literal[1] = 1
    verdict: Literal["equal", "differs", "not compared"]
    config: str  # JSON
    records: list[PlaceRecord]
    deviations: list[Deviation]


def deviation(config: Config, first: PlaceRecord, other: PlaceRecord) -> Deviation:
    """Raises ValueError for records of different lengths."""
    limit, first_step = bounds(config), None
    skips = "float16" in config.precision.dtypes  # a step whose gradients overflow, in both places alike
    losses = [*map(_relative, first.losses, other.losses)]
    norms = [
        0.0 if skips and not any(map(math.isfinite, pair)) else _relative(*pair)
        for pair in zip(first.grad_norms, other.grad_norms, strict=True)
    ]
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        if loss > (limit.loss if step <= 20 else limit.loss_after_20) or norm > limit.norm:
            first_step = first_step or step
    return Deviation(place=other.place, losses=losses, grad_norms=norms, first_step=first_step)


def _relative(first: float, other: float) -> float:
    """Infinite unless both are finite."""
    if not (math.isfinite(first) and math.isfinite(other)):
        return math.inf
    return abs(first - other) / (max(abs(first), abs(other)) or 1.0)
