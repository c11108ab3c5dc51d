"""When a run saves besides every n steps: by the clock, and now. Asked on process 0, told to all with the next step."""

import logging
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("portable_fsdp")


class _Request(NamedTuple):
    """A file `SAVE`, told from one that is made (or touched) later."""

    inode: int
    modified_ns: int


class SaveTriggers:
    """Whether a save is due: `every_minutes` after the last one, or because somebody made the file `SAVE`.

    `touch RUN/SAVE` asks for a checkpoint. One request makes one save, and the file goes when that is committed: by
    then a save in the background has come to its end.
    """

    def __init__(self, folder: Path, every_minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that only grow."""
        self._file = folder / "SAVE"
        self._every_s = None if every_minutes is None else 60 * every_minutes
        self._clock = clock
        self._last = clock()
        self._taken: tuple[int, _Request] | None = None  # the request that is being answered, and by which step's save
        self._has_warned = False

    @property
    def due(self) -> bool:
        """Whether to save soon. True until `began`."""
        by_clock = self._every_s is not None and self._clock() - self._last >= self._every_s
        request = self._request()
        return by_clock or (request is not None and (self._taken is None or self._taken[1] != request))

    def began(self, step: int) -> None:
        """A save of `step` has begun, for whatever reason: it answers a request that was made before."""
        self._last = self._clock()
        request = self._request()
        if request is not None:
            self._taken = step, request

    def committed(self, steps: Iterable[int]) -> None:
        """These were committed; process 0 alone knows, and it alone deletes the file of a request that they answer."""
        if self._taken is None or not any(step >= self._taken[0] for step in steps):
            return
        if self._request() != self._taken[1]:  # it is gone already, or somebody has asked again
            self._taken = None
            return
        try:
            self._file.unlink()
            self._taken = None
        except OSError as error:  # no reason to end a run; nor to save again, so it stays taken
            log.warning("%s: saved as it asked, but it can't be deleted: %s", self._file, error.strerror)

    def _request(self) -> _Request | None:
        try:
            status = self._file.lstat()
        except OSError:
            return None
        if stat.S_ISREG(status.st_mode):
            return _Request(status.st_ino, status.st_mtime_ns)
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s: expected a plain file, which asks for a save; found something else, ignored", self._file)
        return None
