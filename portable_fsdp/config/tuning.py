"""The record of a tuning, CONFIG.tuning.json: `tune` writes it, `launch --tuned` and `plan --compare` read it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from portable_fsdp.config.describe import Settings, option_names, value_of, yaml_value
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import UsageError, without_passwords
from portable_fsdp.runtime.files import read_regular

TUNED = (
    *("memory.gradient_checkpointing", "memory.save_ops", "memory.every", "memory.budget", "memory.classes"),
    *("memory.offload", "memory.cpu_offload", "compile.enabled", "compile.backend", "compile.cache_dir"),
    *("compile.scan_layers", "train.micro_batch", "sharding.strategy", "sharding.forward_prefetch"),
    *("model.attention", "precision.reduce"),
)
"""The keys that a tuning may change: none changes the curve beyond the rounding of the config's dtypes."""

SPEED = (
    *("model.", "data.", "sharding.", "precision.", "memory.", "compile."),
    *("train.task", "train.micro_batch", "train.global_batch", "optim.name", "optim.factory"),
)
"""Prefixes of the keys that decide how fast a step is, and what fits."""


def speed_settings(config: Config) -> Settings:
    """Return the values of the keys that decide the speed, in YAML, without passwords."""
    keys = (key for key in option_names() if key.startswith(SPEED))
    return {key: without_passwords(yaml_value(value_of(config, key))) for key in keys}


class Candidate(BaseModel):
    """Settings with what was measured, or why they were not used."""

    settings: Settings  # what differs from the config
    expected: float | None = None  # seconds of a step, by plan; None: the hardware's speed isn't known
    seconds: float | None = None  # median of a step; on CPUs process 0's processor time, which others disturb less
    spread: float | None = None  # largest less smallest, seconds
    trials: int = 0  # `seconds` and `spread` are those of the fastest
    memory_bytes: int | None = None  # peak of the fullest device of process 0
    loss_difference: float | None = None  # largest relative one from the reference
    problem: str = ""
    trial_s: float = 0.0  # seconds of the first trial, with start and compilation

    @property
    def words(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings.items()) or "the config's own settings"


class Tuning(BaseModel):
    """All of a tuning: what ran, where, and what was measured."""

    schema_version: Literal[1] = 1
    config: str  # path
    base: Settings  # `speed_settings` of the config, which the candidates change
    engine: str
    device_name: str
    devices: int
    versions: dict[str, str]
    candidates: list[Candidate]  # the reference first
    own: Settings = {}  # the config's own values, where `auto` needs one
    chosen: Settings  # empty: nothing is faster than the config itself

    @property
    def where(self) -> str:
        return place_words(self.engine, self.device_name, self.devices)

    def differences(self, config: Config, where: str, versions: Mapping[str, str]) -> Iterator[str]:
        """Yield why it doesn't hold for a run of `config`; nothing if it does. `where`: of `place_words`."""
        if where != self.where:
            yield f"measured on {self.where}, this is {where}"
        for name in sorted(self.versions.keys() | versions.keys()):
            if self.versions.get(name) != versions.get(name):
                yield f"{name} was {self.versions.get(name, 'missing')}, is {versions.get(name, 'missing')}"
        for key, value in speed_settings(config).items():
            if value != self.base.get(key):
                yield f"the config now has {key}={value}"

    @property
    def over_expected(self) -> list[float]:
        """Measured over expected seconds of the candidates that have both."""
        pairs = [(each.seconds, each.expected) for each in self.candidates if not each.problem]
        return [seconds / expected for seconds, expected in pairs if seconds and expected]


def place_words(engine: str, device_name: str, devices: int) -> str:
    return f"{devices} x {device_name}, backend {engine}"


def first_problem(error: ValidationError) -> str:
    """Return the first problem, with its key if it has one."""
    first = error.errors()[0]
    return f"{first['msg']}{' at ' if first['loc'] else ''}{'.'.join(map(str, first['loc']))}"


def tuning_file(config: Path) -> Path:
    """Return the path of a config's record."""
    return config.with_suffix(".tuning.json")


def read_tuning(path: Path) -> Tuning:
    """Read a record. Raises UsageError if it is missing, invalid, or changes other keys than tune does."""
    try:
        tuning = Tuning.model_validate_json(read_regular(path))
        others = [key for key in tuning.chosen if key not in TUNED]
        if not others:
            return tuning
        reason = f"tune doesn't change {others[0]}"
    except OSError as error:
        reason = error.strerror or f"{error}"
    except ValidationError as error:
        reason = first_problem(error)
    raise UsageError(
        f"{path}: not a record of tune: {reason}.\n  python -m portable_fsdp.tune --config=... writes one."
    )
