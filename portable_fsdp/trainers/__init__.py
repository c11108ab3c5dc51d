"""transformers' Trainer on this library's engines: `class MyTrainer(on_portable(Trainer))`.

`arguments.py` makes the Accelerator from TrainingArguments, and refuses what no engine honours; `mixin.py` has the
methods of Trainer that differ here; `of_trl.py` has what trl's trainers need besides. Nothing else in the package
imports them, or transformers' Trainer.
"""

from typing import Any, TypeVar

__all__ = ["on_portable"]

T = TypeVar("T", bound=type[Any])


def on_portable(trainer: T, **options: Any) -> T:
    """Return a subclass of `trainer` (transformers' Trainer, or a subclass of it) that trains on FSDP2 and on XLA.

    Call it before TrainingArguments is made. `options`: those of `portable_fsdp.Accelerator` that TrainingArguments
    lacks (`device`, `backend`, `num_devices`, `config`, `autocast`, sections such as `sharding={...}`). Raises
    ConfigError for a class that is no Trainer, and for a transformers that isn't known.
    """
    from portable_fsdp.trainers.mixin import subclass_of

    return subclass_of(trainer, options)
