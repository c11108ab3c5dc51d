"""What the tables and examples of docs/ say of keys is what the schema and the engines say.

sharding.md: each block of YAML; features.md and migrating.md: each row.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from test_docs import commands

from portable_fsdp import launch
from portable_fsdp.backends.open import ENGINES, options_of
from portable_fsdp.backends.support import verdicts
from portable_fsdp.config.describe import option_names
from portable_fsdp.config.layout import check_batch
from portable_fsdp.config.load import load_config
from portable_fsdp.config.rules import Deployment
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.keys_accelerate import ACCELERATE
from portable_fsdp.convert.table import find_anywhere
from portable_fsdp.runtime.errors import ConfigError

ROOT = Path(__file__).parents[1]

# ------------------------------------------------------------------------------------------ sharding.md, features.md

USUAL = [Deployment("native", "cuda", 8, 2), Deployment("xla", "tpu", 8, 2), Deployment("xla_fsdp1", "tpu", 8, 2)]


def small_config(folder: Path, text: str = "", overrides: Sequence[str] = ()) -> Config:
    """The rest of a config around a part of one."""
    values = yaml.safe_load(text) or {}
    values["train"] = {"steps": 1, **values.get("train", {})}
    values["model"] = {"pretrained": "folder", **values.get("model", {})}
    path = folder / "part.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_config(path, overrides)


BLOCKS = re.findall(r"^```yaml\n# (.*?)\n(.*?)^```", (ROOT / "docs/sharding.md").read_text(), re.MULTILINE | re.DOTALL)


def test_every_block_of_yaml_names_its_engines() -> None:
    assert len(BLOCKS) == (ROOT / "docs/sharding.md").read_text().count("```yaml") > 10


@pytest.mark.parametrize(("engines", "text"), BLOCKS, ids=lambda part: part.split("\n")[0])
def test_a_block_of_yaml_is_taken_by_the_engines_that_it_names(engines: str, text: str, tmp_path: Path) -> None:
    config = small_config(tmp_path, text)
    taking = [place.engine for place in USUAL if all(v.kind != "refused" for v in verdicts(config, place))]
    assert taking == engines.split(", ")


FEATURES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/features.md").read_text().partition("\n## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| feature |")
]
IN_NO_ROW = {"precision.matmul", "compile.backend", "model.experts"}
"""Options without a row of features.md, although their section is FSDP's or an engine refuses some of their values."""


def engines_of(cell: str) -> dict[str, str]:
    """`native; refused: xla, xla_fsdp1 (why)` -> the kind of verdict of each engine."""
    if cell == "all":
        return dict.fromkeys(ENGINES, "honoured")
    kinds: dict[str, str] = {}
    for part in cell.split("; "):
        kind, _, names = part.rpartition(": ")
        assert (kind == "refused") == ("(" in names), f"{part}: a refusal has its reason"
        kinds.update(dict.fromkeys(re.sub(r" \(.*?\)", "", names).split(", "), kind or "honoured"))
    return kinds


@pytest.mark.parametrize("cells", FEATURES, ids=lambda cells: cells[0][:40])
def test_a_feature_is_what_the_engines_say_of_it(cells: list[str], tmp_path: Path) -> None:
    _, setting, engines, _ = cells
    overrides = re.findall(r"`(.*?)`", setting)
    names = {override.partition("=")[0] for override in overrides}
    config = small_config(tmp_path, overrides=overrides)
    kinds = {
        place.engine: {verdict.kind for verdict in verdicts(config, place) if verdict.option in names}
        for place in USUAL
    }
    assert engines_of(engines) == {
        engine: next((kind for kind in ("refused", "delegated") if kind in found), "honoured")
        for engine, found in kinds.items()
    }


def test_features_are_all_there() -> None:
    shown = {name for cells in FEATURES for name in re.findall(r"`([\w.]+)=", cells[1])} | IN_NO_ROW
    fsdp = {name for name in option_names() if name.startswith(("sharding.", "precision.", "memory.", "compile."))}
    refused = {rule.option for engine in ENGINES for rule in options_of(engine).rules}
    assert {name for name in fsdp | refused if not name.startswith("xla_fsdp1.")} - shown == set()


@pytest.mark.parametrize("cells", FEATURES, ids=lambda cells: cells[0][:40])
def test_the_tests_of_a_feature_exist(cells: list[str]) -> None:
    for file, name in re.findall(r"`(\S+?\.py)::(\w+)`", cells[-1]):
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
    assert "::" in cells[-1], "no test"


# -------------------------------------------------------------------------------------------------------- migrating.md

MIGRATING = ROOT / "docs/migrating.md"
NOT_BUILT = "*not built*"


class Row(NamedTuple):
    """A row of a table `their key | ours | remark`: what stands in backticks in each cell, and the cell of ours."""

    tool: str
    theirs: list[str]
    ours: list[str]
    remark: list[str]
    text: str


def migrating_rows(page: str) -> Iterator[Row]:
    for section in page.split("\n## ")[1:]:
        tool = section.partition("\n")[0]
        table = section.partition("| their key | ours | remark |\n|---|---|---|\n")[2].partition("\n\n")[0]
        for line in table.splitlines():
            theirs, ours, remark = (cell.strip() for cell in line.strip("|").split("|"))
            keys, items, notes = (re.findall(r"`(.+?)`", cell) for cell in (theirs, ours, remark))
            yield Row(tool, keys, items, notes, ours)


def check_ours(row: Row, folder: Path) -> None:
    """Fail unless each key of the row is the schema's, each value one that it takes, and each flag one of launch's."""
    assert row.theirs, row
    assert row.ours or row.text == NOT_BUILT, row
    for item in row.ours + [item for item in row.remark if item.partition(".")[0] in Config.model_fields]:
        if item.startswith("--"):
            assert item in launch._parser()._option_string_actions, item
            continue
        assert item.partition("=")[0] in option_names(), f"{row.tool}: {item} is no key of ours"
        small_config(folder, overrides=[item] if "=" in item else [])


MIGRATING_ROWS = list(migrating_rows(MIGRATING.read_text()))


def test_every_tool_has_its_table_and_its_command() -> None:
    tools = [re.split(r"[: ]", row.tool)[0] for row in MIGRATING_ROWS]
    assert list(dict.fromkeys(tools)) == ["accelerate", "torchtitan", "torchprime", "Lightning", "MaxText"]
    for tool in set(tools):
        keys = [key for row in MIGRATING_ROWS if row.tool.startswith(tool) for key in row.theirs]
        assert len(keys) >= 15, tool
    assert len(list(commands(MIGRATING.read_text(), "page"))) == 7
    assert len(MIGRATING.read_text().splitlines()) < 220


@pytest.mark.parametrize("row", MIGRATING_ROWS, ids=lambda row: f"{row.tool.split()[0]} {row.theirs[0]}")
def test_our_side_of_a_row_is_the_schemas(row: Row, tmp_path: Path) -> None:
    check_ours(row, tmp_path)


@pytest.mark.parametrize(
    "cells",
    [
        "| `steps` | `train.step` | |",
        "| `steps` | train.steps | |",
        "| `strategy` | `sharding.strategy=FULL` | |",
        "| `devices` | `--devices` | |",
        "| `steps` | `train.steps` | or `train.epoch` |",
    ],
)
def test_a_wrong_row_is_found(cells: str, tmp_path: Path) -> None:
    [row] = migrating_rows(f"# Page\n\n## Tool\n\n| their key | ours | remark |\n|---|---|---|\n{cells}\n\nEnd.\n")
    with pytest.raises((AssertionError, ConfigError)):
        check_ours(row, tmp_path)


def test_keys_of_accelerate_and_trainer_are_those_that_are_read() -> None:
    theirs = [key for row in MIGRATING_ROWS if row.tool.startswith("accelerate") for key in row.theirs]
    assert [key for key in theirs if find_anywhere(ACCELERATE, key) is None] == []


def test_the_engine_of_each_command_takes_its_config() -> None:
    for command in commands(MIGRATING.read_text(), "migrating.md"):
        if "portable_fsdp.launch" not in command.words:
            continue
        words = command.words[command.words.index("portable_fsdp.launch") + 1 :]
        values = launch._parser().parse_intermixed_args(words)
        config = load_config(ROOT / values.config, values.overrides, [ROOT / name for name in values.imports])
        place = next((place for place in USUAL if place.device == values.device), Deployment("native", "cpu", 2, 1))
        assert [v for v in verdicts(config, place) if v.kind == "refused"] == [], command.where
        check_batch(config, 2 if values.device == "cpu" else 8)
