"""portable_fsdp: train PyTorch causal language models on GPUs and TPUs with one config and one checkpoint.

Read first: `train/loop.py` (a run, top to bottom), `backends/base.py` (what an engine must do), `config/schema.py`.
The names below are for people with a loop of their own; each is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from portable_fsdp.version import __version__ as __version__

if TYPE_CHECKING:
    from portable_fsdp.backends.open import open_backend
    from portable_fsdp.checkpoint.manager import Checkpoints
    from portable_fsdp.config.load import load_config
    from portable_fsdp.data.build import build_data
    from portable_fsdp.models.build import build_model
    from portable_fsdp.optim.schedule import learning_rate
    from portable_fsdp.runtime.command import errors_as_sentences
    from portable_fsdp.train.build import (
        build_evaluator,
        build_training,
        open_batches,
        open_checkpoints,
        total_steps,
    )
    from portable_fsdp.train.step import train_step

__all__ = [
    "Checkpoints",
    "build_data",
    "build_evaluator",
    "build_model",
    "build_training",
    "errors_as_sentences",
    "learning_rate",
    "load_config",
    "open_backend",
    "open_batches",
    "open_checkpoints",
    "total_steps",
    "train_step",
]

_HOMES = {
    "Checkpoints": "portable_fsdp.checkpoint.manager",
    "build_data": "portable_fsdp.data.build",
    "build_evaluator": "portable_fsdp.train.build",
    "build_model": "portable_fsdp.models.build",
    "build_training": "portable_fsdp.train.build",
    "errors_as_sentences": "portable_fsdp.runtime.command",
    "learning_rate": "portable_fsdp.optim.schedule",
    "load_config": "portable_fsdp.config.load",
    "open_backend": "portable_fsdp.backends.open",
    "open_batches": "portable_fsdp.train.build",
    "open_checkpoints": "portable_fsdp.train.build",
    "total_steps": "portable_fsdp.train.build",
    "train_step": "portable_fsdp.train.step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
