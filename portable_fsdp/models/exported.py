"""The hashes of a folder that we exported: `formats` writes them, whoever opens the folder checks them."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.collective_errors import Processes, on_each_process
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.files import names_in, open_regular, parse_json, read_regular
from portable_fsdp.runtime.launchers import detect_launch

MARK = "portable_fsdp.json"
"""In every exported folder: its source, its files, and their hashes. A folder without it isn't ours."""

_BLOCK = 1 << 20


def hashes_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Name -> length and 128-bit XXH3 of each file. Without README.md, which people edit. Raises OSError."""
    return {name: _summary(folder, name) for name in names if name != "README.md"}


def require_as_exported(folder: Path) -> bool:
    """Compare the files of an export with the hashes in its mark.

    False for a folder that has none: it isn't ours, or an earlier release wrote it. Raises ConfigError for a file that
    is damaged or absent, and for weights that the export didn't write.
    """
    if not os.path.lexists(folder / MARK):
        return False
    way_out = f"\n  Copy or export it again. If you changed it on purpose, delete its line below `hashes` in {MARK}."
    try:
        mark: Any = parse_json(read_regular(folder / MARK, folder))
        hashes: dict[str, Any] | None = mark.get("hashes")
        if hashes is None:
            return False
        for name, expected in hashes.items():
            if (actual := _summary(folder, name)) != expected:
                raise ConfigError(
                    f"{folder / name}: damaged: the export wrote {expected:.80}, found {actual}.{way_out}"
                )
        others = [name for name in names_in(folder) if name.endswith(".safetensors") and name not in mark["files"]]
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder}: expected the files that {MARK} lists, found: {error}.{way_out}") from None
    if others:
        raise ConfigError(f"{folder}: expected the weights of one export, found {others[0]} too.\n  Move it elsewhere.")
    return True


def require_intact(config: Config, processes: Processes) -> None:
    """`require_as_exported` for the folders of a run's model, with checkpoint.verify=full; one process of each host
    reads them. *collective*"""

    def check() -> None:
        names = [config.model.pretrained, config.model.lora and config.model.lora.start_from]
        reads = config.checkpoint.verify == "full" and detect_launch(os.environ).local_rank == 0
        for name in filter(None, names if reads else ()):
            require_as_exported(Path(name))

    on_each_process(processes, check)


def _summary(folder: Path, name: str) -> str:
    """The length of a file and its hash."""
    digest = xxhash.xxh3_128()
    with open_regular(folder / name, folder) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
        return f"{file.tell()} bytes, xxh3_128 {digest.hexdigest()}"
