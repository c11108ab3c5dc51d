"""The tensor-parallel plan of a model: the weights that the mesh axis `tensor` splits, and what its modules do for it.

Devices along the axis get the same rows. Each holds a part of the heads of attention, of the width of MLPs and of the
vocabulary, as Megatron-LM does (arXiv 1909.08053, section 3). transformers names the words by module in
`base_model_tp_plan`; `sharding.plan` adds to them. Engines, planners and explain read the plan made here, which needs
no process group.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from portable_fsdp.config.describe import matching
from portable_fsdp.config.schema import Config, Sharding
from portable_fsdp.models.lora import is_adapter
from portable_fsdp.models.wrap import find_layers
from portable_fsdp.quantised import holds_inputs_first
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.tensor_plan import (
    COLWISE,
    EXPERTS,
    GATHERED,
    PACKED,
    ROWWISE,
    SPLIT_INPUT,
    SUMMED,
    WHOLE,
    WORDS,
    Part,
    TensorPlan,
)

_VOCABULARY = "embedding_rowwise"  # the embedding is split over the vocabulary anyway
_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "split_size")
"""Attributes by which an attention module counts heads, or the width of all of them."""


def tensor_plan(model: Any, config: Config) -> TensorPlan:
    """Make the plan of a model on meta for an axis of `sharding.tensor` devices.

    `sharding.plan` comes before the model's own words. Raises ConfigError for a model without a plan, an unknown word,
    a pattern without a module, and for sizes that the devices don't divide.
    """
    if not hasattr(model, "config"):
        name = type(model).__name__
        raise ConfigError(f"sharding.tensor: {name} isn't a model of transformers.\n  Set sharding.tensor=1.")
    size, own = config.sharding.tensor, config.sharding.plan
    layers = find_layers(model, Sharding())  # not those of wrap_classes, which may be parts of layers
    splits_rows = config.sharding.sequence_parallel
    if splits_rows == "auto":
        splits_rows = config.data.seq_len // config.sharding.context % size == 0
    splits_vocabulary = config.train.task == "causal_lm" and hasattr(model, "get_output_embeddings")
    words = _words(model, own)
    embedding = head = ""
    if splits_vocabulary:
        names = {module: name for name, module in model.named_modules()}
        embedding, head = names[model.get_input_embeddings()], names[model.get_output_embeddings()]
    for name in {embedding, head} & words.keys():
        word = words.pop(name)
        if any(fnmatchcase(name, pattern) for pattern in own):
            raise ConfigError(
                f"sharding.plan: {name}: {word}: embedding and head are split over the vocabulary anyway.\n"
                "  Leave them out of sharding.plan."
            )
    words_of_blocks = _blocks(words)
    _check_blocks(model, words, words_of_blocks)
    blocks = tuple(words_of_blocks)
    _check_heads(model, words, size)
    parts: dict[str, Part] = {}
    summed: set[str] = set()
    whole_heads: dict[str, tuple[int, int]] = {}
    for name, word in words.items():
        splits_outputs = word in (COLWISE, PACKED, GATHERED)
        if splits_outputs and (heads := _key_value_heads(model, name, size)) is not None:
            whole_heads[name] = heads
        if word == SUMMED or name in whole_heads:
            summed |= {f"{name}.{leaf}" for leaf, _ in model.get_submodule(name).named_parameters()}
        elif word == EXPERTS:
            parts |= _parts_of_experts(name, model.get_submodule(name), size)
        else:
            of_module, whole = _parts_of_linear(model, name, word, size)
            parts |= of_module
            summed |= whole
    for name in filter(None, (embedding, head)):
        for leaf, weight in model.get_submodule(name).named_parameters():
            fqn = next(fqn for fqn, known in model.named_parameters() if known is weight)  # a tied one has two
            if is_adapter(leaf) or leaf not in ("weight", "bias"):
                raise ConfigError(f"sharding.tensor: {name}.{leaf}: adapters of the embedding or head can't be split.")
            parts[fqn] = Part(0, (weight.shape[0],))
    whole_blocks: tuple[str, ...] = ()
    if splits_rows:
        whole_blocks = _whole_blocks(model, layers, blocks)
        # What works on a part of the rows: all in the layers but blocks, and the biases that are added to their sums.
        inside = tuple(f"{name}." for name in (*blocks, *whole_blocks))
        of_layers = tuple(f"{name}." for name in layers)
        takes_parts = [name for name, word in words.items() if word in (ROWWISE, SPLIT_INPUT)]
        biases = {f"{name}.{leaf}" for name in takes_parts for leaf in ("bias", "base_layer.bias")}
        summed |= {
            fqn
            for fqn, _ in model.named_parameters()
            if fqn not in parts and (fqn in biases or (fqn.startswith(of_layers) and not fqn.startswith(inside)))
        }
    return TensorPlan(
        size=size,
        words=words,
        parts=parts,
        summed=frozenset(summed),
        blocks=blocks,
        attributes=_attributes(model, size, words, blocks, whole_heads),
        whole_heads=whole_heads,
        embedding=embedding,
        head=head,
        layers=layers,
        whole_blocks=whole_blocks,
        splits_rows=splits_rows,
    )


def _words(model: Any, own: Mapping[str, str]) -> dict[str, str]:
    """Return module FQN -> word, in the model's order: those of `own`, else those of the model's plan."""
    names = [name for name, _ in model.named_modules() if name]
    given: dict[str, str] = {}
    for pattern, word in own.items():
        for name in matching("sharding.plan", pattern, names):
            if fnmatchcase(name, pattern):
                given.setdefault(name, word)
    base = getattr(model, "base_model_prefix", "")
    theirs: Mapping[str, str] = getattr(getattr(model, base, model), "_tp_plan", None) or {}
    theirs = theirs or getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    if not theirs and not own:
        raise ConfigError(
            f"sharding.tensor: {type(model).__name__} has no tensor-parallel plan in transformers.\n"
            "  Name its modules in sharding.plan (docs/sharding.md), or set sharding.tensor=1."
        )
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), word) for key, word in theirs.items()]
    found: dict[str, str] = {}
    for name in names:
        short, owner = name.removeprefix(f"{base}."), name.rpartition(".")[0]
        word = given.get(name) or next((word for pattern, word in patterns if pattern.fullmatch(short)), None)
        if word in (None, _VOCABULARY) or found.get(owner) == EXPERTS:
            continue
        if word not in WORDS:
            raise ConfigError(
                f"sharding.tensor: {name}: the plan of {type(model).__name__} in transformers has the word {word!r}, "
                f"which isn't supported.\n  Set sharding.plan={{{name.rpartition('.')[2]}: replicated}} to leave such "
                "modules whole, or sharding.tensor=1."
            )
        found[name] = word
    _use_packed(model, found)
    return {name: word for name, word in found.items() if word != WHOLE}


def _use_packed(model: Any, words: dict[str, str]) -> None:
    """Split weights of several matrices (Phi-3's) matrix by matrix: their own words would gather and split again."""
    for name, word in [*words.items()]:
        owner = name.rpartition(".")[0]
        after = [other for other, w in words.items() if other.rpartition(".")[0] == owner and w == SPLIT_INPUT]
        if word == GATHERED and len(after) == 1 and _packed_sizes(model.config, model.get_submodule(name)):
            words[name], words[after[0]] = PACKED, ROWWISE


def _parts_of_linear(model: Any, name: str, word: str, size: int) -> tuple[dict[str, Part], set[str]]:
    """Return the parts of a linear layer's weights, and the adapters that stay whole: A of split outputs, B of split
    inputs. A bias of split inputs is added to the sum, and has neither."""
    module, parts, whole = model.get_submodule(name), dict[str, Part](), set[str]()
    splits_inputs = word in (ROWWISE, SPLIT_INPUT)
    sizes = _packed_sizes(model.config, module) if word == PACKED else None
    if word == PACKED and sizes is None:
        raise ConfigError(
            f"sharding.plan: {name}: packed_colwise: can't tell which matrices its weight packs: neither q, k and v of "
            "the config's heads, nor gate and up of its intermediate_size."
        )
    for leaf, weight in module.named_parameters():
        fqn = f"{name}.{leaf}"
        is_transposed = not is_adapter(fqn) and holds_inputs_first(_base(module))
        if (".lora_B." if splits_inputs else ".lora_A.") in fqn:
            whole.add(fqn)
        elif weight.dim() > 1:
            parts[fqn] = _part(fqn, weight.shape, int(splits_inputs != is_transposed), size, sizes)
        elif not splits_inputs:
            parts[fqn] = _part(fqn, weight.shape, 0, size, sizes)
    return parts, whole


def _parts_of_experts(name: str, module: nn.Module, size: int) -> dict[str, Part]:
    """`gate_up_proj` `[experts, 2 * width, hidden]`, split half by half, and `down_proj` `[experts, hidden, width]`."""
    weights = dict(module.named_parameters())
    if adapter := next(filter(is_adapter, weights), ""):
        raise ConfigError(
            f"sharding.tensor: {name}.{adapter}: adapters of experts can't be split.\n"
            "  Leave experts out of model.lora.targets, or set sharding.tensor=1."
        )
    wrong = weights.keys() - {"gate_up_proj", "down_proj"}
    up, down = weights.get("gate_up_proj"), weights.get("down_proj")
    if wrong or up is None or down is None or up.shape[1] != 2 * down.shape[2]:
        raise ConfigError(f"sharding.tensor: {name}: experts of this form ({', '.join(weights)}) can't be split yet.")
    half = up.shape[1] // 2
    return {
        f"{name}.gate_up_proj": _part(f"{name}.gate_up_proj", up.shape, 1, size, (half, half)),
        f"{name}.down_proj": _part(f"{name}.down_proj", down.shape, 2, size),
    }


def _part(fqn: str, shape: Iterable[int], dim: int, size: int, sizes: tuple[int, ...] | None = None) -> Part:
    part = Part(dim, sizes or ([*shape][dim],))
    if odd := [length for length in part.sizes if length % size]:
        fitting = _fitting(lambda count: not any(length % count for length in part.sizes), 64)
        raise ConfigError(
            f"sharding.tensor: {fqn}: {size} devices don't divide its {odd[0]:,} "
            f"{'outputs' if dim == 0 else 'columns'}.\n  {fitting}"
        )
    return part


def _fitting(fits: Callable[[int], bool], most: int) -> str:
    return f"Set sharding.tensor={' or '.join(str(size) for size in range(1, most + 1) if fits(size))}."


def _base(module: nn.Module) -> Any:
    """Return the layer under its adapters, if it has any."""
    return getattr(module, "base_layer", module)


def _packed_sizes(config: Any, module: nn.Module) -> tuple[int, ...] | None:
    """Return the outputs of the matrices in one weight: q, k and v by the config's heads, or gate and up."""
    layer = _base(module)
    outputs = layer.weight.shape[1 if holds_inputs_first(layer) else 0]
    heads, kv_heads, width = _heads(config)
    if outputs == (heads + 2 * kv_heads) * width:
        return (heads * width, kv_heads * width, kv_heads * width)
    inner = getattr(config, "intermediate_size", None) or 0
    return (inner, inner) if outputs == 2 * inner else None


def _heads(config: Any) -> tuple[int, int, int]:
    """Return (attention heads, key-value heads, width of a head) of a transformers config."""
    heads = int(getattr(config, "num_attention_heads", 1) or 1)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    width = getattr(config, "head_dim", None) or int(getattr(config, "hidden_size", heads)) // heads
    return heads, kv_heads, int(width)


def _key_value_heads(model: Any, name: str, size: int) -> tuple[int, int] | None:
    """Return (heads, width of a head) of a projection with fewer key-value heads than devices, which stays whole."""
    if not name.endswith(("k_proj", "v_proj")):
        return None
    _, kv_heads, width = _heads(model.config)
    outputs = _base(model.get_submodule(name)).weight.shape[0]
    return (kv_heads, width) if outputs == kv_heads * width and kv_heads < size and size % kv_heads == 0 else None


def _check_heads(model: Any, words: Mapping[str, str], size: int) -> None:
    """Raise ConfigError unless each device gets the same number of whole attention heads."""
    heads, kv_heads, _ = _heads(model.config)
    is_packed = PACKED in words.values()

    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or (size % kv_heads == 0 and not is_packed))

    split = [name for name, word in words.items() if word in (COLWISE, PACKED)]
    if not any("attn" in name or "attention" in name for name in split):
        return
    if not fits(size):
        raise ConfigError(
            f"sharding.tensor: {size} devices can't share {heads} attention heads and {kv_heads} key-value heads "
            f"evenly.\n  {_fitting(fits, heads)}"
        )


def _blocks(words: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that hold an outermost pair of colwise and rowwise, and experts, with the words inside."""
    owners: dict[str, set[str]] = {}
    for name, word in words.items():
        if word == EXPERTS:
            owners[name] = {COLWISE, ROWWISE}
        else:
            owners.setdefault(name.rpartition(".")[0], set()).add(word)
    return {
        name: found
        for name, found in owners.items()
        if found & {COLWISE, PACKED, GATHERED} and found & {ROWWISE, SPLIT_INPUT}
    }


def _check_blocks(model: Any, words: Mapping[str, str], blocks: Mapping[str, set[str]]) -> None:
    """Raise ConfigError for words that would leave results or gradients in parts, or parts that don't fit together."""
    # Where outputs are gathered, each device computes the same up to the layer that splits its input.
    split = [block for block, found in blocks.items() if GATHERED not in found]
    for name, word in words.items():
        owner, module = name.rpartition(".")[0], model.get_submodule(name)
        splits_inputs = word in (ROWWISE, SPLIT_INPUT)
        if word == SUMMED and not any(name.startswith(f"{block}.") for block in split):
            raise ConfigError(
                f"sharding.plan: {name}: {word}: not inside attention or an MLP that is split, where each device has a "
                "part of its gradient.\n  Leave it out of sharding.plan."
            )
        if word not in (SUMMED, EXPERTS) and owner not in blocks:
            missing, partner = ("outputs before", COLWISE) if splits_inputs else ("inputs after", ROWWISE)
            raise ConfigError(
                f"sharding.plan: {name}: {word}: {owner} has no layer that is split by its {missing} it.\n"
                f'  Add a pattern for one with {partner}, or set "{_pattern_of(owner)}": {WHOLE}.'
            )
        holds_packed = word == COLWISE and holds_inputs_first(_base(module))
        if holds_packed and _packed_sizes(model.config, module):
            raise ConfigError(f"sharding.plan: {name}: {word}: its weight packs several matrices.\n  Use {PACKED}.")
    for block, found in blocks.items():
        if {GATHERED, ROWWISE} <= found or (SPLIT_INPUT in found and found & {COLWISE, PACKED}):
            raise ConfigError(
                f"sharding.plan: {block}: {', '.join(sorted(found))} don't fit together.\n  {ROWWISE} takes the "
                f"outputs of {COLWISE} or {PACKED}, {SPLIT_INPUT} those of {GATHERED}."
            )
    for block in split:
        for inner, module in model.get_submodule(block).named_modules():
            name = f"{block}.{inner}" if inner else block
            has_weights = any(True for _ in module.parameters(recurse=False))
            if has_weights and not any(name == known or name.startswith(f"{known}.") for known in words):
                raise ConfigError(
                    f"sharding.plan: {name}: whole inside {block}, whose other weights are split.\n  Give it a word "
                    f'({SUMMED} for norms of heads), or set "{_pattern_of(block)}": {WHOLE}.'
                )


def _pattern_of(owner: str) -> str:
    return f"*.{owner.rpartition('.')[2]}.*"


def _whole_blocks(model: Any, layers: tuple[str, ...], blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the attention modules in layers that the plan leaves whole: they need whole rows."""
    children = [(layer, *child) for layer in layers for child in model.get_submodule(layer).named_children()]
    return tuple(
        f"{layer}.{leaf}"
        for layer, leaf, module in children
        if f"{layer}.{leaf}" not in blocks
        and re.search("attn|attention", f"{leaf} {type(module).__name__}".lower())
        and [*module.children()]
    )


def _attributes(
    model: Any,
    size: int,
    words: Mapping[str, str],
    blocks: tuple[str, ...],
    whole_heads: Mapping[str, tuple[int, int]],
) -> dict[str, dict[str, Any]]:
    """Return block -> attribute -> its value on each device: counts of heads, also in the config that a block reads."""
    configs: dict[int, Any] = {}
    changes: dict[str, dict[str, Any]] = {}
    for name in blocks:
        own, inside = vars(model.get_submodule(name)), {child for child in words if child.rpartition(".")[0] == name}
        if not own.keys() & {*_HEADS, "head_dim", "head_size"} or any(words[child] == GATHERED for child in inside):
            continue
        new: dict[str, Any] = {key: own[key] // size for key in _HEADS if isinstance(own.get(key), int)}
        if whole := [whole_heads[child] for child in inside if child in whole_heads]:
            new |= {key: 1 for key in ("num_key_value_heads",) if key in own}
            new["num_key_value_groups"] = own["num_key_value_groups"] * whole[0][0] // size
        if (config := own.get("config")) is not None:
            if id(config) not in configs:
                configs[id(config)] = copy.copy(config)
                for key in ("num_attention_heads", "num_key_value_heads"):
                    if isinstance(count := getattr(config, key, None), int):
                        setattr(configs[id(config)], key, max(1, count // size))
            new["config"] = configs[id(config)]
        changes[name] = new
    return changes
