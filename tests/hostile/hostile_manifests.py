"""Manifests of our own format, sealed by whoever wrote them: a true one with values put in, taken out or exchanged."""

import atexit
import copy
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from plain_backend import save_once

from portable_fsdp.backends.contract import Partition
from portable_fsdp.checkpoint import report
from portable_fsdp.checkpoint.manifests import MANIFEST, read_manifest, seal
from portable_fsdp.checkpoint.store import Reader

_ODD: tuple[Any, ...] = (
    *(True, False, -1, 0, 1, 2.5, 1e999, float("nan"), 2**63, 10**400, None, "", "a", [], {}, [[0]], [-1], {"a": {}}),
    *("../../harm", "/etc/passwd", "\x1b[2J", "x" * 50_000, "model/../../harm.safetensors", "model/a.safetensors"),
    *("\ud800", [0] * 5000, {str(number): number for number in range(5000)}),
)


def case(seed: int, folder: Path) -> Callable[[], object]:
    draw = random.Random(seed)
    true = _true_checkpoint()
    checkpoint = folder / true.name
    shutil.copytree(true, checkpoint)
    manifest = checkpoint / MANIFEST
    manifest.write_bytes(_hostile(draw, manifest.read_text()).encode(errors="surrogatepass"))

    def read() -> object:
        report.summary(checkpoint, read_manifest(checkpoint))
        with Reader(checkpoint) as reader:
            reader.verify(Partition(0, 1))
            return [reader.read_whole(key) for key in list(reader.manifest.tensors)[:3]]

    return read


@cache
def _true_checkpoint() -> Path:
    folder = tempfile.mkdtemp(prefix="hostile_manifest")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save_once(Path(folder))


def _hostile(draw: random.Random, text: str) -> str:
    match draw.randrange(20):
        case 0:
            place = draw.randrange(len(text))
            return text[:place] + chr(draw.randrange(0x250)) + text[place + draw.randrange(3) :]
        case 1:
            return text[: draw.randrange(len(text))]
        case 2:
            return seal("[" * 100_000)
        case 3:
            return seal('{"a":' * 100_000)
        case 5:
            return seal('{"a":' + "[" * 20_000 + '\\"' * 60_000)
        case 4:
            return seal('{"format_version": 1, "tensors": [' + "[]," * 3_000_000 + "[]]")
        case _:
            pass
    values = json.loads(text)
    del values["xxh3_128"]
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        _change(draw, values)
    content = json.dumps(values)
    if draw.random() < 0.1:
        content = content.replace('"step"', '"step": 1, "step"', 1)
    return seal(content.removesuffix("}")) if draw.random() < 0.95 else content


def _change(draw: random.Random, values: Any) -> None:
    """Somewhere inside."""
    while True:
        keys = list(values) if isinstance(values, dict) else list(range(len(values)))
        if not keys:
            return
        key = draw.choice(keys)
        inner = values[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.8:
            values = inner
            continue
        match draw.randrange(4):
            case 0 if isinstance(values, dict):
                values[draw.choice(("more", "\x1b[31m", "../harm", "x" * 9999))] = values.pop(key)
            case 1:
                del values[key]
            case 2:
                other = draw.choice(keys)
                values[key], values[other] = values[other], copy.deepcopy(inner)
            case _:
                values[key] = draw.choice(_ODD)
        return
