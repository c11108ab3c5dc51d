"""Units are the model's own layers, by their names in the unwrapped model."""

import pytest
from small_models import build
from torch import nn

from portable_fsdp.config.schema import Sharding
from portable_fsdp.models.wrap import find_layers
from portable_fsdp.runtime.errors import ConfigError

LAYERS = {"llama": "model.layers", "gpt2": "transformer.h", "opt": "model.decoder.layers"}


@pytest.mark.parametrize("name", LAYERS)
def test_units_are_the_layers_in_order(name: str) -> None:
    assert find_layers(build(name).model, Sharding()) == (f"{LAYERS[name]}.0", f"{LAYERS[name]}.1")


class Layer(nn.Module):
    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)


def test_a_layer_inside_a_layer_belongs_to_the_outer_one() -> None:
    model = nn.Sequential(Layer(Layer()), nn.Linear(2, 2), Layer())
    model._no_split_modules = ["Layer"]  # pyright: ignore[reportArgumentType]
    assert find_layers(model, Sharding()) == ("0", "2")


@pytest.mark.parametrize("classes", [None, ["Layer"]])
def test_a_model_without_layers_is_refused(classes: list[str] | None) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model._no_split_modules = classes  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"(?s)at least one layer.*found none.*has: Linear, Sequential"):
        find_layers(model, Sharding())
