"""What the documents say holds: commands parse, links lead somewhere, keys, tables and versions are the project's."""

import ast
import contextlib
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import yaml
from documented import PAGES, ROOT, Command, commands, program_of
from pydantic import ValidationError

from portable_fsdp import explain, launch, sample
from portable_fsdp.backends.open import ENGINES, engines_on, options_of, require_names, usual_engine
from portable_fsdp.backends.support import verdicts
from portable_fsdp.checkpoint import __main__ as checkpoint
from portable_fsdp.config.describe import option_names
from portable_fsdp.config.layout import check_batch
from portable_fsdp.config.load import load_config, read_config
from portable_fsdp.config.rules import Deployment
from portable_fsdp.config.schema import Config, Lora
from portable_fsdp.convert.table import ACCELERATE, find_anywhere, key_table
from portable_fsdp.doctor import __main__ as doctor
from portable_fsdp.plan import __main__ as plan
from portable_fsdp.plan.target import parse_target
from portable_fsdp.runtime.errors import ConfigError, UsageError

DOCS = ROOT / "docs"
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
JOBSETS = sorted(ROOT.glob("launch/gke_*.yaml"))
TPU_ACTIONS = {"create", "setup", "logs", "stop", "delete", "doctor"}
USUAL = [Deployment("native", "cuda", 8, 2), Deployment("xla", "tpu", 8, 2), Deployment("xla_fsdp1", "tpu", 8, 2)]


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------ commands and links


def check(command: Command) -> None:
    """Fail unless each word of the command means something in this checkout."""
    program = program_of(command.words)
    match program.words:
        case ["python", "-m", "portable_fsdp.launch", *arguments]:
            check_launch(arguments, command.where, program.processes)
        case ["python", "-m", "portable_fsdp.explain", *arguments]:
            run_explain(arguments)
        case ["python", "-m", "portable_fsdp.doctor", *arguments]:
            doctor._parser().parse_args(arguments)
        case ["export", *assignments]:
            assert all(re.match(r"[A-Z_]+=\S", word) for word in assignments), command.where
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
            assert ROOT / file in ROOT.glob("launch/skypilot_*.yaml"), f"{command.where}: no task {file}"
        case ["docker", "build", "-f", file, "-t", image, "."]:
            assert (ROOT / file).is_file(), f"{command.where}: no file {file}"
            assert image.partition(":")[2] == file.rpartition(".")[2], f"{command.where}: {image} of {file}"
        case ["python", "-m", "portable_fsdp.plan", *arguments]:
            check_plan(arguments)
        case ["python", "-m", "portable_fsdp.checkpoint", *arguments]:
            checkpoint._parser().parse_args(arguments)
        case ["python", "-m", "portable_fsdp.sample", *arguments]:
            sample._parser().parse_args(arguments)
        case ["python", "examples/own_loop.py" as script, *arguments]:
            assert (ROOT / script).is_file(), command.where
            path, device, backend, *overrides = arguments
            require_names(device, backend)
            load_config(ROOT / path, overrides)
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"{command.where}: no file {script}"
        case _:
            pytest.fail(f"{command.where}: no check for `{shlex.join(command.words)}`; add one here")


def check_launch(arguments: list[str], where: str, processes: int | None = None) -> None:
    """Fail where a start would end before it looks at its data and its devices; `processes`: what a launcher starts."""
    values = launch._parser().parse_intermixed_args(arguments)
    require_names(values.device, values.backend)
    loaded = read_config(ROOT / values.config, values.overrides, [ROOT / name for name in values.imports])
    if processes is None and (values.num_devices != "auto" or values.device == "tpu"):
        processes = 8 if values.num_devices == "auto" else int(values.num_devices)  # a slice of eight chips
    if processes is not None:
        check_batch(loaded.config, processes)
    if values.device != "auto":
        assert values.backend == "auto" or values.backend in engines_on(values.device), where
        engine = usual_engine(values.device) if values.backend == "auto" else values.backend
        assert options_of(engine).packages[values.device].is_ours, f"{where}: needs a package that no extra installs"
        explain._require_accepted(loaded, explain.Deployment(engine, values.device, processes, None))


def run_explain(arguments: list[str]) -> None:
    """Really, from the checkout's folder: each key and each file that it names must be there."""
    values = explain._parser().parse_intermixed_args(arguments)
    with TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        if values.write:
            values.write = str(Path(folder, Path(values.write).name))
        answer = explain._schema_text() if values.schema else explain._explain(values)
        assert answer
        assert values.write is None or load_config(values.write)


def check_plan(arguments: list[str]) -> None:
    values = plan._parser().parse_intermixed_args(arguments)
    parse_target(values.on)
    load_config(ROOT / values.config, values.overrides)
    plan._axes(values.over)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_parses(page: Path) -> None:
    for command in commands(page.read_text(), page.name):
        check(command)


WRONG_COMMANDS = """
make everything
pip install '.[rocm]'
python -m portable_fsdp.launch --devices=cpu --config=configs/quickstart.yaml
python -m portable_fsdp.launch --device=gpu --config=configs/quickstart.yaml
python -m portable_fsdp.launch --config=configs/none.yaml
python -m portable_fsdp.launch --config=configs/quickstart.yaml optim.learning_rate=1
python -m portable_fsdp.launch --num_devices=5 --config=configs/quickstart.yaml
NNODES=2 launch/torchrun.sh --config=configs/none.yaml
launch/tpu_vm.sh start
torchrun --standalon --nproc_per_node=8 -m portable_fsdp.launch --config=configs/llama_1b.yaml
torchrun --standalone --nproc_per_nod=8 examples/own_loop.py configs/llama_1b.yaml cuda native
torchrun --standalone --nproc_per_node=8 python -m portable_fsdp.launch --config=configs/llama_1b.yaml
srun --ntask-per-node=8 python -m portable_fsdp.launch --config=configs/llama_1b.yaml
srun --ntasks-per-node=8 -m portable_fsdp.launch --config=configs/llama_1b.yaml
mpirun -nx 16 python -m portable_fsdp.launch --config=configs/llama_1b.yaml
docker run --rmm portable_fsdp:cuda python -m portable_fsdp.launch --config=configs/llama_1b.yaml
docker run --rm portable_fsdp:rocm python -m portable_fsdp.launch --config=configs/llama_1b.yaml
docker run --rm portable_fsdp:cuda --config=configs/llama_1b.yaml
python -m portable_fsdp.launch --device=tpu --backend=native --config=configs/llama_1b.yaml
python -m portable_fsdp.launch --device=cuda --backend=xla --config=configs/llama_1b.yaml
python -m portable_fsdp.launch --device=cuda --config=configs/llama_1b.yaml compile.scan_layers=true
accelerate launch -m portable_fsdp.launch --devise=cuda --config=configs/llama_1b.yaml
accelerate launch --config_file tests/convert/samples/accelerate_1_15_fsdp2.yaml \
    -m portable_fsdp.launch --config=configs/quickstart.yaml
torchrun --standalone --nproc_per_node=8 -m portable_fsdp.launch --config=configs/quickstart.yaml
kubectl apply -f launch/gke_jobset.yaml
kubectl logs --follow --prefix --selector=jobset.sigs.k8s.io/jobset-name=portable_fsdp
sky jobs launch launch/gke_jobset_tpu.yaml
docker build -f launch/Dockerfile.tpu -t portable_fsdp:cuda .
python -m portable_fsdp.explain --backend=none
python -m portable_fsdp.explain nonsense.key
python -m portable_fsdp.explain --write=ours.yaml
python -m portable_fsdp.doctor --jason
torchrun --standalone --nproc_per_node=2 -m portable_fsdp.doctor runs
python -m portable_fsdp.plan --config=configs/llama_1b.yaml --on=h1000:8
python -m portable_fsdp.checkpoint lists runs/demo
python -m portable_fsdp.nothing
python examples/own_loop.py configs/quickstart.yaml gpu native
curl localhost
"""


@pytest.mark.parametrize("line", WRONG_COMMANDS.strip().splitlines())
def test_a_wrong_command_is_found(line: str) -> None:
    [command] = commands(f"```bash\n# a comment\n{line}\n```\n", "page")
    assert command.where == "page:3"
    with pytest.raises((AssertionError, UsageError, SystemExit, pytest.fail.Exception)):
        check(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    """To a file, and to a heading in it as GitHub names it."""
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor


# --------------------------------------------------------------------------------------- configs, keys and versions


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_config_loads(path: Path) -> None:
    assert load_config(path).run.dir == f"runs/{path.stem}"


def test_quickstart_fits_a_few_devices_and_the_demo_changes_engine_half_way() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml")
    for devices in (1, 2, 3, 4):
        check_batch(config, devices)
    half = re.search(r"^DEMO_HALF := (\d+)$", MAKEFILE, re.MULTILINE)
    assert half
    assert config.train.steps == 2 * int(half[1])


PAGE_OF_KEYS = runpy.run_path(str(DOCS / "configuration.py"))


def test_pages_of_keys_are_the_tables() -> None:
    assert PAGE_OF_KEYS["render"]() == text_of("configuration.md"), "run `make docs`"
    foreign = text_of("foreign_configs.md")
    assert runpy.run_path(str(DOCS / "foreign_configs.py"))["render"]() == foreign, "run `make docs`"
    assert all(f"`{row.name}`" in foreign for row in key_table().keys)


def test_page_of_keys_states_defaults_that_yaml_reads_back() -> None:
    stated = dict(re.findall(r"^\| `([a-z_.]+)` \| .*? \| `(.*?)` \|", text_of("configuration.md"), re.MULTILINE))
    assert len(stated) > 20
    defaults = Config.model_validate({"model": {"pretrained": "folder"}, "train": {"steps": 1}}).model_dump(mode="json")
    defaults["model"]["lora"] = Lora().model_dump(mode="json")
    for name, text in stated.items():
        expected = defaults
        for key in name.split("."):
            expected = expected[key]
        if name != "model.lora":
            # YAML 1.1 reads a number without a dot as text.
            assert (float(text) if text == "1e-08" else yaml.safe_load(text)) == expected, name


@pytest.mark.parametrize(("section", "key"), sorted(PAGE_OF_KEYS["ONE_OF"]))
def test_keys_that_exclude_each_other_do(section: str, key: str) -> None:
    whole = {"model": {"pretrained": "folder"}, "train": {"steps": 1}}
    with pytest.raises(ValidationError, match=rf"exactly one of .*{section}\.{key}"):
        Config.model_validate({**whole, section: {}})


def test_the_files_of_ours_that_a_page_names_exist() -> None:
    folders = [ROOT, ROOT / "portable_fsdp", ROOT / "tests"]
    tops = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):  # it names what is gone
        named = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)\b", page.read_text())
        missing = [name for name in named if not any((folder / name).is_file() for folder in folders)]
        assert [name for name in missing if name.partition("/")[0] in tops] == [], page.name


def test_the_schema_stays_small() -> None:
    assert len(option_names()) <= 93


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


# ------------------------------------------------------------------------------------------ sharding.md, features.md


def small_config(folder: Path, text: str = "", overrides: Sequence[str] = ()) -> Config:
    """The rest of a config around a part of one."""
    values = yaml.safe_load(text) or {}
    values["train"] = {"steps": 1, **values.get("train", {})}
    values["model"] = {"pretrained": "folder", **values.get("model", {})}
    path = folder / "part.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_config(path, overrides)


def test_each_block_of_yaml_is_taken_by_the_engines_that_it_names(tmp_path: Path) -> None:
    page = text_of("sharding.md")
    blocks = re.findall(r"^```yaml\n# (.*?)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == page.count("```yaml") > 10
    for engines, text in blocks:
        config = small_config(tmp_path, text)
        taking = [place.engine for place in USUAL if all(v.kind != "refused" for v in verdicts(config, place))]
        assert taking == engines.split(", "), text


FEATURES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in text_of("features.md").partition("\n## ")[0].splitlines()
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
def test_a_feature_is_what_the_engines_say_of_it_and_has_its_tests(cells: list[str], tmp_path: Path) -> None:
    _, setting, engines, tests = cells
    overrides = re.findall(r"`(.*?)`", setting)
    names = {override.partition("=")[0] for override in overrides}
    config = small_config(tmp_path, overrides=overrides)
    kinds = {
        place.engine: {verdict.kind for verdict in verdicts(config, place) if verdict.option in names}
        for place in USUAL
    }
    strongest = {
        engine: next((kind for kind in ("refused", "delegated") if kind in of_engine), "honoured")
        for engine, of_engine in kinds.items()
    }
    assert engines_of(engines) == strongest
    assert "::" in tests, "no test"
    for file, name in re.findall(r"`(\S+?\.py)::(\w+)`", tests):
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_features_are_all_there() -> None:
    shown = {name for cells in FEATURES for name in re.findall(r"`([\w.]+)=", cells[1])} | IN_NO_ROW
    fsdp = {name for name in option_names() if name.startswith(("sharding.", "precision.", "memory.", "compile."))}
    refused = {rule.option for engine in ENGINES for rule in options_of(engine).rules}
    assert {name for name in fsdp | refused if not name.startswith("xla_fsdp1.")} - shown == set()


# -------------------------------------------------------------------------------------------------------- migrating.md

MIGRATING = text_of("migrating.md")
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


MIGRATING_ROWS = list(migrating_rows(MIGRATING))


def test_every_tool_has_its_table_and_its_command() -> None:
    tools = [re.split(r"[: ]", row.tool)[0] for row in MIGRATING_ROWS]
    assert list(dict.fromkeys(tools)) == ["accelerate", "torchtitan", "torchprime", "Lightning", "MaxText"]
    keys = {tool: [key for row in MIGRATING_ROWS if row.tool.startswith(tool) for key in row.theirs] for tool in tools}
    assert min(map(len, keys.values())) >= 15
    assert [key for key in keys["accelerate"] if find_anywhere(ACCELERATE, key) is None] == []
    assert len(list(commands(MIGRATING, "page"))) == 7
    assert len(MIGRATING.splitlines()) < 220


@pytest.mark.parametrize("row", MIGRATING_ROWS, ids=lambda row: f"{row.tool.split()[0]} {row.theirs[0]}")
def test_our_side_of_a_row_is_the_schemas(row: Row, tmp_path: Path) -> None:
    check_ours(row, tmp_path)


WRONG_ROWS = """
| `steps` | `train.step` | |
| `steps` | train.steps | |
| `strategy` | `sharding.strategy=FULL` | |
| `devices` | `--devices` | |
| `steps` | `train.steps` | or `train.epoch` |
"""


@pytest.mark.parametrize("cells", WRONG_ROWS.strip().splitlines())
def test_a_wrong_row_is_found(cells: str, tmp_path: Path) -> None:
    [row] = migrating_rows(f"# Page\n\n## Tool\n\n| their key | ours | remark |\n|---|---|---|\n{cells}\n\nEnd.\n")
    with pytest.raises((AssertionError, ConfigError)):
        check_ours(row, tmp_path)
