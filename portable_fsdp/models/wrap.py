"""Which modules are units: gathered, cast, checkpointed and freed together."""

from torch import nn

from portable_fsdp.runtime.errors import ConfigError


def find_units(model: nn.Module) -> tuple[str, ...]:
    """FQNs of the model's own layers (transformers' `_no_split_modules`), in the order of definition.

    A layer inside a layer belongs to the outer one. What is in no unit (embedding, last norm, head) belongs to the
    root. Raises ConfigError where the model names no layer class, or has none of it.
    """
    classes: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    units: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{unit}.") for unit in units)
        if type(module).__name__ in classes and not inside:
            units.append(name)
    if not units:
        found = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"{type(model).__name__}: expected at least one layer of the class(es) {sorted(classes) or '(none named)'},"
            f" found none.\n  The model has: {', '.join(found)}."
        )
    return tuple(units)
