"""Lines of data, plain and compressed: odd JSON, lines and files without end, columns of wrong kinds."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from portable_fsdp.config.schema import Data
from portable_fsdp.data.examples import Broken
from portable_fsdp.data.render import messages_of
from portable_fsdp.data.sources import open_source
from portable_fsdp.runtime.errors import DataError

_TURNS: tuple[Any, ...] = (
    *([{"role": "user"}], [{"from": "bing", "value": "x"}], [{"from": [], "value": {}}], [1]),
    [{"role": 1, "content": 2}],
)
_TEXTS = ("x", "", "\x1b[2J", "\ud800", "x" * 100_000)
_ODD: tuple[Any, ...] = (*_TEXTS, *_TURNS, True, -1, 1e999, float("nan"), 10**400, None, [], {}, [[]], {"a": 1})
_COLUMNS = ("text", "prompt", "completion", "messages", "conversations", "tools", "\x1b[31m", "y" * 9999)


def case(seed: int, folder: Path) -> Callable[[], object]:
    draw = random.Random(seed)
    content = b"".join(_line(draw) for _ in range(draw.choice((1, 2, 5))))
    if draw.random() < 0.03:
        content += b'{"text": "' + b"x" * draw.choice((1 << 20, 40 << 20))
    path = folder / "hostile.jsonl"
    packed = gzip.compress(content, 1) if draw.random() < 0.3 else content
    if draw.random() < 0.1:
        packed = packed[: draw.randrange(len(packed))]
    path.write_bytes(packed)
    data = Data(source="jsonl", path=str(path), format=draw.choice(("text", "prompt_completion", "chat")))

    def read() -> object:
        examples = list(open_source(data).read())
        for example in examples:
            if isinstance(example, Broken):
                raise DataError(f"{example.place}: {example.problem}")
            for value in example.fields.values():
                try:
                    messages_of(value)
                except ValueError as error:
                    raise DataError(f"{example.place}: {error}") from error
        return examples

    return read


def _line(draw: random.Random) -> bytes:
    match draw.randrange(15):
        case 0:
            return draw.choice((b"[" * 100_000, b'{"a":' * 50_000, b"[1]", b"null", b"\xff\xfe", b"{", b"")) + b"\n"
        case 1:
            return draw.randbytes(draw.choice((1, 100))) + b"\n"
        case 2:
            return b'{"text": "x", "text": "y"}\n'
        case 14:
            return b"[" * 200_001 + b'\\"' * 100_000 + b"\n"
        case 3:
            return b'{"text": [' + b"[]," * 1_000_000 + b"1]}\n"
        case _:
            columns = draw.sample(_COLUMNS, draw.randint(1, 4))
            text = json.dumps({column: draw.choice(_ODD) for column in columns}, ensure_ascii=draw.random() < 0.8)
            return text.encode(errors="surrogatepass") + b"\n"
