"""The position of a prepared loader in its epoch: a resumed epoch has the order of the interrupted one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Position:
    """The epoch of a loader and of its copies that skip batches, and the random state that gives its order."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        """`generator`: the sampler's; None: it draws from torch's."""
        self._generator = generator
        self._done = 0  # batches of the running epoch
        self._began: Tensor | None = None  # the random state before the running epoch
        self._resumes: Tensor | None = None  # the one before the epoch that a load continues

    def take_resumed(self) -> Tensor | None:
        """The random state for the next epoch, once after a load."""
        state, self._resumes = self._resumes, None
        return state

    def begin(self, state: Tensor | None, skipped: int) -> None:
        self._began, self._done = state, skipped

    def note_batch(self) -> None:
        self._done += 1

    def finish(self) -> None:
        self._began, self._done = None, 0

    def state(self, epoch: int, batches: int | None) -> dict[str, Any]:
        """What to save; `batches`: of a whole epoch, if known. After the last one it is the next epoch's beginning: its
        order follows from torch's random state, which is saved too."""
        if self._resumes is not None:
            return {"epoch": epoch, "batches": self._done, "order": self._resumes}
        if self._done and self._done != batches:
            return {"epoch": epoch, "batches": self._done, "order": self._began}
        state = None if self._generator is None else self._generator.get_state()
        return {"epoch": epoch + bool(self._done), "batches": 0, "order": state}

    def load(self, state: Mapping[str, Any]) -> None:
        """The next epoch has the order of the saved one; `skip_first_batches` leaves out what was done of it."""
        self._resumes, self._done = state["order"], state["batches"]
