"""Helpers for tests of foreign configs: the example files of samples/, how to read them, and an import as text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from portable_fsdp.config.describe import value_of, yaml_value
from portable_fsdp.config.load import Loaded
from portable_fsdp.convert.read import read_config
from portable_fsdp.runtime.errors import ConfigError

HERE = Path(__file__).parent
FILES = sorted((HERE / "samples").iterdir())
REST = ("model.pretrained=folder", "train.steps=100", "train.global_batch=64")
"""Options that files of other tools need not set."""
LAUNCHED_WORDS = """
    ACCELERATE_MIXED_PRECISION=no ACCELERATE_USE_CPU=False ACCELERATE_DYNAMO_BACKEND=NO ACCELERATE_DYNAMO_MODE=default
    ACCELERATE_DYNAMO_USE_FULLGRAPH=False ACCELERATE_USE_FSDP=true FSDP_VERSION=1 FSDP_SHARDING_STRATEGY=FULL_SHARD
    FSDP_RESHARD_AFTER_FORWARD=true FSDP_MIN_NUM_PARAMS=100000000 FSDP_OFFLOAD_PARAMS=false FSDP_FORWARD_PREFETCH=false
    FSDP_USE_ORIG_PARAMS=true FSDP_CPU_RAM_EFFICIENT_LOADING=true FSDP_SYNC_MODULE_STATES=true
    FSDP_ACTIVATION_CHECKPOINTING=false FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=false
"""
LAUNCHED = {name: value for name, _, value in (pair.partition("=") for pair in LAUNCHED_WORDS.split())}
"""Variables that `accelerate launch --use_fsdp` of 1.15 sets by itself; a block of environment.txt adds to them."""


def read(path: Path, *overrides: str) -> Loaded:
    options = {text.partition("=")[0] for text in overrides}
    return read_config(path, [*(text for text in REST if text.partition("=")[0] not in options), *overrides])


def problems(path: Path, *overrides: str) -> str:
    """The message of a config that can't be read, without the names of folders."""
    with pytest.raises(ConfigError) as error:
        read_config(path, overrides)
    return plain(str(error.value), path.parent)


def plain(message: str, folder: Path) -> str:
    return message.replace(f"{folder}/", "")


def _as_set(actual: Any, value: object) -> object:
    """What a mapping sets, or each mapping of a list, without the defaults beside it."""
    if isinstance(value, list):
        return [_as_set(one, of_list) for one, of_list in zip(actual, cast(list[object], value), strict=True)]
    return {key: getattr(actual, key) for key in cast(dict[str, Any], value)} if isinstance(value, dict) else actual


def rendered(loaded: Loaded, keys: str | None = None) -> Iterator[str]:
    """Every setting of the imports but Trainer's defaults, then every key that sets nothing; `keys`: those alone."""
    for imported in loaded.imports:
        for option, setting in imported.settings.items():
            if setting.is_default:
                continue
            remark = f" ({setting.remark})" if setting.remark else ""
            value = yaml_value(setting.value)
            if loaded.origins.get(option) == setting.origin:
                assert yaml_value(_as_set(value_of(loaded.config, option), setting.value)) == value
                yield f"{option} = {value}  # {setting.key}: {setting.text}{remark}"
            else:
                yield f"overridden: {option} = {value}  # {setting.key}: {setting.text}{remark}"
        for title, notes in (("launcher", imported.launcher), ("ignored", imported.not_needed)):
            for note in notes:
                fact = f" [{note.fact}]" if note.fact else ""
                if keys is None or note.key in keys:
                    yield f"{title}: {note.key}: {note.text}: {note.remark}{fact}"
