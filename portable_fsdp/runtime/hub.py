"""Find the folder of a model or tokenizer: a local one, or a download from the hub in the cache.

huggingface_hub downloads: its cache (HF_HOME), its token (HF_TOKEN, or `hf auth login`), its offline mode
(HF_HUB_OFFLINE=1), and its locks, so that one process per host downloads while others wait.
"""

import logging
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from portable_fsdp.runtime.errors import ConfigError, DataError
from portable_fsdp.runtime.files import open_inside

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    *("config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*"),
    *("vocab*", "merges.txt", "spiece.model", "sentencepiece*.model", "*.tiktoken"),
)
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
MODEL_FILES = (*CONFIG_FILES, *WEIGHT_FILES, *TOKENIZER_FILES)
"""Name patterns for `fnmatch`. Pickles and code are never downloaded: `_NEVER`."""

_NEVER = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.msgpack", "*.h5", "*.py")
_OF_RUNS = ("events.jsonl", "manifest.json")  # in a run's folder, in a checkpoint's
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


def before_transformers() -> None:
    """Call before importing transformers: it would import torch_xla if installed. It also imports torchao: 0.17 asks
    for a newer torch than 2.9, and torch 2.13 warns about 0.18; these logs are silenced."""
    os.environ.setdefault("USE_TORCH_XLA", "0")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def import_transformers() -> Any:
    """Import and return transformers, which takes seconds."""
    before_transformers()
    import transformers

    return transformers


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form `org/name` or `org/name@revision`, and isn't a local folder."""
    return _hub_parts(name) is not None and not Path(name).is_dir()


def _hub_parts(name: str) -> re.Match[str] | None:
    """Return the parts of a hub id; None for a path: one without a revision whose parent is a local folder."""
    parts = _HUB_ID.fullmatch(name)
    return None if parts and not parts["revision"] and Path(name).parent.is_dir() else parts


def local_folder(key: str, name: str, patterns: Sequence[str] = MODEL_FILES) -> Path:
    """Return `name` if it is a local folder, else a folder with the files of the hub repository that match `patterns`.

    The revision in `org/name@revision` is a branch, tag or commit (default `main`). The hub's folder is named after the
    commit. Any number of processes may call it at once. Raises ConfigError, with the config's `key`, for a missing
    folder and for errors of the hub (no such repository, gated, no network, offline and not in the cache).
    """
    hub_id = require_folder_or_hub_id(key, name)
    if hub_id is not None:
        return _snapshot(key, name, hub_id["repo"], hub_id["revision"], patterns)
    require_plain_files(key, Path(name), patterns)
    return Path(name)


def require_plain_files(key: str, folder: Path, patterns: Sequence[str]) -> None:
    """Raise ConfigError unless the files that match `patterns` can be read and are inside this folder: transformers
    would follow any link."""
    try:
        for path in [*sorted(folder.iterdir()), *sorted(folder.glob("additional_chat_templates/*"))]:
            name = str(path.relative_to(folder))
            if any(fnmatch(name, pattern) for pattern in patterns) and not path.is_dir():  # transformers reports those
                open_inside(path, folder).close()
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename}: {error.strerror}.") from None


@contextmanager
def panic_as_error(what: str) -> Generator[None]:
    """Turn a panic of the tokenizers library, which is no Exception, into a DataError about `what`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{what}: the tokenizer or its chat template failed: {error}.\n  Check the template and the regular "
            "expressions in tokenizer.json, or use another tokenizer."
        ) from None


def require_folder_or_hub_id(key: str, name: str) -> re.Match[str] | None:
    """Return the parts of a hub id; None for a local folder. Raises ConfigError if `name` is neither."""
    if (folder := Path(name)).is_dir():
        places = folder, *folder.glob("step-*")  # a run's `checkpoints` too
        if (folder / "config.json").exists() or not any((place / own).exists() for place in places for own in _OF_RUNS):
            return None
        run = folder if any((folder / own).exists() for own in _OF_RUNS) else folder.parent  # of `checkpoints`
        export = run / "export"
        fix = (
            f"Set {key}={export}"
            if export.is_dir()
            else f"Export it (python -m portable_fsdp.checkpoint export {name} FOLDER), then set {key}=FOLDER"
        )
        raise ConfigError(f"{key}: {name} is the folder of a run or checkpoint, not of a model.\n  {fix}.")
    hub_id = _hub_parts(name)
    if hub_id is None:
        hub = f"{name}@main for a repository of the hub" if _HUB_ID.fullmatch(name) else "a hub id (org/name)"
        raise ConfigError(
            f"{key}: no such folder: {name}\n  Name a local folder or {hub}.\n"
            "  The path is relative to the folder that the run starts in."
        )
    return hub_id


def _snapshot(key: str, name: str, repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_NEVER)
        )
    except Exception as error:  # also of its HTTP library, which differs by version; all concern this download
        cause = error.__cause__ or error
        constants = huggingface_hub.constants
        raise ConfigError(
            f"{key}: {name}: not a local folder, and not downloaded from {constants.ENDPOINT}: {type(error).__name__}: "
            f"{next(iter(str(cause).strip().splitlines()), '')}\n  Check the name (org/name, org/name@revision). A "
            f"private or gated repository needs HF_TOKEN, and access: {constants.ENDPOINT}/{repo}.\n  Without a "
            f"network or with HF_HUB_OFFLINE=1 all files must be in the cache: {constants.HF_HUB_CACHE}."
        ) from error
    return Path(folder)
