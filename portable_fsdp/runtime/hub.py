"""The folder of a model or tokenizer by its name: a local one, or the hub's copy in its cache.

huggingface_hub does the work: its cache (HF_HOME), its token (HF_TOKEN, or `hf auth login`), its offline mode
(HF_HUB_OFFLINE=1), and the locks by which one process of a host downloads while the others wait.
"""

import logging
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.files import MAX_TEXT_BYTES, names_in, open_regular

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    *("config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*"),
    *("vocab*", "merges.txt", "spiece.model", "sentencepiece*.model", "*.tiktoken"),
)
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
MODEL_FILES = (*CONFIG_FILES, *WEIGHT_FILES, *TOKENIZER_FILES)
"""Patterns of names, as for `fnmatch`. Pickles and code are never downloaded: `_NEVER`."""

_WEIGHTS = {".safetensors", ".gguf", ".bin"}
_NEVER = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.msgpack", "*.h5", "*.py")
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


def before_transformers() -> None:
    """transformers would import torch_xla where that is installed, and does import torchao: 0.17 asks for a newer torch
    than 2.9, and torch 2.13 warns of what 0.18 does."""
    os.environ.setdefault("USE_TORCH_XLA", "0")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def import_transformers() -> Any:
    """It takes seconds."""
    before_transformers()
    import transformers

    return transformers


def is_hub_id(name: str) -> bool:
    """Whether it has the form `org/name` or `org/name@revision`, and no local folder has that name."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).is_dir()


def local_folder(key: str, name: str, patterns: Sequence[str] = MODEL_FILES) -> Path:
    """The folder of `name`: itself where it is a local folder, else the files of a hub repository that `patterns` name.

    `org/name@revision` takes a branch, a tag or a commit; without one it is `main`. The hub's folder is named after the
    commit. Any number of processes may call it at once. Raises ConfigError, with the config's `key`, for a folder that
    isn't there and for what the hub answers (no such repository, gated, no network, offline and not in the cache).
    """
    hub_id = require_folder_or_hub_id(key, name)
    if hub_id is not None:
        return _snapshot(key, name, hub_id["repo"], hub_id["revision"], patterns)
    require_plain_files(key, Path(name), patterns)
    return Path(name)


def require_plain_files(key: str, folder: Path, patterns: Sequence[str]) -> None:
    """Raises ConfigError unless the files that `patterns` name are regular ones of this folder, all but weights of
    bounded sizes. transformers would wait for a pipe, read a device until memory is full, and follow a link anywhere.
    """
    templates = folder / "additional_chat_templates"
    try:
        inside = names_in(templates) if templates.is_dir() else []
        names = [*names_in(folder), *(f"{templates.name}/{name}" for name in inside)]
        for path in (folder / name for name in names if any(fnmatch(name, pattern) for pattern in patterns)):
            if not path.is_dir():  # transformers says so
                open_regular(path, folder, None if path.suffix in _WEIGHTS else MAX_TEXT_BYTES).close()
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename}: {error.strerror}.") from None


def require_folder_or_hub_id(key: str, name: str) -> re.Match[str] | None:
    """The parts of a hub id; None for a local folder. Raises ConfigError for what is neither."""
    if Path(name).is_dir():
        return None
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is None:
        raise ConfigError(
            f"{key}: expected a local folder or a hub id (org/name, org/name@revision), found no such folder: {name}\n"
            "  The path is relative to the folder that the run starts in."
        )
    return hub_id


def _snapshot(key: str, name: str, repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_NEVER)
        )
    except Exception as error:  # of its HTTP library too, which changes with its version: all about this download
        cause = error.__cause__ or error
        constants = huggingface_hub.constants
        raise ConfigError(
            f"{key}: {name}: no local folder, and not downloaded from {constants.ENDPOINT}: {type(error).__name__}: "
            f"{next(iter(str(cause).strip().splitlines()), '')}\n  Check the name (org/name, org/name@revision). A "
            f"private or gated repository needs HF_TOKEN, and access: {constants.ENDPOINT}/{repo}.\n  Without a "
            f"network or with HF_HUB_OFFLINE=1 all files must be in the cache: {constants.HF_HUB_CACHE}."
        ) from error
    return Path(folder)
