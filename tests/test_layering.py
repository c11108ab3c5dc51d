"""What a graph of imports doesn't show: engines' names outside `backends`, work at import, what a run loads.

`[tool.importlinter]` in pyproject.toml has the rules about imports; `make check` runs `lint-imports`.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "portable_fsdp"
ENGINES = {"native", "xla", "xla_fsdp1"}

Modules = Mapping[str, ast.Module]
"""Path below the package -> source."""


@cache
def package() -> dict[str, ast.Module]:
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {path.relative_to(ROOT / PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}


def nodes(modules: Modules, *folders: str, but: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(file:line, node) of all modules in `folders` (none: the whole package), except for the folder `but`."""
    for path, tree in modules.items():
        folder = path.partition("/")[0]
        if folder != but and (not folders or folder in folders):
            for node in ast.walk(tree):
                yield f"{path}:{getattr(node, 'lineno', 0)}", node


# The rules: functions from modules to problems.


def engine_names_outside_backends(modules: Modules) -> list[str]:
    """Only an engine's options depend on its name: no other code compares with a name or uses one as a key."""
    problems: list[str] = []
    for at, node in nodes(modules, but="backends"):
        match node:
            case ast.Compare(left=ast.Attribute(attr="type")):  # `device.type == "xla"`: torch's word for a device
                compared = []
            case ast.Compare(left=left, comparators=others):
                compared = [constant for side in (left, *others) for constant in ast.walk(side)]
            case ast.Dict(keys=keys):
                compared = keys
            case ast.MatchValue(value=value):
                compared = [value]
            case _:
                compared = []
        names = {constant.value for constant in compared if isinstance(constant, ast.Constant)} & ENGINES
        problems += [f"{at}: {name} is an engine's name" for name in names]
    return problems


def engine_options_outside_backends(modules: Modules) -> list[str]:
    """Only the engine reads a key of its own section of the config (`config.xla_fsdp1.flatten_parameters`)."""
    return [
        f"{at}: {ast.unparse(node)} is an option of an engine"
        for at, node in nodes(modules, but="backends")
        if isinstance(node, ast.Attribute) and node.attr in ENGINES
    ]


def torch_distributed_on_the_ground(modules: Modules) -> list[str]:
    """Only engines know processes: models, data and optimizers neither import nor read torch.distributed."""
    problems: list[str] = []
    for at, node in nodes(modules, "models", "data", "optim"):
        match node:
            case ast.Import(names=names):
                used = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                used = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute():
                used = [ast.unparse(node)]
            case _:
                used = []
        problems += [f"{at}: {name}" for name in used if f"{name}.".startswith("torch.distributed.")]
    return problems


def torch_xla_by_name_outside_backends(modules: Modules) -> list[str]:
    """No import of torch_xla or torch_tpu that lint-imports doesn't see: `import_module("torch_xla.runtime")`."""
    return [
        f"{at}: {ast.unparse(node)}"
        for at, node in nodes(modules, but="backends")
        if isinstance(node, ast.Call)
        and re.match(r"(\w+\.)*(import_module|__import__)\('(torch_xla|torch_tpu)\b", ast.unparse(node))
    ]


def names_defined_twice(modules: Modules) -> list[str]:
    """Each class and each type alias has a name of its own in the whole package."""
    places: dict[str, list[str]] = {}
    for at, node in nodes(modules):
        if isinstance(node, ast.ClassDef):
            places.setdefault(node.name, []).append(at)
    for path, tree in modules.items():
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_type(name, value):
                    places.setdefault(name, []).append(f"{path}:{node.lineno}")
                case _:
                    pass
    return [f"{name} is defined {len(at)} times: {', '.join(at)}" for name, at in places.items() if len(at) > 1]


def _is_type(name: str, value: ast.expr) -> bool:
    """`Key = tuple[str, ...]`, `Verdict = Literal["fits"]`, `Split = A | B`: CapWords for a type's expression."""
    bare = name.lstrip("_")
    is_capwords = bare[:1].isupper() and not bare.isupper()
    return is_capwords and isinstance(value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute)


PURE_CALLS = {
    *("dict", "field", "float", "frozenset", "int", "len", "list", "max", "min", "range", "set", "sorted", "tuple"),
    *("cache", "compile", "contextmanager", "dataclass", "getLogger", "lru_cache", "no_grad", "timedelta", "wraps"),
    *("field_validator", "model_validator", "field_serializer"),
    # Rules, specs of engines, of constants.
    *("refused", "refused_each", "without", "excluded_by", "_only_for", "_axis_rule", "partial", "replace"),
}
"""Functions that a module may call while it is imported; besides them only constructors, told by their capital."""

# PyYAML keeps what a plain word means on the loader's class; these set it on two classes of config/yaml_text.py.
WORK_WITH_A_REASON = ("`yaml.add_implicit_resolver(", "`yaml.SafeLoader.yaml_implicit_resolvers.items(")
HOOK_OF_COMMANDS = "`if sys.argv[:1] == ['-m']:`"  # they import packages before they can catch an error


def work_at_import(modules: Modules) -> list[str]:
    """A module body holds imports, definitions and constants; what it calls builds a value and does nothing else."""
    return [
        f"{path}:{node.lineno}: {problem}"
        for path, tree in modules.items()
        for statement in tree.body
        for node, problem in _work_in(statement)
        if not (path == "config/yaml_text.py" and problem.startswith(WORK_WITH_A_REASON))
        if not (path == "__init__.py" and problem.startswith(HOOK_OF_COMMANDS))
    ]


def _work_in(statement: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()) | ast.Pass() | ast.AnnAssign(value=None):
            pass
        case ast.If() if ast.unparse(statement.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            pass
        case ast.ClassDef(body=body):
            for part in [*statement.decorator_list, *statement.bases, *(k.value for k in statement.keywords)]:
                yield from _calls_in(part)
            for inner in body:
                yield from _work_in(inner)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            arguments = statement.args
            for part in [*statement.decorator_list, *arguments.defaults, *filter(None, arguments.kw_defaults)]:
                yield from _calls_in(part)
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            yield from _calls_in(value)
        case _:
            yield statement, f"`{ast.unparse(statement).splitlines()[0]}` does work at import"


def _calls_in(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if not name.lstrip("_")[:1].isupper() and name not in PURE_CALLS:
            yield node, f"`{ast.unparse(node.func)}(...)` is called at import"
    for child in ast.iter_child_nodes(node):
        yield from _calls_in(child)


NOT_HIDDEN = {
    "forward": "wrapped",
    "__signature__": "of a wrapped forward",
    "__class__": "of a module whose scalars are read in the compute dtype",
    "training": "torch's own",
    "kwargs": "peft's own",
    "cast_input_dtype_enabled": "peft's own",
    "lora_of": "a submodule, of adapters",
    "quantised": "of a layer of ours",
    "barrier": "of an optimizer of ours",
}
"""Attributes that may be set, and why."""

HOLDERS = {"module", "model", "layer", "block", "embedding", "experts", "optimizer"}
"""Names of values that belong to the user, to torch or to transformers."""


def attributes_on_what_is_not_ours(modules: Modules) -> list[str]:
    """State travels in records. Only attach.py sets attributes on modules and optimizers, besides wrapped forwards."""
    problems: list[str] = []
    for at, node in nodes(modules, "backends", "models", "optim", "train", "quantised.py"):
        match node:
            case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), *_]) if name in HOLDERS:
                pass
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[ast.Name(id=name)])) if name in HOLDERS:
                pass
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="vars"), args=[ast.Name(id=name)]), attr=method)
            ) if name in HOLDERS and method in ("get", "pop", "setdefault", "update"):
                pass
            case ast.Attribute(value=value, attr=name, ctx=ast.Store() | ast.Del()) if (
                _is_cast(value) or (isinstance(value, ast.Name) and value.id in HOLDERS)
            ) and name not in NOT_HIDDEN:
                pass
            case _:
                continue
        problems.append(f"{at}: {ast.unparse(node)}")
    return problems


def _is_cast(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "cast"


BUILDERS = {
    "models/build.py": "build_model",
    "train/build.py": "build_training",
    "train/run.py": "open_run",
    "train/step.py": "train_step",
    "backends/native/engine.py": "shard_model",
}
"""Each capability would add a few lines to these. A new one is a pass in a file of its own."""


def builders_that_grow(modules: Modules) -> list[str]:
    """Builders have at most 60 lines."""
    return [
        f"{path}:{node.lineno}: {node.name} has {lines} lines"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == BUILDERS.get(path)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > 60
    ]


Rule = Callable[[Modules], list[str]]
BREAKERS: dict[Rule, list[str]] = {
    engine_names_outside_backends: [
        "def f(backend):\n    return backend == 'native'",
        "def f(backend):\n    return backend in ('xla', 'xla_fsdp1')",
        "KINDS = {'native': 1}",
        "def f(engine):\n    match engine:\n        case 'xla':\n            return 1",
    ],
    engine_options_outside_backends: [
        "def f(config):\n    return config.xla_fsdp1.flatten_parameters",
        "def f(config):\n    own = config.xla_fsdp1\n    return own.flatten_parameters",
    ],
    torch_distributed_on_the_ground: [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "import torch\ndef f():\n    return torch.distributed.get_rank()",
    ],
    torch_xla_by_name_outside_backends: [
        "from importlib import import_module\ndef f():\n    import_module('torch_xla.runtime')",
        "import importlib\ndef f():\n    importlib.import_module('torch_tpu')",
    ],
    names_defined_twice: [
        "class Row:\n    pass\ndef f():\n    class Row:\n        pass",
        "Row = tuple[int, ...]\nclass Row:\n    pass",
    ],
    attributes_on_what_is_not_ours: [
        "def f(model):\n    setattr(model, 'draws', 1)",
        "def f(model):\n    return vars(model).get('draws')",
        "def f(model):\n    return vars(model)['draws']",
        "def f(module):\n    module.load = module.balance = None",
        "def f(built):\n    cast(Any, built.model).routers = 1",
        "def f(optimizer):\n    del cast(Any, optimizer).found_inf",
    ],
    work_at_import: [
        "register('static', f)",
        "names = Interface.register('static', f)",
        "TEXT = open('corpus.txt').read()",
        "for name in names:\n    load(name)",
        "class C:\n    now = time.time()",
        "def f(now=time.time()):\n    pass",
        "@register('x')\ndef f():\n    pass",
        "WORDS = [read(name) for name in ('a', 'b')]",
    ],
}

ALLOWED = {
    "models/build.py": "if TYPE_CHECKING:\n    import x\nlog = logging.getLogger('x')\nKEYS = frozenset({'a'})",
    "backends/native/options.py": "def f(engine, c):\n    return engine == 'xla' and c.xla_fsdp1.x",
    "backends/torch_xla/runtime.py": "def f():\n    import_module('torch_xla')",
    "plan/tpu_compiler.py": "def f(value):\n    return value.device.type == 'xla'",
    "launch.py": "_DEVICE = flags.DEFINE_enum('d', 'auto', ['a'], 'x')\nif __name__ == '__main__':\n    app.run(main)",
}


@pytest.mark.parametrize("rule", BREAKERS, ids=lambda rule: rule.__name__)
def test_a_rule_holds_finds_what_breaks_it_and_lets_the_rest_be(rule: Rule) -> None:
    problems = rule(package())
    assert not problems, "\n".join(problems)
    assert [source for source in BREAKERS[rule] if not rule({"models/broken.py": ast.parse(source)})] == []
    assert rule({path: ast.parse(source) for path, source in ALLOWED.items()}) == []


def test_builders_stay_short() -> None:
    assert builders_that_grow(package()) == []
    body = "\n    x = 1" * 60
    assert builders_that_grow({"train/step.py": ast.parse(f"def train_step():{body}")}) != []
    names = {path: {n.name for n in ast.walk(package()[path]) if isinstance(n, ast.FunctionDef)} for path in BUILDERS}
    assert [name for path, name in BUILDERS.items() if name not in names[path]] == []


OF_EXTRAS = {
    *("torch_xla", "torch_tpu", "jax", "matplotlib", "datasets", "pyarrow", "peft", "bokeh", "jinja2"),
    *("bitsandbytes", "torchao"),
}
NAMES = {"absl": "absl-py", "upath": "universal-pathlib", "yaml": "PyYAML"}


def test_dependencies_are_what_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    how: dict[str, Any] = {"include_external_packages": True, "exclude_type_checking_imports": True, "cache_dir": None}
    graph = grimp.build_graph(PACKAGE, **how)
    imported = {name.partition(".")[0] for name in graph.modules} - {PACKAGE, *OF_EXTRAS, *sys.stdlib_module_names}
    assert {NAMES.get(name, name.replace("_", "-")) for name in imported} == declared


def test_no_command_imports_torch_before_it_has_read_its_arguments() -> None:
    """Nor does the ground, in a fresh process: `--help` waits for neither torch nor what imports it."""
    light = {"config", "convert", "observe", "runtime"}
    names = [
        f"{PACKAGE}.{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
        for path in package()
        if path.partition("/")[0] in light
        or path.endswith("__main__.py")
        or ("/" not in path and path not in ("attach.py", "quantised.py"))
    ]
    heavy = {"torch", "torch_xla", "torch_tpu", "transformers", "accelerate"}
    program = f"import sys, {', '.join(names)}\nprint(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FILES, LINES = 82, 19_500
"""Of ours, that a plain native training run may load."""

TOOLS = ("convert", "doctor.py", "formats", "init.py", "parity", "plan", "report", "tune")

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
