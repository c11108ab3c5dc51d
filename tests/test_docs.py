"""What the documents say holds: commands parse, links lead somewhere, keys, tables and versions are the project's."""

import contextlib
import importlib
import inspect
import math
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml
from documented import PAGES, ROOT, Command, blocks, commands, program_of
from pydantic import ValidationError
from torch.utils.data import default_collate

import portable_fsdp
from portable_fsdp import doctor, explain, init, launch, sample
from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.open import ENGINES, engines_on, require_names, spec_of, usual_engine
from portable_fsdp.backends.refusals import Deployment, verdicts
from portable_fsdp.checkpoint import __main__ as checkpoint
from portable_fsdp.config.describe import option_names
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import load_config, read_config
from portable_fsdp.convert.table import ACCELERATE, find_anywhere, key_table
from portable_fsdp.layout import split_batch
from portable_fsdp.parity import __main__ as parity
from portable_fsdp.plan import __main__ as plan
from portable_fsdp.plan.target import parse_target
from portable_fsdp.report import __main__ as report
from portable_fsdp.runtime.errors import UsageError
from portable_fsdp.tune import __main__ as tune

DOCS = ROOT / "docs"
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
USUAL = [Deployment("native", "cuda", 8, 2), Deployment("xla", "tpu", 8, 2), Deployment("xla_fsdp1", "tpu", 8, 2)]


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


PARSED = {f"portable_fsdp.{m.__name__.split('.')[1]}": m._parser for m in (doctor, checkpoint, sample, report, init)}
TARGETS = "|".join(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
JOBSETS = {yaml.safe_load(file.read_text())["metadata"]["name"] for file in ROOT.glob("launch/gke_*.yaml")}
# The other commands; a file of ours in them must exist.
FORMS = [
    rf"make ({TARGETS})",
    rf"pip install '?\.(\[({'|'.join(EXTRAS)})\])?'?",
    r"export( '?[A-Z_]+=[^']+)+'?",
    r"launch/tpu_(vm|queued_resource)\.sh (create|setup|logs|stop|delete|doctor)( -- --internal-ip)?",
    r"kubectl apply -f launch/gke_jobset_\w+\.yaml",
    rf"env '\|' grep .* '\|' kubectl create secret generic ({'|'.join(JOBSETS)}) --from-env-file=/dev/stdin",
    rf"kubectl logs --follow --prefix --selector=jobset\.sigs\.k8s\.io/jobset-name=({'|'.join(JOBSETS)})",
    r"sky jobs launch launch/skypilot_\w+\.yaml",
    r"docker build -f launch/Dockerfile\.(\w+) -t portable_fsdp:\1 \.",
    r"python -c 'import time, torch\.distributed as d; s = d\.TCPStore.*",  # test_host_faults.py runs it
    r"python examples/(plot_loss|read_checkpoint)\.py .*",
]


def check(command: Command) -> None:
    """Fail unless each word of the command means something in this checkout."""
    program = program_of(command.words)
    files = [word for word in command.words if re.match(r"(launch|examples|configs)/", word)]
    assert [file for file in files if not (ROOT / file).is_file()] == [], command.where
    match program.words:
        case ["python", "-m", "portable_fsdp.launch", *arguments]:
            check_launch(arguments, command.where, program.processes)
        case (
            ["launch/torchrun.sh", *arguments]
            | ["launch/tpu_vm.sh" | "launch/tpu_queued_resource.sh", "run", *arguments]
            | ["sbatch", "launch/slurm.sbatch", *arguments]
            | ["bash", "launch/slurm.sbatch", "--dry-run", *arguments]
        ):
            ours = arguments[: arguments.index("--")] if "--" in arguments else arguments  # the rest is gcloud's
            check_launch([word for word in ours if not word.startswith("--env=")], command.where)
        case ["python", "-m", "portable_fsdp.explain", *arguments]:
            run_explain(arguments)
        case ["python", "-m", "portable_fsdp.plan", *arguments]:
            values = plan._parser().parse_args(arguments)
            parse_target(values.on)
            load_config(ROOT / values.config, values.overrides)
            plan._axes(values.over)
        case ["python", "-m", "portable_fsdp.parity", *arguments]:
            values = parity._parser().parse_intermixed_args(arguments)
            if not values.compare:
                [path, *overrides] = values.words
                for engine, devices in (place.split(":") for place in values.on.split(",")):
                    require_names(values.device, engine)
                    split_batch(load_config(ROOT / path, overrides), int(devices))
        case ["python", "-m", "portable_fsdp.tune", *arguments]:
            values = tune._parser().parse_args(arguments)
            load_config(ROOT / values.config, values.overrides)
        case ["python", "-m", module, *arguments] if module in PARSED:
            PARSED[module]().parse_args(arguments)
        case ["python", "examples/accelerate_loop.py" | "examples/ported_loop.py"]:
            pass
        case ["python", "examples/trainer.py" | "examples/sft.py"]:
            pass
        case ["python", "examples/fsdp1_loop.py" | "examples/fsdp2_loop.py"]:
            pass
        case ["python", script, device, backend, *_] if re.search(r"/(own_rows|from_fsdp._loop)\.py$", script):
            require_names(device, backend)
        case ["python", "examples/own_loop.py", path, device, backend, *overrides]:
            require_names(device, backend)
            load_config(ROOT / path, overrides)
        case _:
            line = shlex.join(command.words)
            assert any(re.fullmatch(form, line) for form in FORMS), f"{command.where}: no check for `{line}`"


def check_launch(arguments: list[str], where: str, processes: int | None = None) -> None:
    """Fail where a start would end before it looks at its data and its devices; `processes`: what a launcher starts."""
    values = launch._parser().parse_intermixed_args(arguments)
    require_names(values.device, values.backend)
    loaded = read_config(ROOT / values.config, values.overrides, [ROOT / name for name in values.imports])
    if processes is None and (values.num_devices != "auto" or values.device == "tpu"):
        processes = 8 if values.num_devices == "auto" else int(values.num_devices)  # a slice of eight chips
    if processes is not None:
        split_batch(loaded.config, processes)
    if values.device != "auto":
        assert values.backend == "auto" or values.backend in engines_on(values.device), where
        engine = usual_engine(values.device) if values.backend == "auto" else values.backend
        explain._require_accepted(loaded, explain.Deployment(engine, values.device, processes, None))


def run_explain(arguments: list[str]) -> None:
    """Really, from the checkout's folder: each key and each file that it names must be there."""
    values = explain._parser().parse_intermixed_args(arguments)
    with TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        if values.write:
            values.write = str(Path(folder, Path(values.write).name))
        assert explain.main(arguments) == 0 if values.schema else explain._explain(values)
        assert values.write is None or load_config(values.write)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse_and_links_and_names_of_files_lead_somewhere(page: Path) -> None:
    """A link leads to a file, or to a heading in it as GitHub names it."""
    text = page.read_text()
    for command in commands(text, page.name):
        check(command)
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", text):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor
    folders = [ROOT, ROOT / "portable_fsdp", ROOT / "tests"]
    tops = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    for name in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)\b", text):
        assert name.partition("/")[0] not in tops or any((folder / name).is_file() for folder in folders), name


def test_each_page_is_in_the_navigation_of_the_site_and_the_makefile_says_what_pages_do() -> None:
    """Once, under a heading of index.md (docs/conf.py). The demo changes its engine half way."""
    parts = re.split(r"^## ", text_of("index.md"), flags=re.MULTILINE)[1:]
    assert [part.split(maxsplit=1)[0] for part in parts] == ["Start", "Guides", "Concepts", "Reference", "FAQ"]
    listed = sorted((DOCS / link).resolve() for part in parts for link in re.findall(r"\]\((.+?)\)", part))
    assert listed == sorted(page for page in PAGES if page.name != "index.md")
    config = load_config(ROOT / "configs/quickstart.yaml")
    for devices in (1, 2, 3, 4):
        split_batch(config, devices)
    [half] = re.findall(r"^DEMO_HALF := (\d+)$", MAKEFILE, re.MULTILINE)
    assert config.train.steps == 2 * int(half)
    build = (ROOT / "BUILD.md").read_text()
    [latest] = re.findall(r"^TORCH_LATEST := (\S+)$", MAKEFILE, re.MULTILINE)
    assert f"torch {latest}, no torch_xla" in build
    pins = dict(line.partition(";")[0].split("==") for line in EXTRAS["xla"])
    assert pins["jax"] == pins["jaxlib"]
    row = next(line for line in build.splitlines() if line.startswith("| `xla` |"))
    assert all(f"{name} {pins[name]}" in row for name in ("torch", "torch_xla", "jaxlib", "flax")), row


@pytest.mark.proof
def test_the_site_builds_offline_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", DOCS, "--fail-on-warning", "--quiet", ROOT, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    start = (tmp_path / "docs/index.html").read_text()
    assert all(f"{page.stem}.html" in start for page in PAGES if page.name != "index.md")
    assert "portable_fsdp.train_step" in (tmp_path / "docs/api.html").read_text()


# One for each kind of check.
WRONG_COMMANDS = r"""
make everything
pip install '.[rocm]'
python -m portable_fsdp.launch --devices=cpu --config=configs/quickstart.yaml
python -m portable_fsdp.launch --config=configs/none.yaml
python -m portable_fsdp.launch --config=configs/quickstart.yaml optim.learning_rate=1
python -m portable_fsdp.launch --device=cuda --config=configs/llama_1b.yaml compile.scan_layers=true
torchrun --standalon --nproc_per_node=8 -m portable_fsdp.launch --config=configs/llama_1b.yaml
torchrun --standalone --nproc_per_node=24 -m portable_fsdp.launch --config=configs/quickstart.yaml
srun --ntask-per-node=8 python -m portable_fsdp.launch --config=configs/llama_1b.yaml
docker run --rm portable_fsdp:rocm python -m portable_fsdp.launch --config=configs/llama_1b.yaml
accelerate launch -m portable_fsdp.launch --devise=cuda --config=configs/llama_1b.yaml
kubectl logs --follow --prefix --selector=jobset.sigs.k8s.io/jobset-name=portable_fsdp
python -m portable_fsdp.explain nonsense.key
python -m portable_fsdp.doctor --jason
python -m portable_fsdp.plan --config=configs/llama_1b.yaml --on=h1000:8
python -m portable_fsdp.parity configs/quickstart.yaml --on=native:24 --device=cpu
python examples/own_loop.py configs/quickstart.yaml gpu native
curl localhost
"""


def test_wrong_commands_are_found() -> None:
    lines: list[str] = [*WRONG_COMMANDS.splitlines()]
    for command in commands(f"```bash\n# a comment{WRONG_COMMANDS}```\n", "page"):
        assert command.where == f"page:{lines.index(shlex.join(command.words)) + 2}"
        with pytest.raises((AssertionError, UsageError, SystemExit)):
            check(command)


def test_pages_of_keys_are_the_tables() -> None:
    page = runpy.run_path(str(DOCS / "configuration.py"))
    assert page["render"]() == text_of("configuration.md"), "run `make docs`"
    foreign = text_of("foreign_configs.md")
    assert runpy.run_path(str(DOCS / "foreign_configs.py"))["render"]() == foreign, "run `make docs`"
    assert all(f"`{row.name}`" in foreign for row in key_table().keys)
    assert len(option_names()) <= 130
    for section, key in page["ONE_OF"]:  # keys that exclude each other do
        whole = {"model": {"pretrained": "folder"}, "train": {"steps": 1}}
        with pytest.raises(ValidationError, match=rf"exactly one of .*{section}\.{key}"):
            Config.model_validate({**whole, section: {}})


def small_config(folder: Path, text: str = "", overrides: Sequence[str] = ()) -> Config:
    """The rest of a config around a part of one."""
    values = yaml.safe_load(text) or {}
    train = values.get("train", {})
    values["train"] = train if "epochs" in train else {"steps": 1, **train}
    model = values.get("model", {})
    values["model"] = model if {"architecture", "factory"} & model.keys() else {"pretrained": "folder", **model}
    path = folder / "part.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_config(path, overrides)


def test_each_block_of_yaml_is_taken_by_the_engines_that_it_names(tmp_path: Path) -> None:
    texts = blocks("docs/sharding.md", "yaml")
    assert len(texts) > 10
    for text in texts:
        engines = text.partition("\n")[0].removeprefix("# ")
        config = small_config(tmp_path, text)
        taking = [place.engine for place in USUAL if all(v.kind != "refused" for v in verdicts(config, place))]
        assert taking == engines.split(", "), text
    for name in ("any_model.md", "checkpoints.md", "pretrained.md", "watching.md"):
        assert blocks(f"docs/{name}", "yaml")
        for text in blocks(f"docs/{name}", "yaml"):
            small_config(tmp_path, text)
    # The functions of any_model.md do what it says.
    names: dict[str, Any] = {"torch": torch, "default_collate": default_collate}
    exec("\n".join(blocks("docs/any_model.md", "python")), names)
    batch = names["by_name"]([(torch.ones(2), 3), (torch.zeros(2), 4)])
    assert batch["images"].shape == (2, 2)
    assert batch["labels"].tolist() == [3, 4]
    pairs = {"chosen": torch.ones(3, 2), "rejected": -torch.ones(3, 2)}
    total, count, metrics = names["loss"](lambda rows: rows.sum(dim=1), pairs)
    assert total.item() == pytest.approx(3 * math.log1p(math.exp(-4)))
    assert (count.item(), metrics["accuracy"].item()) == (3, 3)


def rows_of(text: str, first: str) -> Iterator[list[str]]:
    """The cells of each row of the text's table, whose first column is named `first`."""
    for line in text.partition(f"| {first} |")[2].partition("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


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


def test_features_are_all_there_are_what_the_engines_say_and_have_their_tests(tmp_path: Path) -> None:
    features = list(rows_of(text_of("features.md"), "feature"))
    tests_of_features: dict[str, list[str]] = yaml.safe_load((ROOT / "tests/features.yaml").read_text())
    assert [feature for feature, *_ in features] == [*tests_of_features]
    assert all(tests_of_features.values())
    for feature, setting, engines, _ in features:
        overrides = re.findall(r"`(.*?)`", setting)
        names = {override.partition("=")[0] for override in overrides}
        config = small_config(tmp_path, overrides=overrides)
        strongest: dict[str, str] = {}
        for place in USUAL:
            kinds = {verdict.kind for verdict in verdicts(config, place) if verdict.option in names}
            strongest[place.engine] = next((kind for kind in ("refused", "delegated") if kind in kinds), "honoured")
        assert engines_of(engines) == strongest, feature
    for file, _, name in {test.partition("::") for tests in tests_of_features.values() for test in tests}:
        assert re.search(rf"^def {name}\(" if name else "", (ROOT / "tests" / file).read_text(), re.MULTILINE), name
    shown = {name for _, setting, *_ in features for name in re.findall(r"`([\w.]+)=", setting)} | IN_NO_ROW
    fsdp = {name for name in option_names() if name.startswith(("sharding.", "precision.", "memory.", "compile."))}
    refused = {rule.option for engine in ENGINES for rule in spec_of(engine).rules}
    assert {name for name in fsdp | refused if not name.startswith("xla_fsdp1.")} - shown == set()


OF_TORCHTPU = {
    "`compile.backend=inductor`": "compile.backend=inductor compile.enabled=true",
    "`memory.cpu_offload`": "memory.cpu_offload=true",
    "`memory.offload`": "memory.offload=activations memory.gradient_checkpointing=full",
    "float16": "precision.compute=float16",
    "float8": "precision.products=float8 precision.compute=bfloat16",
    "bases in 4 or 8 bits": 'precision.frozen=nf4 model.lora={"r":16}',
    "`observe.profile`": 'observe.profile={"steps":[1,2]}',
}
"""What launching.md says that TorchTPU refuses, as overrides: the first is refused there, and taken on a GPU."""
NOT_BUILT = {
    "paged": ("optim", "paged_adamw_8bit"),
    "4-bit": ("optim", "adamw_torch_4bit"),
    "GaLore": ("optim", "galore_adamw"),
    "pipeline": ("parallelism_config_pp_size", "2"),
    "adapters other than LoRA and DoRA": ("adapter", "ia3"),
}
"""What migrating.md calls *not built*, and a key of another tool that asks for it."""


def test_what_pages_call_refused_or_not_built_is(tmp_path: Path) -> None:
    """The columns of optimizers.md, TorchTPU's row of launching.md, and keys that ask for what isn't built."""

    def refused(place: Deployment, *overrides: str) -> bool:
        option, config = overrides[0].partition("=")[0], small_config(tmp_path, overrides=overrides)
        return any(verdict.kind == "refused" and verdict.option == option for verdict in verdicts(config, place))

    for names, *cells, _, _ in rows_of(text_of("optimizers.md"), "`optim.name`"):
        for place, cell in zip(USUAL, cells, strict=True):
            for name in re.findall(r"`(.+?)`", names):
                assert refused(place, f"optim.name={name}") == (cell == "refused"), (name, place)
    items: str = re.findall(r"^\| refused \| (`compile\.backend.*?) \|", text_of("launching.md"), re.MULTILINE)[0]
    for item in items.split(", "):
        overrides = OF_TORCHTPU.get(item, item.strip("`")).split()
        assert refused(Deployment("native", "tpu", 4, 1), *overrides), f"TorchTPU takes {overrides}"
        assert not refused(USUAL[0], *overrides), overrides
    migrating = text_of("migrating.md")
    not_built = re.findall(r"^\*Not built\*: (.*)|[;|] ([^;|]*): \*not built\*", migrating, re.MULTILINE)
    assert len(not_built) == 5, not_built
    for word, (key, value) in NOT_BUILT.items():
        assert any(word in "".join(claim) for claim in not_built), word
        row = find_anywhere("Trainer", key)
        assert row is not None, key
        assert row.words.get(value, row).refuse, key
    # Words of torch's FSDP: a hint at a key of ours is where from_fsdp.md has a counterpart.
    hints = {word: hint for words, hint in key_table().torch.items() for word in words.split("=")}
    counterparts = dict[str, bool]()
    for theirs, ours, _ in words_of_fsdp()[0]:
        for word in re.findall(r"`(?:FSDP|fully_shard|FSDP\.|\w+Policy|MixedPrecision)\W?(\w+)=?\)?`", theirs):
            counterparts[word] = counterparts.get(word, False) or not ours.startswith("no counterpart")
    shared = hints.keys() & counterparts.keys()
    assert len(shared) > 15
    for word in shared:
        assert counterparts[word] == (not hints[word].startswith("leave it out")), word
    # No reason "x is not built" is about what a key of ours does.
    reasons = [outcome.refuse or "" for row in key_table().keys for outcome in (row, *row.words.values())]
    for reason in {reason for reason in reasons if "not built" in reason}:
        words = re.sub(r" (is|are) not built.*", "", reason).replace(" ", "_")
        assert not any(name.endswith(words) for name in option_names()), reason


def test_our_side_of_a_row_of_migrating_is_the_schemas(tmp_path: Path) -> None:
    """Each key of ours is the schema's, each value one that it takes, each flag one of launch's. accelerate's exist."""
    sections = re.split(r"^## ", text_of("migrating.md"), flags=re.MULTILINE)[1:]
    rows = [cells for section in sections for cells in rows_of(section, "their key")]
    assert len(rows) > 55
    overrides: list[str] = []
    for theirs, ours, remark in rows:
        items, hints = re.findall(r"`(.+?)`", ours), re.findall(r"`(.+?)`", remark)
        assert items, theirs
        for item in items + [hint for hint in hints if hint.partition(".")[0] in Config.model_fields]:
            if item.startswith("--"):
                assert item in launch._parser()._option_string_actions, item
            else:
                assert item.partition("=")[0] in option_names(), f"{theirs}: {item} is no key of ours"
                overrides += [item] * ("=" in item)
    for override in {*overrides}:
        small_config(tmp_path, overrides=[override])
    [section] = (section for section in sections if section.startswith("accelerate"))
    keys = [key for cells in rows_of(section, "their key") for key in re.findall(r"`(.+?)`", cells[0])]
    assert len(keys) >= 15
    assert [key for key in keys if find_anywhere(ACCELERATE, key) is None] == []


OF_TORCH = (
    *("torch.distributed.fsdp", "torch.distributed.fsdp.wrap", "torch.distributed.checkpoint.state_dict"),
    *("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "torch.distributed.device_mesh"),
    "torch.utils.data",
)
ALIASES = {"FSDP": "FullyShardedDataParallel", "dcp": "checkpoint"}
WHOLE = ("FSDP", "MixedPrecision", "CPUOffload", "fully_shard", "MixedPrecisionPolicy", "CPUOffloadPolicy")
ELSEWHERE = {"FSDP(module=)", "FSDP(sharding_strategy=)", "fully_shard(module=)"}
WORDS = """
ShardingStrategy.FULL_SHARD ShardingStrategy.SHARD_GRAD_OP ShardingStrategy.NO_SHARD ShardingStrategy.HYBRID_SHARD
ShardingStrategy._HYBRID_SHARD_ZERO2 size_based_auto_wrap_policy transformer_auto_wrap_policy ModuleWrapPolicy
BackwardPrefetch.BACKWARD_PRE BackwardPrefetch.BACKWARD_POST FSDP.no_sync FSDP.clip_grad_norm_ FSDP.summon_full_params
FSDP.state_dict_type StateDictType.FULL_STATE_DICT StateDictType.SHARDED_STATE_DICT StateDictType.LOCAL_STATE_DICT
FullStateDictConfig ShardedStateDictConfig LocalStateDictConfig FullOptimStateDictConfig ShardedOptimStateDictConfig
FSDP.optim_state_dict apply_activation_checkpointing DistributedSampler.set_epoch XlaFullyShardedDataParallel
XlaFullyShardedDataParallel(reshard_after_forward=) checkpoint_module consolidate_sharded_model_checkpoints fully_shard
FSDPModule.set_modules_to_forward_prefetch FSDPModule.set_modules_to_backward_prefetch FSDPModule.unshard
FSDPModule.reshard FSDPModule.set_requires_gradient_sync FSDPModule.set_is_last_backward get_model_state_dict
StateDictOptions(full_state_dict=) StateDictOptions(cpu_offload=) StateDictOptions(ignore_frozen_params=)
StateDictOptions(keep_submodule_prefixes=) StateDictOptions(strict=) StateDictOptions(broadcast_from_rank0=)
StateDictOptions(flatten_optimizer_state_dict=) dcp.save dcp.load init_device_mesh
"""


def of_torch(name: str) -> Any:
    """What a name of from_fsdp.md means in the installed torch; fails where it means nothing."""
    path, _, argument = name.removesuffix("=)").partition("(")
    first, *rest = (ALIASES.get(part, part) for part in path.split("."))
    homes = [importlib.import_module(home) for home in ("torch.distributed", *OF_TORCH)]
    value: Any = next((getattr(home, first) for home in homes if hasattr(home, first)), None)
    for part in rest:
        value = getattr(value, part, None)
    assert value is not None, f"{name}: torch has no such name"
    assert not argument or argument in inspect.signature(value).parameters, f"{name}: no such argument"
    return value


def words_of_fsdp() -> tuple[list[list[str]], set[str], set[str]]:
    """The rows of from_fsdp.md, the words of torch in their first column, and those of torch_xla."""
    parts = text_of("from_fsdp.md").split("| theirs |")[1:]
    fsdp1, of_xla, fsdp2 = (list(rows_of(f"| theirs |{part}", "theirs")) for part in parts)

    def words(rows: list[list[str]]) -> set[str]:
        return {name for theirs, *_ in rows for name in re.findall(r"`(.+?)`", theirs)}

    return fsdp1 + of_xla + fsdp2, words(fsdp1 + fsdp2), words(of_xla)


@pytest.mark.xla
def test_each_word_of_xlas_fsdp_is_torch_xlas() -> None:
    """In a process of its own: torch_xla sets variables of its process."""
    names = [name.removesuffix("=)").partition("(")[::2] for name in words_of_fsdp()[2]]
    checks = [f"assert {argument!r} in ('', *inspect.signature(fsdp.{name}).parameters)" for name, argument in names]
    code = "\n".join(["import inspect", "from torch_xla.distributed import fsdp", *checks])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_each_word_of_fsdp_is_torchs_and_our_side_is_ours(tmp_path: Path) -> None:
    rows, words, of_xla = words_of_fsdp()
    arguments = {f"{name}({argument}=)" for name in WHOLE for argument in inspect.signature(of_torch(name)).parameters}
    assert ({*WORDS.split()} | arguments) - ELSEWHERE - words - of_xla == set()
    assert all(of_torch(name) for name in words)
    parser, overrides = launch._parser(), set[str]()
    for theirs, ours, remark in rows:
        items = re.findall(r"`(.+?)`", ours)
        assert items or ours.startswith(("no counterpart: ", "the same")), theirs
        for item in [
            *items,
            *(hint for hint in re.findall(r"`(.+?)`", remark) if re.match(r"--|[a-z_0-9]+\.\w", hint)),
        ]:
            owner, _, name = item.partition("=")[0].partition(".")
            owners = {"pf": portable_fsdp, "engine": Backend, "checkpoints": portable_fsdp.Checkpoints}
            if item.startswith("--"):
                assert owner in parser._option_string_actions, item
            elif owner in owners:
                assert hasattr(owners[owner], name), item
            else:
                assert f"{owner}.{name}" in option_names(), f"{theirs}: {item} is no key of ours"
                overrides |= {item} if "=" in item else set()
    assert len(overrides) > 25
    for override in overrides:
        small_config(tmp_path, overrides=[override])
