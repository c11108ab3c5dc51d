"""Saves besides those every n steps: by the clock, and now. Process 0 looks; all learn of it with the next step."""

import logging
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("portable_fsdp")


class _Request(NamedTuple):
    """Tells a file `SAVE` from one that is made (or touched) later."""

    inode: int
    modified_ns: int


class SaveTriggers:
    """Whether a save is due: `every_minutes` after the last one, or because of the file `SAVE` (`touch RUN/SAVE`).

    One file makes one save. Its commit, perhaps in the background, deletes the file.
    """

    def __init__(self, folder: Path, every_minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that only grow."""
        self._file = folder / "SAVE"
        self._every_s = None if every_minutes is None else 60 * every_minutes
        self._clock = clock
        self._last = clock()
        self._taken: tuple[int, _Request] | None = None  # step of the save that answers it, and the request
        self._has_warned = False

    @property
    def due(self) -> bool:
        """Whether to save soon. True until `began`."""
        by_clock = self._every_s is not None and self._clock() - self._last >= self._every_s
        request = self._request()
        return by_clock or (request is not None and (self._taken is None or self._taken[1] != request))

    def began(self, step: int) -> None:
        """A save of `step` has begun, for whatever reason; it answers earlier requests."""
        self._last = self._clock()
        request = self._request()
        if request is not None:
            self._taken = step, request

    def committed(self, steps: Iterable[int]) -> None:
        """These were committed, which process 0 alone knows: it deletes the file that they answer."""
        if self._taken is None or not any(step >= self._taken[0] for step in steps):
            return
        if self._request() != self._taken[1]:  # gone already, or made again
            self._taken = None
            return
        try:
            self._file.unlink()
            self._taken = None
        except OSError as error:  # no reason to end a run, nor to save again
            log.warning("%s: saved, but the file can't be deleted: %s", self._file, error.strerror)

    def _request(self) -> _Request | None:
        try:
            status = self._file.lstat()
        except OSError:
            return None
        if stat.S_ISREG(status.st_mode):
            return _Request(status.st_ino, status.st_mtime_ns)
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s: expected a plain file, which requests a save; ignoring what is there", self._file)
        return None
