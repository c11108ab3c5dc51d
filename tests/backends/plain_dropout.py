"""Dropout of a plain loop on whole batches, by its definition: masks in 64-bit numbers, sites counted by hooks."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

U64 = np.ndarray[Any, np.dtype[np.uint64]]
LOW = 0xFFFFFFFF


def mix(x: Any) -> Any:
    """lowbias32; also of Python's numbers."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & LOW
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & LOW
    return x ^ (x >> 16)


def row_key(seed: int, scope: str, first: int, sample: int, call: int = 0, *, shared: bool = False) -> int:
    digest = hashlib.blake2b(f"{seed} {scope}".encode(), digest_size=8).digest()
    of_scope = int.from_bytes(digest[4:] if shared else digest[:4], "little")
    number = first if shared else sample
    key = mix(mix(number & LOW ^ of_scope) ^ number >> 32)
    return mix(key ^ (call * 0x85EBCA77 & LOW)) if call else key


def is_kept(key: int, site: int, place: int, feature: int, rate: float) -> bool:
    """One element. `place`: its position, plus 2 ** 20 times the head."""
    key = mix(key ^ (site * 0x9E3779B1 & LOW) ^ (place * 0x85EBCA77 & LOW))
    bits = (key ^ mix(feature * 0xC2B2AE3D & LOW)) * (key * 0x27D4EB2F & LOW | 1) & LOW
    return (bits + 2**31) % 2**32 >= round(rate * 2**32)


def mask(keys: Sequence[int], site: int, shape: Sequence[int], rate: float) -> Tensor:
    """`shape`: rows, or rows and what follows, flattened; perhaps heads; positions; features."""
    first, *middle, features = shape
    middle = [first // len(keys), *middle] if first > len(keys) else middle
    *heads, tokens = middle or [1]
    place = np.arange(tokens, dtype=np.uint64)
    if heads:
        place = np.arange(np.prod(heads), dtype=np.uint64)[:, None] * 2**20 + place
    of_rows = np.array(keys, np.uint64).reshape(-1, *[1] * place.ndim) ^ np.uint64(site * 0x9E3779B1 & LOW)
    key: U64 = mix(of_rows ^ (place * 0x85EBCA77 & LOW))[..., None]
    of_features = mix(np.arange(features, dtype=np.uint64) * 0xC2B2AE3D & LOW)
    bits = (key ^ of_features) * (key * 0x27D4EB2F & LOW | 1) & LOW
    return torch.from_numpy((bits + 2**31) % 2**32 >= round(rate * 2**32)).view(*shape)


class PlainDropout:
    """Counts the dropouts of a model by hooks on its layers, the numbered modules with one number in their names."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed, self._samples, self._calls, self._scopes = seed, (0, [0]), Counter[str](), [("", 0)]
        self._sites = Counter[tuple[str, int]]()
        for name, layer in model.named_modules():
            if not re.fullmatch(r"\D+\.\d+", name):
                continue
            layer.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            layer.register_forward_hook(self._leave)

    def _leave(self, *_: Any) -> None:
        self._scopes.pop()

    def _enter(self, name: str) -> None:
        self._scopes.append((name, self._calls[name]))
        self._calls[name] += 1

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        scope, (first, samples) = self._scopes[-1], self._samples
        site, self._sites[scope] = self._sites[scope], self._sites[scope] + 1
        keys = [row_key(self._seed, scope[0], first, sample, scope[1]) for sample in samples]
        return torch.where(mask(keys, site, input.shape, p), input / (1 - p), 0.0)

    @contextmanager
    def of_step(self, first: int, rows: int) -> Generator[None]:
        """Context of a forward of the whole batch."""
        self._samples = first, [first + row for row in range(rows)]
        self._calls.clear()
        self._sites.clear()
        plain: Callable[..., Tensor] = F.dropout
        F.dropout = self._drop
        try:
            yield
        finally:
            F.dropout = plain
