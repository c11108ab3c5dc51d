"""Which packages are installed, and whether they fit each other: read from their metadata, none is imported.

What must be there is what portable_fsdp's own metadata asks for (pyproject.toml, as it was installed), with its extras.
"""

import platform
import re
from importlib import metadata
from typing import NamedTuple

from portable_fsdp.doctor.finding import Finding, failed, ok, warning

OURS = "portable-fsdp"
EXTRAS = ("xla", "tpu", "plan")
OLDEST_PYTHON = (3, 11)
_LINE = re.compile(r"([\w.-]+)(?:\[([\w,]+)\])?\s*([^;]*)(?:;\s*(.*))?")
_SPECIFIER = re.compile(r"(==|!=|<=|>=|<|>)\s*([\w.]+)")


class Requirement(NamedTuple):
    """`name[extras] specifiers`, wanted by one extra, or always where that is empty."""

    name: str
    extras: tuple[str, ...]
    specifiers: tuple[tuple[str, str], ...]
    wanted_by: str

    def __str__(self) -> str:
        return self.name + ",".join(f"{sign}{version}" for sign, version in self.specifiers)


def installed(package: str) -> str | None:
    """Its version; None where it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements(package: str, extra: str = "") -> list[Requirement]:
    """What an installed package asks for on this machine: always, or for an extra, those of its extras among them."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    found: list[Requirement] = []
    for line in lines:
        wanted = _parsed(line)
        if wanted is None or wanted.wanted_by != extra:
            continue
        if wanted.name != package:
            found.append(wanted)
        for inner in wanted.extras:
            found += requirements(wanted.name, inner)
    return found


def _parsed(line: str) -> Requirement | None:
    """None for another kind of machine: the only such marker of ours is that torch_xla has wheels for one kind."""
    match = _LINE.match(line)
    if match is None:
        return None
    name, extras, specifiers, marker = (part or "" for part in match.groups())
    if "platform_system" in marker and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return None
    wanted_by = re.search(r"extra\s*==\s*['\"](\w+)['\"]", marker)
    pairs = tuple((sign, version) for sign, version in _SPECIFIER.findall(specifiers))
    return Requirement(name, tuple(filter(None, extras.split(","))), pairs, wanted_by[1] if wanted_by else "")


def release(version: str) -> tuple[int, ...]:
    """(2, 9) for 2.9.0+cu128: without a local part, a mark of a pre-release, and zeros at the end."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def fits(version: str, specifiers: tuple[tuple[str, str], ...]) -> bool:
    here = release(version)
    holds = {
        "==": lambda there: here == there,
        "!=": lambda there: here != there,
        "<": lambda there: here < there,
        "<=": lambda there: here <= there,
        ">": lambda there: here > there,
        ">=": lambda there: here >= there,
    }
    return all(holds[sign](release(limit)) for sign, limit in specifiers)


def unmet(wanted: list[Requirement]) -> list[str]:
    """In words, each requirement that is missing or of another version."""
    problems: dict[str, None] = {}
    for requirement in wanted:
        version = installed(requirement.name)
        if version is None:
            problems[f"{requirement.name} missing"] = None
        elif not fits(version, requirement.specifiers):
            problems[f"{requirement.name} {version} (expected {requirement})"] = None
    return list(problems)


# ------------------------------------------------------------------------------------------------------- the checks


def check_python(version: tuple[int, ...]) -> Finding:
    here = f"{'.'.join(map(str, version[:3]))} on {platform.system()} {platform.machine()}"
    if version[:2] < OLDEST_PYTHON:
        return failed("python", here, "python3.11 -m venv .venv, or newer; then pip install '.' in it")
    return ok("python", here)


def check_package(name: str) -> Finding:
    """A package that every engine needs: torch, transformers."""
    version = installed(name)
    if version is None:
        return failed(name, "not installed", "pip install '.'")
    wrong = unmet([wanted for wanted in requirements(OURS) if wanted.name == name])
    if wrong:
        return failed(name, "; ".join(wrong), "pip install '.'")
    return ok(name, version)


def check_others(shown: tuple[str, ...]) -> Finding:
    """All other packages without which nothing works; `shown` have lines of their own."""
    if installed(OURS) is None:
        return warning(
            "packages", "portable_fsdp runs from a folder: what it needs can't be compared", "pip install '.'"
        )
    wanted = [requirement for requirement in requirements(OURS) if requirement.name not in shown]
    wrong = unmet(wanted)
    if wrong:
        return failed("packages", "; ".join(wrong), "pip install '.'")
    return ok("packages", f"{len(wanted)} others that it needs are installed, and fit")


def check_torch_xla(chips: int) -> Finding:
    """torch_xla X.Y is built against torch X.Y; `chips`: TPU chips of this host, which need it."""
    name, ours, torch = "torch_xla", installed("torch_xla"), installed("torch")
    if ours is None:
        if chips and installed("torch_tpu") is None:
            return failed(name, f"not installed, on a host with {chips} TPU chips", "pip install '.[tpu]'")
        return ok(name, "not installed: only --backend=xla and xla_fsdp1 need it")
    if installed("torch_tpu") is not None:
        return failed(
            name,
            f"{ours} beside torch_tpu {installed('torch_tpu')}, which needs torch 2.11 or newer",
            "an environment for each: pip uninstall torch_tpu here, or torch_xla",
        )
    if torch is None or release(torch)[:2] != release(ours)[:2]:
        return failed(name, f"{ours}, built for another torch than {torch or 'none'}", "pip install '.[xla]'")
    return ok(name, f"{ours}, built for torch {torch}")


def check_extras() -> Finding:
    """Complete, or not asked for: an extra of which a part is there and another isn't, or doesn't fit, is a warning."""
    said: list[str] = []
    mend: list[str] = []
    for extra in EXTRAS:
        wanted = requirements(OURS, extra)
        wrong = unmet(wanted)
        if wanted and not wrong:
            said.append(f"{extra} complete")
        elif any(installed(part.name) for part in wanted if part.name != "torch") and extra == "xla":
            said.append(f"{extra}: {'; '.join(wrong)}")
            mend.append(f"pip install '.[{extra}]'")
        else:
            said.append(f"{extra} not installed" + (f" ({'; '.join(wrong)})" if wrong else ""))
    if mend:
        return warning("extras", ", ".join(said), mend[0])
    return ok("extras", ", ".join(said))
