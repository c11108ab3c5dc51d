"""Each rule of layering.py holds for the package, finds what breaks it, and lets the rest be."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from layering import (
    PACKAGE,
    Module,
    Modules,
    banned_imports,
    cycles,
    engine_names_outside_backends,
    engines_that_know_each_other,
    imports,
    imports_upwards,
    names_defined_twice,
    read_package,
    section,
    unknown_sections,
    work_at_import,
)

ROOT = Path(__file__).parents[1]


def invented(**sources: str) -> dict[str, Module]:
    """Modules for a test of a rule: `config__load="import torch"` is portable_fsdp/config/load.py."""
    modules = {PACKAGE: Module(PACKAGE, "__init__.py", ast.parse(""), True)}
    for key, source in sources.items():
        parts = key.split("__")
        for depth in range(1, len(parts)):
            package = ".".join([PACKAGE, *parts[:depth]])
            modules.setdefault(package, Module(package, f"{package}.__init__", ast.parse(""), True))
        name = ".".join([PACKAGE, *parts])
        modules[name] = Module(name, name, ast.parse(source), False)
    return modules


Rule = Callable[[Modules], list[str]]
BREAKERS: dict[Rule, list[dict[str, Module]]] = {
    unknown_sections: [invented(helpers__misc="")],
    imports_upwards: [
        invented(config__load="from portable_fsdp.train.loop import run", train__loop=""),
        invented(config__load="def f():\n    from ..train import loop", train__loop=""),
        invented(data__order="from portable_fsdp.optim import schedule", optim__schedule=""),
        invented(backends__native="import portable_fsdp.checkpoint.store", checkpoint__store=""),
        invented(train__loop="from portable_fsdp.plan import report", plan__report=""),
        invented(observe__console="from portable_fsdp.train import loop", train__loop=""),
        invented(train__loop="from portable_fsdp import launch", launch=""),
        invented(train__loop="def f():\n    from portable_fsdp.parity import worker", parity__worker=""),
        invented(config__load="def f():\n    from portable_fsdp.convert import read", convert__read=""),
        invented(doctor__checks="from portable_fsdp.launch import main", launch=""),
        invented(train__loop="def f():\n    from portable_fsdp.doctor import checks", doctor__checks=""),
        invented(train__loop="def f():\n    from portable_fsdp.formats import base", formats__base=""),
        invented(plan__fake_step="def f():\n    from portable_fsdp.formats import dcp", formats__dcp=""),
    ],
    engines_that_know_each_other: [
        invented(backends__xla="from . import native", backends__native=""),
        invented(backends__xla="def f():\n    from .native import Native", backends__native=""),
        invented(backends__xla__engine="from ..native.units import x", backends__native__units=""),
        invented(backends__native__engine="from ..pjrt import x", backends__pjrt=""),
        invented(backends__pjrt="from .xla.engine import x", backends__xla__engine=""),
        invented(backends__open="from portable_fsdp.backends.torch_xla.spmd import tpu_chips", backends__xla=""),
        invented(backends__native__engine="from ..pjrt_options import x", backends__pjrt_options=""),
    ],
    engine_names_outside_backends: [
        invented(launch="def f(backend):\n    return backend == 'native'"),
        invented(launch="def f(backend):\n    return backend in ('xla', 'xla_fsdp1')"),
        invented(plan__planner="KINDS = {'native': 1}"),
        invented(explain="def f(engine):\n    match engine:\n        case 'xla':\n            return 1"),
    ],
    banned_imports: [
        invented(backends__xla="from portable_fsdp.models.loss import loss", models__loss=""),
        invented(data__order="import torch.distributed as dist"),
        invented(models__loss="from torch import distributed"),
        invented(models__meter="import torch\ndef f():\n    return torch.distributed.get_rank()"),
        invented(optim__optimizer="def f():\n    import torch_xla.runtime"),
        invented(data__batches="from portable_fsdp.backends.contract import Batch", backends__base=""),
        invented(train__step="def f():\n    import torch_xla"),
        invented(plan__time="from importlib import import_module\ndef f():\n    import_module('torch_xla.runtime')"),
        invented(checkpoint__manager="from portable_fsdp.backends import native", backends__native=""),
        invented(checkpoint__manager="from portable_fsdp.backends.open import open_backend", backends__open=""),
    ],
    names_defined_twice: [
        invented(data__a="class Row:\n    pass", optim__b="class Row:\n    pass"),
        invented(data__a="Row = tuple[int, ...]", optim__b="def f():\n    class Row:\n        pass"),
    ],
    cycles: [
        invented(config__load="from . import schema", config__schema="def f():\n    from .load import x"),
        invented(data__a="from . import b", data__b="from . import c", data__c="from .a import x"),
    ],
    work_at_import: [
        invented(models__attention="register('static', f)"),
        invented(models__attention="names = Interface.register('static', f)"),
        invented(data__sources="TEXT = open('corpus.txt').read()"),
        invented(data__sources="for name in names:\n    load(name)"),
        invented(config__schema="class C:\n    now = time.time()"),
        invented(config__schema="def f(now=time.time()):\n    pass"),
        invented(config__schema="@register('x')\ndef f():\n    pass"),
        invented(config__schema="WORDS = [read(name) for name in ('a', 'b')]"),
        invented(launch="main()"),
    ],
}

ALLOWED = invented(
    runtime__errors='"""Docstring."""\nclass E(Exception):\n    exit_code = 1',
    convert__read="from portable_fsdp.config import schema",
    config__schema="if TYPE_CHECKING:\n    import torch\nfrom portable_fsdp.runtime import errors",
    models__build="import torch\nfrom portable_fsdp.config.schema import Model\nlog = logging.getLogger('x')",
    backends__base="from dataclasses import dataclass, field\n@dataclass(frozen=True)\nclass B:\n    a: int = field()",
    backends__xla="import torch_xla\nfrom .base import Backend\nfrom portable_fsdp import __version__",
    checkpoint__store="from portable_fsdp.backends.contract import Backend\nKEYS = frozenset({'a', 'b'})",
    backends__pjrt="def f():\n    import torch_xla",
    backends__xla_fsdp1__engine="from portable_fsdp.backends.torch_xla.runtime import tpu_chips",
    backends__xla__options="from portable_fsdp.backends import pjrt_options\ndef f():\n    return engine == 'xla'",
    backends__pjrt_options="from portable_fsdp.backends.open import Package",
    backends__open="from portable_fsdp.config import schema",
    train__loop="from portable_fsdp.backends.open import f\nfrom portable_fsdp.checkpoint.store import KEYS",
    formats__base="from portable_fsdp.checkpoint.store import KEYS",
    plan__tpu="def f(value):\n    return value.device.type == 'xla'",
    plan__tpu_trace="import torch_xla\nfrom portable_fsdp.train import loop",
    launch="_DEVICE = flags.DEFINE_enum('d', 'auto', ['a'], 'x')\ndef main():\n    from .train import loop\n"
    "if __name__ == '__main__':\n    app.run(main)",
)


@pytest.mark.parametrize("rule", BREAKERS, ids=lambda rule: rule.__name__)
def test_a_rule_holds_finds_what_breaks_it_and_lets_the_rest_be(rule: Rule) -> None:
    problems = rule(read_package(ROOT / PACKAGE))
    assert not problems, "\n".join(problems)
    assert [number for number, modules in enumerate(BREAKERS[rule]) if not rule(modules)] == []
    assert rule(ALLOWED) == []


def test_dependencies_are_what_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    optional = {
        "torch_xla",
        "torch_tpu",
        "jax",
        "matplotlib",
        "datasets",
        "pyarrow",
        "peft",
        "bokeh",
        "jinja2",
        "bitsandbytes",
        "torchao",
    }  # extras
    names = {
        "absl": "absl-py",
        "annotated_types": "annotated-types",
        "huggingface_hub": "huggingface-hub",
        "upath": "universal-pathlib",
        "yaml": "PyYAML",
    }
    imported = {
        name.target.split(".")[0] for module in read_package(ROOT / PACKAGE).values() for name in imports(module)
    }
    foreign = imported - sys.stdlib_module_names - optional - {PACKAGE}
    assert {names.get(name, name) for name in foreign} == declared


def test_no_command_imports_torch_before_it_has_read_its_arguments() -> None:
    """Nor does the ground, in a fresh process: `--help` waits for neither torch nor what imports it."""
    light = {"config", "convert", "doctor", "observe", "runtime", ""}
    names = [name for name in read_package(ROOT / PACKAGE) if section(name) in light]
    heavy = {"torch", "torch_xla", "torch_tpu", "transformers", "accelerate"}
    program = f"import sys, {', '.join(names)}\nprint(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FILES, LINES = 103, 18_300
"""Of ours, that a plain native training run may load."""

TOOLS = ("convert", "doctor", "formats", "parity", "plan", "report")

LOADED_BY_A_RUN = """
import sys
from portable_fsdp.launch import main
code = main(sys.argv[1:])
print(code, *(module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "portable_fsdp"))
"""


@pytest.mark.slow
def test_a_plain_training_run_loads_few_modules_and_no_tool(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("The quick brown fox. " * 2000)
    settings = ["data.source=text", f"data.path={tmp_path}/corpus.txt", f"run.dir={tmp_path}/run", "train.steps=2"]
    settings += ["train.global_batch=2", "train.micro_batch=2", "optim.warmup_steps=0", "data.seq_len=32"]
    flags = ["--device=cpu", "--backend=native", "--num_devices=1", f"--config={ROOT}/configs/quickstart.yaml"]
    command = [sys.executable, "-c", LOADED_BY_A_RUN, *flags, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    code, *files = done.stdout.splitlines()[-1].split(" ")
    assert code == "0"
    folders = {Path(file).relative_to(ROOT / PACKAGE).parts[0] for file in files}
    assert folders.isdisjoint(TOOLS)
    lines = sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert (len(files) <= FILES, lines <= LINES) == (True, True), f"{len(files)} files, {lines} lines"
