"""Trials of a small copy of a model, so that no list of architectures is needed: static attention computes what the
model's own does, documents of one row don't see each other, devices can split the tokens of a row, and a plan of
`sharding.tensor` changes nothing.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from portable_fsdp.attach import set_row_parts
from portable_fsdp.config.schema import Config, Sharding
from portable_fsdp.layout import RowParts
from portable_fsdp.models.architecture import last_line
from portable_fsdp.models.attention import STATIC
from portable_fsdp.models.document_masks import document_arguments
from portable_fsdp.models.tasks import find_task
from portable_fsdp.models.wrap import find_layers
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.tensor_plan import PACKED, SUMMED, WHOLE, TensorPlan

_TOKENS = 16  # more than any window and chunk of a small copy
_WINDOW = 3  # tokens: shorter than the documents, so that it matters
_LAYERS, _WIDTH, _VOCABULARY = 4, 32, 64  # maxima of the small model
_BOUND = 1e-4  # relative to the largest output: a hundred times float32's rounding
_SIZES_INSIDE = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim")


def _ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, _VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    if actual.shape != expected.shape:
        return math.inf
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def try_small_copies(
    model: Any,
    build: Callable[[Any], Any],
    run: Callable[[Any], Tensor],
    compare: Callable[[Any, Tensor], str],
    change: Callable[[Any], object] = lambda config: None,
) -> str:
    """Return `compare(copy, run(copy))` of the first small copy of `model` that runs, or why none does.

    `build(config)` returns a model on the host, in float32; `change(config)` adapts each config in place. Weights get
    random values, large enough that a position seen by mistake changes the outputs.
    """
    problem = ""
    with torch.no_grad(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # On the CPU attention over blocks runs uncompiled, and torch warns.
        warnings.filterwarnings("ignore", message=r"flex_attention called without torch\.compile", category=UserWarning)
        for narrow in (True, False):
            torch.manual_seed(0)
            try:
                config = _small_config(model.config, narrow)
                change(config)
                copied = build(config).eval()
                for weight in copied.parameters():
                    scale = 1 / math.sqrt(weight.shape[-1]) if weight.dim() > 1 else 0.1
                    weight.add_(torch.randn(weight.shape) * scale)
                result = run(copied)
            except Exception as error:  # this model refuses the sizes
                problem = f"a small copy can't run ({type(error).__name__}: {error})"
            else:
                return compare(copied, result)
    return problem


def _small_config(config: Any, narrow: bool) -> Any:
    """Return a config to try; `narrow`: with fewer heads of the same width, else of the model's own width."""
    whole = copy.deepcopy(config)
    small = whole.get_text_config(decoder=True)
    _cut_layers(small, _LAYERS)
    small.vocab_size = _VOCABULARY
    for key in _SIZES_INSIDE:
        if isinstance(size := getattr(small, key, None), int):
            setattr(small, key, min(size, _WIDTH))
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):  # outside the small vocabulary
        try:
            setattr(small, key, None)
        except StrictDataclassFieldValidationError:  # the class takes numbers only
            setattr(small, key, _VOCABULARY - 1)
    for key in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(small, key, None), int):
            setattr(small, key, _WINDOW)
    if narrow:
        _cut_heads(small)
    return whole


def _cut_layers(config: Any, most: int) -> None:
    """Keep the first `most` layers, or more until there is one of each kind."""
    layers = config.num_hidden_layers
    lists = {key: value for key, value in config.to_dict().items() if isinstance(value, list) and len(value) == layers}
    kinds = {key: value for key, value in lists.items() if all(isinstance(kind, str | int) for kind in value)}
    firsts = [value.index(kind) + 1 for value in kinds.values() for kind in set(value)]
    kept = min(layers, max([most, *firsts]))
    for key, value in kinds.items():
        setattr(config, key, value[:kept])
    config.num_hidden_layers = kept


def _cut_heads(config: Any) -> None:
    """Keep one or two groups of heads, with the same width."""
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(groups, int):
        return
    share = groups // 2 if groups % 2 == 0 else groups
    if heads % share or config.hidden_size % share:
        return
    for key in ("num_attention_heads", "num_key_value_heads", "num_kv_heads", "hidden_size", "word_embed_proj_dim"):
        if isinstance(size := getattr(config, key, None), int) and size % share == 0:
            setattr(config, key, size // share)


# ------------------------------------------------------------------------------------------------- the model's own mask


def find_difference(model: Any, build: Callable[..., Any]) -> str:
    """Describe how a small copy's logits under static attention differ from those under its own; empty: they don't.

    The model's mask may say more than attention's arguments: Doge adds its own, Llama 4 attends within chunks of a row.
    `build(config, attention=...)` returns a model of that transformers config on the host, in float32.
    """

    def compare(copied: Any, ours: Tensor) -> str:
        own = build(copied.config, attention="eager").eval()
        own.load_state_dict(copied.state_dict())
        if not _difference(_logits(own), ours) < _BOUND:
            return _sees_later(ours) or "its mask says more than causality and windows"
        return ""

    return try_small_copies(model, partial(build, attention="static"), _logits, compare)


def is_causal(model: Any, build: Callable[..., Any]) -> bool:
    """Whether a small copy with the model's own attention doesn't see later tokens. `build`: as above."""
    own = partial(build, attention="eager")
    return not try_small_copies(model, own, _logits, lambda _, logits: _sees_later(logits))


def _logits(copied: Any) -> Tensor:
    """The logits of two rows that differ in their last token."""
    ids = _ids(_TOKENS)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % _VOCABULARY
    return torch.cat([copied(input_ids=rows, use_cache=False).logits for rows in (ids, changed)])


def _sees_later(logits: Tensor) -> str:
    return "" if _difference(logits[0, :-1], logits[1, :-1]) < _BOUND else "tokens would see later ones"


# ------------------------------------------------------------------------------------------- documents that share a row


_LENGTHS, _PADDING = (5, 8), 3  # tokens of the documents, and after them


def find_crossing(model: Any, build: Callable[[Any], Any], *, eager: bool) -> str:
    """Say how a small copy of `model` lets documents of one row affect each other; empty if it doesn't.

    It detects a state that carries over from one document to the next (Mamba), a model's own attention (Bloom), and
    positions that the model counts itself. `build(config)` returns a model on the host, in float32.
    """

    def alone(copied: Any) -> Tensor:
        """The logits of each document in its own row, one after the other."""
        return torch.cat([copied(input_ids=ids, use_cache=False).logits for ids in _documents()], dim=1)

    problem = try_small_copies(model, build, alone, partial(_difference_of_documents, eager=eager))
    return f"{type(model).__name__} doesn't keep the documents of a row apart: {problem}" if problem else ""


def _difference_of_documents(model: Any, alone: Tensor, *, eager: bool) -> str:
    """Describe how the logits of both documents in one row differ from `alone`; empty if they don't."""
    attention, windows = model.config._attn_implementation, (None, _WINDOW)
    make = document_arguments(attention, torch.float32, eager=eager, packs=True, windows=windows)
    numbers = [*(number for number, length in enumerate(_LENGTHS, 1) for _ in range(length)), *[0] * _PADDING]
    positions = [place for length in (*_LENGTHS, _PADDING) for place in range(length)]
    ids = torch.cat([*_documents(), torch.zeros(1, _PADDING, dtype=torch.int64)], dim=1)
    try:
        arguments = make(ids, torch.tensor([positions]), torch.tensor([numbers])) if make else {}
        packed = model(input_ids=ids, use_cache=False, **arguments).logits
    except Exception as error:
        return f"it accepts no mask of documents ({type(error).__name__}: {error})"
    difference = _difference(packed[:, : sum(_LENGTHS)], alone)
    return "" if difference < _BOUND else f"logits differ by {difference:.2g} of the largest, more than {_BOUND:g}"


def _documents() -> list[Tensor]:
    return [_ids(length, seed) for seed, length in enumerate(_LENGTHS, 1)]


# ---------------------------------------------------------------------------------------------- rows that devices split


_LIMITS = ("original_max_position_embeddings", "floor_scale")
"""Numbers of tokens from which models compute otherwise (longrope, Llama 4); small copies do from _LIMIT."""
_LIMIT = 12  # one of two devices sees more


def require_rows_that_split(model: Any, build: Callable[[Any], Any], seq_len: int, devices: int) -> None:
    """Raise ConfigError if `devices` can't split rows of `seq_len` tokens of `model` (`sharding.context`).

    Each token must depend on others through the static attention alone: it gathers keys and values. So the trial runs a
    small copy on a row, and again on the tokens of one device with the keys and values of the first run: the outputs of
    each layer must be equal. It detects recurrent states, convolutions, and models that count positions themselves, or
    whose rotary embeddings depend on the length of a row. `build(config)` returns a model on the host, in float32.
    """
    ids = _ids(_TOKENS)

    def limit(config: Any) -> None:
        for values in (vars(config), getattr(config, "rope_parameters", None) or {}):
            values.update({key: _LIMIT for key in _LIMITS if values.get(key) and values[key] < seq_len})

    def run(copied: Any) -> Tensor:
        return copied(input_ids=ids, use_cache=False).logits

    if seq_len % (2 * devices):
        problem = f"{devices} devices can't split rows of {seq_len} tokens into two equal pieces each"
    elif model.config._attn_implementation != STATIC:
        problem = "it has its own attention"
    else:
        problem = try_small_copies(model, build, run, lambda copied, _: _difference_of_parts(copied, ids), limit)
    if problem:
        raise ConfigError(f"sharding.context: {type(model).__name__}: {problem}.\n  Set sharding.context=1.")


def _difference_of_parts(model: nn.Module, ids: Tensor) -> str:
    """Name the first layer whose outputs for the tokens of one device differ from those for the whole row."""
    rows: list[Tensor] = []  # keys and values of each call of attention

    def keep(tokens: Tensor) -> Tensor:
        rows.append(tokens)
        return tokens

    try:
        whole = _outputs(model, ids, RowParts(0, 1, keep))
        for index in (0, 1):
            kept = iter(rows)
            part = RowParts(index, 2, lambda _, kept=kept: next(kept))
            own = part.positions(_TOKENS)
            for name, out in _outputs(model, ids[:, own], part).items():
                if not _difference(out, whole[name][:, own]) < _BOUND:
                    return f"{name}: tokens depend on others by more than the static attention"
    except Exception as error:
        return f"{error}" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"
    return ""


def _outputs(model: Any, ids: Tensor, parts: RowParts) -> dict[str, Tensor]:
    """Return name -> output `[1, tokens, ...]` of each layer, and of the model's logits."""
    set_row_parts(model, parts)
    outputs: dict[str, Tensor] = {}
    layers = {name: model.get_submodule(name) for name in find_layers(model, Sharding())}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: tree_leaves(out)[0]}))
        for name, layer in layers.items()
    ]
    logits = model(input_ids=ids, position_ids=torch.tensor([parts.positions(_TOKENS)]), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return {**outputs, "its logits": cast(Tensor, logits)}


# ---------------------------------------------------------------------------------------- the plan of `sharding.tensor`


_PLAN_BOUND = 1e-3  # relative to the largest value: a thousand times float32's rounding

RunParts = Callable[[Sequence[nn.Module], TensorPlan, Callable[[nn.Module], Tensor]], Tensor]
"""`run_parts(copies, plan, run)`: give each of the equal copies the parts of one device, and call `run` on all of them
at once, then sum gradients as a step does. Returns what the first one returned."""


def require_plan(model: Any, config: Config, plan: TensorPlan, make: Callable[..., Any], run_parts: RunParts) -> None:
    """Raise ConfigError if a small copy of `model` computes other outputs or gradients when its plan splits it.

    The plan's words fit weights by their sizes, which don't tell what the weights mean. `make`: `build.make_model`.
    Words that only layers beyond the copy have are tried in its layers. transformers' own plan is taken as it is where
    no copy can run.
    """
    devices = next(count for count in range(2, config.sharding.tensor + 1) if config.sharding.tensor % count == 0)
    task, own = find_task(config.train.task, eager=True), config.sharding.plan
    attention = "eager" if model.config._attn_implementation == "eager" else "auto"
    has_run = False

    def build(small: Any) -> Any:
        return make(small, attention, task)

    def compare(copied: Any, whole: Tensor) -> str:
        nonlocal has_run
        has_run = True
        problems = (_problem(copied, whole, build, each, devices, run_parts) for each in _configs(config, copied, plan))
        return next(filter(None, problems), "")

    problem = try_small_copies(model, build, _run_backward, compare)
    if not problem or not (has_run or own):
        return
    hint = f"Norms of heads need {SUMMED}" if "gradient" in problem else "Correct the words"
    if PACKED in plan.words.values() and "outputs" in problem:
        hint = f"{PACKED} is for matrices one after the other; where they alternate head by head, try colwise"
    kind = "computes something else than the whole one" if has_run else "is needed to try the plan"
    raise ConfigError(
        f"sharding.{'plan' if own else 'tensor'}: {type(model).__name__}: a small copy, split over {devices} devices "
        f"by the plan, {kind}: {problem}.\n  {hint}, or set sharding.tensor=1."
    )


def _problem(
    copied: Any, whole: Tensor, build: Callable[[Any], Any], config: Config, devices: int, run_parts: RunParts
) -> str:
    """Describe how the copy in parts differs from the copy that has run, with outputs `whole`; empty: it doesn't."""
    from portable_fsdp.models.parallel import tensor_plan  # other trials don't load it

    copies = [build(copied.config).eval() for _ in range(devices)]
    for part in copies:
        part.load_state_dict(copied.state_dict())
    try:
        plan = tensor_plan(copied, _with(config, tensor=devices))
        outputs = run_parts(copies, plan, _run_backward)
    except Exception as error:  # of the model's code, with parts that it doesn't expect
        return f"it fails ({type(error).__name__}: {last_line(error)})"
    if not (difference := _difference(outputs, whole)) <= _PLAN_BOUND:  # or NaN
        return f"its outputs differ by {difference:.2g} of the largest"
    for fqn, weight in copied.named_parameters():
        for index, part in enumerate(copies):
            gradient = part.get_parameter(fqn).grad
            if weight.grad is None:
                continue
            if gradient is None or not _difference(gradient, plan.part_of(fqn, weight.grad, index)) <= _PLAN_BOUND:
                return f"the gradient of {fqn} is another"
    return ""


def _configs(config: Config, copied: nn.Module, plan: TensorPlan) -> Iterator[Config]:
    """Yield the configs to try: with the patterns that match in the copy, then with the words of each further layer.

    `plan`: of the whole model.
    """
    names = [name for name, _ in copied.named_modules()]
    own = {at: word for at, word in config.sharding.plan.items() if any(fnmatchcase(name, at) for name in names)}
    yield _with(config, plan=own)
    layers, tried = find_layers(copied, Sharding()), list[dict[str, str]]()
    for layer in plan.layers if config.sharding.plan else ():
        words = {name.removeprefix(f"{layer}."): w for name, w in plan.words.items() if name.startswith(f"{layer}.")}
        if layer in layers or words in tried:
            continue
        tried.append(words)
        alike = [each for each in layers if all(f"{each}.{name}" in names for name in words)]
        theirs = {f"{each}.{name}": word for each in alike for name, word in words.items()}
        whole = {f"{each}.*": WHOLE for each in alike}
        yield _with(config, plan=theirs | whole | own)


def _with(config: Config, **values: Any) -> Config:
    return config.model_copy(update={"sharding": config.sharding.model_copy(update=values)})


def _run_backward(model: Any) -> Tensor:
    """Run a row through a model, and the backward of a sum of its outputs that weighs each differently.

    One row: a classifier of several needs a token of padding.
    """
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        size, channels = model.config.image_size, model.config.num_channels
        inputs = {"pixel_values": torch.randn(1, channels, size, size, generator=generator)}
    else:
        inputs = {"input_ids": _ids(_TOKENS)}
        if getattr(model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.enable_grad():
        outputs = model(**inputs).logits
        (outputs * torch.randn(outputs.shape, generator=generator)).sum().backward()
    return outputs.detach()
