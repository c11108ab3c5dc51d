"""What a place is told to do, what it writes, and the certificate of several: JSON, by pydantic. No torch here."""

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from portable_fsdp.config.schema import Config

Kind = Literal["data", "weights", "forward", "backward", "gradient", "update"]
EXACT_STEPS, LAST_STEP = 20, 50
_NOT_FINITE = ConfigDict(ser_json_inf_nan="strings")  # JSON has no number for them


def loss_bound(config: Config, step: int) -> float:
    """The relative difference of losses that the project promises (docs/parity.md) up to a step."""
    if not is_float32(config):
        return 2e-3
    return 1e-5 if step <= EXACT_STEPS else 5e-5


def norm_bound(config: Config) -> float:
    """Of gradient norms, for which there is no promise: what the project's own tests of curves hold."""
    return 2e-3 if is_float32(config) else 1e-1


def is_float32(config: Config) -> bool:
    """Whether no operation has fewer digits."""
    precision = config.precision
    dtypes = {precision.master, precision.compute, precision.reduce, precision.output, *precision.modules.values()}
    return dtypes <= {"float32", "auto"} and precision.matmul == "highest"


class Place(BaseModel):
    """An engine with a number of devices."""

    device: str
    engine: str
    devices: int

    def __str__(self) -> str:
        return f"{self.engine}:{self.devices}"


class PlaceTask(BaseModel):
    """Of one worker."""

    place: Place
    config: str  # JSON
    steps: int
    records: bool  # each module's tensors too
    processes: int
    module: str  # the worker
    out: str


class RunRecord(BaseModel):
    """What one place computed."""

    model_config = _NOT_FINITE

    place: Place
    device_name: str
    versions: dict[str, str]
    losses: list[float] = []
    grad_norms: list[float] = []
    modules: list[dict[str, list[float]]] = []  # by step; see StepRecorder
    state: list[dict[str, list[float]]] = []  # before the first step, and after each


class Culprit(BaseModel):
    """The first thing that differs although all that it depends on agrees."""

    model_config = _NOT_FINITE

    step: int
    kind: Kind
    layer: str  # the module's name; empty: the model's own forward, or all parameters
    parameter: str  # whose update in that step differs most
    what: str
    key: str  # of the record
    relative: float
    before: float  # the largest difference of what comes before it


class Deviation(BaseModel):
    """Of one place from the first."""

    model_config = _NOT_FINITE

    place: Place
    losses: list[float]  # relative differences by step
    grad_norms: list[float]
    first_step: int | None  # beyond a bound
    culprit: Culprit | None = None
    remark: str = ""


class Certificate(BaseModel):
    """Written as certificate.json; certificate.md is the same for people."""

    model_config = _NOT_FINITE

    schema_version: Literal[1] = 1
    verdict: Literal["equal", "differs", "not compared"]
    config: dict[str, Any]
    records: list[RunRecord]
    deviations: list[Deviation]


def relative(first: float, second: float) -> float:
    """|a - b| / max(|a|, |b|); infinite unless both are finite."""
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / (max(abs(first), abs(second)) or 1.0)


def deviation(config: Config, first: RunRecord, other: RunRecord) -> Deviation:
    losses = [relative(*pair) for pair in zip(first.losses, other.losses, strict=True)]
    norms = [relative(*pair) for pair in zip(first.grad_norms, other.grad_norms, strict=True)]
    beyond = (
        step
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1)
        if loss > loss_bound(config, step) or norm > norm_bound(config)
    )
    return Deviation(place=other.place, losses=losses, grad_norms=norms, first_step=next(beyond, None))
