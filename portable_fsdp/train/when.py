"""When a run saves besides every n steps: by the clock, and now. Asked on process 0, told to all with the next step."""

import time
from collections.abc import Callable
from pathlib import Path


class SaveRequests:
    """Whether a save is due: `every_minutes` after the last one, or because somebody made the file `SAVE`.

    `touch RUN/SAVE` asks for a checkpoint; the file goes when it is saved.
    """

    def __init__(self, folder: Path, every_minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that only grow."""
        self._file = folder / "SAVE"
        self._every_s = None if every_minutes is None else 60 * every_minutes
        self._clock = clock
        self._last = clock()

    @property
    def due(self) -> bool:
        """Whether to save soon. True until `saved`."""
        by_clock = self._every_s is not None and self._clock() - self._last >= self._every_s
        return by_clock or self._file.exists()

    def saved(self) -> None:
        """Answered, or a save has come about for another reason."""
        self._last = self._clock()
        self._file.unlink(missing_ok=True)
