"""The floors: which part of the package may import which, read from the AST, so that no engine needs to be there.

Each rule is a function from modules to problems. `test_layering.py` gives it the package, and modules that break it.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "portable_fsdp"
VERSION = f"{PACKAGE}.version"
"""It imports nothing, and every module may import it."""

FLOORS = [
    {"runtime"},
    {"config"},
    {"layout"},
    {"models", "data", "optim"},
    {"checkpoint", "backends"},
    {"observe"},
    {"train", "formats", "plan", "convert", "doctor", "report", "parity"},
]
"""From the bottom; what stands directly in the package, the commands, is on top of them."""

SIDEWAYS = {("checkpoint", "backends"), ("plan", "train"), ("parity", "train")}
"""Imports on one floor: a checkpoint knows the contract's types; plan plans the trainer's own step, parity runs it."""

PURE_CALLS = {
    *(
        "dict",
        "field",
        "float",
        "fromkeys",
        "frozenset",
        "int",
        "len",
        "list",
        "max",
        "min",
        "range",
        "set",
        "sorted",
        "tuple",
    ),
    *("cache", "compile", "contextmanager", "dataclass", "getLogger", "lru_cache", "no_grad", "timedelta", "wraps"),
    *("field_validator", "model_validator", "field_serializer"),
    *("refused", "refused_each", "without", "_only_for", "torch_xla_spec"),  # rules and specs of engines, of constants
}
"""Functions that a module may call while it is imported; besides them only constructors, told by their capital."""

WORK_WITH_A_REASON = {
    # PyYAML keeps what a plain word means on the loader's class; these set it on two classes of that module.
    "portable_fsdp.config.yaml_text": ("yaml.add_implicit_resolver", "yaml.SafeLoader.yaml_implicit_resolvers.items"),
}


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is the dotted path as Python reads it, with relative dots resolved."""

    target: str
    line: int


@dataclass(frozen=True)
class Module:
    name: str
    path: str
    tree: ast.Module
    is_package: bool

    def at(self, line: int) -> str:
        return f"{self.path}:{line}"


Modules = Mapping[str, Module]


@cache
def read_package(folder: Path) -> dict[str, Module]:
    """All modules under `folder`, by dotted name."""
    modules: dict[str, Module] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, str(path.relative_to(folder.parent)), ast.parse(text), is_package)
    return modules


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


@cache
def imports(module: Module) -> list[Import]:
    """Every import that can run, `import_module("literal")` among them; not those for type checkers alone."""

    def walk(node: ast.AST) -> Iterator[Import]:
        if is_type_checking(node):
            return
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(names=names):
                base = _base_of(module, node)
                yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in names)
            case ast.Call(func=func, args=[ast.Constant(value=str(target)), *_]) if _last_name(func) in {
                "import_module",
                "__import__",
            }:
                yield Import(target, node.lineno)
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return list(walk(module.tree))


def _base_of(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    upwards = node.level - 1 if module.is_package else node.level
    return ".".join([*parts[: len(parts) - upwards], *([node.module] if node.module else [])])


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def resolve(target: str, modules: Modules) -> str | None:
    """The module of the package that holds `target` (a module, or a name in one); None for anything else."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def inner_imports(module: Module, modules: Modules) -> Iterator[tuple[str, Import]]:
    """Imports of modules of the package; not of the package itself, whose `__init__` holds only names."""
    for line in imports(module):
        name = resolve(line.target, modules)
        if name is not None and name not in {PACKAGE, VERSION, module.name}:
            yield name, line


def section(name: str) -> str:
    """`backends` for portable_fsdp.backends.native; "" for a command (`__main__` too) and for the package itself."""
    parts = name.split(".")
    if parts[-1] == "__main__":
        return ""
    return parts[1] if len(parts) > 1 and any(parts[1] in floor for floor in FLOORS) else ""


def height(name: str) -> int:
    return next((i for i, floor in enumerate(FLOORS) if section(name) in floor), len(FLOORS))


def is_under(target: str, names: Iterable[str]) -> bool:
    return any(target == name or target.startswith(f"{name}.") for name in names)


# The rules.


def unknown_sections(modules: Modules) -> list[str]:
    """Each subpackage stands on a floor."""
    packages = [m for m in modules.values() if m.is_package and m.name.count(".") == 1]
    return [f"{m.path}: {m.name} stands on no floor; give it one in FLOORS" for m in packages if not section(m.name)]


def imports_upwards(modules: Modules) -> list[str]:
    """A dependency points to a lower floor, or stays within its section."""
    problems: list[str] = []
    for module in modules.values():
        if module.name == PACKAGE:
            continue
        for name, line in inner_imports(module, modules):
            here, there = section(module.name), section(name)
            is_own = here == there != ""
            if not is_own and (here, there) not in SIDEWAYS and height(name) >= height(module.name):
                problems.append(f"{module.at(line.line)}: {module.name} imports {name}, which is not on a lower floor")
    return problems


SHARED_BY_ENGINES = {
    # One runtime, torch_xla's, is under both engines.
    f"{PACKAGE}.backends.pjrt": [f"{PACKAGE}.backends.{name}" for name in ("xla", "xla_fsdp1")],
    f"{PACKAGE}.backends.pjrt_recurrent": [f"{PACKAGE}.backends.pjrt"],
    f"{PACKAGE}.backends.pjrt_program": [f"{PACKAGE}.backends.{name}" for name in ("pjrt", "xla", "xla_fsdp1")],
    f"{PACKAGE}.backends.pjrt_options": [f"{PACKAGE}.backends.{name}" for name in ("pjrt", "xla", "xla_fsdp1")],
    f"{PACKAGE}.backends.weight_uses": [f"{PACKAGE}.backends.{name}" for name in ("native", "xla")],
    **{f"{PACKAGE}.backends.{name}": [PACKAGE] for name in ("nested", "open", "refusals")},
}
"""Modules of `backends` that are no engine, and who there may know them; all may know `base`."""


def engines_that_know_each_other(modules: Modules) -> list[str]:
    """An engine, one module or a folder, imports the contract and no other engine."""
    problems: list[str] = []
    for module in modules.values():
        for name, line in inner_imports(module, modules):
            if {section(module.name), section(name)} != {"backends"} or name == f"{PACKAGE}.backends.base":
                continue
            is_shared = is_under(module.name, SHARED_BY_ENGINES.get(name, ()))
            if not is_shared and name.split(".")[:3] != module.name.split(".")[:3]:
                problems.append(f"{module.at(line.line)}: {module.name} imports {name}; an engine may not")
    return problems


NAMES_OF_OTHERS = {
    # torch_xla's format of checkpoints bears the name of an engine.
    f"{PACKAGE}.formats": "xla_fsdp1",
}


def engine_names_outside_backends(modules: Modules) -> list[str]:
    """Only an engine's options depend on its name: no other code compares with a name or uses one as a key."""
    engines = {"native", "xla", "xla_fsdp1"}
    problems: list[str] = []
    for module in modules.values():
        if section(module.name) == "backends":
            continue
        for node in ast.walk(module.tree):
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
            names = {constant.value for constant in compared if isinstance(constant, ast.Constant)} & engines
            names -= {NAMES_OF_OTHERS.get(module.name, "")}
            problems += [f"{module.at(getattr(node, 'lineno', 0))}: {name} is an engine's name" for name in names]
    return problems


def cycles(modules: Modules) -> list[str]:
    """Modules that import each other, however long the way round, at import or in a function."""
    edges = {m.name: {name for name, _ in inner_imports(m, modules)} for m in modules.values() if m.name != PACKAGE}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


_ALL = {"", *(name for floor in FLOORS for name in floor)}
_GROUND = {"models", "data", "optim"}
BANS: list[tuple[set[str], set[str], tuple[str, ...]]] = [
    (_GROUND, {"torch.distributed", "torch_xla", "torch_tpu", f"{PACKAGE}.backends"}, ()),
    (_ALL - {"backends"}, {"torch_xla"}, (f"{PACKAGE}.plan.tpu_trace",)),
    ({"checkpoint", "observe"}, {f"{PACKAGE}.backends"}, (f"{PACKAGE}.backends.base",)),
    ({"backends"}, {f"{PACKAGE}.{name}" for name in ("models", "data", "checkpoint")}, ()),
]
"""Sections, what they may not import, and the targets and modules that are exempt.

Only engines know devices and processes; a checkpoint knows the contract's types alone; an engine knows no model.
"""


def banned_imports(modules: Modules) -> list[str]:
    problems: list[str] = []
    for module in modules.values():
        named = [(line.target, line.line) for line in imports(module)]
        if section(module.name) in _GROUND:
            named += [(ast.unparse(n), n.lineno) for n in ast.walk(module.tree) if isinstance(n, ast.Attribute)]
        problems += [
            f"{module.at(line)}: {module.name} uses {target}"
            for sections, targets, exempt in BANS
            if section(module.name) in sections and module.name not in exempt
            for target, line in named
            if is_under(target, targets) and not is_under(target, exempt)
        ]
    return problems


def names_defined_twice(modules: Modules) -> list[str]:
    """Each class and each type alias has a name of its own in the whole package."""
    places: dict[str, list[str]] = {}
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module.at(node.lineno))
        for node in module.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_type(name, value):
                    places.setdefault(name, []).append(module.at(node.lineno))
                case _:
                    pass
    return [f"{name} is defined {len(at)} times: {', '.join(at)}" for name, at in places.items() if len(at) > 1]


def _is_type(name: str, value: ast.expr) -> bool:
    """`Key = tuple[str, ...]`, `Verdict = Literal["fits"]`, `Split = A | B`: CapWords for a type's expression."""
    bare = name.lstrip("_")
    is_capwords = bare[:1].isupper() and not bare.isupper()
    return is_capwords and isinstance(value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute)


def work_at_import(modules: Modules) -> list[str]:
    """A module body holds imports, definitions and constants; what it calls builds a value and does nothing else."""
    problems: list[str] = []
    for module in modules.values():
        for statement in module.tree.body:
            problems += [
                f"{module.at(node.lineno)}: {problem}"
                for node, problem in _work_in(statement)
                if not problem.startswith(tuple(f"`{call}(" for call in WORK_WITH_A_REASON.get(module.name, ())))
            ]
    return problems


def _work_in(statement: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()) | ast.Pass() | ast.AnnAssign(value=None):
            pass
        case ast.If() if is_type_checking(statement) or ast.unparse(statement.test) == "__name__ == '__main__'":
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
        name = _last_name(node.func)
        if not name.lstrip("_")[:1].isupper() and name not in PURE_CALLS:
            yield node, f"`{ast.unparse(node.func)}(...)` is called at import"
    for child in ast.iter_child_nodes(node):
        yield from _calls_in(child)
