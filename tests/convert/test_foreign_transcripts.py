"""What becomes of whole files and of single keys, in golden files: samples/ in golden/, small inputs in transcripts/.

A block of a transcript is an input, `---`, and what follows from it: settings of ours with the key that set them, keys
that set nothing, or the message. Its first line may be `$ overrides`, besides those that every run needs, or
`$$ overrides` alone. `--rewrite-goldens` writes what follows anew: review the diff.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_files import FILES, HERE, REST, plain, read, rendered

from portable_fsdp.convert.read import read_config
from portable_fsdp.runtime.errors import ConfigError

TRANSCRIPTS = sorted((HERE / "transcripts").iterdir())
Compare = Callable[[Path, str], None]

LAUNCHED = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
"""What `accelerate launch --use_fsdp` of 1.15 sets by itself; a block of environment.txt adds to it."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_sample(path: Path, assert_golden: Compare) -> None:
    assert_golden(HERE / "golden" / f"{path.name}.txt", plain("\n".join(rendered(read(path))) + "\n", path.parent))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path, tmp_path: Path, assert_golden: Compare) -> None:
    blocks = path.read_text().removeprefix("===\n").split("\n===\n")
    inputs = [block.partition("\n---\n")[0].removesuffix("\n---") for block in blocks]
    results = [f"===\n{text}\n---\n{outcome(path.stem, text, tmp_path)}\n" for text in inputs]
    assert_golden(path, "".join(results))


def outcome(topic: str, text: str, folder: Path) -> str:
    overrides, lines = list(REST), text
    if text.startswith("$"):
        line, _, lines = text.partition("\n")
        sign, *more = line.split()
        options = {override.partition("=")[0] for override in more}
        rest = [override for override in REST if override.partition("=")[0] not in options]
        overrides = [*rest, *more] if sign == "$" else more
    path, environ = folder / "theirs.yaml", dict[str, str]()
    path.write_text(lines)
    if topic == "environment":
        path = folder / "ours.yaml"
        path.write_text("model: {pretrained: folder}\ntrain: {steps: 100}\n")
        environ = LAUNCHED | dict(line.split("=", 1) for line in lines.splitlines() if "=" in line)
    try:
        loaded = read_config(path, overrides, environ=environ)
    except ConfigError as error:
        return plain(str(error), folder)
    return plain("\n".join(rendered(loaded, lines if topic == "environment" else None)), folder)
