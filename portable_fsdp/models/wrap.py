"""Which modules are units: gathered, cast, checkpointed and freed together."""

from torch import nn

from portable_fsdp.config.patterns import matching
from portable_fsdp.config.schema import Precision, Sharding
from portable_fsdp.runtime.errors import ConfigError


def find_layers(model: nn.Module, sharding: Sharding) -> tuple[str, ...]:
    """FQNs of the model's repeated blocks, in the order of definition: what is recomputed, scanned and compiled.

    They are the modules of `sharding.wrap_classes`, else transformers' `_no_split_modules`; a layer inside a layer
    belongs to the outer one. Raises ConfigError where the model has none of a class, or names none.
    """
    classes = set(sharding.wrap_classes) or set(getattr(model, "_no_split_modules", None) or ())
    layers: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{layer}.") for layer in layers)
        if type(module).__name__ in classes and not inside:
            layers.append(name)
    if not layers:
        found = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"{type(model).__name__}: expected at least one layer of the class(es) {sorted(classes) or '(none named)'},"
            f" found none.\n  The model has: {', '.join(found)}."
        )
    return tuple(layers)


def find_units(model: nn.Module, sharding: Sharding) -> tuple[str, ...]:
    """FQNs of the units, outer ones before those inside them. What is in no unit belongs to the root."""
    return find_layers(model, sharding)


def modules_of_own_dtype(model: nn.Module, precision: Precision) -> dict[str, str]:
    """FQN -> dtype of the outermost modules that `precision.modules` names; the first pattern that matches counts."""
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    found: dict[str, str] = {}
    for pattern, dtype in precision.modules.items():
        for name in matching("precision.modules", pattern, names):
            if not any(name == outer or name.startswith(f"{outer}.") for outer in found):
                found[name] = dtype
    return {name: found[name] for name in names if name in found}
