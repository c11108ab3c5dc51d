"""All processes train on the same rows and the same weights: what each has opened is compared before the first step.

Each process opens files and hub repositories by itself, without a collective; between two hosts' looks a branch of the
hub may move, and a file may differ from host to host.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portable_fsdp.backends.base import Backend
from portable_fsdp.config.schema import Config
from portable_fsdp.data.build import Corpus, build_data
from portable_fsdp.runtime.collective_errors import on_each_process
from portable_fsdp.runtime.errors import ConfigError


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

    `config`: transformers', of the model as it was opened.
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
    found = backend.gather(dict(facts))
    for key, first in found[0].items():
        for index, other in enumerate(found):
            if other[key] != first:
                raise ConfigError(
                    f"{key}: expected the same on all processes, found {first} on process 0 and {other[key]} on "
                    f"process {index}.\n  Of the hub, name a commit (org/name@commit): a branch may have moved between "
                    "two hosts' looks. Files must be the same on all hosts. Nothing was started."
                )
