"""The base of every section of the config."""

from typing import Annotated

from annotated_types import Ge, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict


def _float_from_yaml(value: object) -> object:
    """YAML 1.1 reads `3e-4` (no dot) as a string; take it as the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Float = Annotated[float, BeforeValidator(_float_from_yaml)]
DecayRate = Annotated[float, BeforeValidator(_float_from_yaml), Ge(0), Lt(1)]


class Section(BaseModel):
    """Frozen, with strict keys and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
