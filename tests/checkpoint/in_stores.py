"""Saves and loads of the plain backend behind URLs, for the tests of object stores."""

from functools import cache
from pathlib import Path
from typing import Any

from plain_backend import PlainBackend, checkpoints, in_processes, load, small_model, snapshot

from portable_fsdp.checkpoint.manager import Checkpoints
from portable_fsdp.checkpoint.storage import locate

OURS = {"run": {"name": "ours"}}


def opened(url: str, backend: PlainBackend, config: dict[str, Any] = OURS, **settings: Any) -> Checkpoints:
    return checkpoints(at(url), backend, settings, config=config)


@cache
def at(url: str) -> Path:
    """fsspec keeps a client for each thread that asks for one: here all processes take the same."""
    return locate(url)


def save(url: str, step: int, count: int = 1, config: dict[str, Any] = OURS, **settings: Any) -> Path:
    at(url)

    def work(backend: PlainBackend) -> Path:
        return opened(url, backend, config, **settings).save(step, *small_model(seed=step), (0, step))

    result = in_processes(count, work, devices=2)[0]
    assert not isinstance(result, Exception), result
    return result


def loaded(url: str, backend: PlainBackend) -> tuple[int, dict[str, bytes]]:
    model, optimizer = small_model(seed=9)
    return load(opened(url, backend), model, optimizer).step, snapshot(model, optimizer)


def expect_loaded(url: str, step: int, count: int = 1) -> None:
    results = in_processes(count, lambda backend: loaded(url, backend))
    assert results == [(step, snapshot(*small_model(seed=step)))] * count
