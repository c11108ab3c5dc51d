"""`checkpoint.export`: the finished run as a Hugging Face folder. A command hands this module to the loop."""

import logging
from pathlib import Path

from portable_fsdp.backends.contract import Backend
from portable_fsdp.checkpoint.commit import with_cause
from portable_fsdp.checkpoint.format import Evaluated, best_checkpoint
from portable_fsdp.config.schema import Config
from portable_fsdp.data.tokenize import Tokenizer
from portable_fsdp.formats.base import ExportOptions
from portable_fsdp.formats.exporting import export_checkpoint, require_replaceable
from portable_fsdp.runtime.collective_errors import on_process_0
from portable_fsdp.runtime.errors import TrainingError

log = logging.getLogger("portable_fsdp")


def require_room(config: Config) -> None:
    """Raises where something else than an earlier export lies in its place."""
    require_replaceable(_folder(config))


def export_run(
    config: Config, backend: Backend, tokenizer: Tokenizer | None, newest: Path, history: Evaluated | None
) -> None:
    """Export the best checkpoint by its evaluation, the newest where there was none. *collective*"""
    folder = _folder(config)
    kind = "peft" if config.model.lora is not None and not config.checkpoint.merge_adapters else "huggingface"

    def export() -> None:
        checkpoint, reason = best_checkpoint(newest, history)
        # The base may have moved since the checkpoint was saved.
        save = tokenizer.save if tokenizer else None
        options = ExportOptions(save_tokenizer=save, base=config.model.pretrained)
        export_checkpoint(checkpoint, kind, folder, options)
        log.info("exported %s%s to %s", checkpoint, reason, folder)

    def as_error(error: Exception) -> TrainingError:
        again = f"python -m portable_fsdp.checkpoint export {newest.parent} FOLDER{' --format peft' * (kind == 'peft')}"
        reason = with_cause(error, folder.parent)
        return TrainingError(f"checkpoint.export: {reason}\n  The run itself is saved: {again} repeats it.")

    on_process_0(backend, export, as_error)  # nobody leaves before the folder is whole


def _folder(config: Config) -> Path:
    return Path(config.run.dir) / "export"
