"""Find the modules that are units (gathered and freed together), layers, recomputed, or have their own dtype."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from portable_fsdp.config.describe import is_inside, matching
from portable_fsdp.config.schema import Memory, Precision, Sharding
from portable_fsdp.models.weights import names_of_weights
from portable_fsdp.runtime.errors import ConfigError


def find_layers(model: nn.Module, sharding: Sharding) -> tuple[str, ...]:
    """Return the FQNs of the model's repeated blocks, which are recomputed, scanned, compiled, in definition order.

    They are the modules of `sharding.wrap_classes`, else of transformers' `_no_split_modules`, else of the classes that
    lists hold several times; a layer inside a layer belongs to the outer one, and neither the embedding nor the head is
    one. A model may have none. Raises ConfigError for a class of `wrap_classes` that can't be a unit, and for a model
    of transformers with blocks that doesn't name them.
    """
    own, classes = _of_wrap_classes(model, sharding.wrap_classes), set(sharding.wrap_classes)
    if not classes:
        classes, repeated = set(getattr(model, "_no_split_modules", None) or ()), _repeated(model)
        if not classes and not repeated:
            return ()
        if not classes and not hasattr(model, "_no_split_modules"):  # no model of transformers
            classes = set(repeated)
        own = [name for name, kind in _possible_units(model).items() if kind in classes]
    tables = _tables(model)
    layers = _outermost(name for name in own if name not in tables)
    if not layers:
        blocks = _repeated(model) or sorted({*_possible_units(model).values()})
        raise ConfigError(
            f"{type(model).__name__}: found no layer of the class(es) {sorted(classes) or '(none named)'}.\n"
            f"  Set sharding.wrap_classes to the class of its blocks: {' or '.join(blocks)}."
        )
    return tuple(layers)


def _repeated(model: nn.Module) -> list[str]:
    """Return the classes of blocks that a list of modules holds several times; a block has modules inside."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    blocks = [m for each in lists for m in each if not isinstance(m, nn.ModuleList | nn.ModuleDict)]  # without forward
    counts = Counter(type(m).__name__ for m in blocks if any(True for _ in m.children()))
    return [name for name, count in counts.items() if count > 1]


def find_units(model: nn.Module, sharding: Sharding) -> tuple[str, ...]:
    """Return the FQNs of the units, outer ones before inner ones. Modules in no unit belong to the root.

    TRANSFORMER_BASED_WRAP: all modules of `wrap_classes`, else the layers; also the embedding and the head, which would
    otherwise stay gathered as long as the root. SIZE_BASED_WRAP: see `_by_size`. NO_WRAP: none. In addition the
    outermost modules that each pattern of `wrap_modules` matches: with NO_WRAP, units chosen by hand.

    One unit gathers a tied weight. So a module with only some of its uses is no unit; raises ConfigError if the user
    named it by class or pattern.
    """
    by_hand = set(_of_patterns(model, sharding.wrap_modules))
    by_policy: set[str] = set()
    if sharding.wrap == "TRANSFORMER_BASED_WRAP":
        by_hand |= set(_of_wrap_classes(model, sharding.wrap_classes))
        by_policy = set() if sharding.wrap_classes else set(find_layers(model, sharding))
        by_policy |= {name for name in _tables(model) if not is_inside(name, by_hand | by_policy)}
    elif sharding.wrap == "SIZE_BASED_WRAP" and sharding.min_num_params is not None:
        by_policy = set(_by_size(model, sharding.min_num_params))
    for places in _shared(model):
        splitting = {name for name in by_hand | by_policy if len({is_inside(place, [name]) for place in places}) > 1}
        for name in sorted(splitting & by_hand):
            raise ConfigError(
                f"sharding: {name} ({type(model.get_submodule(name)).__name__}) can't be a unit: a weight belongs "
                f"to one unit, and it shares one with another module: {', '.join(places)}.\n"
                "  Leave it out of sharding.wrap_classes and sharding.wrap_modules."
            )
        by_policy -= splitting
    return tuple(name for name, _ in model.named_modules() if name in by_hand | by_policy)


def recomputed_layers(model: nn.Module, layers: Sequence[str], memory: Memory) -> tuple[str, ...]:
    """Return the modules that gradient checkpointing recomputes: the outermost of `memory.classes`, else `layers`.

    Raises ConfigError for an unknown class and for an `every` above their count.
    """
    if memory.gradient_checkpointing in ("none", "budget"):
        return ()
    if memory.classes:
        kinds = {name: type(module).__name__ for name, module in model.named_modules() if name and _has_forward(module)}
        layers = _outermost(_of_classes("memory.classes", "run", model, memory.classes, kinds))
    if not layers:
        raise ConfigError(
            "memory.gradient_checkpointing: the model has no repeated blocks.\n"
            "  Name their classes in memory.classes, or set memory.gradient_checkpointing=none."
        )
    every = memory.every or 1
    if every > len(layers):
        raise ConfigError(
            f"memory.every: expected at most {len(layers)} (the layers of the model, or of memory.classes), found "
            f"{every}.\n  Lower it, or set memory.gradient_checkpointing=full and memory.every=null."
        )
    return tuple(layers[::every])


def modules_of_own_dtype(model: nn.Module, precision: Precision) -> dict[str, str]:
    """FQN -> dtype of the outermost modules that `precision.modules` matches; the first matching pattern applies.

    Includes only modules that run and hold parameters, and with each of them those that share a weight with it, since a
    weight is cast once. Raises ConfigError for a pattern whose modules all match an earlier one, for a module that
    holds one of another dtype, and for a shared weight with two dtypes.
    """
    names = list(_possible_units(model))
    dtypes: dict[str, str] = {}
    for pattern, dtype in precision.modules.items():
        before = len(dtypes)
        for name in matching("precision.modules", pattern, names):
            if is_inside(name, dtypes):
                continue
            inner = next((inner for inner in dtypes if is_inside(inner, [name])), None)
            if inner is not None:
                raise ConfigError(
                    f"precision.modules: {pattern!r} matches {name} ({dtype}), which contains {inner} "
                    f"({dtypes[inner]}): these can't be nested.\n  Name the modules beside it instead."
                )
            dtypes[name] = dtype
        if len(dtypes) == before:
            raise ConfigError(
                f"precision.modules: all modules that {pattern!r} matches also match an earlier pattern, which "
                "applies.\n  Leave it out, or put it first."
            )
    for places in _shared(model):
        owners = [place.rpartition(".")[0] for place in places]
        shared = {owner: dtypes[outer] for owner in owners for outer in dtypes if is_inside(owner, [outer])}
        if len(set(shared.values())) > 1:
            raise ConfigError(
                f"precision.modules: expected one dtype for {' and '.join(owners)}, which share a weight, found "
                f"{' and '.join(sorted(set(shared.values())))}.\n  Set the same dtype for them."
            )
        if shared:
            dtypes |= {owner: next(iter(shared.values())) for owner in owners if owner not in shared}
    return {name: dtypes[name] for name in names if name in dtypes}


def _by_size(model: nn.Module, min_num_params: int) -> list[str]:
    """Return units by size, bottom up: modules whose parameters outside smaller units reach the number.

    Like torch's `size_based_auto_wrap_policy` (torch/distributed/fsdp/wrap.py, `_recursive_wrap`). A tied weight counts
    in the smallest module that holds all its uses.
    """
    homes = {id(parameter): fqn.rpartition(".")[0] for fqn, parameter in model.named_parameters()}
    for places in _shared(model):
        home = places[0].rpartition(".")[0]
        while home and not all(is_inside(place, [home]) for place in places):
            home = home.rpartition(".")[0]
        homes[id(model.get_parameter(places[0]))] = home
    units: list[str] = []

    def taken(name: str, module: nn.Module) -> int:
        """Add the units in a module; return the number of its parameters in units."""
        total = sum(p.numel() for p in module.parameters() if is_inside(homes[id(p)], [name]))
        if total < min_num_params:
            return 0
        inside = sum(taken(f"{name}.{leaf}", child) for leaf, child in module.named_children())
        if total - inside < min_num_params or not _has_forward(module):
            return inside
        units.append(name)
        return total

    for leaf, child in model.named_children():
        taken(leaf, child)
    return units


# ------------------------------------------------------------------------------------------------ names in a model


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the names that are inside no other; `names` are in definition order."""
    kept: list[str] = []
    for name in names:
        if not is_inside(name, kept):
            kept.append(name)
    return kept


def _has_forward(module: nn.Module) -> bool:
    """Whether the module runs. Lists and dicts of modules don't: nothing could gather them before that."""
    return type(module).forward is not nn.Module.forward


def _possible_units(model: nn.Module) -> dict[str, str]:
    """FQN -> class of each module that runs and holds parameters (a rotary embedding has none to gather)."""
    modules = {name: module for name, module in model.named_modules() if name and _has_forward(module)}
    return {name: type(m).__name__ for name, m in modules.items() if any(True for _ in m.parameters())}


def _of_classes(key: str, what: str, model: nn.Module, classes: Collection[str], kinds: Mapping[str, str]) -> list[str]:
    """Return the FQNs of the modules of `classes`. `kinds`: FQN -> class of the modules that satisfy `what`.

    Raises ConfigError for unknown `classes`.
    """
    known = sorted({*kinds.values()})
    if wrong := [name for name in classes if name not in known]:
        raise ConfigError(
            f"{key}: expected classes of modules in {type(model).__name__} that {what}, found {', '.join(wrong)}.\n"
            f"  The model has: {', '.join(known)}."
        )
    return [name for name, kind in kinds.items() if kind in classes]


def _of_wrap_classes(model: nn.Module, classes: Collection[str]) -> list[str]:
    return _of_classes("sharding.wrap_classes", "run and hold parameters", model, classes, _possible_units(model))


def _of_patterns(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    chosen = [name for pattern in patterns for name in _outermost(matching("sharding.wrap_modules", pattern, names))]
    for name in chosen:
        module = model.get_submodule(name)
        if not _has_forward(module):
            raise ConfigError(
                f"sharding.wrap_modules: {name}, a {type(module).__name__}, has no forward: it only holds other "
                f"modules.\n  Name them: {name}.*."
            )
    return chosen


def table_weights(model: nn.Module) -> list[str]:
    """Return the FQNs of the weights of all embeddings and of the head, if the model names it."""
    names = {*_tables(model), *(name for name, module in model.named_modules() if isinstance(module, nn.Embedding))}
    return [fqn for fqn, _ in model.named_parameters() if fqn.rpartition(".")[0] in names]


def _tables(model: nn.Module) -> list[str]:
    """Return the FQNs of the embedding and of the head, if the model has them."""
    tables: list[Any] = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        with suppress(NotImplementedError):  # transformers' own method, of a model without a vocabulary
            tables.append(getattr(model, name, lambda: None)())
    return [name for name, module in model.named_modules() if any(module is table for table in tables)]


def _shared(model: nn.Module) -> list[list[str]]:
    """Return all FQNs of each tied parameter."""
    return [names for names in names_of_weights(model).values() if len(names) > 1]
