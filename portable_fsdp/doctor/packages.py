"""Which packages are installed, and whether they fit each other: read from their metadata, without importing any.

The requirements are those of portable_fsdp's own metadata (pyproject.toml, as it was installed), with its extras.
"""

import operator
import platform
import re
from importlib import metadata
from typing import NamedTuple

from portable_fsdp.doctor.finding import Finding, failed, ok, warning

OURS = "portable-fsdp"
EXTRAS = ("xla", "tpu", "torchtpu", "plan")
OLDEST_PYTHON = (3, 11)
INSTALL = "pip install '.'"
_MATCHES = {
    **{"==": operator.eq, "!=": operator.ne, "<": operator.lt},
    **{"<=": operator.le, ">": operator.gt, ">=": operator.ge},
}
_LINE = re.compile(r"([\w.-]+)(?:\[([\w,]+)\])?\s*([^;]*)(?:;\s*(.*))?")
_SPECIFIER = re.compile(r"(==|!=|<=|>=|<|>)\s*([\w.]+)")


class Requirement(NamedTuple):
    """`name[extras] specifiers`, required by one extra, or always where that is empty."""

    name: str
    extras: tuple[str, ...]
    specifiers: tuple[tuple[str, str], ...]
    required_by: str

    def __str__(self) -> str:
        return self.name + ",".join(f"{sign}{version}" for sign, version in self.specifiers)


def installed(package: str) -> str | None:
    """Its version; None where it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements(package: str, extra: str = "") -> list[Requirement]:
    """What an installed package requires on this machine: always, or for an extra with the extras that this names."""
    if installed(package) is None:
        return []
    required: list[Requirement] = []
    for requirement in filter(None, map(_parse, metadata.requires(package) or [])):
        if requirement.required_by == extra:
            required += [requirement] if requirement.name != package else []
            required += [part for inner in requirement.extras for part in requirements(requirement.name, inner)]
    return required


def _parse(line: str) -> Requirement | None:
    """None for another kind of machine: the only such marker of ours is that torch_xla has wheels for one kind."""
    match = _LINE.match(line)
    if match is None:
        return None
    name, extras, specifiers, marker = (part or "" for part in match.groups())
    if "platform_system" in marker and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return None
    extra = re.search(r"extra\s*==\s*['\"](\w+)['\"]", marker)
    pairs = tuple(_SPECIFIER.findall(specifiers))
    return Requirement(name, tuple(filter(None, extras.split(","))), pairs, extra[1] if extra else "")


def release(version: str) -> tuple[int, ...]:
    """(2, 9) for 2.9.0+cu128: without local part, pre-release mark and trailing zeros."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers[-1:] == [0]:
        numbers.pop()
    return tuple(numbers)


def fits(version: str, specifiers: tuple[tuple[str, str], ...]) -> bool:
    return all(_MATCHES[sign](release(version), release(limit)) for sign, limit in specifiers)


def unmet(required: list[Requirement]) -> str:
    """In words, each requirement that is missing or of another version; empty where there is none."""
    problems: list[str] = []
    for requirement in required:
        version = installed(requirement.name)
        if version is None:
            problems.append(f"{requirement.name} missing")
        elif not fits(version, requirement.specifiers):
            problems.append(f"{requirement.name} {version} (expected {requirement})")
    return "; ".join(dict.fromkeys(problems))


# ------------------------------------------------------------------------------------------------------- the checks


def check_python(version: tuple[int, ...]) -> Finding:
    here = f"{'.'.join(map(str, version[:3]))} on {platform.system()} {platform.machine()}"
    if version[:2] < OLDEST_PYTHON:
        return failed(here, "python3.11 -m venv .venv, or newer; then pip install '.' in it")
    return ok(here)


def check_package(name: str) -> Finding:
    """A package that every engine needs: torch, transformers."""
    version = installed(name)
    problem = unmet([required for required in requirements(OURS) if required.name == name])
    if version is None or problem:
        return failed(problem if version else "not installed", INSTALL)
    return ok(version)


def check_others(shown: tuple[str, ...]) -> Finding:
    """All other packages that every run needs; `shown` have lines of their own."""
    if installed(OURS) is None:
        return warning("portable_fsdp runs from a folder: what it needs can't be compared", INSTALL)
    required = [requirement for requirement in requirements(OURS) if requirement.name not in shown]
    if problem := unmet(required):
        return failed(problem, INSTALL)
    return ok(f"{len(required)} others that it needs are installed, and fit")


def check_torch_xla(chips: int) -> Finding:
    """torch_xla X.Y is built against torch X.Y; `chips`: TPU chips of this host, which need it."""
    version, torch, torch_tpu = map(installed, ("torch_xla", "torch", "torch_tpu"))
    if version is None:
        if chips and torch_tpu is None:
            return failed(f"not installed, on a host with {chips} TPU chips", "pip install '.[tpu]'")
        return ok("not installed: only --backend=xla and xla_fsdp1 need it")
    if torch_tpu is not None:
        problem = f"{version} beside torch_tpu {torch_tpu}, which needs torch 2.11 or newer"
        return failed(problem, "an environment for each: pip uninstall torch_tpu here, or torch_xla")
    if torch is None or release(torch)[:2] != release(version)[:2]:
        return failed(f"{version}, built for another torch than {torch or 'none'}", "pip install '.[xla]'")
    return ok(f"{version}, built for torch {torch}")


def check_torch_tpu(chips: int) -> Finding:
    """TorchTPU has a range of torch versions, and needs libtpu; `chips`: TPU chips of this host."""
    version = installed("torch_tpu")
    if version is None:
        return ok("not installed: only --device=tpu --backend=native needs it")
    required = [part for part in requirements("torch_tpu") if part.name in ("torch", "libtpu")]
    if problem := unmet(required):
        return failed(f"{version}: {problem}", "in a new environment: pip install '.[torchtpu]'")
    return ok(f"{version}; torch {installed('torch')} and libtpu {installed('libtpu')} fit it, {chips} chip(s) here")


def check_extras() -> Finding:
    """Each extra is complete or not installed; `xla` may also be there in part or in other versions: a warning.

    Beside torch_tpu nothing that brings torch_xla is advised: pip would replace its torch.
    """
    states: list[str] = []
    mend = ""
    for extra in EXTRAS:
        required = requirements(OURS, extra)
        problem = unmet(required)
        if extra != "torchtpu" and installed("torch_tpu") is not None:
            states.append(f"{extra} not for this environment")
        elif required and not problem:
            states.append(f"{extra} complete")
        elif extra == "xla" and any(installed(part.name) for part in required if part.name != "torch"):
            states.append(f"{extra}: {problem}")
            mend = f"pip install '.[{extra}]'"
        else:
            states.append(f"{extra} not installed" + (f" ({problem})" if problem else ""))
    return warning(", ".join(states), mend) if mend else ok(", ".join(states))
