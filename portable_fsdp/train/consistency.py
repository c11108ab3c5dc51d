"""Checks that all processes make together before the first step: folders, and the same model and rows on each.

Each process opens files and hub repositories by itself, without a collective. A file may differ from host to host, and
a branch of the hub may move in between.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portable_fsdp.backends.base import Backend
from portable_fsdp.config.schema import Config
from portable_fsdp.data.build import Corpus, build_data
from portable_fsdp.models.architecture import check_architecture
from portable_fsdp.runtime.collective_errors import on_each_process, on_process_0
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.hub import before_transformers
from portable_fsdp.train.early_checks import require_trackers, require_writable


def require_folders_and_model(config: Config, backend: Backend) -> None:
    """Raises, on all processes, for folders that can't be written and for a wrong architecture, before minutes of
    tokenizing. *collective*"""
    on_process_0(backend, lambda: _require_folders(config))
    if (architecture := config.model.architecture) is not None:
        before_transformers()
        on_each_process(backend, lambda: check_architecture(architecture, config.train.task))


def _require_folders(config: Config) -> None:
    require_writable(Path(config.run.dir))
    require_trackers(config)


def open_data(config: Config, backend: Backend) -> Corpus:
    """The corpus, which is the same on all processes. *collective*

    Raises DataError or ConfigError: on all of them, with the number of the one that found it where others didn't.
    """
    corpus = on_each_process(backend, lambda: build_data(config.data, config.model))
    require_same_data(backend, corpus)
    return corpus


def require_same_data(backend: Backend, corpus: Corpus) -> None:
    """Raises ConfigError on all processes where one has other rows or another tokenizer. *collective*"""
    if backend.process.count == 1:
        return
    rows, tokenizer = corpus.fingerprint
    held_out = corpus.eval_rows.fingerprint() if corpus.eval_rows is not None else "none"
    require_same(backend, {"data.tokenizer": tokenizer, "data": rows, "data.eval_split": held_out})


def require_same_model(backend: Backend, config: Mapping[str, Any]) -> None:
    """Raises ConfigError on all processes where one has another commit of `model.pretrained`, or another config.json.
    *collective*

    `config`: transformers', of the model as it was opened; empty where it is none of transformers.
    """
    opened = Path(str(config.get("_name_or_path", "")))
    rest = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    facts = {
        "model.pretrained": opened.name if opened.parent.name == "snapshots" else "no hub's commit",
        "the model's config.json": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16],
    }
    require_same(backend, facts)


def require_same(backend: Backend, facts: Mapping[str, str]) -> None:
    """Raises ConfigError, the same on all processes, for the first key whose fact isn't process 0's. *collective*"""
    by_process = backend.gather(dict(facts))
    for key, first in by_process[0].items():
        for index, others in enumerate(by_process):
            if others[key] != first:
                raise ConfigError(
                    f"{key}: expected the same on all processes, found {first} on process 0 and {others[key]} on "
                    f"process {index}.\n  Use the same files on all hosts; of the hub name a commit "
                    "(org/name@commit), since a branch may move."
                )
