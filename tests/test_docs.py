"""What the documents say holds: commands parse, links lead somewhere, keys are the schema's, versions fit."""

import contextlib
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from documented import PAGES, ROOT, Command, commands, program_of
from pydantic import ValidationError

from portable_fsdp import explain, launch, sample
from portable_fsdp.backends.open import engines_on, options_of, require_names, usual_engine
from portable_fsdp.checkpoint import __main__ as checkpoint
from portable_fsdp.config.describe import option_names
from portable_fsdp.config.layout import check_batch
from portable_fsdp.config.load import load_config, read_config
from portable_fsdp.config.schema import Config, Lora
from portable_fsdp.convert.table import TABLE
from portable_fsdp.doctor import __main__ as doctor
from portable_fsdp.plan import __main__ as plan
from portable_fsdp.plan.target import parse_target
from portable_fsdp.runtime.errors import UsageError

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

JOBSETS = sorted(ROOT.glob("launch/gke_*.yaml"))
SKY_TASKS = sorted(ROOT.glob("launch/skypilot_*.yaml"))
TPU_ACTIONS = {"create", "setup", "logs", "stop", "delete", "doctor"}


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
    if processes is None and values.num_devices != "auto":
        processes = int(values.num_devices)
    if processes is not None:
        check_batch(loaded.config, processes)
    if values.device != "auto":
        assert values.backend == "auto" or values.backend in engines_on(values.device), where
        engine = usual_engine(values.device) if values.backend == "auto" else values.backend
        assert options_of(engine).packages[values.device].is_ours, f"{where}: needs a package that no extra installs"
        explain._require_taken(loaded, explain.Deployment(engine, values.device, processes, None))


def run_explain(arguments: list[str]) -> None:
    """Really, from the checkout's folder: each key and each file that it names must be there."""
    values = explain._parser().parse_intermixed_args(arguments)
    with TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        if values.write:
            values.write = str(Path(folder, Path(values.write).name))
        said = explain._schema_text() if values.schema else explain._explain(values)
        assert said
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
        "torchrun --standalon --nproc_per_nod=8 -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "torchrun --standalon --nproc_per_node=8 -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "torchrun --standalone --nproc_per_nod=8 -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "torchrun --standalone --nproc_per_nod=2 -m portable_fsdp.doctor",
        "torchrun --standalone --nproc_per_nod=8 examples/own_loop.py configs/llama_1b.yaml cuda native",
        "torchrun --standalone --nproc_per_node=8 python -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "srun --ntask-per-node=8 python -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "srun --ntasks-per-node 8 python -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "srun --ntasks-per-node= python -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "srun --ntasks-per-node=8 -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "mpirun -nx 16 python -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "mpirun -np=16 python -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "mpirun -np 2 python -m portable_fsdp.launch --config=configs/none.yaml",
        "docker run --rmm portable_fsdp:cuda python -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "docker run --rm=yes portable_fsdp:cuda python -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "docker run --rm portable_fsdp:rocm python -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "docker run --rm portable_fsdp:cuda --config=configs/llama_1b.yaml",
        "accelerate launch --num_procs=8 -m portable_fsdp.launch --config=configs/llama_1b.yaml",
        "python -m portable_fsdp.launch --device=tpu --backend=native --config=configs/llama_1b.yaml",
        "python -m portable_fsdp.launch --device=cuda --backend=xla --config=configs/llama_1b.yaml",
        "python -m portable_fsdp.launch --device=cuda --config=configs/llama_1b.yaml compile.scan_layers=true",
        "python -m portable_fsdp.launch --config=configs/quickstart.yaml --import=nope.yaml",
        "accelerate launch -m portable_fsdp.launch --devise=cuda --config=configs/llama_1b.yaml",
        "accelerate launch --config_file tests/convert/samples/accelerate_1_15_fsdp2.yaml -m portable_fsdp.launch "
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
        "python -m portable_fsdp.explain --import=nope.yaml",
        "python -m portable_fsdp.explain --config=configs/quickstart.yaml --import=nope.yaml",
        "python -m portable_fsdp.explain nonsense.key",
        "python -m portable_fsdp.explain --write=ours.yaml",
        "python -m portable_fsdp.doctor --jason",
        "torchrun --standalone --nproc_per_node=2 -m portable_fsdp.doctor runs",
        "python -m portable_fsdp.plan --config=configs/llama_1b.yaml --on=h1000:8",
        "python -m portable_fsdp.plan --config=configs/llama_1b.yaml --on=h100:8 --sweeps",
        "python -m portable_fsdp.plan --config=configs/none.yaml --on=h100:8",
        "python -m portable_fsdp.checkpoint lists runs/demo",
        "python -m portable_fsdp.checkpoint verify --every runs/demo",
        "python -m portable_fsdp.nothing",
        "python examples/none.py",
        "python examples/own_loop.py configs/quickstart.yaml gpu native",
        "curl localhost",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    [command] = commands(f"```bash\n# a comment\n{line}\n```\n", "page")
    assert command.where == "page:3"
    with pytest.raises((AssertionError, UsageError, SystemExit, pytest.fail.Exception)):
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
        value = yaml.safe_load(default)
        value = float(value) if default == "1e-08" else value  # YAML 1.1 reads a number without a dot as text
        found = config if not name.startswith("model.lora.") else {"model": {"lora": Lora().model_dump(mode="json")}}
        for key in name.split("."):
            found = found[key]
        assert value == found, name


@pytest.mark.parametrize(("section", "key"), sorted(PAGE_OF_KEYS["ONE_OF"]))
def test_keys_said_to_exclude_each_other_do(section: str, key: str) -> None:
    whole = {"model": {"pretrained": "folder"}, "train": {"steps": 1}}
    with pytest.raises(ValidationError, match=rf"exactly one of .*{section}\.{key}"):
        Config.model_validate({**whole, section: {}})


def test_the_schema_stays_small() -> None:
    assert len(option_names()) <= 96  # 80 before people's own data, evaluation and adapters


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
