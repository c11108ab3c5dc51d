"""portable_fsdp: train PyTorch models on GPUs and TPUs with one config and one checkpoint.

Read first: `train/loop.py` (a run, top to bottom), `backends/contract.py` (the interface of an engine), and
`config/schema.py`. The names below are for custom training loops; each is imported on first use.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable_fsdp.accelerator.front import Accelerator as Accelerator
    from portable_fsdp.accelerator.start import notebook_launcher as notebook_launcher
    from portable_fsdp.backends.open import open_backend as open_backend
    from portable_fsdp.checkpoint.__main__ import export as export
    from portable_fsdp.checkpoint.manager import Checkpoints as Checkpoints
    from portable_fsdp.config.load import make_config as make_config
    from portable_fsdp.convert.read import load_config as load_config
    from portable_fsdp.data.build import build_data as build_data
    from portable_fsdp.models.attention import register_static_attention as register_static_attention
    from portable_fsdp.models.build import build_model as build_model
    from portable_fsdp.optim.optimizer import learning_rate as learning_rate
    from portable_fsdp.runtime.command import errors_as_sentences as errors_as_sentences
    from portable_fsdp.train.build import build_evaluator as build_evaluator
    from portable_fsdp.train.build import build_training as build_training
    from portable_fsdp.train.build import open_batches as open_batches
    from portable_fsdp.train.build import open_checkpoints as open_checkpoints
    from portable_fsdp.train.build import shard as shard
    from portable_fsdp.train.build import shard_model as shard_model
    from portable_fsdp.train.build import total_steps as total_steps
    from portable_fsdp.train.step import train_step as train_step

__version__ = "0.1.0"

_HOMES = {
    "accelerator.front": "Accelerator",
    "accelerator.start": "notebook_launcher",
    "backends.open": "open_backend",
    "checkpoint.__main__": "export",
    "checkpoint.manager": "Checkpoints",
    "config.load": "make_config",
    "convert.read": "load_config",
    "data.build": "build_data",
    "models.attention": "register_static_attention",
    "models.build": "build_model",
    "optim.optimizer": "learning_rate",
    "runtime.command": "errors_as_sentences",
    "train.build": "build_evaluator build_training open_batches open_checkpoints shard shard_model total_steps",
    "train.step": "train_step",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":  # for `import *`
        return [name for names in _HOMES.values() for name in names.split()]
    if home := next((module for module, names in _HOMES.items() if name in names.split()), ""):
        if "accelerator" in home:
            importlib.import_module(f"{__name__}.accelerator").keep_xla_out()
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if sys.argv[:1] == ["-m"]:  # `python -m portable_fsdp.COMMAND`, before the imports of its module
    from portable_fsdp.runtime.command import excepthook

    sys.excepthook = excepthook
