"""Every key and variable of a release of accelerate, read from its sources, which are parsed and never imported.

accelerate_keys.json holds those of older releases. It was written from the wheels on PyPI, each unpacked by itself:

    pip download accelerate==0.20.3 --no-deps && unzip -d 0.20.3 accelerate-0.20.3-*.whl
    python tests/convert/accelerate_keys.py 0.20.3/accelerate 0.34.2/accelerate ... > tests/convert/accelerate_keys.json
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SECTIONS = {"fsdp": "fsdp_config", "parallelism_config": "parallelism_config", "megatron_lm": "megatron_lm_config"}
VARIABLE = re.compile(r"(ACCELERATE|FSDP|PARALLELISM_CONFIG|MEGATRON_LM)_[A-Z0-9_]*[A-Z0-9]")


def keys_of(package: Path) -> dict[str, list[str]]:
    """Place -> keys: fields of the file's classes, what the questions write, flags of sections, plugins, variables."""
    found: dict[str, set[str]] = {}
    arguments = package / "commands/config/config_args.py"
    found["accelerate"] = {*class_fields(arguments, "BaseConfig", "ClusterConfig")}
    found["SageMaker"] = {*class_fields(arguments, "SageMakerConfig")}
    for place, key in _questions(package / "commands/config/cluster.py"):
        found.setdefault(place, set()).add(key)
    for flag in re.findall(r'"--(\w+)"', (package / "commands/launch.py").read_text()):
        if section := next((name for name in SECTIONS if flag.startswith(f"{name}_")), None):
            found.setdefault(SECTIONS[section], set()).add(flag)
    found["fsdp_config"] |= {*class_fields(package / "utils/dataclasses.py", "FullyShardedDataParallelPlugin")}
    found["variables"] = {name for path in package.rglob("*.py") for name in _variables(path) if _is_run(path)}
    return {place: sorted(keys) for place, keys in found.items()}


def class_fields(path: Path, *classes: str) -> Iterator[str]:
    """The annotated fields of classes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name in classes:
            targets = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _questions(path: Path) -> Iterator[tuple[str, str]]:
    """`fsdp_config["fsdp_offload_params"] = ...`, and with a prefix, `dynamo_config[prefix + "mode"] = ...`."""
    pattern = r'prefix = "(\w+)"|(\w+_config)\[(prefix \+ )?"(\w+)"\]'
    prefix = ""
    for said, place, prefixed, key in re.findall(pattern, path.read_text()):
        prefix = said or prefix
        if place:
            yield place, f"{prefix if prefixed else ''}{key}"


def _variables(path: Path) -> Iterator[str]:
    """Texts that are a variable's whole name, and `prefix + "VERSION"` after `prefix = "FSDP_"`."""
    prefix = ""
    text = path.read_text()
    for said, rest, whole in re.findall(r'prefix = "(\w+_)"|prefix \+ "([A-Z0-9_]+)"|"([A-Z0-9_]+)"', text):
        prefix = said or prefix
        if VARIABLE.fullmatch(name := whole or f"{prefix}{rest}"):
            yield name
    if "fp8_" in text and path.parts[-2:] == ("commands", "launch.py"):  # written as f"{prefix}{arg.upper()}"
        yield from (f"ACCELERATE_{flag.upper()}" for flag in re.findall(r'"--(fp8_\w+)"', text))


def _is_run(path: Path) -> bool:
    return "test_utils" not in path.parts and path.name != "constants.py"


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:]]
    releases = {path.parent.name: {place: " ".join(keys) for place, keys in keys_of(path).items()} for path in folders}
    json.dump(releases, sys.stdout, indent=1)
    print()
