"""What the documents say holds: commands parse, links lead somewhere, keys are the schema's, versions fit."""

import ast
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from absl import flags
from pydantic import ValidationError

from portable_fsdp import doctor, explain, launch
from portable_fsdp.backends.open import BACKENDS, DEVICES
from portable_fsdp.config.describe import option_names
from portable_fsdp.config.foreign.keys_accelerate import ACCELERATE
from portable_fsdp.config.foreign.table import TABLE, find_anywhere
from portable_fsdp.config.load import check_batch, load_config
from portable_fsdp.config.refusals import EVERY, Place
from portable_fsdp.config.schema import Config
from portable_fsdp.config.support import verdicts
from portable_fsdp.runtime.errors import ConfigError

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


LAUNCHERS = {"torchrun", "accelerate", "srun", "mpirun", "docker"}
"""Whose command lines end with `-m portable_fsdp.launch ARGUMENTS`."""
JOBSETS = sorted(ROOT.glob("launch/gke_*.yaml"))
SKY_TASKS = sorted(ROOT.glob("launch/skypilot_*.yaml"))
TPU_ACTIONS = {"create", "setup", "logs", "stop", "delete", "doctor"}


class Command(NamedTuple):
    """One command of a fenced block: where it stands, and its words without leading `NAME=value`."""

    where: str
    words: list[str]


def commands(text: str, where: str) -> Iterator[Command]:
    """The commands of the ```bash blocks, but for blocks that begin with `# not run here: <reason>`."""
    for block in re.finditer(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if re.match(r"# not run here: \S", block[1]):
            continue
        first = text.count("\n", 0, block.start(1)) + 1
        for number, line in enumerate(block[1].replace("\\\n", "  ").splitlines(), start=first):
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                yield Command(f"{where}:{number}", words)


def check(command: Command) -> None:
    """Fail unless each word of the command means something in this checkout."""
    starts, _, arguments = shlex.join(command.words).partition("-m portable_fsdp.launch")
    if starts == "python " or (arguments and command.words[0] in LAUNCHERS):
        return check_launch(shlex.split(arguments), command.where, processes_of(starts))
    match command.words:
        case ["python", "-m", "portable_fsdp.explain", *arguments]:
            check_explain(arguments, command.where)
        case ["python", "-m", "portable_fsdp.doctor", *arguments] | [
            "torchrun",
            "--standalone",
            _,
            "-m",
            "portable_fsdp.doctor",
            *arguments,
        ]:
            assert doctor._define_flags()(["doctor", *arguments])[1:] == [], f"{command.where}: flags alone"
        case ["export", *assignments]:
            assert all(re.match(r"[A-Z_]+=\S", one) for one in assignments), command.where
        case ["make", target]:
            assert target in TARGETS, f"{command.where}: no target {target} in the Makefile"
        case ["pip", "install", what]:
            extra = re.fullmatch(r"\.(?:\[([a-z]+)\])?", what)
            assert extra, f"{command.where}: {what} is not this project"
            assert extra[1] is None or extra[1] in EXTRAS, f"{command.where}: no extra {extra[1]}"
        case (
            ["launch/torchrun.sh", *arguments]
            | ["launch/tpu_vm.sh" | "launch/tpu_queued_resource.sh", "run", *arguments]
            | ["sbatch", "launch/slurm.sbatch", *arguments]
            | ["bash", "launch/slurm.sbatch", "--dry-run", *arguments]
        ):
            check_launch(arguments, command.where)
        case ["launch/tpu_vm.sh" | "launch/tpu_queued_resource.sh", action]:
            assert action in TPU_ACTIONS, f"{command.where}: no action {action}"
        case ["kubectl", "apply", "-f", file]:
            assert ROOT / file in JOBSETS, f"{command.where}: no JobSet {file}"
        case ["kubectl", "logs", "--follow", "--prefix", selector]:
            names = {yaml.safe_load(file.read_text())["metadata"]["name"] for file in JOBSETS}
            assert names == {selector.rpartition("=")[2]}, f"{command.where}: JobSets are named {names}"
        case ["sky", "jobs", "launch", file]:
            assert ROOT / file in SKY_TASKS, f"{command.where}: no task {file}"
        case ["docker", "build", "-f", file, "-t", image, "."]:
            assert (ROOT / file).is_file(), f"{command.where}: no file {file}"
            assert image.partition(":")[2] == file.rpartition(".")[2], f"{command.where}: {image} of {file}"
        case ["python", "-m", module, *_] if module.startswith("portable_fsdp."):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{command.where}: {module}"
        case ["python", "examples/own_loop.py" as script, *arguments] | [
            "torchrun",
            "--standalone",
            _,
            "examples/own_loop.py" as script,
            *arguments,
        ]:
            assert (ROOT / script).is_file(), command.where
            path, device, backend, *overrides = arguments
            assert (device in DEVICES, backend in BACKENDS) == (True, True), command.where
            load_config(ROOT / path, overrides)
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"{command.where}: no file {script}"
        case _:
            pytest.fail(f"{command.where}: no check for `{shlex.join(command.words)}`; add one here")


def processes_of(launcher: str) -> int | None:
    """Those that the words of torchrun, mpirun or accelerate start, as far as one command says it."""
    file = re.search(r"--config_file[= ](\S+)", launcher)
    if file and "--num_processes" not in launcher:
        return int(yaml.safe_load((ROOT / file[1]).read_text())["num_processes"])
    found = re.search(r"(?:--num_processes|--nproc[_-]per[_-]node)[= ](\d+)|-np (\d+)", launcher)
    return int(found[1] or found[2]) if found else None


def check_launch(arguments: list[str], where: str, processes: int | None = None) -> None:
    values = launch._define_flags()
    overrides = values(["launch", *arguments])[1:]
    assert values.device in DEVICES, where
    assert values.backend in BACKENDS, where
    config = load_config(ROOT / values.config, overrides, [ROOT / name for name in values["import"].value or ()])
    if processes is None and values.num_devices != "auto":
        processes = int(values.num_devices)
    if processes is not None:
        check_batch(config, processes)


def check_explain(arguments: list[str], where: str) -> None:
    values = explain._define_flags()
    overrides = values(["explain", *arguments])[1:]
    assert explain._places(values), where
    if values.config is not None:
        load_config(ROOT / values.config, overrides, [ROOT / name for name in values["import"].value or ()])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_parses(page: Path) -> None:
    for command in commands(page.read_text(), page.name):
        check(command)


@pytest.mark.parametrize(
    "line",
    [
        "make everything",
        "pip install '.[rocm]'",
        "python -m portable_fsdp.launch --devices=cpu --config=configs/quickstart.yaml",
        "python -m portable_fsdp.launch --device=gpu --config=configs/quickstart.yaml",
        "python -m portable_fsdp.launch --config=configs/none.yaml",
        "python -m portable_fsdp.launch --config=configs/quickstart.yaml optim.learning_rate=1",
        "python -m portable_fsdp.launch --num_devices=5 --config=configs/quickstart.yaml",
        "torchrun --nproc_per_node=8 -m portable_fsdp.launch --config=configs/none.yaml",
        "NNODES=2 launch/torchrun.sh --config=configs/none.yaml",
        "launch/tpu_vm.sh start",
        "launch/tpu_queued_resource.sh run --config=configs/none.yaml",
        "sbatch launch/slurm.sbatch --config=configs/quickstart.yaml optim.learning_rate=1",
        "mpirun -np 2 python -m portable_fsdp.launch --config=configs/none.yaml",
        "accelerate launch -m portable_fsdp.launch --devise=cuda --config=configs/llama_1b.yaml",
        "accelerate launch --config_file tests/config/foreign/accelerate_1_15_fsdp2.yaml -m portable_fsdp.launch "
        "--config=configs/quickstart.yaml",
        "accelerate launch --num_processes=8 -m portable_fsdp.launch --config=configs/quickstart.yaml",
        "torchrun --standalone --nproc_per_node=8 -m portable_fsdp.launch --config=configs/quickstart.yaml",
        "mpirun -np 8 python -m portable_fsdp.launch --config=configs/quickstart.yaml",
        "kubectl apply -f launch/gke_jobset.yaml",
        "kubectl apply -f launch/skypilot_tpu.yaml",
        "kubectl logs --follow --prefix --selector=jobset.sigs.k8s.io/jobset-name=portable_fsdp",
        "sky jobs launch launch/gke_jobset_tpu.yaml",
        "docker build -f launch/Dockerfile.tpu -t portable_fsdp:cuda .",
        "python -m portable_fsdp.explain --backend=none",
        "python -m portable_fsdp.explain --config=configs/quickstart.yaml optim.learning_rate=1",
        "python -m portable_fsdp.doctor --jason",
        "torchrun --standalone --nproc_per_node=2 -m portable_fsdp.doctor runs",
        "python -m portable_fsdp.nothing",
        "python examples/none.py",
        "python examples/own_loop.py configs/quickstart.yaml gpu native",
        "curl localhost",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    [command] = commands(f"```bash\n# a comment\n{line}\n```\n", "page")
    assert command.where == "page:3"
    with pytest.raises((AssertionError, ConfigError, flags.Error, pytest.fail.Exception)):
        check(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_loads(path: Path) -> None:
    config = load_config(path)
    assert config.run.dir == f"runs/{path.stem}"


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_quickstart_fits_any_small_number_of_devices(devices: int) -> None:
    check_batch(load_config(ROOT / "configs/quickstart.yaml"), devices)


def test_demo_changes_backend_half_way() -> None:
    half = re.search(r"^DEMO_HALF := (\d+)$", MAKEFILE, re.MULTILINE)
    assert half
    assert load_config(ROOT / "configs/quickstart.yaml").train.steps == 2 * int(half[1])


PAGE_OF_KEYS = runpy.run_path(str(ROOT / "docs/configuration.py"))


def test_page_of_keys_is_the_schemas() -> None:
    assert PAGE_OF_KEYS["render"]() == (ROOT / "docs/configuration.md").read_text(encoding="utf-8"), "run `make docs`"


def test_page_of_foreign_keys_is_the_tables() -> None:
    page = ROOT / "docs/foreign_configs.md"
    render = runpy.run_path(str(page.with_suffix(".py")))["render"]
    assert render() == page.read_text(encoding="utf-8"), "run `make docs`"
    assert all(f"`{row.key}`" in page.read_text(encoding="utf-8") for row in TABLE)


def test_page_of_keys_states_defaults_that_yaml_reads_back() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `([a-z_.]+)` \| .*? \| `(.*?)` \|", page, re.MULTILINE))
    assert len(stated) > 20
    config = Config.model_validate({"model": {"pretrained": "folder"}, "train": {"steps": 1}}).model_dump(mode="json")
    for name, default in stated.items():
        section, key = name.split(".")
        value = yaml.safe_load(default)
        value = float(value) if default == "1e-08" else value  # YAML 1.1 reads a number without a dot as text
        assert value == config[section][key], name


@pytest.mark.parametrize(("section", "key"), sorted(PAGE_OF_KEYS["ONE_OF"]))
def test_keys_said_to_exclude_each_other_do(section: str, key: str) -> None:
    whole = {"model": {"pretrained": "folder"}, "train": {"steps": 1}}
    with pytest.raises(ValidationError, match=rf"exactly one of .*{section}\.{key}"):
        Config.model_validate({**whole, section: {}})


def test_the_schema_stays_small() -> None:
    assert len(option_names()) <= 80


# ------------------------------------------------------------------------------------------ sharding.md, features.md

USUAL = [Place("native", "cuda", 8, 2), Place("xla", "tpu", 8, 2), Place("xla_fsdp1", "tpu", 8, 2)]
WORDS = {"honoured": "works", "delegated": "delegated", "refused": "refused"}


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
    for line in (ROOT / "docs/features.md").read_text().splitlines()
    if re.match(r"\| \d+\. ", line)
]


@pytest.mark.parametrize("cells", FEATURES, ids=lambda cells: cells[0][:40])
def test_a_feature_is_what_the_engines_say_of_it(cells: list[str], tmp_path: Path) -> None:
    _, setting, *engines, _ = cells
    assert len(engines) == len(EVERY)
    overrides = re.findall(r"`(.*?)`", setting)
    names = {override.partition("=")[0] for override in overrides}
    config = small_config(tmp_path, overrides=overrides)
    for place, cell in zip(USUAL, engines, strict=True):
        kinds = {verdict.kind for verdict in verdicts(config, place) if verdict.option in names}
        kind = next((kind for kind in ("refused", "delegated") if kind in kinds), "honoured")
        assert re.match(rf"{WORDS[kind]}(: \S.*)?$", cell), f"{place.engine}: {kind}"
        assert (kind == "refused") == (":" in cell), "a refusal has its reason"


def test_features_are_all_there() -> None:
    assert {int(cells[0].partition(".")[0]) for cells in FEATURES} == {*range(1, 20), 22, 23}


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
            assert item.removeprefix("--") in launch._define_flags(), item
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
        values = launch._define_flags()
        overrides = values(["launch", *command.words[command.words.index("portable_fsdp.launch") + 1 :]])[1:]
        config = load_config(ROOT / values.config, overrides, [ROOT / name for name in values["import"].value or ()])
        place = next((place for place in USUAL if place.device == values.device), Place("native", "cpu", 2, 1))
        assert [v for v in verdicts(config, place) if v.kind == "refused"] == [], command.where
        check_batch(config, 2 if values.device == "cpu" else 8)


def test_versions_in_build_md_are_the_projects() -> None:
    build = (ROOT / "BUILD.md").read_text()
    latest = re.search(r"^TORCH_LATEST := (\S+)$", MAKEFILE, re.MULTILINE)
    assert latest
    assert f"torch {latest[1]}, no torch_xla" in build
    pins = dict(line.partition(";")[0].split("==") for line in EXTRAS["xla"])
    assert pins["jax"] == pins["jaxlib"]
    row = next(line for line in build.splitlines() if line.startswith("| `xla` |"))
    for name in ("torch", "torch_xla", "jaxlib", "flax"):
        assert f"{name} {pins[name]}" in row
