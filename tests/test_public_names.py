"""The names that people import: few, lazy, and pinned here."""

from typing import Any

import portable_fsdp
from portable_fsdp import trainers

NAMES = [
    *("Accelerator", "Checkpoints", "build_data", "build_evaluator", "build_model", "build_training"),
    *("errors_as_sentences", "export", "learning_rate", "load_config", "make_config", "notebook_launcher"),
    *("open_backend", "open_batches", "open_checkpoints", "register_static_attention", "shard", "shard_model"),
    *("total_steps", "train_step"),
]


def test_the_public_names_are_these_and_lead_somewhere() -> None:
    assert sorted(name for names in portable_fsdp._HOMES.values() for name in names.split()) == NAMES
    starred: dict[str, Any] = {}
    exec("from portable_fsdp import *", starred)
    assert set(NAMES) == starred.keys() - {"__builtins__"}
    assert all(callable(getattr(portable_fsdp, name)) for name in NAMES)


def test_trainers_has_one_name() -> None:
    assert trainers.__all__ == ["on_portable"]
    assert callable(trainers.on_portable)
