"""For the tests of foreign configs: the example files of tests/convert/samples/, and how they are read."""

from pathlib import Path

from portable_fsdp.config.load import Loaded, read_config

FILES = sorted((Path(__file__).parent / "samples").iterdir())
REST = ("model.pretrained=folder", "train.steps=100", "train.global_batch=64")
"""What no file of another tool has to say."""


def read(path: Path, *overrides: str) -> Loaded:
    ours = [text for text in REST if text.partition("=")[0] not in {given.partition("=")[0] for given in overrides}]
    return read_config(path, [*ours, *overrides])


def named(name: str) -> Path:
    return next(path for path in FILES if path.name == name)
