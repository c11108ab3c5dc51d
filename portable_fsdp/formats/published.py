"""An export of a multimodal model whose text has trained: the published folder with the text's new weights in it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from portable_fsdp.checkpoint.manifests import SAFETENSORS_DTYPES, TensorEntry
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config.schema import Model
from portable_fsdp.formats import base as formats
from portable_fsdp.models.architecture import text_config
from portable_fsdp.models.multimodal import Published, open_published
from portable_fsdp.models.pretrained import ConvertedTensors, open_pretrained
from portable_fsdp.runtime.errors import CheckpointError, ConfigError

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def published_model(model_config: Mapping[str, Any] | None, where: str) -> Published | None:
    """Return the multimodal model of a checkpoint's config, on meta; None if the config is of a text model alone.

    Raises `CheckpointError`.
    """
    config = None if model_config is None else formats.config_object(model_config, where)
    if model_config is None or text_config(config) is config:
        return None
    try:
        return open_published(config, text_config(config)).holding(formats.model_on_meta(model_config, where))
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def with_parts(
    reader: Reader, place: str, whole: Published, tensors: dict[str, TensorEntry], read: Callable[[str], Tensor]
) -> tuple[dict[str, TensorEntry], Callable[[str], Tensor], Path]:
    """Add the base's other tensors to those of the text, all under the names in its files.

    `place`: the base, a folder or hub id. A weight that transformers joins from several tensors has its name in the
    model. Returns also the base's folder. Raises `CheckpointError` if it can't be opened, or is another model.
    """
    where = f"checkpoint {reader.folder.name}: expected the multimodal model whose text it is"
    try:
        config, file = open_pretrained(Model(pretrained=place))
    except ConfigError as error:
        raise CheckpointError(f"{where}, found: {error}\n  Name it: --base FOLDER (or org/name@revision).") from None
    text = formats.model_on_meta(reader.manifest.architecture or {}, where)
    of_text = ConvertedTensors(file, text, whole)
    if type(config) is not type(whole.model.config) or not of_text.keys:
        raise CheckpointError(f"{where}, found {type(config).__name__} in {place}.\n  Name it: --base FOLDER.")
    names: dict[str, str] = {}
    for fqn in tensors:
        keys = [] if fqn in of_text.joined else of_text.keys.get(fqn, [])
        names[keys[0] if keys else whole.name(fqn)] = fqn
    dtypes = {theirs: ours for ours, theirs in SAFETENSORS_DTYPES.items()}
    replaced = {key for keys in of_text.keys.values() for key in keys}
    rest = {
        key: TensorEntry(shape=shape, dtype=dtypes[file.dtype_of(key)])
        for key, shape in file.shapes.items()
        if key not in replaced
    }
    added = {key: tensors[fqn] for key, fqn in names.items()}
    return added | rest, lambda key: read(names[key]) if key in names else file.read(key, ()), file.where
