"""Dropout whose masks are functions of (seed, site, call, step) and of global coordinates, without a generator.

A site is the n-th dropout in a call of a repeated layer (or of the model, outside all layers). The host makes a key for
each row of a step and each layer; the batch carries them. A device mixes a row's key with position and feature, so no
axis, micro batch, recomputation or loop over layers changes a mask, and a resume draws the same.

`intercept` replaces `torch.nn.functional.dropout` (which nn.Dropout calls) and `scaled_dot_product_attention` while a
step runs, in torch and where the model's sources import them by name. They draw by keys inside `Draws.run`; anywhere
else they are torch's own.
"""

import hashlib
import math
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from portable_fsdp.attach import change_attributes, row_parts_of, switch_off_attention_dropout
from portable_fsdp.config import schema
from portable_fsdp.layout import RowParts
from portable_fsdp.runtime.errors import ConfigError

T = TypeVar("T")

BATCH_KEY = "dropout_keys"
"""The name of the keys in a batch: int32 `[rows, scopes, 2]`; `scopes`: the model and its layers. The last dimension
has a key of the row and one of the step, for tensors that all rows share."""

_ARGUMENT = "_dropout_draw"  # of a layer's forward, so that recomputation, compilers and loops get the keys as inputs

# lowbias32 of Chris Wellons: github.com/skeeto/hash-prospector (public domain). Odd factors of Weyl sequences follow.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_OF_SITE, _OF_PLACE, _OF_FEATURE, _OF_FACTOR = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F
_OUTER = 1 << 20  # more than a row has positions


class _Draw(NamedTuple):
    """From what the dropouts of a layer draw, passed to its forward."""

    rows: Tensor  # int32 [rows, 2]
    site: int  # its next dropout
    positions: Tensor | None  # int32: those of a row that this device has; None: all
    chunk: int | None  # which of equal parts of the positions it has; None: as `positions` says
    of_layers: Tensor | None  # int32 [rows, scopes, 2]; None: inside a layer
    calls: dict[int, int]  # layer -> its calls so far


class _Now(threading.local):
    """The draw of the running forward in this thread. Backward runs in other threads, or after `Draws.run`."""

    draw: _Draw | None = None
    site = 0
    is_drawing = False  # torch.compile can't compare a draw with None
    chunk: int | None = None
    part: tuple[int, int] | None = None  # of heads or features: which part, and its first feature; None: all


_now = _Now()
_lock = threading.Lock()
_users: list[object] = []  # of `intercept`
_replaced: list[tuple[dict[str, Any], str, Any]] = []  # namespace, name and torch's function
_torchs_dropout, _torchs_attention = F.dropout, F.scaled_dot_product_attention

# ------------------------------------------------------------------------------------------------------------ keys


def _signed(number: int) -> int:
    """The number's low 32 bits as an int32."""
    return (number + 2**31) % 2**32 - 2**31


@dataclass(frozen=True)
class RowKeys:
    """Makes the keys of a step's rows on the host."""

    seed: int
    scopes: tuple[str, ...]  # "" for the model, and the FQNs of its layers

    @cached_property
    def _of_scopes(self) -> Tensor:
        """int32 `[scopes, 2]`."""
        digests = [hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest() for name in self.scopes]
        return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int32).view(-1, 2)

    def __call__(self, first: int, places: NDArray[np.int64]) -> Tensor:
        """Return int32 `[rows, scopes, 2]` of the rows at `places` of the step whose first sample has position
        `first`."""
        samples = np.stack([first + places, np.full_like(places, first)], axis=-1)
        low, high = torch.from_numpy(samples)[:, None, :, None].view(torch.int32).unbind(-1)  # of int64: [rows, 1, 2]
        return _mixed(_mixed(low ^ self._of_scopes) ^ high)


# ------------------------------------------------------------------------------------------------- the mask of a site


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int32 to the right, filling with zeros."""
    if x.device.type == "xla":  # torch_xla 2.9 rounds a shifted negative number toward zero: clear the lost bits before
        x = x & -(1 << bits)
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    """Mix int32 in place: each bit of the result depends on all bits."""
    x.bitwise_xor_(_shifted(x, 16)).mul_(_signed(_FIRST))
    x.bitwise_xor_(_shifted(x, 15)).mul_(_signed(_SECOND))
    return x.bitwise_xor_(_shifted(x, 16))


def _next_keys(draw: _Draw, shape: Sequence[int], start: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return the keys of the next site for a tensor of 2 dimensions or more: int32 `[..., 1]` of all its places, and
    `[n]` of its last dimension.

    Dimension 0 is rows, or rows and the next dimension flattened, or 1 for all rows. `start`: global indices of the
    first of what lies between, as one number, of the dimension before the last, and of the last. Raises ValueError for
    a tensor without rows.
    """
    keys, site = draw.rows, _now.site
    _now.site = site + 1
    (first, *middle, features), rows, device = shape, len(keys), keys.device
    if first % rows == 0:
        key, middle = keys[:, 0], [first // rows, *middle] if first > rows else middle
    elif first == 1:
        key = keys[:1, 1]
    else:
        raise ValueError(f"dropout of a tensor {[*shape]}: expected the batch's {rows} rows in dimension 0")
    *outer, tokens = middle or [1]
    heads, first_token, first_feature = start
    if _now.chunk is not None:
        first_token += _now.chunk * tokens
    if _now.part is not None:
        part, of_part = _now.part
        heads, first_feature = heads + part * math.prod(outer), first_feature if outer else of_part
    places = _indices(tokens, first_token, device)
    if not outer and draw.positions is not None and tokens == len(draw.positions):
        places = draw.positions
    if outer:
        places = _indices(math.prod(outer), heads, device)[:, None].mul(_OUTER) + places
    key = (key ^ _signed(site * _OF_SITE)).view(-1, *(1,) * places.dim())
    key = _mixed(key ^ places.mul(_signed(_OF_PLACE)))
    return key.reshape(*shape[:-1], 1), _feature_keys(_indices(features, first_feature, device))


def _feature_keys(indices: Tensor) -> Tensor:
    return _mixed(indices.mul_(_signed(_OF_FEATURE)))


def _indices(size: int, start: int, device: torch.device) -> Tensor:
    return torch.arange(start, start + size, dtype=torch.int32, device=device)


def _masked(x: Tensor, places: Tensor, features: Tensor, rate: float) -> Tensor:
    """Zero the share `rate` of `x`, and scale the rest. Two cheap operations an element: both keys are mixed before."""
    bits = (places ^ features).mul_(places.mul(_signed(_OF_FACTOR)).bitwise_or_(1))
    keep = bits >= min(round(rate * 2**32) - 2**31, 2**31 - 1)
    return (x * keep).mul_(1 / (1 - rate))


class _Dropout(torch.autograd.Function):
    """Backward makes the mask again from its keys: neither mask nor input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, features: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(places, features)
        ctx.rate = rate
        return _masked(x, places, features, rate)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        places, features = ctx.saved_tensors
        return _masked(gradients[0], places, features, ctx.rate), None, None, None


def drop(x: Tensor, rate: float, start: tuple[int, int, int] = (0, 0, 0), *, is_new: bool = True) -> Tensor:
    """Drop by the keys of the running forward; without them as torch does.

    `start`: as of `_next_keys`. `is_new`: not a further piece of the last tensor.
    """
    draw = _now.draw
    if draw is None or not 0 < rate < 1:
        return _torchs_dropout(x, rate)
    if x.dim() < 2:
        return drop(x[:, None], rate, start)[:, 0]
    _now.site -= not is_new
    return cast(Tensor, _Dropout.apply(x, *_next_keys(draw, x.shape, start), rate))


# ------------------------------------------------------------------------------------------------ torch's functions


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """In place of torch.nn.functional.dropout."""
    if _now.draw is None or not training or not 0 < p < 1:
        return _torchs_dropout(input, p, training, inplace)
    return input.copy_(drop(input, p)) if inplace else drop(input, p)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In place of torch.nn.functional.scaled_dot_product_attention, whose kernels draw themselves."""
    if _now.draw is None or not dropout_p:
        more: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        return _torchs_attention(query, key, value, **more, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
    scores = (query @ key.transpose(-1, -2)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -1e30) if attn_mask.dtype == torch.bool else scores + attn_mask
    return drop(scores.softmax(dim=-1).to(value.dtype), dropout_p) @ value


_OURS = {_torchs_dropout: _dropout, _torchs_attention: _attention}


def _imports(namespace: dict[str, Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """Find torch's functions in a module's namespace, under any name."""
    return [(namespace, name, torchs) for name, value in namespace.items() for torchs in _OURS if value is torchs]


@contextmanager
def intercept(imports: Iterable[tuple[dict[str, Any], str, Any]] = ()) -> Generator[None]:
    """Replace torch's functions while a step runs, backward included: it may recompute. Several threads may do so.

    `imports`: of `_imports`, from the model's sources.
    """
    in_torch = [(F.__dict__, torchs.__name__, torchs) for torchs in _OURS]
    with _lock:
        for namespace, name, function in (*in_torch, *imports):
            if namespace[name] is function:
                namespace[name] = _OURS[function]
                _replaced.append((namespace, name, function))
        _users.append(_OURS)
    try:
        yield
    finally:
        with _lock:
            _users.pop()
            while not _users and _replaced:
                namespace, name, function = _replaced.pop()
                namespace[name] = function


# -------------------------------------------------------------------------------------------------------- the model


def _scopes(model: nn.Module) -> Iterator[str]:
    """Yield the FQNs of the model's repeated layers: the outermost modules in lists. No setting changes them."""
    newest = "."
    for name, module in model.named_modules():
        holder = model.get_submodule(name.rpartition(".")[0])
        is_member = name and isinstance(holder, nn.ModuleList | nn.Sequential) and any(True for _ in module.children())
        if is_member and type(module).forward is not nn.Module.forward and not name.startswith(f"{newest}."):
            newest = name
            yield name


class Draws:
    """The sites of a model. Create it before an engine lays the model out, and call `attach` after that."""

    argument = _ARGUMENT
    chunk: int | None = None
    """Which of equal parts of the positions this process has in layers; None: all. An engine sets it."""

    def __init__(self, model: nn.Module, seed: int, regions: Iterable[str] = ()) -> None:
        """`regions`: modules that an engine compiles, or runs again. They don't change the sites."""
        scopes = [*_scopes(model)]
        self.keys = BATCH_KEY, RowKeys(seed, ("", *scopes))
        self._model = model
        sources = {type(module).__module__ for module in model.modules()} - {F.__name__}
        self._imports = [
            each for name in sources if name in sys.modules for each in _imports(sys.modules[name].__dict__)
        ]
        self._layers = {name: model.get_submodule(name) for name in scopes}
        self._regions = [model.get_submodule(name) for name in regions if name not in self._layers]
        for module in (*self._layers.values(), *self._regions):
            forward = module.forward
            plain = forward.__func__ if isinstance(forward, MethodType) else _taking_itself(forward)
            module.forward = MethodType(_drawing(plain), module)

    def attach(self) -> None:
        """Let layers get their keys, and recomputed modules what is left of those around them, as an argument."""
        for scope, layer in enumerate(self._layers.values(), start=1):
            layer.forward = partial(_run_layer, scope, self.chunk, layer.forward)
        for module in self._regions:
            module.forward = partial(_run_region, module.forward)

    def switch_off(self) -> None:
        """Set all rates to 0, before the first step."""
        for module in self._model.modules():
            names = {"p"} if isinstance(module, nn.Dropout) else set[str]()
            names |= {name for name in vars(module) if "drop" in name}
            rates = {name for name in names if isinstance(getattr(module, name), float)}
            change_attributes(module, dict.fromkeys(rates, 0.0))

    def move(self, chunk: int | None, part: tuple[int, int] | None) -> tuple[int | None, tuple[int, int] | None]:
        """Tell which part of positions, and of heads or features (which part, its first feature), what follows has;
        return what was before."""
        before = _now.chunk, _now.part
        _now.chunk, _now.part = chunk, part
        return before

    def rows_of(self, layers: Sequence[str]) -> Tensor:
        """Return int32 `[layers, rows, 2]` of equal layers, for a loop over them that the first one runs."""
        draw, scopes = cast(_Draw, _now.draw), [*self._layers]
        return torch.stack([_rows_of(draw, 1 + scopes.index(name)) for name in layers])

    @contextmanager
    def drawing(self) -> Generator[Callable[..., Any]]:
        """Context of forward and backward; yields `run`."""
        with intercept(self._imports):
            yield self.run

    def run(self, function: Callable[[dict[str, Tensor]], T], batch: Mapping[str, Tensor]) -> T:
        """Run a forward on a placed batch without its keys, drawing by them. A batch without keys draws as torch
        does."""
        rest = dict(batch)
        keys = rest.pop(BATCH_KEY, None)
        if keys is None:
            return function(rest)
        parts = row_parts_of(self._model)
        positions = None
        if parts is not None:
            ids = batch["input_ids"]
            positions = _own_positions(parts.index, parts.count, ids.shape[1], ids.device)
        _set(_Draw(keys[:, 0], 0, positions, None, keys, {}))
        try:
            return function(rest)
        finally:
            _set(None)


@cache
def _own_positions(index: int, count: int, tokens: int, device: torch.device) -> Tensor:
    own = RowParts(index, count, lambda tokens: tokens).positions(tokens * count)
    return torch.tensor(own, dtype=torch.int32, device=device)


def _set(draw: _Draw | None) -> None:
    _now.draw, _now.site, _now.is_drawing = draw, 0 if draw is None else draw.site, draw is not None
    _now.chunk, _now.part = None if draw is None else draw.chunk, None


def _run_layer(scope: int, chunk: int | None, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a layer with its own keys, then restore those of its caller."""
    around = _now.draw
    if around is None or around.of_layers is None:
        return forward(*args, **kwargs)
    around, call = around._replace(site=_now.site), around.calls.get(scope, 0)
    draw = _Draw(_rows_of(around, scope), 0, around.positions, chunk, None, {})
    try:
        return forward(*args, **kwargs, **{_ARGUMENT: draw})
    finally:
        _set(around._replace(calls={**around.calls, scope: call + 1}))


def _rows_of(around: _Draw, scope: int) -> Tensor:
    rows, call = cast(Tensor, around.of_layers)[:, scope], around.calls.get(scope, 0)
    return _mixed(rows ^ _signed(call * _OF_PLACE)) if call else rows


def _run_region(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a recomputed module that isn't a layer: its sites are those of what is around it."""
    draw = _now.draw
    if draw is None:
        return forward(*args, **kwargs)
    return forward(*args, **kwargs, **{_ARGUMENT: draw._replace(site=_now.site)})


@cache  # equal layers get the same function, so that torch.compile makes one program for all of them
def _drawing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        draw = kwargs.pop(_ARGUMENT, None)
        if draw is None:
            return forward(self, *args, **kwargs)
        is_recomputation = not _now.is_drawing
        _set(draw)
        try:
            return forward(self, *args, **kwargs)
        finally:
            if is_recomputation:
                _set(None)

    return run


def _taking_itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: forward(*args, **kwargs)


# ----------------------------------------------------------------------------------------------------- which apply


def choose_dropouts(model: nn.Module, section: schema.Model, rates: dict[str, float], *, has_kernels: bool) -> str:
    """Switch off the dropout of attention whose kernels can't draw; describe the rest.

    `rates`: of `architecture.set_dropout`. `has_kernels`: attention runs by such kernels. Raises ConfigError for a
    number that sets nothing.
    """
    if has_kernels:
        switch_off_attention_dropout(model)
    whole = [key for key, rate in rates.items() if not rate]
    undrawn = [key for key in rates if has_kernels and any(word in key for word in ("attention", "attn"))]
    by_rate: dict[float, list[str]] = {}
    for key, rate in rates.items():
        if key not in (*undrawn, *whole):
            by_rate.setdefault(rate, []).append(key)
    if section.dropout and section.dropout != "published" and not by_rate:
        fix = "model.attention=static" if undrawn else "model.dropout=null; adapters have model.lora.dropout"
        found = f"only {', '.join(undrawn)}, which attention kernels can't apply" if undrawn else "none"
        raise ConfigError(
            f"model.dropout={section.dropout:g}: expected a dropout in {type(model).__name__}, found {found}.\n"
            f"  Set {fix}."
        )
    origin = "published: " if section.resolved_dropout == "published" else ""
    text = "; ".join(f"{rate:g} ({origin}{', '.join(keys)})" for rate, keys in by_rate.items()) or "0"
    kernels = f"; {', '.join(undrawn)}: 0, since no kernel draws; model.attention=static does" if undrawn else ""
    layers = f"; {', '.join(whole)}: 0, since masks leave out no whole layers" if whole else ""
    return f"model.dropout: {text}{kernels}{layers}"
