"""Lines in the store where a run's processes meet, which anyone who reaches it can write."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from portable_fsdp.backends.peers import Heartbeat, _Peer, _verdict  # pyright: ignore[reportPrivateUsage]
from portable_fsdp.runtime.errors import TrainingError, printable

_ODD: tuple[Any, ...] = (
    *("many", "", "\x1b[2J\x1b[31m", "x" * 300_000, "\u202e", "\ud800", "0"),
    *(True, False, -1, 0, 1, 2.5, 1e999, float("nan"), 2**63, 10**400, None, [], {}, [[]], {"a": 1}),
    *(["a"] * 5000, [1], "\n" * 50),
)


def case(seed: int, folder: Path) -> Callable[[], object]:
    """Reads a line as the watching thread does, and writes what would be said of its process."""
    line = _line(random.Random(seed))

    def read() -> object:
        peer = _Peer()
        for text in (b"first", line):
            peer.read(text, 5.0)
        if peer.beat is None:
            raise TrainingError("the line is no heartbeat")
        assert peer.beat.steps + 1 > 0
        shown = printable(_verdict(1, peer.beat, 120.0) + peer.beat.verdict)
        assert shown.replace("\n", "").isprintable()
        return shown

    return read


def _line(draw: random.Random) -> bytes:
    values: dict[str, Any] = asdict(Heartbeat("id", "host", 1, 0, ["127.0.0.1"], 3, 2))
    for _ in range(draw.choice((0, 1, 1, 2, 5))):
        key = draw.choice((*values, "more", "\x1b[31m"))
        if draw.random() < 0.2:
            values.pop(key, None)
        else:
            values[key] = draw.choice(_ODD)
    text = json.dumps(values).encode(errors="surrogatepass")
    match draw.randrange(12):
        case 0:
            return text[: draw.randrange(len(text))]
        case 1:
            return draw.randbytes(draw.choice((0, 1, 1000)))
        case 2:
            return draw.choice((b"[" * 100_000, b'{"id":' * 50_000, b"null", b"[]", b"3", b'"x"', b"\xff" * 9, b"{}"))
        case 3:
            place = draw.randrange(len(text))
            return text[:place] + draw.randbytes(1) + text[place + 1 :]
        case 4:
            return text.replace(b'"steps": 2', b'"steps": 2, "steps": "many"')
        case _:
            return text
