"""Notices that this host is about to end, from the metadata server of Compute Engine.

A server answers only about its own host, so one process of each host watches it, and the control vector carries its
request to stop to the others. A notice that the server had before the run began doesn't count. Otherwise a run that
the launch file starts again on a host with an hour of notice would stop after each step.
"""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

log = logging.getLogger("portable_fsdp")

_PREEMPTED, _MAINTENANCE, _WINDOW = "preempted", "maintenance-event", "upcoming-maintenance"
"""Keys below `computeMetadata/v1/instance`. TPUs and some other machines have the last; it names a window of time."""

_LONGEST_S = 3.0  # to connect, and beyond _HELD_S for an answer
_HELD_S = 5  # the server holds a request until `preempted` changes, or this long
_PAUSE_S = 1.0  # at least, between two requests: a proxy may not hold them
_FIRST_FAILURES = 3  # in a row, before the server has answered once
_FAILURES = 60  # the same; a server that has answered before may be absent for minutes
_BEFORE_S = 120.0  # before a window of maintenance
_MOST_BYTES = 1 << 16


@contextmanager
def watched(url: str, request_stop: Callable[[str], bool]) -> Generator[None]:
    """Call `request_stop` with the reason, in a thread, at the first notice of the server at `url`.

    Logs one warning, and ends, if the server doesn't answer.
    """
    over = threading.Event()
    arguments = (url, request_stop, over)
    threading.Thread(target=_watch, args=arguments, name="portable_fsdp preemption", daemon=True).start()
    try:
        yield
    finally:
        over.set()  # without waiting for its last request


def _watch(url: str, request_stop: Callable[[str], bool], over: threading.Event) -> None:
    keys, etag, failures, earlier = [_PREEMPTED, _MAINTENANCE, _WINDOW], None, 0, set[str]()
    while not over.is_set():
        began, is_first = time.monotonic(), etag is None
        try:
            notices, etag, is_whole = _look(url, keys, etag)
        except (OSError, HTTPException, ValueError) as error:
            failures += 1
            if failures >= (_FIRST_FAILURES if is_first else _FAILURES):
                cause = str(error) or type(error).__name__
                log.warning("run.preemption: %s is no metadata server: %s. Only signals will stop the run.", url, cause)
                return
            over.wait(_PAUSE_S if is_first else _HELD_S)
            continue
        failures = 0
        for notice in sorted(notices) if is_first else ():
            log.warning("%s, announced before this start: the run continues until a signal", notice)
        if is_first or is_whole:
            earlier = notices if is_first else earlier & notices
        if new := sorted(notices - earlier):
            if not over.is_set() and request_stop(new[0]):
                log.warning("%s: ending after the current step and its save", new[0])
            return
        over.wait(max(0.0, _PAUSE_S - (time.monotonic() - began)))


class _Missing(ValueError):
    """The server has no such key."""


def _look(url: str, keys: list[str], etag: str | None) -> tuple[set[str], str, bool]:
    """Return (notices, ETag of `preempted`, whether all keys answered), as soon as that ETag differs from `etag`, or
    after _HELD_S.

    Removes keys that this machine lacks. A failure of `preempted` is raised; the others are asked again next time.
    """
    notices, tag, is_whole = set[str](), "", True
    for key in [*keys]:
        query = "?alt=json" if key == _WINDOW else ""
        if key == _PREEMPTED and etag:
            query = f"?wait_for_change=true&timeout_sec={_HELD_S}&last_etag={etag}"
        try:
            answer, own_tag = _ask(url, key + query)
            notices.update(_notices(key, answer))
        except (OSError, HTTPException, ValueError) as error:
            if key == _PREEMPTED:
                raise
            is_whole = False
            if isinstance(error, _Missing):
                keys.remove(key)
        else:
            tag = own_tag if key == _PREEMPTED else tag
    return notices, tag, is_whole


def _ask(url: str, key: str) -> tuple[str, str]:
    """Return (answer, its ETag). Raises ValueError for anything but a metadata server's answer. Uses no proxy."""
    server = urlsplit(url)
    kind = HTTPSConnection if server.scheme == "https" else HTTPConnection
    connection = kind(server.hostname or "", server.port, timeout=_LONGEST_S)
    try:
        connection.connect()
        connection.sock.settimeout(_LONGEST_S + _HELD_S * ("wait_for_change" in key))
        path = f"{server.path.rstrip('/')}/computeMetadata/v1/instance/{key}"
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        response = connection.getresponse()
        answer = response.read(_MOST_BYTES).decode(errors="replace").strip()
        if response.status == 404:
            raise _Missing(f"HTTP status 404 for {key.partition('?')[0]}")
        if response.status != 200 or response.getheader("Metadata-Flavor") != "Google":
            raise ValueError(f"HTTP status {response.status} for {key.partition('?')[0]}")
        return answer, response.getheader("ETag", "")
    finally:
        connection.close()


def _notices(key: str, answer: str) -> Sequence[str]:
    """Return the notices in an answer. Raises ValueError for an unknown value."""
    host = socket.gethostname()
    if key == _WINDOW:
        begins, starts = '"ONGOING"' in answer, re.search(r'"window_?start_?time": *"([^"]+)"', answer, re.IGNORECASE)
        with suppress(ValueError):
            begins |= starts is not None and datetime.fromisoformat(starts[1]).timestamp() - time.time() < _BEFORE_S
        return [f"Compute Engine's maintenance of {host} begins"] if begins else []
    meanings = {
        _PREEMPTED: {"FALSE": [], "TRUE": [f"Compute Engine preempts {host}"]},
        _MAINTENANCE: {
            "NONE": [],
            "MIGRATE_ON_HOST_MAINTENANCE": [],  # the host moves, with all that runs on it
            "TERMINATE_ON_HOST_MAINTENANCE": [f"Compute Engine's maintenance ends {host}"],
        },
    }
    if answer not in meanings[key]:
        raise ValueError(f"{answer[:60]!r} for {key}")
    return meanings[key][answer]
