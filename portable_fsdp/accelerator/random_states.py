"""Process 0's random states of Python, NumPy and torch, as an object of a checkpoint."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from portable_fsdp.backends.contract import Backend


class RandomStates:
    """Read at a save; a load keeps them until `set`. XLA's own generator isn't among them."""

    def __init__(self, engine: Backend) -> None:
        self._engine, self._loaded = engine, dict[str, Any]()

    def state_dict(self) -> dict[str, Any]:
        """The states of now. *collective*"""
        name, keys, *rest = np.random.get_state()
        version, numbers, gauss = random.getstate()
        own: dict[str, Any] = {
            "python": [version, torch.tensor(numbers), gauss],
            "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            own["cuda"] = torch.cuda.get_rng_state()
        return self._engine.agree(own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = dict(state)

    def set(self) -> None:
        """Set the states that a load has read, if there are any."""
        if not self._loaded:
            return
        version, numbers, gauss = self._loaded["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
        name, keys, *rest = self._loaded["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(self._loaded["torch"])
        if "cuda" in self._loaded and torch.cuda.is_available():
            torch.cuda.set_rng_state(self._loaded["cuda"])
