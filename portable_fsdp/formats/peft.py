"""The folder that peft's `PeftModel.from_pretrained` opens: adapters alone, and what they belong to. Export only."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from torch import nn

from portable_fsdp.checkpoint.format import Manifest
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats.base import Advance, SaveTokenizer, as_dtype, say_nothing, verify
from portable_fsdp.formats.merging import adapters_of
from portable_fsdp.formats.names import import_transformers
from portable_fsdp.formats.streams import write_file
from portable_fsdp.formats.target import new_folder, require_replaceable
from portable_fsdp.models.lora import WEIGHTS, holds_inputs_first, peft_keys
from portable_fsdp.runtime.errors import CheckpointError


def export_adapters(checkpoint: Path, folder: Path, save_tokenizer: SaveTokenizer | None) -> None:
    """`export` of the checkpoint in a folder, in the dtype that it was saved in."""
    with Reader(checkpoint) as reader:
        export(reader, folder, save_tokenizer=save_tokenizer)


def export(
    reader: Reader,
    target: Path,
    *,
    dtype: str | None = None,
    save_tokenizer: SaveTokenizer | None = None,
    advance: Advance = say_nothing,
) -> None:
    """Write adapter_config.json and the adapters' weights; the tokenizer too. For one process.

    `dtype`: of the adapters; None: as saved. Hashes the model's files first. Raises `CheckpointError`: no adapters, a
    damaged checkpoint, another thing in `target`.
    """
    require_replaceable(target)
    adapters = adapters_of(reader)
    if adapters is None:
        raise CheckpointError(
            f"checkpoint {reader.folder.name}: expected adapters (model.lora), found none: it has whole weights.\n"
            "  Take --format huggingface."
        )
    import_transformers()  # chosen before peft imports it
    from peft import LoraConfig

    pretrained, revision = _base_model(reader.manifest)
    ours = {theirs: key for names in adapters.layers for theirs, key in peft_keys(names)}
    tensors = {theirs: as_dtype(reader.manifest.tensors[key], dtype) for theirs, key in ours.items()}
    settings = LoraConfig(
        r=adapters.r,
        lora_alpha=cast(int, int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha),
        fan_in_fan_out=any(holds_inputs_first(adapters.base.get_submodule(names.layer)) for names in adapters.layers),
        task_type="CAUSAL_LM",
        base_model_name_or_path=pretrained,
        revision=revision,
        inference_mode=True,
    )
    # After it was made, which would turn them into a set, and the file's order into chance.
    settings.target_modules = _target_modules(adapters.base, [names.layer for names in adapters.layers])
    verify(reader, advance, "model/")
    with new_folder(target, reader.manifest) as unfinished:
        settings.save_pretrained(str(unfinished))
        write_file(unfinished / WEIGHTS, tensors, lambda key: reader.read_whole(ours[key]), {"format": "pt"}, advance)
        if save_tokenizer is not None:
            save_tokenizer(unfinished)


def _target_modules(base: nn.Module, layers: Iterable[str]) -> list[str]:
    """The last parts of the layers' names, as people write them, where these name no other module; else whole names."""
    wanted = set(layers)
    ends = {name.rpartition(".")[2] for name in wanted}
    named = {name for name, _ in base.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if named == wanted else wanted)


def _base_model(manifest: Manifest) -> tuple[str | None, str | None]:
    """What adapters belong to: a hub id, or a folder by a path that holds wherever it is read from; its revision."""
    name = manifest.config.get("model", {}).get("pretrained")
    if name is None:
        return None, None
    if Path(name).is_dir():
        return str(Path(name).resolve()), None
    repository, _, revision = name.partition("@")
    return repository, revision or None
